"""The verdict and its reason, by bounds or by perturbed runs."""

from crossframe.recording.known_settings import COMMAND, RECORD, TRAIN
from crossframe.recording.lines import UPDATE
from crossframe.verdict.envelope import ENOUGH, Envelope, decisive
from crossframe.verdict.findings import Findings
from crossframe.verdict.islands import Island
from crossframe.verdict.kinds import Verdict
from crossframe.verdict.measure.comparable import labels
from crossframe.verdict.measure.locate import Divergence
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.start import other_start, parted_replica
from crossframe.verdict.unseen import unseen
from crossframe.verdict.words import in_words

# Rounding that training amplifies grows from one recorded step to the next by a factor: about 100 in five steps was seen for
# a GPT at a learning rate too high for it. A bug is there at once: what it touches is off by many orders of magnitude
# more than all that came before. The border lies between the two.
JUMP = 1000.0
NEAR = 0.1
"""The share of a coarse bound, one not measured on perturbed runs, above which the verdict is inconclusive."""


def conclude_by_bounds(
    pair: Pair, findings: Findings, where: Divergence | None, island: Island | None
) -> tuple[Verdict, str]:
    """The verdict and its reason, without perturbed runs."""
    verdict, reason = _of_bounds(pair, findings, where, island)
    return verdict, f"{reason}; {island.in_words()}" if island and not findings.equal else reason


def _of_bounds(pair: Pair, findings: Findings, where: Divergence | None, island: Island | None) -> tuple[Verdict, str]:
    first, bounds = findings.first, island.bounds if island else pair.bounds
    dtype = island.dtype if island else pair.dtype
    if first is not None and where is not None:
        said = in_words(first, where, labels(pair.a, pair.b), unseen=unseen(pair, where))
        if first.one_sided or first.quantity.bound is None:
            return Verdict.BUG, said
        if not bounds.decisive:
            return Verdict.INCONCLUSIVE, f"{said}, but {dtype} is too coarse for a bound: {_settle(pair)}"
        if where.step == 0 and where.phase != UPDATE:
            return Verdict.BUG, said
        if dtype == "float64":
            if first.used > JUMP * findings.used_before:
                return Verdict.BUG, said
            grown = f"it grew up to there by less than {JUMP:g} times at once, as rounding does that training amplifies"
            return Verdict.INCONCLUSIVE, f"{said}, but {grown}: compare fewer steps, or lower the learning rate"
        return (
            Verdict.INCONCLUSIVE,
            f"{said}, but in {dtype} the optimizer may have amplified rounding by then: {_settle(pair)}",
        )
    also = ""
    if (judgement := findings.not_finite) is not None:
        q = judgement.quantity
        also = f"from step {q.step} on ({q.phase} {q.name!r}) both sides hold NaN or infinity"
    if findings.equal:
        return Verdict.EQUAL, "every bit that was compared is equal" + (f"; {also}" if also else "")
    if also:
        return Verdict.INCONCLUSIVE, f"{also}, where nothing can be compared: lower the learning rate"
    largest = max(findings.parameters.values(), default=0.0)
    said = f"losses differ by at most {max(findings.losses):.1e}, parameters by {largest:.1e}"
    if not bounds.decisive:
        return Verdict.INCONCLUSIVE, f"{said}, but {dtype} is too coarse for a bound: {_settle(pair)}"
    said = f"{said}; rounding may reach {bounds.loss:.1e} and {bounds.parameter:.1e}"
    if dtype != "float64" and (near := [each for each in findings.judged if (each.used or 0.0) > NEAR]):
        most = max(near, key=lambda each: each.used or 0.0)
        what = f"the {most.name or most.event} at step {most.step} uses {most.used:.2f} of it"
        return Verdict.INCONCLUSIVE, (
            f"{said}, a coarse bound for {dtype}, within which a small bug may hide: {what}, and {len(near)} of "
            f"{len(findings.judged)} quantities more than {NEAR:g}; {_settle(pair)}"
        )
    return Verdict.ROUNDING, said


