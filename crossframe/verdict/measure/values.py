"""Reads the values of a quantity from one recording: its elements, or a sketch of them."""

from dataclasses import dataclass

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.recording import Recording
from crossframe.recording.event_format import REDUCE
from crossframe.recording.sketch import WHOLE, Sketch, sketches_of
from crossframe.verdict.measure.metrics import norm
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


Sides = tuple[np.ndarray, np.ndarray, tuple[Sketch, Sketch] | None]
"""(a, b, sketches) of a `Quantity`."""


def match_values(a: Side, b: Side, *, by_sketch: bool) -> Sides:
    """Both sides as elements, or both as sketches with the same number of sums if one has no elements, or if `by_sketch` and the
    tensor is large."""
    large = a.elements is None or a.elements.size > WHOLE
    if a.elements is None or b.elements is None or (by_sketch and large):
        seed = next((side.sketch.seed for side in (a, b) if side.sketch is not None), "")
        first, second = a.sketched(seed), b.sketched(seed)
        num_sums = min(first.sums.size, second.sums.size)
        both = (first.folded(num_sums), second.folded(num_sums))
        return both[0].sums, both[1].sums, both
    return a.elements, b.elements, None


def assemble(recording: Recording, phase: str, step: int, name: str, use: str = "", replica: int = 0) -> Side:
    """The value of a parameter, gradient or optimizer state entry, assembled from the shards of one replica.

    A gradient that was not recorded is zeros, because a gradient of None and zeros are equivalent (R29).
    """
    spec = recording.manifest.params[name]
    if phase == REDUCE and not recording.has(phase, step, name):
        return Side(np.zeros(spec.shape, numpy_dtype(spec.dtype)))
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
