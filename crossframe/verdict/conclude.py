"""Derives the verdict from the findings, and writes its reason. `crossframe.report.sentences` writes the headline."""

import shlex

from crossframe.recording.event_format import UPDATE
from crossframe.recording.known_settings import COMMAND, RECORD, TRAIN
from crossframe.verdict.divergence_text import describe
from crossframe.verdict.findings import Findings
from crossframe.verdict.initial_values import differing_replica, unrelated_parameters
from crossframe.verdict.measure.comparable import labels
from crossframe.verdict.measure.locate import Divergence
from crossframe.verdict.measure.narrower_dtypes import NarrowerDtype
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.perturbed_runs.limits import SUFFICIENT_RUNS, Limits, decisive
from crossframe.verdict.unrecorded_causes import unseen
from crossframe.verdict.verdicts import Verdict

# Amplified rounding grows gradually: by about 100 times in five steps for a GPT with a learning rate that was too high. A bug
# appears at once, many orders of magnitude above all earlier differences. The threshold lies in between.
JUMP = 1000.0
NEAR = 0.1
"""The share of a coarse bound (one not measured on perturbed runs) above which the verdict is inconclusive."""


def conclude_by_bounds(
    pair: Pair, findings: Findings, where: Divergence | None, narrower: NarrowerDtype | None
) -> tuple[Verdict, str]:
    """Return the verdict and its reason, without perturbed runs."""
    verdict, reason = _of_bounds(pair, findings, where, narrower)
    return verdict, f"{reason}; {narrower.describe()}" if narrower and not findings.equal else reason


def _of_bounds(
    pair: Pair, findings: Findings, where: Divergence | None, narrower: NarrowerDtype | None
) -> tuple[Verdict, str]:
    first, bounds = findings.first, narrower.bounds if narrower else pair.bounds
    dtype = narrower.dtype if narrower else pair.dtype
    if first is not None and where is not None:
        text = describe(first, where, labels(pair.a, pair.b), unseen=unseen(pair, where))
        if first.one_sided or first.quantity.bound is None:
            return Verdict.BUG, text
        if not bounds.decisive:
            return Verdict.INCONCLUSIVE, f"{text}, but {dtype} is too coarse for a bound: {_settle(pair)}"
        if where.step == 0 and where.phase != UPDATE:
            return Verdict.BUG, text
        if dtype == "float64":
            if first.used > JUMP * findings.used_before:
                return Verdict.BUG, text
            grown = (
                f"differences grew by less than {JUMP:g} times from one step to the next, as amplified rounding does"
            )
            return Verdict.INCONCLUSIVE, f"{text}, but {grown}: compare fewer steps, or lower the learning rate"
        return (
            Verdict.INCONCLUSIVE,
            f"{text}, but in {dtype} the optimizer may have amplified rounding by then: {_settle(pair)}",
        )
    also = ""
    if (judgement := findings.not_finite) is not None:
        q = judgement.quantity
        also = f"from step {q.step} on ({q.phase} {q.name!r}) both sides contain NaN or infinity"
    if findings.equal:
        return Verdict.EQUAL, "all compared values are bitwise equal" + (f"; {also}" if also else "")
    if also:
        return Verdict.INCONCLUSIVE, f"{also} and cannot be compared: lower the learning rate"
    largest = max(findings.parameters.values(), default=0.0)
    text = f"losses differ by at most {max(findings.losses):.1e}, parameters by {largest:.1e}"
    if not bounds.decisive:
        return Verdict.INCONCLUSIVE, f"{text}, but {dtype} is too coarse for a bound: {_settle(pair)}"
    text = f"{text}; the bounds are {bounds.loss:.1e} and {bounds.parameter:.1e}"
    if dtype != "float64" and (near := [each for each in findings.judged if (each.used or 0.0) > NEAR]):
        most = max(near, key=lambda each: each.used or 0.0)
        what = f"the {most.name or most.event} at step {most.step} uses {most.used:.2f} of its bound"
        return Verdict.INCONCLUSIVE, (
            f"{text}, which are coarse in {dtype}, so a small bug may stay within them: {what}, and {len(near)} of "
            f"{len(findings.judged)} quantities use more than {NEAR:g}; {_settle(pair)}"
        )
    return Verdict.ROUNDING, text


