"""Gradients are divided with the bits of a division by a number, whatever their dtype."""

import pytest
import torch

from torch_backend.memory._grad_reduction import _divide

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [2.0, 3.0, 8.0, 256.0, 257.0, 2049.0, 2.0**24 + 1, 0.3, 1e-3])
def test_R26_a_division_has_the_bits_of_one_by_a_number(dtype, factor):
    tiny = torch.finfo(dtype).smallest_normal
    values = torch.cat([torch.randn(500, generator=torch.Generator().manual_seed(0)), torch.linspace(-4, 4, 41) * tiny])
    values = values.to(dtype)
    divided = values.clone()
    _divide(divided, factor)
    assert torch.equal(divided, values / factor)
