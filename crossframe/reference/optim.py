"""Elementwise optimizers, whose result on a shard is that on the whole parameter."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

State = dict[str, np.ndarray]


class Optimizer(Protocol):
    """The interface of an optimizer in the reference."""

    def init(self, values: np.ndarray) -> State:
        """The state of these values before the first step."""
        ...

    def update(self, values: np.ndarray, grad: np.ndarray, state: State, step: int) -> None:
        """Change values and state in place; `step` counts from 1."""
        ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, as torch.optim.SGD defines it: weight decay joins the gradient, and the first momentum is
    the first gradient."""

    lr: float = 1e-2
    momentum: float = 0.0
    weight_decay: float = 0.0

    def init(self, values: np.ndarray) -> State:
        """A momentum for each element, if there is momentum."""
        return {"momentum": np.zeros_like(values)} if self.momentum else {}

    def update(self, values: np.ndarray, grad: np.ndarray, state: State, step: int) -> None:
        """values -= lr * momentum."""
        if self.weight_decay:
            grad = grad + _as(values, self.weight_decay) * values
        if self.momentum:
            state["momentum"] *= _as(values, self.momentum)
            state["momentum"] += grad
            grad = state["momentum"]
        values -= _as(values, self.lr) * grad


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, with the defaults of torch.optim.AdamW. Source: Loshchilov and Hutter, Decoupled Weight
    Decay Regularization, 2019, algorithm 2."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def init(self, values: np.ndarray) -> State:
        """Two moments for each element."""
        return {"exp_avg": np.zeros_like(values), "exp_avg_sq": np.zeros_like(values)}

    def update(self, values: np.ndarray, grad: np.ndarray, state: State, step: int) -> None:
        """values -= lr * (moment / (sqrt(second moment) + eps) + weight_decay * values), with both moments unbiased."""
        beta1, beta2 = self.betas
        values *= _as(values, 1 - self.lr * self.weight_decay)
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first += _as(values, 1 - beta1) * (grad - first)
        second *= _as(values, beta2)
        second += _as(values, 1 - beta2) * grad * grad
        root = np.sqrt(second) / _as(values, np.sqrt(1 - beta2**step)) + _as(values, self.eps)
        values -= _as(values, self.lr / (1 - beta1**step)) * first / root


def _as(values: np.ndarray, number: float) -> np.generic:
    """A number in the dtype of the values, so that the arithmetic stays in it."""
    return values.dtype.type(number)
