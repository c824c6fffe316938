"""Detects parts of a run that compute in a narrower dtype than the run, as the norms of many models do.

From such a part on, all quantities carry the rounding of the narrower dtype, so the bound of the run's dtype does not apply. Many
modules cast back before they return, so the narrower dtype shows in the values of an output, not in its dtype. A parameter that
is stored in a narrower dtype shows it in its gradient.
"""

from dataclasses import dataclass, replace

import numpy as np

from crossframe.dtypes import numpy_dtype, unit_roundoff
from crossframe.recording.event_format import BACKWARD, REDUCE, UPDATE
from crossframe.verdict.measure.bounds_by_dtype import Bounds, bounds_for
from crossframe.verdict.measure.quantities import ACTIVATION, Quantity

_NARROW = "float32"
_SHOWING = {ACTIVATION: "", BACKWARD: "gradient of ", REDUCE: "gradient of ", UPDATE: "update of "}
"""The kinds of quantities that show a narrower dtype, and what their names lack."""
# A random float64 value is representable in float32 with probability 2^-29, so eight of them (four on each side) are no
# coincidence.
_LEAST_DIFFERING = 4


@dataclass(frozen=True)
class NarrowerDtype:
    """The first quantity with the rounding of a narrower dtype.

    Attributes:
        name: the quantity in words: "output of blocks.0", "gradient of head.weight".
        dtype: the narrower dtype.
        own: the dtype of the run.
    """

    name: str
    dtype: str
    own: str

    @property
    def bounds(self) -> Bounds:
        """The bounds that apply from this quantity on."""
        return bounds_for(self.dtype)

    def judged(self, quantity: Quantity) -> Quantity:
        """The quantity with the bound of the narrower dtype; unchanged if it must be bitwise equal or is not bounded."""
        if quantity.bound is None or quantity.bound == np.inf:
            return quantity
        wider = quantity.bound * unit_roundoff(self.dtype) / unit_roundoff(self.own)
        return replace(quantity, bound=min(wider, self.bounds.parameter))

    def describe(self) -> str:
        return f"the {self.name} is computed in {self.dtype}, in a run in {self.own}"


def narrower_dtype_at(group: list[Quantity], dtype: str) -> NarrowerDtype | None:
    """The narrower dtype that begins at a group of quantities of a run in `dtype`, or None.

    One begins in a float64 run at a differing activation, gradient or parameter if all differing elements are float32 values on
    both sides, but not all are values of bfloat16 or float16, such as the zeros and ones of a mask. Sketches cannot show one.
    """
    first = group[0]
    if dtype != "float64" or first.kind not in _SHOWING or any(quantity.sketched for quantity in group):
        return None
    found = [_is_narrow(quantity) for quantity in group]
    name = f"{_SHOWING[first.kind]}{first.name}"
    return NarrowerDtype(name, _NARROW, dtype) if True in found and False not in found else None


def _is_narrow(quantity: Quantity) -> bool | None:
    """Whether the differing elements are float32 values, not all of an even narrower dtype; None if too few elements differ."""
    a, b = quantity.a.reshape(-1).astype(np.float64), quantity.b.reshape(-1).astype(np.float64)
    differ = a != b
    if differ.sum() < _LEAST_DIFFERING:
        return None
    values = np.concatenate([a[differ], b[differ]])
    return _all_in(values, _NARROW) and not any(_all_in(values, dtype) for dtype in ("bfloat16", "float16"))


def _all_in(values: np.ndarray, dtype: str) -> bool:
    with np.errstate(over="ignore"):
        return np.array_equal(values.astype(numpy_dtype(dtype)).astype(np.float64), values, equal_nan=True)