def conclude_by_limits(pair: Pair, findings: Findings, where: Divergence | None, limits: Limits) -> tuple[Verdict, str]:
    """Return the verdict and its reason, from the spread of perturbed runs."""
    if findings.first is not None and where is not None:
        names, by = labels(pair.a, pair.b), limits.describe()
        text = describe(findings.first, where, names, by=by, unseen=unseen(pair, where))
        if not findings.settled:
            return Verdict.INCONCLUSIVE, (
                f"{text}; but no quantity exceeds {findings.most_beyond:.2f} times its bound, and with {limits.num_runs} "
                f"perturbed runs {decisive(limits.num_runs):.1f} times would be decisive: {_settle(pair, SUFFICIENT_RUNS)}"
            )
        return Verdict.BUG, text
    if findings.equal:
        return Verdict.EQUAL, "all compared values are bitwise equal"
    if (judgement := findings.not_finite) is not None:
        q = judgement.quantity
        text = f"from step {q.step} on ({q.phase} {q.name!r}) both sides contain NaN or infinity and cannot be compared"
        return Verdict.INCONCLUSIVE, f"{text}: lower the learning rate"
    text = (
        f"all differences are within the spread of {limits.describe()}: at most {findings.used_before:.2f} of the bound "
        f"({100 * limits.judged_share:.0f} % of the updated elements had gradients large enough to be judged)"
    )
    if (step := limits.saturated_from) is not None:
        chaos = f"but from step {step} on the gradients of the perturbed runs are unrelated, so a bug would not show"
        return Verdict.INCONCLUSIVE, f"{text}, {chaos}: compare fewer steps (--steps {max(step, 1)}), or in float64"
    return Verdict.ROUNDING, text


def conclude_initial_values(pair: Pair) -> tuple[Verdict, str] | None:
    """Return the verdict on differing initial values: a bug if replicas of one recording differ, incomparable if the two runs
    drew different values; None otherwise."""
    names = labels(pair.a, pair.b)
    for recording, label in zip((pair.a, pair.b), names, strict=True):
        if (found := differing_replica(recording)) is not None:
            replica, name = found
            mesh = recording.manifest.mesh
            ranks = mesh.shard_group(replica * mesh.shard)
            who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
            return Verdict.BUG, (
                f"{who} of {label} started with other values of {name!r} than rank 0: broadcast the parameters from rank 0, or "
                "use the same seed on all ranks"
            )
    if apart := unrelated_parameters(pair):
        total = sum(recorded.numel > 0 for recorded in pair.a.manifest.params.values())
        return Verdict.INCOMPARABLE, (
            f"the runs start with different values of {len(apart)} of {total} parameters, first {apart[0]!r}, on all ranks: "
            "start both from the same seed or checkpoint"
        )
    return None


def _settle(pair: Pair, num_runs: int = 4) -> str:
    """What to do to settle the verdict: record perturbed runs, of the run that has to have them if the dtypes differ."""
    runs = [(pair.a, pair.b)[side] for side in pair.measured]
    alike = "in float64" if pair.coarser is None else "in one dtype"
    alike = "with products in one precision" if pair.by_products else alike
    for recording in runs:
        if recording.golden is not None:
            golden = shlex.quote(str(recording.directory))
            return f"measure rounding with `crossframe baseline update --golden {golden} --perturbed-runs {num_runs}`"
        if isinstance(command := recording.manifest.settings.get(COMMAND), str):
            records = f"{RECORD} " in command.partition(" -- ")[0]  # variables may come first
            if records or command.startswith(TRAIN):
                ours, dashes, of_script = command.partition(" -- ")
                keep = "--top-up" if records else "--overwrite"
                again = f"`{ours} --output {recording.directory} {keep} --perturbed-runs {num_runs}{dashes}{of_script}`"
            else:
                first = 1 + len(recording.perturbed_runs())
                again = (
                    f"`{command}`, once each with CROSSFRAME_PERTURBED_RUN={first} to {num_runs} in its environment,"
                )
            return f"measure rounding with {again} and compare again, or record both {alike}"
    which, dtype = "one of them", "with --dtype float64"
    if pair.coarser is not None:
        which, dtype = labels(pair.a, pair.b)[pair.measured[0]], alike
    return f"record {which} again with perturbed runs (--perturbed-runs {num_runs}), or both {dtype}, and compare those"
