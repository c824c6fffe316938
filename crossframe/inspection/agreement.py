"""Finds values that ranks must share and on which they disagree.

These are the full parameters in forward; the reduced gradients, optimizer state and parameters of the replicas; the gradient
norm; and a loss that each rank recorded as the mean over all ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.inspection.values import finite_or_none, side_of
from crossframe.recording import Recording
from crossframe.recording.event_format import NORM, PARAMETERS, REDUCE, STATE, UNSHARDED, UPDATE, before_step
from crossframe.recording.known_settings import LOSSES, MEAN
from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from crossframe.verdict.measure.metrics import distance, ratio
from crossframe.verdict.measure.values import Side, assemble, local_gradients

_NOUNS = {PARAMETERS: "initial value", REDUCE: "reduced gradient", UPDATE: "updated value"}


@dataclass(frozen=True)
class Disagreement:
    """A value that is not the same on all ranks that share it.

    Attributes:
        step, phase: where the value was recorded.
        ranks: the ranks that differ from the majority; without a majority, all ranks that share the value.
        name: name of the value.
        difference: the difference of two ranks that disagree, relative to the larger value; inf if only one of them is finite.
        rounding: whether rounding of one value can explain the difference (`crossframe.verdict.measure.bounds_by_dtype`). Ranks
            that differ by rounding drift apart.
        by_majority: whether a majority of the ranks agrees.
    """

    step: int
    phase: str
    name: str
    ranks: tuple[int, ...]
    difference: float
    rounding: bool
    by_majority: bool = True

    def describe(self) -> str:
        """The finding in a sentence.

        >>> Disagreement(2, "norm", "gradient norm", (1,), 0.5, False).describe()
        "step 2: the gradient norm on rank 1 differs from the other ranks' by 0.5 (relative)"
        """
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks[:8]))}"
        where = f"on {ranks} differs from the other ranks'" if self.by_majority else f"differs between {ranks}"
        text = f"step {self.step}: the {self.name} {where} by {self.difference:.3g} (relative)"
        return (
            f"{text}, which is rounding; ranks that share a value should hold the same bits" if self.rounding else text
        )

    def to_json(self) -> dict:
        """The finding as a JSON object."""
        return {
            **asdict(self),
            "ranks": list(self.ranks),
            "difference": finite_or_none(self.difference),
            "description": self.describe(),
        }


def disagreements(recording: Recording) -> tuple[list[Disagreement], list[str]]:
    """The values on which ranks disagree, in causal order, and notes on other observations."""
    found: list[Disagreement] = []
    notes: list[str] = []
    fed_alike = ""
    for step in range(recording.num_steps):
        differing, observed = disagreements_at(recording, step)
        found += differing
        notes += observed
        fed_alike = fed_alike or _same_batches(recording, step)
    return found, [*notes, fed_alike] if fed_alike else notes


def disagreements_at(recording: Recording, step: int) -> tuple[list[Disagreement], list[str]]:
    """The values of a step on which ranks disagree, in causal order, and notes: of parameters that were changed after the update
    of the step before, alike on all ranks, and of an optimizer that reduces gradients by itself."""
    found: list[Disagreement] = []
    edited: list[str] = []
    recorded = recording.is_recorded(step)
    if step == 0:
        found += [*_replicas(recording, PARAMETERS, 0), *_model_ranks(recording, PARAMETERS, 0)]
    if recorded:
        differing, edited = _unsharded(recording, step)
        found += differing
    found += _losses(recording, step)
    notes = []
    if recorded:
        found += [*_replicas(recording, REDUCE, step), *_model_ranks(recording, REDUCE, step)]
        if step == recording.recorded_steps()[0] and local_gradients(recording):
            notes.append("ranks have their own gradients until the optimizer steps, which reduces them")
    found += _norms(recording, step)
    if recorded:
        for phase in (STATE, UPDATE):
            found += [*_replicas(recording, phase, step), *_model_ranks(recording, phase, step)]
    if edited:
        more = f" and {len(edited) - 1} more" if len(edited) > 1 else ""
        what = "parameters were changed after the update of the step before, alike on all ranks"
        notes.insert(0, f"step {step}: {what}: {edited[0]!r}{more}")
    return found, notes


def _unsharded(recording: Recording, step: int) -> tuple[list[Disagreement], list[str]]:
    """Disagreements on full parameters, and names of parameters that all ranks share but that differ from the shards."""
    found, edited = [], []
    for name in recording.manifest.params:
        parts = recording.ranges(UNSHARDED, step, name)
        sides = {part.rank: side_of(recording, step, name, part) for part in parts}
        if not sides:
            continue
        found += _parted(recording, step, UNSHARDED, f"unsharded value of {name!r}", name, sides)
        held = _held(recording, step, name, parts[0].dtype)
        if held is not None and not found and not held.sketched().equals(sides[parts[0].rank].sketched()):
            edited.append(name)
    return found, edited


def _held(recording: Recording, step: int, name: str, dtype: str) -> Side | None:
    """A parameter in the shards of the first replica before the step, in the dtype of forward; None if it was not recorded."""
    phase, before = before_step(step)
    if not recording.has(phase, before, name):
        return None
    held = assemble(recording, phase, before, name)
    if held.elements is not None:
        return Side(held.elements.astype(numpy_dtype(dtype)))
    assert held.sketch is not None
    return held if held.sketch.dtype == dtype else None


def _replicas(recording: Recording, phase: str, step: int) -> Iterator[Disagreement]:
    """Disagreements between replicas, for each piece of each parameter."""
    if recording.manifest.mesh.replicate == 1:
        return
    local = local_gradients(recording) if phase == REDUCE else frozenset()
    for name in recording.manifest.params:
        if name in local:
            continue
        for slot in recording.state_slots(step, name) if phase == STATE else ("",):
            pieces: dict[tuple[int, int], dict[int, Side]] = {}
            for part in recording.ranges(phase, step, name, slot):
                pieces.setdefault((part.start, part.stop), {})[part.rank] = side_of(recording, step, name, part)
            what = f"{slot or _NOUNS[phase]} of {name!r}"
            for sides in pieces.values():
                yield from _parted(recording, step, phase, what, name, sides)


def _model_ranks(recording: Recording, phase: str, step: int) -> Iterator[Disagreement]:
    """Disagreements between ranks that compute one replica together, which the recorder has found."""
    bound = bounds_for(recording.manifest.dtype).parameter
    for each in recording.disagreements(recording.num_steps):
        if (each.step, each.phase) == (step, phase):
            what = f"{each.use if phase == STATE else _NOUNS[phase]} of {each.name!r} along the mesh axis {each.axis!r}"
            yield Disagreement(step, phase, what, each.ranks, each.difference, each.difference <= bound)


def _parted(
    recording: Recording, step: int, phase: str, what: str, name: str, sides: dict[int, Side]
) -> Iterator[Disagreement]:
    kinds: dict[object, list[int]] = {}
    for rank, side in sides.items():
        elements = side.elements
        key = side.sketched().fingerprint if elements is None else (elements.dtype.name, elements.tobytes())
        kinds.setdefault(key, []).append(rank)
    if len(kinds) < 2:
        return
    most, second = sorted(kinds.values(), key=len, reverse=True)[:2]
    by_majority = 2 * len(most) > len(sides)
    others = sorted(set(sides) - set(most)) if by_majority else sorted(sides)
    usual, other = sides[most[0]], sides[second[0]]
    size = max(usual.norm, other.norm)
    if usual.num_not_finite != other.num_not_finite:
        difference = np.inf
    elif usual.elements is None or other.elements is None:
        difference = ratio(usual.sketched().distance(other.sketched()), size)
    else:
        difference = ratio(distance(usual.elements, other.elements), size)
    yield _made(recording, step, phase, what, others, difference, by_majority)


def _made(
    recording: Recording, step: int, phase: str, what: str, ranks: Sequence[int], difference: float, by_majority: bool
) -> Disagreement:
    # Data movement does not round.
    rounding = phase not in (PARAMETERS, UNSHARDED) and difference <= bounds_for(recording.manifest.dtype).parameter
    return Disagreement(step, phase, what, tuple(ranks), float(difference), rounding, by_majority)


def _numbers(recording: Recording, step: int, phase: str, what: str, values: Sequence[float]) -> Iterator[Disagreement]:
    yield from _parted(recording, step, phase, what, "", {rank: Side(np.array([x])) for rank, x in enumerate(values)})


def _losses(recording: Recording, step: int) -> Iterator[Disagreement]:
    if recording.manifest.settings.get(LOSSES) == MEAN:
        yield from _numbers(recording, step, "forward", "mean loss", recording.losses_at(step).tolist())


def _norms(recording: Recording, step: int) -> Iterator[Disagreement]:
    norms = [recording.grad_norm(step, rank) for rank in range(recording.manifest.world_size)]
    values = [norm for norm in norms if norm is not None]
    if len(values) == len(norms):
        yield from _numbers(recording, step, NORM, "gradient norm", values)


def _same_batches(recording: Recording, step: int) -> str:
    """A note on two ranks with the same batch; "" if there are none."""
    seen: dict[str, int] = {}
    for rank in range(recording.manifest.world_size):
        digest = recording.batch(step, rank).digest
        if digest in seen:
            return f"step {step}: ranks {seen[digest]} and {rank} were fed the same samples"
        seen[digest] = rank
    return ""
