"""Conversion between torch's dtypes and their names in the core."""

import functools

import numpy as np
import torch

from crossframe.dtypes import numpy_dtype


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The core's name of a torch dtype.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype that the core names so.

    >>> torch_dtype("float16")
    torch.float16
    """
    return getattr(torch, name)


def name_or_none(dtype: torch.dtype | None) -> str | None:
    """The core's name of a dtype that a user may leave out. What is no dtype stays, for the core to refuse."""
    return dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of real numbers in a last dim of 2, an alias; others as they are.

    >>> as_real(torch.tensor([1 + 2j]))
    tensor([[1., 2.]])
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.dtype.is_complex else tensor


def real_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of `as_real(tensor)`."""
    return (*tensor.shape, 2) if tensor.dtype.is_complex else tuple(tensor.shape)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as an array of the same dtype, bfloat16 too; on the CPU without a copy where it is contiguous.

    >>> to_numpy(torch.ones(2, dtype=torch.bfloat16)).dtype.name
    'bfloat16'
    """
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # numpy has none of its own: the bits are taken as they are
        return tensor.contiguous().view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """The inverse of `to_numpy`. The tensor aliases the array.

    >>> from_numpy(to_numpy(torch.tensor(2.0, dtype=torch.bfloat16)))
    tensor(2., dtype=torch.bfloat16)
    """
    data = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return data.view(torch_dtype(array.dtype.name)).reshape(array.shape)
