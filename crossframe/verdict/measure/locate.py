"""Where inside a quantity the difference lies."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from crossframe.layout import Sharding
from crossframe.recording.lines import COUNT, FORWARD, NORM, STATE
from crossframe.recording.manifest import Manifest
from crossframe.verdict.measure.judge import Judgement, not_finite
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import Quantity


@dataclass(frozen=True)
class Divergence:
    """The first place at which two recordings part, while all of its causes agree.

    Attributes:
        rank: whose it is: the owner, in the second recording, of the worst element; None for a mean over ranks, for samples that
            came to other ranks, and where only a sketch of all ranks together can be compared.
        unit: whose parameter it is, or whose code made it.
        parameter: None for an activation, a loss and a norm.
        start, stop: the smallest range of elements of the parameter, taken as one row-major line and cut to that rank's
            piece, that holds all elements that are off; of an activation likewise, and None for a single number. Of a sketch it
            is all that the rank holds.
        event: what made it: "all_gather", "input", "output", "loss", "backward", "reduce_scatter", "all_reduce", "grad_norm",
            "state" or "optimizer".
        ranks: every rank whose values are off, in order; empty where that is not known.
        module: of an activation, whose input or output it is; None for the model's own, and for all else.
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

    def to_json(self) -> dict:
        """The place as a JSON object."""
        return asdict(self) | {"ranks": list(self.ranks)}


def who(rank: int, ranks: Sequence[int]) -> str:
    """The rank that is off most, and which others are.

    >>> who(1, ()), who(1, (0, 1, 2, 3)), who(3, (1, 3))
    ('rank 1', 'ranks 0 to 3, rank 1 most', 'ranks 1 and 3, rank 3 most')
    """
    if len(ranks) < 2:
        return f"rank {rank}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}, rank {rank} most"
    some, more = ", ".join(map(str, ranks[:-1][:4])), len(ranks) - 5
    last = f"{more + 1} more" if more > 0 else str(ranks[-1])
    return f"ranks {some} and {last}, rank {rank} most"


def ranks_off(group: Sequence[Judgement], manifest: Manifest) -> tuple[int, ...]:
    """Every rank that a group of judgements says is off: whose own quantity is, or who owns elements that are.

    Args:
        manifest: of the second recording.
    """
    found: set[int] = set()
    for judgement in (each for each in group if each.beyond):
        q = judgement.quantity
        if q.rank is not None:
            found.add(q.rank)
        elif q.parameter and not q.sketched and q.use != COUNT:
            found |= _owners(manifest, q, np.flatnonzero(_off(judgement)[0]))
    return tuple(sorted(found))


def _owners(manifest: Manifest, q: Quantity, elements: np.ndarray) -> set[int]:
    """The ranks of a copy of the model that hold any of these elements."""
    found = Sharding(manifest.units, manifest.mesh).find(q.parameter)
    assert found is not None, q.parameter
    layout, name = manifest.units[found[0]][1], q.parameter
    owners = set()
    for place in range(manifest.mesh.shard):
        runs = [run for piece in layout.pieces(place) if piece.name == name for run in piece.runs()]
        if any(((elements >= r.param_start) & (elements < r.param_start + r.numel)).any() for r in runs):
            owners.add(q.replica * manifest.mesh.shard + place)
    return owners


def locate(judgement: Judgement, manifest: Manifest) -> Divergence:
    """Where a quantity that is beyond its bound is off.

    Off are elements of other bits where equal bits are asked for, else those with |a - b| > bound * scale / sqrt(numel): if
    none were, norm(a - b) would be within bound * scale.

    Args:
        manifest: of the second recording; its layout says which rank owns what.
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
        return Divergence(q.step, q.phase, q.rank, q.unit, None, start, stop, q.event, module=q.module or None)
    worst = int(np.flatnonzero(off)[np.argmax(size[off])])
    rank, held = q.rank, np.arange(off.size)
    if rank is None:
        shard_rank, held = _held_with(manifest, q.parameter, worst)
        rank = q.replica * manifest.mesh.shard + shard_rank
    inside = held[off[held]]
    return Divergence(q.step, q.phase, rank, q.unit, q.parameter or None, int(inside[0]), int(inside[-1]) + 1, q.event)


def _off(judgement: Judgement) -> tuple[np.ndarray, np.ndarray]:
    """Which elements are off, and by how much."""
    q = judgement.quantity
    a, b = q.a.reshape(-1), q.b.reshape(-1)
    one_sided, shared = not_finite(a, b)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.where(one_sided | shared, 0.0, np.abs(a.astype(np.float64) - b.astype(np.float64)))
    if judgement.one_sided:
        return one_sided, one_sided.astype(np.float64)
    if q.bound is None and a.dtype != b.dtype:
        return apart > 0, apart
    if q.bound is None:
        bits = [np.ascontiguousarray(x).view(np.uint8).reshape(x.size, -1) for x in (a, b)]
        return (bits[0] != bits[1]).any(axis=1), apart
    return apart > q.bound * q.scale / np.sqrt(a.size), apart


def _held_with(manifest: Manifest, parameter: str, element: int) -> tuple[int, np.ndarray]:
    """The place among the shards that holds an element, and the elements of the parameter that it holds."""
    sharding = Sharding(manifest.units, manifest.mesh)
    found = sharding.find(parameter)
    assert found is not None, parameter
    bucket, i = found
    layout = sharding.units[bucket][1]
    (one,) = layout.find(i, element, element + 1)
    pieces = (piece for piece in layout.pieces(one.rank) if piece.name == layout.params[i].name)
    runs = [run for piece in pieces for run in piece.runs()]
    return one.rank, np.concatenate([np.arange(run.param_start, run.param_start + run.numel) for run in runs])


def locate_sketch(judgement: Judgement, pair: Pair) -> Divergence:
    """The same of sketches: the rank whose own differs, and what it holds."""
    q = judgement.quantity
    rank, start, stop = _held(q, pair)
    module = q.module or None
    return Divergence(q.step, q.phase, rank, q.unit, q.parameter or None, start, stop, q.event, module=module)


def _held(q: Quantity, pair: Pair) -> tuple[int | None, int, int]:
    """The rank whose sketch differs most, and which elements it holds; no rank where both sides lie otherwise on theirs."""
    if q.rank is not None or not q.parameter:
        return q.rank, 0, q.numel
    use = q.use if q.phase == STATE else ""
    ours, theirs = (recording.runs(q.phase, q.step, q.parameter, use) for recording in (pair.a, pair.b))
    shard = pair.b.manifest.mesh.shard
    held = [run for run in theirs if run.rank // shard == q.replica]
    by_range = {(run.start, run.stop): run for run in ours}
    apart = []
    for run in held:
        other = by_range.get((run.start, run.stop))
        if other is None:
            return None, 0, q.numel
        sketches = (pair.a.sketch_of(q.step, q.parameter, other), pair.b.sketch_of(q.step, q.parameter, run))
        lost = abs(sketches[0].num_not_finite - sketches[1].num_not_finite)
        apart.append((lost, sketches[0].distance(sketches[1]), run))
    if not apart:
        return None, 0, q.numel
    worst = max(apart, key=lambda each: each[:2])[2]
    return worst.rank, worst.start, worst.stop
