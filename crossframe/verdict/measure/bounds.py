"""How far rounding alone can drive two runs apart.

The contract is stated in float64, where frameworks agree to about 1e-12 and a bug stands out by many orders of magnitude:
losses within 1e-12 (relative) at every step, parameters and gradients within 1e-11.

To other dtypes it is carried over thus. Each operation returns fl(x op y) = (x op y)(1 + d) with |d| <= u, the unit
roundoff. To first order in u the error of a whole computation is a sum of such d's, each weighted by a condition number
that depends on the function and its data and not on the arithmetic; so it is proportional to u (N. Higham, Accuracy and
Stability of Numerical Algorithms, 2nd ed., sections 1.6 and 3.1). What is c * u in float64 is c * u everywhere, with the
same c:

    losses      1e-12 / 2**-53 = 9007 u
    parameters  1e-11 / 2**-53 = 90072 u

That holds while c * u is small. In float32 (u = 2**-24) these are 5.4e-4 and 5.4e-3. In bfloat16 and float16 they pass 1:
first order says nothing any more, and a doubled gradient would lie within. There the bounds decide nothing (`decisive`);
differences beyond `COARSE` are located all the same, but neither "rounding" nor "bug" can be concluded from them.
"""

import math
from dataclasses import dataclass

from crossframe.dtypes import unit_roundoff

LOSS_UNITS = 1e-12 / 2.0**-53
PARAMETER_UNITS = 1e-11 / 2.0**-53
COARSE = 0.5
"""Where a dtype is too coarse for a bound: half of the quantity itself, less than what doubling or losing it makes."""


@dataclass(frozen=True)
class Bounds:
    """The bounds of one dtype.

    Attributes:
        loss: on |a - b| / |a| of losses, at every step.
        parameter: on norm(a - b) / `parameter_scale`, and of gradients / `gradient_scale`.
        unit_roundoff: u of the dtype.
        decisive: whether being inside or outside says anything.
    """

    loss: float
    parameter: float
    unit_roundoff: float
    decisive: bool

    def noise_scale(self, terms: int, typical: float, numel: int) -> float:
        """The norm below which a gradient is measured by this instead of by itself.

        Averaging n terms errs by at most n * u times their mean magnitude (`crossframe.verdict.measure.zero_gradient`), which
        is taken to be that of a `typical` element, the root mean square over all gradients. Both sides may err, so
        2 * terms * u * typical an element, times sqrt(numel) in norm. The scale is the norm at which this absolute error is
        just what the bound allows: a direction in which the terms cancel is not held against a relative bound that no
        summation can meet.
        """
        return 2 * terms * self.unit_roundoff * typical * math.sqrt(numel) / self.parameter


def bounds_for(dtype: str) -> Bounds:
    """The bounds of a run that computes in this dtype.

    >>> bounds_for("float64").loss, bounds_for("float64").parameter
    (1e-12, 1e-11)
    >>> round(bounds_for("float32").loss, 6), bounds_for("bfloat16").decisive
    (0.000537, False)
    """
    u = unit_roundoff(dtype)
    decisive = PARAMETER_UNITS * u < COARSE
    return Bounds(min(LOSS_UNITS * u, COARSE), min(PARAMETER_UNITS * u, COARSE), u, decisive)
