"""Buffers, which are not sharded: cast and moved to the compute device when a root is first used (R33)."""

from collections.abc import Iterable

import torch
from torch import nn

from crossframe.precision import PrecisionPolicy
from torch_backend.compat._dtypes import dtype_name, torch_dtype


def cast_buffers(
    units: Iterable[tuple[nn.Module, PrecisionPolicy, torch.device | None]], ignored: Iterable[nn.Module]
) -> None:
    """Move and cast each buffer as its innermost enclosing unit requires.

    Args:
        units: (module, policy, device or None), the outermost first.
        ignored: modules whose buffers are not changed.
    """
    done = {id(buffer) for module in ignored for buffer in module.buffers(recurse=False)}
    for module, policy, device in reversed(list(units)):
        for buffer in module.buffers():
            if id(buffer) not in done:
                done.add(id(buffer))
                buffer.data = buffer.to(device, torch_dtype(policy.buffer(dtype_name(buffer.dtype))))
