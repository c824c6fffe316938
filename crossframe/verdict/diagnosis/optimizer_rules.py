"""Optimizer rules in float64, with bounds on their rounding.

AdamW (I. Loshchilov, F. Hutter, Decoupled weight decay regularization, ICLR 2019), as in torch and optax, at step t:

    m = beta1 m' + (1 - beta1) g        v = beta2 v' + (1 - beta2) g^2
    p = p' - rate * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay p')

SGD with momentum as in torch, where the decay is part of the gradient:

    b = momentum b' + (g + decay p')        p = p' - rate * b
"""

from dataclasses import dataclass

import numpy as np

from crossframe.verdict.measure.metrics import norm


@dataclass(frozen=True)
class AdamW:
    """One step of AdamW.

    Attributes:
        rate, beta1, beta2, epsilon, decay: as above.
        epsilon_in_root: whether the root is sqrt(v / (1 - beta2^t) + epsilon) instead of sqrt(...) + epsilon.
        count_m, count_v: t in the bias correction of m and v; None for no correction.
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
        """The update without decay, divided by -rate."""
        root = self._squares(v)
        below = np.sqrt(root + self.epsilon) if self.epsilon_in_root else np.sqrt(root) + self.epsilon
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = self._corrected(m) / below
        return np.where(below > 0, ratio, 0.0)

    def updated(self, before: np.ndarray, m: np.ndarray, v: np.ndarray) -> np.ndarray:
        """p, from p' and the moments after this step."""
        return before - self.rate * (self.direction(m, v) + self.decay * before)

    def slope(self, m: np.ndarray, v: np.ndarray) -> np.ndarray:
        """The derivative of `updated` with respect to epsilon."""
        root = self._squares(v)
        if self.epsilon_in_root:
            below = 2 * np.maximum(root + self.epsilon, 1e-200) ** 1.5
        else:
            below = np.maximum(np.sqrt(root) + self.epsilon, 1e-150) ** 2
        return self.rate * self._corrected(m) / below

    def error(self, before: np.ndarray, moved: np.ndarray, roundoff: float) -> float:
        """The bound on the rounding of `updated`, in norm.

        Decay and the final difference each round a number as large as p': 2 u |p'|. The step takes fewer than 16 operations: 16 u
        |p - p'|. The rounding of beta, t u beta^t, and of its power, u beta^t, changes 1 - beta^t by (t + 1) u beta^t / (1 -
        beta^t) relative to it; the square root of the second moment halves this.
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
    """One step of SGD."""

    rate: float
    momentum: float
    decay: float

    def updated(self, before: np.ndarray, buffer: np.ndarray) -> np.ndarray:
        """p, from p' and the buffer after this step (without momentum: the gradient with its decay)."""
        return before - self.rate * buffer

    def error(self, before: np.ndarray, moved: np.ndarray, roundoff: float) -> float:
        """The bound on the rounding of `updated`, in norm: one rounding of p, two of the step, one of the decay."""
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
        """The moment after this step."""
        return self.keep * old + self.gain * gradient

    def error(self, old: np.ndarray, gradient: np.ndarray, roundoff: float) -> float:
        """The bound on the rounding of `new`, in norm: four operations, and a gain of 1 - beta whose own relative error is u /
        gain."""
        return roundoff * (4 * (norm(self.keep * old) + norm(self.gain * gradient)) + norm(gradient))
