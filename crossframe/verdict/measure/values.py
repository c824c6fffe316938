"""Reads the values of a quantity from one recording: its elements, or a sketch of them.

[Note: optimizers that reduce] Some optimizers reduce gradients inside of their step, as distributed variants of Muon do. Before
it each rank has the gradients of its own samples, which the recording has as reduced ones. Such a recording is known by its
replicas: most of their gradients differ before the optimizer steps. If nobody reduces the gradient of a parameter, the parameter
parts as well; where it does not, its reduced gradient is the mean over replicas.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.recording import Recording
from crossframe.recording.event_format import PARAMETERS, REDUCE, UPDATE
from crossframe.recording.hashing import same_bits
from crossframe.recording.sketch import WHOLE, Sketch, sketches_of
from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from crossframe.verdict.measure.metrics import norm, ratio
from crossframe.verdict.measure.quantities import finite


@dataclass(frozen=True)
class Side:
    """Elements or a sketch of them; the other is None."""

    elements: np.ndarray | None
    sketch: Sketch | None = None

    @property
    def norm(self) -> float:
        if self.sketch is not None:
            return self.sketch.norm
        assert self.elements is not None
        return norm(finite(self.elements))

    @property
    def num_not_finite(self) -> int:
        if self.sketch is not None:
            return self.sketch.num_not_finite
        assert self.elements is not None
        return int(np.size(self.elements) - np.isfinite(self.elements.astype(np.float64)).sum())

    def sketched(self, seed: str = "") -> Sketch:
        """The sketch, which is computed from the elements with this seed (`Sketch`) if there is none."""
        if self.sketch is not None:
            return self.sketch
        assert self.elements is not None
        return sketches_of([self.elements], seed=seed)[0]

    def has_bits_of(self, other: "Side") -> bool:
        """Whether all elements are equal bit for bit."""
        if self.elements is None or other.elements is None:
            return self.sketched().equals(other.sketched())
        return self.elements.tobytes() == other.elements.tobytes()


Sides = tuple[np.ndarray, np.ndarray, tuple[Sketch, Sketch] | None]
"""(a, b, sketches) of a `Quantity`."""


def match_values(a: Side, b: Side, *, by_sketch: bool) -> Sides:
    """Both sides as elements, or both as sketches with the same number of sums if one has no elements, or if `by_sketch` and the
    tensor is large."""
    if a.elements is None or b.elements is None or (by_sketch and a.elements.size > WHOLE):
        seed = next((side.sketch.seed for side in (a, b) if side.sketch is not None), "")
        first, second = a.sketched(seed), b.sketched(seed)
        num_sums = min(first.sums.size, second.sums.size)
        both = (first.folded(num_sums), second.folded(num_sums))
        return both[0].sums, both[1].sums, both
    return a.elements, b.elements, None


def is_same(sides: Sides) -> bool:
    """Whether both sides have the same bits, or equal sketches."""
    a, b, sketches = sides
    return same_bits(a, b) if sketches is None else sketches[0].equals(sketches[1])


def assemble(recording: Recording, phase: str, step: int, name: str, use: str = "", replica: int = 0) -> Side:
    """The value of a parameter, gradient or optimizer state entry, assembled from the shards of one replica.

    A gradient that was not recorded is zeros, because a gradient of None and zeros are equivalent (R29).
    """
    spec = recording.manifest.params[name]
    if phase == REDUCE and not recording.has(phase, step, name):
        return Side(np.zeros(spec.shape, numpy_dtype(spec.dtype)))
    if phase == REDUCE and name in local_gradients(recording):
        return _mean([_own(recording, phase, step, name, use, i) for i in range(recording.manifest.mesh.replicate)])
    return _own(recording, phase, step, name, use, replica)


def local_gradients(recording: Recording) -> Set[str]:
    """The parameters whose reduced gradients in a recording are those of each replica's own samples ([Note: optimizers that
    reduce])."""
    if recording.manifest.mesh.replicate == 1:
        return frozenset()
    if recording not in _local:
        _local[recording] = _find_local(recording)
    return _local[recording]


_local: WeakKeyDictionary[Recording, Set[str]] = WeakKeyDictionary()


def _find_local(recording: Recording) -> Set[str]:
    names, steps = list(recording.manifest.params), recording.recorded_steps()
    first = next((step for step in steps if any(recording.has(REDUCE, step, name) for name in names)), None)
    if first is None:
        return frozenset()
    grads = [name for name in names if recording.has(REDUCE, first, name) and _own(recording, REDUCE, first, name).norm]
    if 2 * sum(_part(recording, REDUCE, first, name) for name in grads) <= len(grads):
        return frozenset()
    alike = frozenset(name for name in names if _is_updated_alike(recording, name, steps))
    # Parameters that a learning rate of zero leaves as they are say nothing.
    return alike if any(_has_moved(recording, name, steps) for name in alike) else frozenset()


def _is_updated_alike(recording: Recording, name: str, steps: Sequence[int]) -> bool:
    updated = [step for step in steps if recording.has(UPDATE, step, name)]
    return bool(updated) and not any(_part(recording, UPDATE, step, name, by_bits=True) for step in updated)


def _has_moved(recording: Recording, name: str, steps: Sequence[int]) -> bool:
    last = max(step for step in steps if recording.has(UPDATE, step, name))
    before = _own(recording, PARAMETERS, 0, name) if recording.has(PARAMETERS, 0, name) else None
    return before is not None and not before.has_bits_of(_own(recording, UPDATE, last, name))


def _part(recording: Recording, phase: str, step: int, name: str, *, by_bits: bool = False) -> bool:
    """Whether the first and the last replica have other values, by more than rounding or by any bit."""
    if not recording.has(phase, step, name):
        return False
    a, b = (_own(recording, phase, step, name, "", i) for i in (0, recording.manifest.mesh.replicate - 1))
    if by_bits or a.has_bits_of(b):
        return not a.has_bits_of(b)
    difference = ratio(a.sketched().distance(b.sketched()), max(a.norm, b.norm))
    return difference > bounds_for(recording.manifest.dtype).parameter


def _mean(sides: Sequence[Side]) -> Side:
    """The mean of values, or of sketches, whose sums are linear and estimate the norm."""
    arrays = [side.elements for side in sides if side.elements is not None]
    if len(arrays) == len(sides):
        return Side(np.mean(arrays, axis=0, dtype=np.float64).astype(arrays[0].dtype))
    sketches = [side.sketched() for side in sides]
    sums = np.mean([each.sums for each in sketches], axis=0)
    prints = sum(each.fingerprint for each in sketches) % 2**64
    lost = sum(each.num_not_finite for each in sketches)
    squares = float(np.square(sums).sum())
    return Side(None, replace(sketches[0], fingerprint=prints, sums=sums, squares=squares, num_not_finite=lost))


def _own(recording: Recording, phase: str, step: int, name: str, use: str = "", replica: int = 0) -> Side:
    """What one replica has."""
    if recording.is_sketched(phase, step, name, use):
        return Side(None, recording.sketch(phase, step, name, use=use, replica=replica))
    return Side(recording.full(phase, step, name, use=use, replica=replica))


def rank_values(recording: Recording, phase: str, step: int, rank: int, name: str) -> Side:
    """A rank's own full tensor for a parameter; zeros if it recorded none."""
    spec, part = recording.manifest.params[name], recording.own_range(phase, step, rank, name)
    if part is None:
        return Side(np.zeros(spec.shape, numpy_dtype(spec.dtype)))
    if part.sketch is not None:
        return Side(None, recording.sketch_of(step, name, part))
    return Side(recording.elements(step, part).reshape(spec.shape))


def activation_values(recording: Recording, step: int, rank: int, at: tuple[int, str, str]) -> Side:
    """The input or output of a module on one rank; `at` is (microbatch, module, use)."""
    sketch = recording.activation_sketch(step, rank, *at)
    return Side(None, sketch) if sketch is not None else Side(recording.activation(step, rank, *at))
