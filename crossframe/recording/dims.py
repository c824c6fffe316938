"""The order of dims of a recorded activation: torch's, or the program's, which may have channels last.

A convolution of torch takes (batch, channels, *positions), one of JAX (batch, *positions, channels). What lies between
convolutions has the same order, and nothing in an array tells an image from the heads of an attention. So a recorder that does
not know the order writes the array as it is and says so; two recordings tell it by their shapes (`crossframe.verdict.dims`).
"""

from enum import StrEnum
from typing import Any

import numpy as np

LEAST_DIMS = 3
"""Of an array that may have channels last: a batch, positions, channels."""


class Order(StrEnum):
    """What is known of an activation's order of dims.

    TORCH: torch's. UNSTATED: torch's, or the same with the channels last. CONVOLUTION: likewise, of a convolution of a framework
    that has channels last: where both orders fit, it is that one.
    """

    TORCH = "torch"
    UNSTATED = "unstated"
    CONVOLUTION = "convolution"


def channels_first(array: np.ndarray) -> np.ndarray:
    """(batch, *positions, channels) as (batch, channels, *positions).

    >>> channels_first(np.zeros((2, 5, 6, 3))).shape
    (2, 3, 5, 6)
    """
    return np.ascontiguousarray(np.moveaxis(array, -1, 1))


def channels_first_shape(shape: Any) -> tuple[int, ...]:
    """The shape of `channels_first` of an array of this shape."""
    return (shape[0], shape[-1], *shape[1:-1])
