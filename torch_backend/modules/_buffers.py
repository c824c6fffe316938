"""Buffers, which are not sharded: cast and moved to the compute device when a root is first used (R33)."""

from collections.abc import Iterable

import torch
from torch import nn


def cast_buffers(
    units: Iterable[tuple[nn.Module, torch.dtype | None, torch.device | None]], ignored: Iterable[nn.Module]
) -> None:
    """Move and cast each buffer as its innermost enclosing unit requires.

    Args:
        units: (module, dtype of floating-point buffers or None, device or None), the outermost first.
        ignored: modules whose buffers are not changed.
    """
    done = {id(buffer) for module in ignored for buffer in module.buffers(recurse=False)}
    for module, dtype, device in reversed(list(units)):
        for buffer in module.buffers():
            if id(buffer) not in done:
                done.add(id(buffer))
                buffer.data = buffer.to(device, dtype if buffer.is_floating_point() else None)
