"""What an optimizer's step should have made of what was recorded, in float64, and how far rounding may carry it from that.

AdamW (I. Loshchilov, F. Hutter, Decoupled weight decay regularization, ICLR 2019), as torch and optax have it, at its t-th step:

    m = beta1 m' + (1 - beta1) g        v = beta2 v' + (1 - beta2) g^2
    p = p' - rate * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay p')

SGD with momentum, as torch has it: the decay is part of the gradient.

    b = momentum b' + (g + decay p')        p = p' - rate * b
"""

from dataclasses import dataclass

import numpy as np

from crossframe.verdict.measure.metrics import norm


@dataclass(frozen=True)
class AdamW:
    """The constants of a step.

    Attributes:
        rate, beta1, beta2, epsilon, decay: as above.
        epsilon_in_root: sqrt(v / (1 - beta2^t) + epsilon) in the place of sqrt(...) + epsilon.
        count_m, count_v: t in the correction of m and of v; None corrects nothing.
    """

    rate: float
    beta1: float
    beta2: float
    epsilon: float
    decay: float
    count_m: float | None
    count_v: float | None
    epsilon_in_root: bool = False

    def direction(self, m: np.ndarray, v: np.ndarray) -> np.ndarray:
        """What the rate is multiplied by, decay left out."""
        root = self._squares(v)
        below = np.sqrt(root + self.epsilon) if self.epsilon_in_root else np.sqrt(root) + self.epsilon
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = self._corrected(m) / below
        return np.where(below > 0, ratio, 0.0)

    def updated(self, before: np.ndarray, m: np.ndarray, v: np.ndarray) -> np.ndarray:
        """p, from p' and the moments behind this step's gradient."""
        return before - self.rate * (self.direction(m, v) + self.decay * before)

    def slope(self, m: np.ndarray, v: np.ndarray) -> np.ndarray:
        """By how much `updated` rises with epsilon."""
        root = self._squares(v)
        if self.epsilon_in_root:
            below = 2 * np.maximum(root + self.epsilon, 1e-200) ** 1.5
        else:
            below = np.maximum(np.sqrt(root) + self.epsilon, 1e-150) ** 2
        return self.rate * self._corrected(m) / below

    def error(self, before: np.ndarray, moved: np.ndarray, roundoff: float) -> float:
        """By how much rounding alone may carry `updated` away, in norm.

        Decay and the final difference each round a number as large as p': 2 u |p'|. The step itself comes from less than 16
        operations: 16 u |p - p'|. And 1 - beta^t inherits what rounding leaves of beta, t u beta^t, and of its power, u beta^t:
        relative to it (t + 1) u beta^t / (1 - beta^t), of which the root of the second moment's takes half.
        """
        lost = 16.0
        for beta, count, share in ((self.beta1, self.count_m, 1.0), (self.beta2, self.count_v, 0.5)):
            if count:
                lost += share * (count + 1) * beta**count / (1 - beta**count)
        return roundoff * (2 * norm(before) + lost * norm(moved))

    def _corrected(self, m: np.ndarray) -> np.ndarray:
        return m / (1 - self.beta1**self.count_m) if self.count_m else m

    def _squares(self, v: np.ndarray) -> np.ndarray:
        return np.maximum(v / (1 - self.beta2**self.count_v) if self.count_v else v, 0.0)


@dataclass(frozen=True)
class SGD:
    """The constants of a step."""

    rate: float
    momentum: float
    decay: float

    def updated(self, before: np.ndarray, buffer: np.ndarray) -> np.ndarray:
        """p, from p' and the buffer behind this step's gradient (without momentum: the gradient with its decay)."""
        return before - self.rate * buffer

    def error(self, before: np.ndarray, moved: np.ndarray, roundoff: float) -> float:
        """By how much rounding alone may carry `updated` away, in norm: one rounding of p, two of the step, one of the decay."""
        return roundoff * (2 * norm(before) + 4 * norm(moved))


@dataclass(frozen=True)
class Average:
    """A moment as a running average: new = keep * old + gain * gradient.

    >>> Average(0.9, 0.1).new(np.ones(1), np.zeros(1)).tolist()
    [0.9]
    """

    keep: float
    gain: float

    def new(self, old: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        """The moment behind this step's gradient."""
        return self.keep * old + self.gain * gradient

    def error(self, old: np.ndarray, gradient: np.ndarray, roundoff: float) -> float:
        """By how much rounding alone may carry `new` away, in norm: four operations, and a gain 1 - beta that was itself taken in
        the dtype at hand is off by u / gain of itself."""
        return roundoff * (4 * (norm(self.keep * old) + norm(self.gain * gradient)) + norm(gradient))
