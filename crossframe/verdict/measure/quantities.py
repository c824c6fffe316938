"""A compared quantity and its kind."""

import math
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from crossframe.recording.event_format import (
    BACKWARD,
    BUFFERS,
    FORWARD,
    INPUT,
    NORM,
    OUTPUT,
    REDUCE,
    STATE,
    UPDATE,
)
from crossframe.recording.sketch import Sketch
from crossframe.verdict.measure.metrics import norm

ACTIVATION = "activation"
LATE_UPDATE = "late update"
KINDS = (ACTIVATION, FORWARD, BACKWARD, REDUCE, NORM, STATE, UPDATE, LATE_UPDATE, BUFFERS)
"""The kinds of computed quantities. Data that is only moved must be bitwise equal and has no kind."""


@dataclass(frozen=True)
class Quantity:
    """A quantity in both recordings.

    Attributes:
        event: the operation that produced it: "all_gather", "input", "output", "loss", "backward", "reduce_scatter",
            "all_reduce", "grad_norm", "state", "optimizer", "buffer".
        unit: the unit of the parameter or of the computing module.
        parameter: canonical name; "" for an activation, a loss, a norm or a buffer.
        rank: the rank of a local quantity; None for a quantity assembled from shards and for a mean over ranks.
        replica: the replica of the second recording that it was assembled from.
        a, b: the elements in their shape, or the sums of the sketches.
        scale: the divisor of norm(a - b).
        bound: the bound on norm(a - b) / scale. None requires bitwise equality; inf only requires that both are finite.
        microbatch: that of an activation; of the losses of several backwards of a step, the number of the backward, from 1.
        late: whether it is an update after a step that was not recorded.
        module, use: for an activation, its module, and "input" or "output"; for optimizer state, `use` is the name of the entry.
        sketches: of both sides, if not both have elements.
        within: "" for a comparison of both recordings; "a" or "b" for a check within one recording, where a is the value of the
            shards and b the gathered value.
        by: the factors by which a and b were multiplied to undo clipping (`crossframe.verdict.measure.clipping`) or a scale of
            the loss (`crossframe.verdict.measure.loss_scale`), and their rounding with them.
        stored: the dtypes of the recorded elements, where a factor gives elements that they do not have.
        buffer: canonical name of a buffer; "" for other quantities.
    """

    step: int
    phase: str
    event: str
    unit: str
    parameter: str
    rank: int | None
    replica: int
    a: np.ndarray
    b: np.ndarray
    scale: float
    bound: float | None
    microbatch: int = 0
    late: bool = False
    module: str = ""
    use: str = ""
    sketches: tuple[Sketch, Sketch] | None = None
    within: str = ""
    by: tuple[float, float] = (1.0, 1.0)
    stored: tuple[str, str] | None = None
    buffer: str = ""

    @property
    def kind(self) -> str:
        """One of KINDS: the phase, except for activations and late updates."""
        if self.use in (INPUT, OUTPUT):
            return ACTIVATION
        return LATE_UPDATE if self.late else self.phase

    @property
    def name(self) -> str:
        """The name of the quantity, unique within step and phase.

        >>> empty = np.zeros(0)
        >>> Quantity(0, "state", "state", "h.0", "h.0.w", None, 0, empty, empty, 1.0, None, use="exp_avg").name
        'exp_avg of h.0.w'
        """
        if self.kind == ACTIVATION:
            return f"{self.use} of {self.module or 'the model'}"
        return f"{self.use} of {self.parameter}" if self.use else self.parameter or self.buffer

    @property
    def sketched(self) -> bool:
        return self.sketches is not None

    @property
    def numel(self) -> int:
        return self.sketches[0].numel if self.sketches else self.a.size

    @property
    def dtypes(self) -> tuple[str, str]:
        """The dtypes in which both sides were recorded."""
        if self.sketches:
            return self.sketches[0].dtype, self.sketches[1].dtype
        return self.stored or (self.a.dtype.name, self.b.dtype.name)

    @property
    def norms(self) -> tuple[float, float]:
        """The norms of the finite elements of both sides."""
        if self.sketches:
            return self.sketches[0].norm, self.sketches[1].norm
        return norm(finite(self.a)), norm(finite(self.b))

    def with_scale(self, scale: float) -> "Quantity":
        return replace(self, scale=scale)

    def times(self, a: float, b: float) -> "Quantity":
        """The quantity with its sides multiplied by these factors, and the same scale.

        >>> one = Quantity(0, "norm", "grad_norm", "", "", 0, 0, np.ones(1), np.ones(1), 1.0, None)
        >>> one.times(1.0, 0.5).b.tolist()
        [0.5]
        """
        sketches = self.sketches and (_sketch_times(self.sketches[0], a), _sketch_times(self.sketches[1], b))
        first, second = _times(self.a, a), _times(self.b, b)
        by = a * self.by[0], b * self.by[1]
        return replace(self, a=first, b=second, sketches=sketches, by=by, stored=self.dtypes)

    @property
    def typical(self) -> float:
        return self.norms[0] / math.sqrt(max(self.numel, 1))


def finite(array: np.ndarray) -> np.ndarray:
    """A float64 copy with 0 for elements that are not finite; these are judged separately and would make scales infinite."""
    array = np.asarray(array, np.float64)
    return np.where(np.isfinite(array), array, 0.0)


def _times(array: np.ndarray, factor: float) -> np.ndarray:
    """The product in the dtype of the array, or in float64 if that has no number near an element, as float16 below 6e-5."""
    if factor == 1.0:
        return array
    wide = np.asarray(array, np.float64) * factor
    with np.errstate(over="ignore"):
        product = wide.astype(array.dtype)
    least = float(ml_dtypes.finfo(array.dtype).smallest_normal)
    in_range = np.isfinite(product) & (np.abs(wide) >= least)
    return product if np.all(in_range | (product == wide) | ~np.isfinite(wide)) else wide


def _sketch_times(sketch: Sketch, factor: float) -> Sketch:
    """The sketch of scaled elements, with a fingerprint that equals no other."""
    if factor == 1.0:
        return sketch
    return replace(
        sketch, sums=sketch.sums * factor, squares=sketch.squares * factor**2, fingerprint=sketch.fingerprint ^ 1
    )
