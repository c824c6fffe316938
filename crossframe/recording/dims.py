"""The order of dims of a recorded activation: torch's order, or one with channels last.

A convolution takes (batch, channels, *positions) in torch and (batch, *positions, channels) in JAX. Activations between
convolutions have the same order, and an array alone does not show whether it is an image or the heads of an attention. A recorder
that does not know the order therefore writes the array unchanged and marks it; a comparison infers the order from the shapes of
both recordings (`crossframe.verdict.activation_dims`).
"""

from enum import StrEnum
from typing import Any

import numpy as np

LEAST_DIMS = 3
"""Minimum number of dims of an array that may have channels last: batch, positions, channels."""


class Order(StrEnum):
    """The known order of dims of an activation.

    TORCH: torch's order. UNSTATED: torch's order, or the same with channels last. CONVOLUTION: as UNSTATED, but channels last if
    both fit, since the activation is that of a convolution in a framework with channels last.
    """

    TORCH = "torch"
    UNSTATED = "unstated"
    CONVOLUTION = "convolution"


def channels_first(array: np.ndarray) -> np.ndarray:
    """Transpose (batch, *positions, channels) to (batch, channels, *positions).

    >>> channels_first(np.zeros((2, 5, 6, 3))).shape
    (2, 3, 5, 6)
    """
    return np.ascontiguousarray(np.moveaxis(array, -1, 1))


def channels_first_shape(shape: Any) -> tuple[int, ...]:
    """The shape of `channels_first` of an array of this shape."""
    return (shape[0], shape[-1], *shape[1:-1])
