"""A small network to train. Each unit is a layer y = tanh(x @ weight.T + bias); the loss is the mean squared error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from crossframe.params import ParamSpec

Params = Mapping[str, np.ndarray]
Batch = tuple[np.ndarray, np.ndarray]


class Net(Protocol):
    """The interface of a network in the reference: the forward and backward of one rank, unit by unit."""

    def start(self, rank: int, batch: Batch) -> None:
        """Begin a microbatch on a rank."""
        ...

    def forward(self, unit: str, rank: int, params: Params) -> None:
        """Compute the forward of a unit with its full parameters."""
        ...

    def backward(self, unit: str, rank: int, params: Params) -> Params:
        """The rank's gradients of the unit's parameters, without parameters that have none."""
        ...

    def loss(self, rank: int) -> float:
        """The rank's mean loss, after its forward."""
        ...


@dataclass
class Layers:
    """A sequence of layers. The unit "" is the last one, since the forward of the root ends last.

    Attributes:
        units: names in the order of forward.
        sizes: widths; layer i maps sizes[i] to sizes[i + 1].
    """

    units: Sequence[str]
    sizes: Sequence[int]
    _inputs: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    _now: dict[int, np.ndarray] = field(default_factory=dict)
    _grad: dict[int, np.ndarray] = field(default_factory=dict)
    _target: dict[int, np.ndarray] = field(default_factory=dict)

    def specs(self, dtype: str = "float64") -> dict[str, tuple[ParamSpec, ...]]:
        """The parameters of each unit."""
        prefix = {unit: f"{unit}." if unit else "" for unit in self.units}
        return {
            unit: (
                ParamSpec(f"{prefix[unit]}weight", (self.sizes[i + 1], self.sizes[i]), dtype),
                ParamSpec(f"{prefix[unit]}bias", (self.sizes[i + 1],), dtype),
            )
            for i, unit in enumerate(self.units)
        }

    def initial(self, seed: int = 0, dtype: str = "float64") -> dict[str, np.ndarray]:
        """Initial values by name, drawn from one stream of random numbers."""
        generator = np.random.default_rng(seed)
        return {
            spec.name: (generator.standard_normal(spec.shape) / 2).astype(dtype)
            for specs in self.specs().values()
            for spec in specs
        }

    def batch(self, seed: int, samples: int = 4) -> Batch:
        """Inputs of shape (samples, sizes[0]) and targets of shape (samples, sizes[-1])."""
        generator = np.random.default_rng(seed)
        return generator.standard_normal((samples, self.sizes[0])), generator.standard_normal((samples, self.sizes[-1]))

    def start(self, rank: int, batch: Batch) -> None:
        """Set the rank's inputs and targets."""
        self._now[rank], self._target[rank] = batch

    def forward(self, unit: str, rank: int, params: Params) -> None:
        """Compute one layer, and keep its input for backward."""
        weight, bias = _pair(params)
        self._inputs[rank, unit] = x = self._now[rank].astype(weight.dtype)
        self._now[rank] = np.tanh(x @ weight.T + bias)

    def loss(self, rank: int) -> float:
        """The mean squared error."""
        error = self._now[rank] - self._target[rank]
        self._grad[rank] = 2 * error / error.size
        return float(np.mean(error**2))

    def backward(self, unit: str, rank: int, params: Params) -> dict[str, np.ndarray]:
        """The chain rule through one layer."""
        weight, bias = _pair(params)
        x = self._inputs.pop((rank, unit))
        y = np.tanh(x @ weight.T + bias)
        grad = self._grad[rank].astype(weight.dtype) * (1 - y * y)
        self._grad[rank] = grad @ weight
        prefix = f"{unit}." if unit else ""
        return {f"{prefix}weight": grad.T @ x, f"{prefix}bias": grad.sum(axis=0)}


def _pair(params: Params) -> tuple[np.ndarray, np.ndarray]:
    weight, bias = sorted(params.values(), key=lambda value: -value.ndim)
    return weight, bias
