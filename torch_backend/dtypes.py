"""From torch's dtypes to the core's names of them, and back."""

import functools

import torch


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
