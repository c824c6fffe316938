"""torch.optim.SGD(fused=True) in bfloat16 on the CPU: parameters of 16 or more elements do not change (torch 2.13).

Every full vector of the kernel stays as it was; only the rest of an uneven parameter is updated. pytorch/pytorch#191763.
"""

import torch
from torch import nn


def num_unchanged(numel: int, dtype: torch.dtype) -> int:
    """The number of elements that a step with learning rate 0.5 and gradient 1 leaves at 1."""
    param = nn.Parameter(torch.ones(numel, dtype=dtype))
    param.grad = torch.ones_like(param)
    torch.optim.SGD([param], lr=0.5, momentum=0.9, fused=True).step()
    return int((param == 1).sum())


if __name__ == "__main__":
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (6, 16, 40):
            print(f"{dtype}, {numel} elements: expected 0 unchanged, got {num_unchanged(numel, dtype)}")
