"""From torch's dtypes to the core's names of them, and back."""

import torch


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
