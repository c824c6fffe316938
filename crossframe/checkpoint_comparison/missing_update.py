"""Finds out whether the parameters of two stored models lie one optimizer step apart, from the optimizer state that both have."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crossframe.checkpoint_comparison.stored import StoredModel
from crossframe.dtypes import unit_roundoff

# Share of the difference's norm that the update may leave unexplained. Two factors are fitted, so of a difference that is
# unrelated to the update all but about 2 / numel of its square is left. Of an update, rounding leaves about
# u * |parameter| / learning rate.
_LEFT = 0.05


@dataclass(frozen=True)
class MissingUpdate:
    """The parameters of one model lie one update after those of the other.

    Attributes:
        later: 0 if the first model has the update, 1 if the second one has it.
        learning_rate: of the update, up to Adam's bias correction.
        left: the share of the difference that it does not explain.
    """

    later: int
    learning_rate: float
    left: float


def missing_update(a: StoredModel, b: StoredModel, names: Sequence[str]) -> MissingUpdate | None:
    """The update that turns the parameters of one model into those of the other; None if there is none.

    The update is the direction of the optimizer state (Adam's `exp_avg / sqrt(exp_avg_sq)`, or the momentum), and the parameters
    themselves for weight decay. Their two factors are fitted to all parameters at once.

    Args:
        names: the parameters that differ, whose optimizer state is equal in both.
    """
    # Normal equations of least squares in two unknowns, summed over parameters.
    products, right, total = np.zeros((2, 2)), np.zeros(2), 0.0
    for name in names:
        first, second = (model.tensors[name]().astype(np.float64).reshape(-1) for model in (a, b))
        direction = _direction(a, name)
        if direction is None:
            return None
        away = second - first
        columns = np.stack([direction, first])
        products += columns @ columns.T
        right += columns @ away
        total += float(away @ away)
    if not names or not total or not np.isfinite(products).all():
        return None
    factors = np.linalg.lstsq(products, right, rcond=None)[0]
    left = np.sqrt(max(total - 2 * factors @ right + factors @ products @ factors, 0.0) / total)
    if left > _LEFT or abs(factors[0]) <= unit_roundoff("float32"):
        return None
    return MissingUpdate(1 if factors[0] < 0 else 0, abs(float(factors[0])), float(left))


def _direction(model: StoredModel, name: str) -> np.ndarray | None:
    moments = {entry: value.astype(np.float64).reshape(-1) for entry, value in model.moments(name).items()}
    if {"exp_avg", "exp_avg_sq"} <= moments.keys():
        step = max(model.steps, default=0)
        # Without the betas: of their defaults.
        corrections = (1 - 0.9**step, np.sqrt(1 - 0.999**step)) if step else (1.0, 1.0)
        return moments["exp_avg"] / corrections[0] / (np.sqrt(moments["exp_avg_sq"]) / corrections[1] + 1e-8)
    return moments.get("momentum_buffer")
