"""Parts of a run that compute in a narrower dtype than the run's own, as norms of many models do.

From there on, everything carries the rounding of that dtype, and a bound for the run's own dtype says nothing. Many modules cast
back before they return, so the dtype of an output does not tell; its values do: each is one that the narrower dtype has.
"""

from dataclasses import dataclass, replace

import numpy as np

from crossframe.dtypes import numpy_dtype, unit_roundoff
from crossframe.verdict.measure.bounds import Bounds, bounds_for
from crossframe.verdict.measure.quantities import ACTIVATION, Quantity

_NARROW = "float32"
# A float64 value drawn at random is one of float32 once in 2^29, so that eight of them, four a side, are no coincidence.
_LEAST_DIFFERING = 4


@dataclass(frozen=True)
class Island:
    """Where a run begins to carry the rounding of a narrower dtype.

    Attributes:
        name: of the activation, as `Quantity.name` has it.
        dtype: the narrower one.
        own: the run's.
    """

    name: str
    dtype: str
    own: str

    @property
    def bounds(self) -> Bounds:
        """What rounding may reach from there on."""
        return bounds_for(self.dtype)

    def judged(self, quantity: Quantity) -> Quantity:
        """The quantity with the bound of the narrower dtype; what only moves, or is not bounded, stays."""
        if quantity.bound is None or quantity.bound == np.inf:
            return quantity
        wider = quantity.bound * unit_roundoff(self.dtype) / unit_roundoff(self.own)
        return replace(quantity, bound=min(wider, self.bounds.parameter))

    def in_words(self) -> str:
        """What is computed in which dtype."""
        return f"the {self.name} is computed in {self.dtype}, in a run in {self.own}"


def island_at(group: list[Quantity], dtype: str) -> Island | None:
    """The island that begins at a group of quantities of a run in `dtype`; None if none does.

    It begins in a float64 run at an activation that differs, where each differing element is a float32 value on both sides. Of a
    sketch nothing is known. Values that bfloat16 or float16 has too, such as the zeros and ones of a mask, do not count: they
    say nothing about how they were computed.
    """
    if dtype != "float64" or group[0].kind != ACTIVATION or any(quantity.sketched for quantity in group):
        return None
    found = [_is_narrow(quantity) for quantity in group]
    return Island(group[0].name, _NARROW, dtype) if True in found and False not in found else None


def _is_narrow(quantity: Quantity) -> bool | None:
    """Whether the elements that differ are float32 values, and not all of a narrower dtype; None if too few differ to tell."""
    a, b = quantity.a.reshape(-1).astype(np.float64), quantity.b.reshape(-1).astype(np.float64)
    differ = a != b
    if differ.sum() < _LEAST_DIFFERING:
        return None
    values = np.concatenate([a[differ], b[differ]])
    return _all_in(values, _NARROW) and not any(_all_in(values, dtype) for dtype in ("bfloat16", "float16"))


def _all_in(values: np.ndarray, dtype: str) -> bool:
    with np.errstate(over="ignore"):
        return np.array_equal(values.astype(numpy_dtype(dtype)).astype(np.float64), values, equal_nan=True)
