"""One quantity judged, and where inside it the difference lies."""

from dataclasses import asdict, dataclass

import numpy as np

from crossframe.layout import Sharding
from crossframe.recording.lines import FORWARD
from crossframe.recording.manifest import Manifest
from crossframe.verdict.metrics import distance, ratio
from crossframe.verdict.quantities import Quantity


@dataclass(frozen=True)
class Divergence:
    """The first place at which two recordings part, while everything that causes it agrees.

    Attributes:
        rank: whose it is: the owner, in the second recording, of the worst element; None for a mean over ranks.
        unit: whose parameter or output it is.
        parameter: None for an output and for a loss.
        start, stop: the smallest range of elements of the parameter, taken as one row-major line and cut to that rank's
            piece, that holds all elements that are off; of an output likewise, and None for a loss.
        event: what made it: "all_gather", "output", "loss", "backward", "reduce_scatter", "all_reduce" or "optimizer".
    """

    step: int
    phase: str
    rank: int | None
    unit: str
    parameter: str | None
    start: int | None
    stop: int | None
    event: str

    def to_json(self) -> dict:
        """The place as a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class Judgement:
    """What became of one quantity.

    Attributes:
        equal: every bit, dtype included.
        difference: what is held against the bound: norm(a - b) / scale, or with twins what they measure of it; inf where only
            one side is finite.
        beyond: whether it is outside its bound.
        one_sided: whether an element is not finite on one side only (or not finite in another way).
        both_not_finite: whether an element is NaN, or the same infinity, on both sides.
        whole: norm(a - b) / scale, whatever is held against the bound.
    """

    quantity: Quantity
    equal: bool
    difference: float
    beyond: bool
    one_sided: bool
    both_not_finite: bool
    whole: float = 0.0

    @property
    def used(self) -> float:
        """How much of its bound the difference uses up; more than 1 is outside. Data movement may use nothing."""
        return ratio(self.difference, self.quantity.bound or 0.0)


def judge(quantity: Quantity) -> Judgement:
    """Hold both sides of a quantity against its bound."""
    a, b = quantity.a.reshape(-1), quantity.b.reshape(-1)
    equal = a.dtype == b.dtype and a.tobytes() == b.tobytes()
    a, b = a.astype(np.float64), b.astype(np.float64)
    if equal:
        return Judgement(quantity, True, 0.0, False, False, not np.isfinite(a).all())
    one_sided, shared = _not_finite(a, b)
    if one_sided.any():
        return Judgement(quantity, False, np.inf, True, True, bool(shared.any()), np.inf)
    difference = ratio(distance(np.where(shared, 0.0, a), np.where(shared, 0.0, b)), quantity.scale)
    beyond = True if quantity.bound is None else difference > quantity.bound
    return Judgement(quantity, False, difference, beyond, False, bool(shared.any()), difference)


def locate(judgement: Judgement, manifest: Manifest) -> Divergence:
    """Where a quantity that is beyond its bound is off.

    Off are elements of other bits where equal bits are asked for, else those with |a - b| > bound * scale / sqrt(numel): if
    none were, norm(a - b) would be within bound * scale.

    Args:
        manifest: of the second recording; its layout says which rank owns what.
    """
    q = judgement.quantity
    if q.kind == FORWARD:
        return Divergence(q.step, q.phase, q.rank, q.unit, None, None, None, q.event)
    off, size = _off(judgement)
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
    one_sided, shared = _not_finite(a, b)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.where(one_sided | shared, 0.0, np.abs(a.astype(np.float64) - b.astype(np.float64)))
    if judgement.one_sided:
        return one_sided, one_sided.astype(np.float64)
    if q.bound is None:
        bits = [np.ascontiguousarray(x).view(np.uint8).reshape(x.size, -1) for x in (a, b)]
        return (bits[0] != bits[1]).any(axis=1), apart
    return apart > q.bound * q.scale / np.sqrt(a.size), apart


def _not_finite(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Elements that are not finite on one side only or otherwise than on the other, and those that are so alike."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    either = ~np.isfinite(a) | ~np.isfinite(b)
    alike = (np.isnan(a) & np.isnan(b)) | (a == b)
    return either & ~alike, either & alike


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
