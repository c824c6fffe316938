"""Buffers, which are not sharded: cast and moved to the compute device when a root is first used (R33)."""

from collections.abc import Iterable

import torch
from torch import nn


def cast_buffers(
    units: Iterable[tuple[nn.Module, torch.dtype | None, torch.device | None]], ignored: Iterable[nn.Module]
) -> None:
    """Bring every buffer to the device and into the dtype that the nearest unit around it asks for.

    Args:
        units: (module, dtype of floating buffers or None to leave them, device or None), the outermost first.
        ignored: modules whose buffers are left alone.
    """
    done = {id(buffer) for module in ignored for buffer in module.buffers(recurse=False)}
    for module, dtype, device in reversed(list(units)):
        for buffer in module.buffers():
            if id(buffer) not in done:
                done.add(id(buffer))
                buffer.data = buffer.to(device, dtype if buffer.is_floating_point() else None)
