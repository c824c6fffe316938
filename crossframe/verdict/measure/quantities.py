"""One thing that both recordings hold, and what kind of thing it is."""

import math
from dataclasses import dataclass, replace

import numpy as np

from crossframe.recording.lines import BACKWARD, FORWARD, NORM, REDUCE, STATE, UPDATE
from crossframe.recording.sketch import Sketch
from crossframe.verdict.measure.metrics import norm

ACTIVATION = "activation"
LATE_UPDATE = "late update"
KINDS = (ACTIVATION, FORWARD, BACKWARD, REDUCE, NORM, STATE, UPDATE, LATE_UPDATE)
"""Kinds of quantities that are computed. What only moves is asked for equal bits, and is of no kind."""


@dataclass(frozen=True)
class Quantity:
    """One thing that both recordings hold.

    Attributes:
        event: what made it, in words of a step: "all_gather", "input", "output", "loss", "backward", "reduce_scatter",
            "all_reduce", "grad_norm", "state", "optimizer".
        unit: whose parameter it is, or whose code made it.
        parameter: canonical name; "" for an activation, a loss and a norm.
        rank: the rank whose it is alone; None for what is put together from shards, and for a mean over ranks.
        replica: the copy of the model in the second recording that it was put together from.
        a, b: its elements, in its shape; of a sketched one the sums of the sketches.
        scale: what norm(a - b) is divided by.
        bound: how large that may be. None asks for equal bits; inf asks only that both are finite.
        late: an update after a step that was not recorded.
        module, use: of an activation: of which module, and whether it is the "input" or the "output"; of an optimizer's state the
            use is its slot.
        sketches: of both sides, where the elements are not there.
        within: "" for a comparison of both recordings; "a" or "b" where that one alone contradicts itself: a is then what its own
            shards say, and b what was seen.
        grown: what one side was multiplied by to undo its clipping (`crossframe.verdict.measure.clipping`); the effect of
            rounding was multiplied too.
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
    unclipped_by: float = 1.0

    @property
    def kind(self) -> str:
        """One of KINDS: the phase, but for what is of several kinds."""
        if self.module or self.use in ("input", "output"):
            return ACTIVATION
        return LATE_UPDATE if self.late else self.phase

    @property
    def name(self) -> str:
        """What it is called within its step and phase.

        >>> empty = np.zeros(0)
        >>> Quantity(0, "state", "state", "h.0", "h.0.w", None, 0, empty, empty, 1.0, None, use="exp_avg").name
        'exp_avg of h.0.w'
        """
        if self.kind == ACTIVATION:
            return f"{self.use} of {self.module or 'the model'}"
        return f"{self.use} of {self.parameter}" if self.use else self.parameter

    @property
    def sketched(self) -> bool:
        """Whether only sketches of it are there."""
        return self.sketches is not None

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.sketches[0].numel if self.sketches else self.a.size

    @property
    def dtypes(self) -> tuple[str, str]:
        """Of both sides."""
        return tuple(s.dtype for s in self.sketches) if self.sketches else (self.a.dtype.name, self.b.dtype.name)  # type: ignore[return-value]

    @property
    def norms(self) -> tuple[float, float]:
        """Of the finite elements of both sides."""
        if self.sketches:
            return self.sketches[0].norm, self.sketches[1].norm
        return norm(finite(self.a)), norm(finite(self.b))

    def with_scale(self, scale: float) -> "Quantity":
        """The same, measured by another scale."""
        return replace(self, scale=scale)

    @property
    def typical(self) -> float:
        """The root mean square of the first side's elements."""
        return self.norms[0] / math.sqrt(max(self.numel, 1))


def finite(array: np.ndarray) -> np.ndarray:
    """Without what is not finite: that is judged apart, and would make every scale infinite."""
    array = np.asarray(array, np.float64)
    return np.where(np.isfinite(array), array, 0.0)
