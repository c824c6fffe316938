"""What one recording holds of a quantity: its elements, or a sketch of them."""

from dataclasses import dataclass

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.recording import Recording
from crossframe.recording.lines import REDUCE, activation_key
from crossframe.recording.sketch import WHOLE, Sketch, sketches_of
from crossframe.verdict.measure.metrics import norm
from crossframe.verdict.measure.quantities import finite


@dataclass(frozen=True)
class Side:
    """Elements, or a sketch of them; one of both is None."""

    elements: np.ndarray | None
    sketch: Sketch | None = None

    @property
    def norm(self) -> float:
        """Of the finite elements."""
        if self.sketch is not None:
            return self.sketch.norm
        assert self.elements is not None
        return norm(finite(self.elements))

    @property
    def num_not_finite(self) -> int:
        """How many elements are NaN or infinite."""
        if self.sketch is not None:
            return self.sketch.num_not_finite
        assert self.elements is not None
        return int(np.size(self.elements) - np.isfinite(self.elements.astype(np.float64)).sum())

    def sketched(self, name: str) -> Sketch:
        """Its sketch; `name` is what the hashes of elements are made of."""
        if self.sketch is not None:
            return self.sketch
        assert self.elements is not None
        return sketches_of(name, [self.elements])[0]


Sides = tuple[np.ndarray, np.ndarray, tuple[Sketch, Sketch] | None]
"""What a `Quantity` takes: a, b and sketches."""


def match_values(name: str, a: Side, b: Side, *, by_sketch: bool) -> Sides:
    """Both sides in elements, or both in sketches: where one has no elements, or where that is asked for and it is large."""
    large = a.elements is None or a.elements.size > WHOLE
    if a.elements is None or b.elements is None or (by_sketch and large):
        both = (a.sketched(name), b.sketched(name))
        return both[0].sums, both[1].sums, both
    return a.elements, b.elements, None


def assemble(recording: Recording, phase: str, step: int, name: str, use: str = "", replica: int = 0) -> Side:
    """What the shards of one copy of the model hold of a parameter. A gradient that was not recorded counts as zeros: None and
    zeros mean the same (R29)."""
    spec = recording.manifest.params[name]
    if phase == REDUCE and not recording.has(phase, step, name):
        return Side(np.zeros(spec.shape, numpy_dtype(spec.dtype)))
    if recording.is_sketched(phase, step, name, use):
        return Side(None, recording.sketch(phase, step, name, use=use, replica=replica))
    return Side(recording.full(phase, step, name, use=use, replica=replica))


def rank_values(recording: Recording, phase: str, step: int, rank: int, name: str) -> Side:
    """What one rank holds of a parameter in full; zeros where it recorded none."""
    spec, run = recording.manifest.params[name], recording.own_run(phase, step, rank, name)
    if run is None:
        return Side(np.zeros(spec.shape, numpy_dtype(spec.dtype)))
    if run.sketch is not None:
        return Side(None, recording.sketch_of(step, name, run))
    return Side(recording.elements(step, run).reshape(spec.shape))


def activation_values(recording: Recording, step: int, rank: int, at: tuple[int, str, str]) -> Side:
    """What one rank's module was given or gave; `at` is (microbatch, module, use)."""
    sketch = recording.activation_sketch(step, rank, *at)
    return Side(None, sketch) if sketch is not None else Side(recording.activation(step, rank, *at))


def activation_name(at: tuple[int, str, str]) -> str:
    """What the hashes of an activation's elements are made of."""
    microbatch, module, use = at
    return activation_key(use, microbatch, module)
