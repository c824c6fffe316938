"""Which optimizer state entries hold squares, whose relative error is twice that of the squared values.

Of (g (1 + e))^2 = g^2 (1 + 2 e + e^2) the relative error is 2 e to first order, and an average of squares, or one over rows or
columns, has at most that of its terms. So squares have twice the relative bound of gradients.
"""

import numpy as np

from crossframe.recording import Recording
from crossframe.recording.event_format import REDUCE, STATE
from crossframe.verdict.measure.metrics import norm
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.values import assemble

_KNOWN = (
    "exp_avg_sq",
    "max_exp_avg_sq",
    "square_avg",
    "acc_delta",
    "sum",
    "variance",
    "row_var",
    "col_var",
)
"""torch's names of entries that hold squares of gradients or updates, or means of them."""


def holds_squares(pair: Pair, slot: str) -> bool:
    """Whether an optimizer state entry holds squares: by torch's name, or else by its values at the first step."""
    return slot in _KNOWN or pair.remember(
        (holds_squares, slot), lambda: any(_squares_at_first(r, slot) for r in (pair.a, pair.b))
    )


def _squares_at_first(recording: Recording, slot: str) -> bool:
    """Whether an entry of the largest parameter at step 0 correlates more with the square of the gradient than its magnitude.

    It is c + k g^2 then if it holds squares, with an initial value c and k from the decay rate, and c + k |g| if it is linear in
    the gradient: the correlation is 1 with one of them.
    """
    names = [
        n for n in recording.manifest.params if recording.has(REDUCE, 0, n) and recording.has(STATE, 0, n, use=slot)
    ]
    name = max(names, key=lambda each: recording.manifest.params[each].numel, default=None)
    if name is None:
        return False
    gradient, entry = (
        assemble(recording, phase, 0, name, use).elements for phase, use in ((REDUCE, ""), (STATE, slot))
    )
    if gradient is None or entry is None or gradient.shape != entry.shape:
        return False
    size, wide = np.abs(gradient.astype(np.float64)), entry.astype(np.float64)
    if not (np.isfinite(size).all() and np.isfinite(wide).all()) or (wide < 0).any():
        return False
    return _correlation(wide, np.square(size)) > _correlation(wide, size)


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's; 0 for a constant."""
    x, y = x - x.mean(), y - y.mean()
    sizes = norm(x), norm(y)
    return float(np.vdot(x / sizes[0], y / sizes[1])) if all(sizes) else 0.0