def conclude_by_envelope(
    pair: Pair, findings: Findings, where: Divergence | None, envelope: Envelope
) -> tuple[Verdict, str]:
    """The verdict and its reason, by the spread of perturbed runs."""
    if findings.first is not None and where is not None:
        names, by = labels(pair.a, pair.b), envelope.in_words()
        said = in_words(findings.first, where, names, by=by, unseen=unseen(pair, where))
        near, enough = findings.most_beyond, decisive(envelope.num_runs)
        if findings.first.quantity.bound is not None and near <= enough:
            return Verdict.INCONCLUSIVE, (
                f"{said}; but nothing is more than {near:.2f} times what rounding may reach, and with {envelope.num_runs} "
                f"perturbed runs only {enough:.1f} times would be decisive: {_settle(pair, ENOUGH)}"
            )
        return Verdict.BUG, said
    if findings.equal:
        return Verdict.EQUAL, "every bit that was compared is equal"
    if (judgement := findings.not_finite) is not None:
        q = judgement.quantity
        said = f"from step {q.step} on ({q.phase} {q.name!r}) both sides hold NaN or infinity, where nothing can be compared"
        return Verdict.INCONCLUSIVE, f"{said}: lower the learning rate"
    said = (
        f"everything lies as near as {envelope.in_words()} do to one another: at most {findings.used_before:.2f} of what "
        f"rounding may reach ({100 * envelope.judged_share:.0f} % of what was updated had gradients large enough to be judged)"
    )
    if (step := envelope.saturated_from) is not None:
        chaos = (
            f"but from step {step} on the perturbed runs' gradients have nothing in common, and a bug would not show"
        )
        return Verdict.INCONCLUSIVE, f"{said}, {chaos}: compare fewer steps (--steps {max(step, 1)}), or in float64"
    return Verdict.ROUNDING, said


def started_apart(pair: Pair) -> tuple[Verdict, str] | None:
    """The verdict on initial values that differ: a bug if copies within one recording do, else another run."""
    names = labels(pair.a, pair.b)
    for recording, label in zip((pair.a, pair.b), names, strict=True):
        if (found := parted_replica(recording)) is not None:
            replica, name = found
            mesh = recording.manifest.mesh
            ranks = mesh.shard_group(replica * mesh.shard)
            who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
            return Verdict.BUG, (
                f"{who} of {label} started from other values of {name!r} than rank 0: broadcast parameters from rank 0, or seed "
                "all ranks alike"
            )
    if apart := other_start(pair):
        total = sum(recorded.numel > 0 for recorded in pair.a.manifest.params.values())
        return Verdict.INCOMPARABLE, (
            f"the runs start from different values: {len(apart)} of {total} parameters, {apart[0]!r} the first, on all ranks "
            "alike; start both from one seed or one checkpoint"
        )
    return None


def _settle(pair: Pair, num_runs: int = 4) -> str:
    """What would tell, with so many perturbed runs: of either run, or of the one that rounds more."""
    runs = (pair.a, pair.b)
    alike = "in float64" if pair.coarser is None else "in one dtype"
    for recording in runs if pair.coarser is None else (runs[pair.coarser],):
        if isinstance(command := recording.manifest.settings.get(COMMAND), str):
            if command.startswith((RECORD, TRAIN)):
                ours, dashes, of_script = command.partition(" -- ")
                keep = "--top-up" if command.startswith(RECORD) else "--overwrite"
                again = f"`{ours} --output {recording.directory} {keep} --perturbed-runs {num_runs}{dashes}{of_script}`"
            else:
                first = 1 + len(recording.twins())
                again = (
                    f"`{command}`, started as it was, with CROSSFRAME_TWIN={first}, then {first + 1} to {num_runs} in its "
                    "environment,"
                )
            return f"measure what rounding does with {again} and compare again, or record both {alike}"
    which, dtype = "one of both", "with --dtype float64"
    if pair.coarser is not None:
        which, dtype = labels(pair.a, pair.b)[pair.coarser], alike
    return f"record {which} again with perturbed runs (--perturbed-runs {num_runs}), or both {dtype}, and compare those"
