"""Parts of a run that compute in a narrower dtype than the run's own, as norms of many models do.

From there on, everything carries the rounding of that dtype, and a bound for the run's own dtype says nothing. Many modules cast
back before they return, so the dtype of an output does not tell; its values do: each is one that the narrower dtype has.
"""

from dataclasses import dataclass, replace

import numpy as np

from crossframe.dtypes import itemsize, numpy_dtype, unit_roundoff
from crossframe.verdict.bounds import Bounds, bounds_for
from crossframe.verdict.quantities import ACTIVATION, Quantity

_NARROWER = ("bfloat16", "float16", "float32")
# So many elements in which the two differ, all of them values of a narrower dtype, are no coincidence.
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

    It begins at an activation that differs, where each differing element is a value of a narrower dtype on both sides. Of a
    sketch nothing is known.
    """
    if group[0].kind != ACTIVATION or any(quantity.sketched for quantity in group):
        return None
    found = [_narrowest(quantity, dtype) for quantity in group]
    known = [narrow for narrow in found if narrow]
    if not known or "" in found:
        return None
    return Island(group[0].name, max(known, key=itemsize), dtype)


def _narrowest(quantity: Quantity, dtype: str) -> str | None:
    """The narrowest dtype that has all values that differ; "" if that is the run's own, None if too few differ to tell."""
    a, b = quantity.a.reshape(-1), quantity.b.reshape(-1)
    differ = a.astype(np.float64) != b.astype(np.float64)
    if differ.sum() < _LEAST_DIFFERING:
        return None
    values = np.concatenate([a[differ], b[differ]]).astype(np.float64)
    for narrow in _NARROWER:
        if itemsize(narrow) < itemsize(dtype):
            with np.errstate(over="ignore"):
                if np.array_equal(values.astype(numpy_dtype(narrow)).astype(np.float64), values, equal_nan=True):
                    return narrow
    return ""
