"""Locates a difference within a quantity."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from crossframe.recording.event_format import COUNT, FORWARD, NORM, STATE
from crossframe.recording.manifest import Manifest
from crossframe.verdict.measure.judge import Judgement, not_finite
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import Quantity


@dataclass(frozen=True)
class Divergence:
    """The location of the first difference whose causes all agree.

    Attributes:
        rank: the owner of the worst element in the second recording; None for a mean over ranks, for samples on other ranks, and
            if only a sketch over all ranks can be compared.
        unit: the unit of the parameter or of the computing module.
        parameter: None for an activation, a loss or a norm.
        start, stop: the smallest range of row-major element indices, within the piece of that rank, that contains all differing
            elements; None for a single number. For a sketch, the whole piece of the rank.
        event: the operation that produced it: "all_gather", "input", "output", "loss", "backward", "reduce_scatter",
            "all_reduce", "grad_norm", "state", "optimizer" or "buffer".
        ranks: all ranks with differing values, in order; empty if unknown.
        module: the module of an activation, or a further call of it, such as "encoder (call 2)"; None for the model's own input
            or output, and for other quantities.
        buffer: the name of a buffer; None for other quantities.
    """

    step: int
    phase: str
    rank: int | None
    unit: str
    parameter: str | None
    start: int | None
    stop: int | None
    event: str
    ranks: tuple[int, ...] = ()
    module: str | None = None
    buffer: str | None = None

    def to_json(self) -> dict:
        return asdict(self) | {"ranks": list(self.ranks)}


def who(rank: int, ranks: Sequence[int]) -> str:
    """Describe the differing ranks and the one that differs most.

    >>> who(1, ()), who(1, (0, 1, 2, 3)), who(3, (1, 3))
    ('rank 1', 'ranks 0 to 3, largest on rank 1', 'ranks 1 and 3, largest on rank 3')
    >>> who(2, (0, 2, 4, 6, 8)), who(2, (0, 2, 4, 6, 8, 10))
    ('ranks 0, 2, 4, 6 and 8, largest on rank 2', 'ranks 0, 2, 4, 6 and 2 more, largest on rank 2')
    """
    if len(ranks) < 2:
        return f"rank {rank}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}, largest on rank {rank}"
    some, more = ", ".join(map(str, ranks[:-1][:4])), len(ranks) - 5
    last = f"{more + 1} more" if more > 0 else str(ranks[-1])
    return f"ranks {some} and {last}, largest on rank {rank}"


def with_ranks(noun: str, rank: int, ranks: Sequence[int]) -> str:
    """A quantity of ranks that has no other attributes, with the differing ranks.

    >>> with_ranks("the loss", 1, ()), with_ranks("the loss", 0, (0, 1))
    ('the loss of rank 1', 'the loss (ranks 0 and 1, largest on rank 0)')
    """
    return f"{noun} of rank {rank}" if len(ranks) < 2 else f"{noun} ({who(rank, ranks)})"


def ranks_off(group: Sequence[Judgement], manifest: Manifest) -> tuple[int, ...]:
    """All ranks whose own quantity differs or that own differing elements.

    Args:
        manifest: of the second recording.
    """
    found: set[int] = set()
    for judgement in (each for each in group if each.beyond):
        q = judgement.quantity
        if q.rank is not None:
            found.add(q.rank)
        elif q.parameter and not q.sketched and q.use != COUNT:
            off, first = _off(judgement)[0], q.replica * manifest.mesh.shard
            found |= {first + i for i, held in enumerate(_held_by_rank(manifest, q.parameter)) if off[held].any()}
    return tuple(sorted(found))


def _held_by_rank(manifest: Manifest, parameter: str) -> list[np.ndarray]:
    """The elements of a parameter that each shard rank owns, in order."""
    layout, held = manifest.layout_of(parameter), []
    for rank in range(manifest.mesh.shard):
        runs = [run for piece in layout.pieces(rank) if piece.name == parameter for run in piece.runs()]
        own = [np.arange(run.param_start, run.param_start + run.numel) for run in runs]
        held.append(np.concatenate([np.empty(0, int), *own]))
    return held


def locate(judgement: Judgement, manifest: Manifest) -> Divergence:
    """Locate the difference of a quantity that exceeds its bound.

    Differing elements are those with different bits if bitwise equality is required, else those with |a - b| > bound * scale /
    sqrt(numel): without any, norm(a - b) would be at most bound * scale.

    Args:
        manifest: of the second recording, whose layout maps elements to ranks.
    """
    q = judgement.quantity
    if q.kind in (FORWARD, NORM):
        return Divergence(q.step, q.phase, q.rank, q.unit, None, None, None, q.event)
    if q.phase == STATE and q.use == COUNT:
        return Divergence(q.step, q.phase, None, q.unit, q.parameter, None, None, q.event)
    off, size = _off(judgement)
    if not q.parameter:
        inside = np.flatnonzero(off)
        start, stop = int(inside[0]), int(inside[-1]) + 1
        return _of_model(q, q.rank, start, stop)
    worst = int(np.flatnonzero(off)[np.argmax(size[off])])
    rank, held = q.rank, np.arange(off.size)
    if rank is None:
        by_rank = enumerate(_held_by_rank(manifest, q.parameter))
        shard_rank, held = next((i, own) for i, own in by_rank if worst in own)
        rank = q.replica * manifest.mesh.shard + shard_rank
    inside = held[off[held]]
    return Divergence(q.step, q.phase, rank, q.unit, q.parameter or None, int(inside[0]), int(inside[-1]) + 1, q.event)


def _off(judgement: Judgement) -> tuple[np.ndarray, np.ndarray]:
    """The mask of differing elements, and their differences."""
    q = judgement.quantity
    a, b = q.a.reshape(-1), q.b.reshape(-1)
    one_sided, shared = not_finite(a, b)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
    if judgement.one_sided:
        return one_sided, one_sided.astype(np.float64)
    if q.bound is None and a.dtype != b.dtype:
        return apart > 0, apart
    if q.bound is None:
        bits = [np.ascontiguousarray(x).view(np.uint8).reshape(x.size, -1) for x in (a, b)]
        return (bits[0] != bits[1]).any(axis=1) & ~shared, apart
    return apart > q.bound * q.scale / np.sqrt(a.size), apart


def locate_sketch(judgement: Judgement, pair: Pair) -> Divergence:
    """Locate the difference of a sketched quantity: the rank whose sketch differs most, and its piece."""
    q = judgement.quantity
    rank, start, stop = _held(q, pair)
    if not q.parameter:
        return _of_model(q, rank, start, stop)
    return Divergence(q.step, q.phase, rank, q.unit, q.parameter, start, stop, q.event)


def _of_model(q: Quantity, rank: int | None, start: int, stop: int) -> Divergence:
    """The location of an activation or a buffer."""
    module, buffer = q.module or None, q.buffer or None
    return Divergence(q.step, q.phase, rank, q.unit, None, start, stop, q.event, module=module, buffer=buffer)


def _held(q: Quantity, pair: Pair) -> tuple[int | None, int, int]:
    """The rank whose sketch differs most and its range of elements; no rank if the two layouts differ."""
    if q.rank is not None or not q.parameter:
        return q.rank, 0, q.numel
    use = q.use if q.phase == STATE else ""
    ours, theirs = (recording.ranges(q.phase, q.step, q.parameter, use) for recording in (pair.a, pair.b))
    shard = pair.b.manifest.mesh.shard
    held = [part for part in theirs if part.rank // shard == q.replica]
    by_range = {(part.start, part.stop): part for part in ours}
    apart = []
    for part in held:
        other = by_range.get((part.start, part.stop))
        if other is None:
            return None, 0, q.numel
        sketches = (pair.a.sketch_of(q.step, q.parameter, other), pair.b.sketch_of(q.step, q.parameter, part))
        lost = abs(sketches[0].num_not_finite - sketches[1].num_not_finite)
        apart.append((lost, sketches[0].distance(sketches[1]), part))
    if not apart:
        return None, 0, q.numel
    worst = max(apart, key=lambda each: each[:2])[2]
    return worst.rank, worst.start, worst.stop
