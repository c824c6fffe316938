"""Bounds on the difference that rounding can cause, where no perturbed runs measure it (`crossframe.verdict.perturbed_runs`).

The bounds are defined in float64, where frameworks agree to about 1e-12 and a bug exceeds this by many orders of magnitude:
1e-12 (relative) for losses at every step, 1e-11 for parameters and gradients.

They scale to other dtypes with the unit roundoff. Each operation returns fl(x op y) = (x op y)(1 + d) with |d| <= u, the unit
roundoff. To first order in u the error of a whole computation is a sum of such d's, each weighted by a condition number that
depends on the function and its data and not on the arithmetic; so it is proportional to u (N. Higham, Accuracy and Stability of
Numerical Algorithms, 2nd ed., sections 1.6 and 3.1). A bound of c * u in float64 is c * u in every dtype, with the same c:

    losses      1e-12 / 2**-53 = 9007 u
    parameters  1e-11 / 2**-53 = 90072 u

This holds while c * u is small. In float32 (u = 2**-24), the bounds are 5.4e-4 and 5.4e-3. In bfloat16 and float16 they exceed 1,
so the first-order argument fails and even a doubled gradient would be within them. There the bounds are not `decisive`:
differences beyond `COARSE` are located, but neither "rounding" nor "bug" is concluded from them.
"""

import math
from dataclasses import dataclass

from crossframe.dtypes import FLOATING, unit_roundoff
from crossframe.recording import Recording

LOSS_UNITS = 1e-12 / 2.0**-53
PARAMETER_UNITS = 1e-11 / 2.0**-53
COARSE = 0.5
"""The bound for dtypes that are too coarse: half of the quantity, less than the effect of doubling or losing it."""


@dataclass(frozen=True)
class Bounds:
    """The bounds of one dtype.

    Attributes:
        loss: bound on |a - b| / |a| of losses, at every step.
        parameter: bound on norm(a - b) / `parameter_scale` of parameters, and on norm(a - b) / `gradient_scale` of gradients.
        unit_roundoff: u of the dtype.
        decisive: whether the bounds are small enough to conclude anything.
    """

    loss: float
    parameter: float
    unit_roundoff: float
    decisive: bool

    def noise_scale(self, terms: int, typical: float, numel: int) -> float:
        """The smallest scale by which a gradient's difference is divided.

        Averaging n terms has an error of at most n * u times their mean magnitude (`crossframe.verdict.measure.zero_gradient`),
        for which `typical` is used, the root mean square over all gradients. Both sides have this error: 2 * terms * u * typical
        per element, times sqrt(numel) in norm. At the returned scale the bound equals this absolute error, so that a gradient
        whose terms cancel is not judged by a relative bound that no summation can meet.
        """
        return 2 * terms * self.unit_roundoff * typical * math.sqrt(numel) / self.parameter


def bounds_for(dtype: str) -> Bounds:
    """The bounds for runs that compute in this dtype.

    >>> bounds_for("float64").loss, bounds_for("float64").parameter
    (1e-12, 1e-11)
    >>> round(bounds_for("float32").loss, 6), bounds_for("bfloat16").decisive
    (0.000537, False)
    """
    u = unit_roundoff(dtype)
    decisive = PARAMETER_UNITS * u < COARSE
    return Bounds(min(LOSS_UNITS * u, COARSE), min(PARAMETER_UNITS * u, COARSE), u, decisive)


def reduces_in(recording: Recording) -> str:
    """The dtype in which a recording reduces gradients, or its compute dtype if not stated."""
    settings = recording.manifest.settings
    stated = settings.get("reduce_dtype") or settings.get("param_dtype")
    return stated if stated in FLOATING else recording.manifest.dtype
