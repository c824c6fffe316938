"""Finds elementwise activations between two arrays: what one module returns may include the activation that follows another.

A norm that applies its activation itself is another module than a norm before an activation, although both have the same
parameters.
"""

import math
from collections.abc import Callable

import numpy as np

_SAMPLED = 1 << 12
"""The number of elements that are tried first."""


def activation_between(x: np.ndarray, y: np.ndarray, near: float) -> str | None:
    """The name of the activation f for which y = f(x), up to a relative distance of `near`; None if there is none, or y = x.

    Args:
        x, y: arrays of equally many elements. Some of x that are not finite are no activation's.
    """
    x, y = (np.asarray(each, np.float64).reshape(-1) for each in (x, y))
    most = near * float(np.linalg.norm(y))
    if not most > 0 or not np.isfinite(x).all() or not np.isfinite(most) or np.linalg.norm(x - y) <= most:
        return None
    some = slice(None, None, max(1, x.size // _SAMPLED))
    with np.errstate(all="ignore"):
        for name, activation in ACTIVATIONS.items():
            if all(np.linalg.norm(activation(x[part]) - y[part]) <= most for part in (some, slice(None))):
                return name
    return None


_erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu_by_erf(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def gelu_by_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0.0)


def silu(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(x)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, 0.0)


def _leaky(slope: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.where(x > 0, x, slope * x)


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ReLU": relu,
    "GELU": gelu_by_erf,
    "GELU by tanh": gelu_by_tanh,
    "SiLU": silu,
    "ReLU6": lambda x: np.clip(x, 0.0, 6.0),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "hard swish": lambda x: x * np.clip(x / 6 + 0.5, 0.0, 1.0),
    "hard sigmoid": lambda x: np.clip(x / 6 + 0.5, 0.0, 1.0),
    "ELU": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0.0))),
    "softplus": _softplus,
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "squared ReLU": lambda x: np.square(relu(x)),
    **{f"leaky ReLU of slope {slope:g}": _leaky(slope) for slope in (0.01, 0.1, 0.2)},
}
"""Activations that implementations of a model apply inside of a module or after it, with the constants of torch and JAX."""
