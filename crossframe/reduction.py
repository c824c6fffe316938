"""How gradients become one gradient (R26, R28): divide factors and the order of the reduction."""

import math
from dataclasses import dataclass

from crossframe.dtypes import itemsize
from crossframe.errors import PlanError
from crossframe.mesh import check_world_size


@dataclass(frozen=True)
class DivideFactors:
    """Divide by `before` ahead of the sum and by `after` behind it; their product is the number of ranks."""

    before: float
    after: float


def divide_factors(num_ranks: int) -> DivideFactors:
    """Split the division by the number of ranks around the sum, so that neither overflows (R26).

    The factor before is the least power of two f that does not divide num_ranks or that has f >= num_ranks / f:
    `f = 1; while N % f == 0 and N / f > f: f *= 2` (torch's FSDP1 does this in every dtype).

    >>> divide_factors(8), divide_factors(6)
    (DivideFactors(before=4.0, after=2.0), DivideFactors(before=4.0, after=1.5))
    """
    check_world_size(num_ranks)
    before = 1
    while num_ranks % before == 0 and num_ranks / before > before:
        before *= 2
    return DivideFactors(float(before), num_ranks / before)


def mean_factors(num_ranks: int, dtype: str) -> DivideFactors:
    """FSDP2's division (R26): float32 and bfloat16 are averaged by the collective, which divides once behind the sum; other
    dtypes are split as FSDP1 splits them.

    >>> mean_factors(3, "float32"), mean_factors(3, "float64")
    (DivideFactors(before=1.0, after=3.0), DivideFactors(before=2.0, after=1.5))
    """
    check_world_size(num_ranks)
    itemsize(dtype)
    if dtype in ("float32", "bfloat16"):
        return DivideFactors(1.0, float(num_ranks))
    return divide_factors(num_ranks)


def custom_factors(factor: float) -> DivideFactors:
    """A divide factor of the user's own (R27): applied once, ahead of the sum."""
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise PlanError(f"expected a finite gradient divide factor above 0, got {factor!r}")
    return DivideFactors(float(factor), 1.0)
