"""Sketches made by torch are those of the core."""

import numpy as np
import pytest
import torch

from crossframe.recording.sample import sample_of
from crossframe.recording.sketch import sketches_of as by_the_core
from torch_backend.compat._dtypes import to_numpy
from torch_backend.recorder import _sketch as sketch
from torch_backend.recorder._sketch import sample_by_torch, sketches_by_torch, sketches_of

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("numel", "start"), [(1, 0), (700, 12345), ((1 << 15) + 3, 0), (100_000, 2**40)])
def test_a_sketch_on_the_device_has_the_bits_and_the_sums_of_the_cores(dtype, numel, start, monkeypatch):
    monkeypatch.setattr(sketch, "_CHUNK", 1 << 14)
    torch.manual_seed(numel)
    tensors = [torch.randn(numel).to(dtype), torch.randn(numel).mul(1e-3).to(dtype)]
    for ours, array in zip(sketches_by_torch(tensors, start), map(to_numpy, tensors), strict=True):
        (core,) = by_the_core([array], start)
        assert ours.equals(core)
        assert ours.num_not_finite == core.num_not_finite == 0
        assert np.sqrt(np.square(ours.sums - core.sums).sum()) <= core.resolution
        assert ours.norm == pytest.approx(core.norm, rel=1e-12)
    assert sketches_of(tensors, start)[1].equals(core)


def test_zeros_of_both_signs_and_what_is_not_finite_count_as_in_the_core():
    tensor = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.5, -1e-40])
    (ours,), (core,) = sketches_by_torch([tensor]), by_the_core([tensor.numpy()])
    assert ours.equals(core)
    assert ours.num_not_finite == core.num_not_finite == 3
    assert np.array_equal(ours.sums, core.sums)
    assert not ours.equals(sketches_by_torch([tensor.abs()])[0])
    negative = torch.where(tensor.isnan(), -tensor, tensor)
    assert sketches_by_torch([negative])[0].equals(core) and by_the_core([negative.numpy()])[0].equals(core)
    assert (
        sample_by_torch(negative).signature
        == sample_by_torch(tensor).signature
        == sample_of(negative.numpy()).signature
    )


def test_sketches_of_pieces_add_up_to_that_of_the_whole():
    torch.manual_seed(0)
    tensor = torch.randn(50, 41)
    (whole,) = sketches_by_torch([tensor])
    parts = [sketches_by_torch([tensor.flatten()[a:b]], a)[0] for a, b in ((0, 7), (7, 1900), (1900, 2050))]
    total = parts[0] + parts[1] + parts[2]
    assert total.equals(whole)
    assert np.sqrt(np.square(total.sums - whole.sums).sum()) <= whole.resolution


def test_a_strided_tensor_is_read_in_its_own_order():
    tensor = torch.arange(2000.0).view(40, 50).T
    assert sketches_by_torch([tensor])[0].equals(by_the_core([tensor.numpy()])[0])


def test_no_tensors_have_no_sketches_and_empty_ones_empty_ones():
    assert sketches_of([]) == sketches_by_torch([]) == []
    assert sketches_by_torch([torch.empty(0)])[0].equals(by_the_core([np.empty(0, np.float32)])[0])
