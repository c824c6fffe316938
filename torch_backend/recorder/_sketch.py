"""Sketches and samples of tensors, computed by torch on the tensors' device. crossframe.recording.sketch and sample define them.

torch has no unsigned 64-bit arithmetic on all devices: int64 wraps modulo 2^64 all the same, so that sums and products have the
right bits, and a shift to the right has its sign bits cut off.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from crossframe.recording.hashing import GOLDEN, MULTIPLIERS, name_key
from crossframe.recording.sample import Sample, nearest, num_sampled
from crossframe.recording.sample import sample_of as sample_of_array
from crossframe.recording.sketch import NUM_SUMS, ODD, SUM_SHIFT, Sketch
from crossframe.recording.sketch import sketches_of as sketches_of_arrays
from torch_backend.compat._dtypes import dtype_name, to_numpy

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements at a time: as many as keep a device busy.
_CHUNK = 1 << 24


def sketches_of(tensors: Sequence[Tensor], start: int = 0) -> list[Sketch]:
    """The sketches of several tensors on one device that lie alike.

    Args:
        tensors: elements `start:start + numel` of a parameter each, of any floating dtype; all of one number of elements.
    """
    if all(tensor.is_cpu for tensor in tensors):  # numpy is faster there
        return sketches_of_arrays([to_numpy(tensor) for tensor in tensors], start)
    return sketches_by_torch(tensors, start)


def sketches_by_torch(tensors: Sequence[Tensor], start: int = 0) -> list[Sketch]:
    """The same on any device: equal to the core's in every bit of the fingerprint, and in the sums up to `Sketch.resolution`.

    >>> tensor = torch.linspace(-1, 1, 5)
    >>> sketches_by_torch([tensor], 3)[0].equals(sketches_of([tensor], 3)[0])
    True
    """
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    if not flat:
        return []
    size, device = flat[0].numel(), flat[0].device
    assert all(tensor.numel() == size and tensor.device == device for tensor in flat), [t.shape for t in flat]
    whole = torch.zeros(3, len(flat), dtype=torch.int64, device=device)  # fingerprints, and how many are not finite
    sums = torch.zeros(len(flat), NUM_SUMS, dtype=torch.float64, device=device)
    squares = torch.zeros(len(flat), dtype=torch.float64, device=device)
    for first in range(0, size, _CHUNK):
        last = min(first + _CHUNK, size)
        keys = _element_keys(start + first, start + last, device)
        places, signs = _shifted(keys, SUM_SHIFT), (1 - 2 * (keys & 1)).double()
        for i, tensor in enumerate(flat):
            values = tensor[first:last]
            whole[0, i] += _mixed(_bits_of(_one_nan(values)).mul_(_signed(ODD)).add_(keys)).sum()
            wide = values.double()
            finite = torch.isfinite(wide)
            whole[1, i] += finite.sum()
            wide = torch.where(finite, wide, 0.0)
            squares[i] += wide @ wide
            sums[i].index_add_(0, places, wide * signs)
    # One copy from the device for all of them.
    numbers, by_place, lengths = whole.tolist(), sums.cpu().numpy(), squares.tolist()
    return [
        Sketch(
            size,
            dtype_name(flat[i].dtype),
            numbers[0][i] % 2**64,
            by_place[i],
            lengths[i],
            size - numbers[1][i],
        )
        for i in range(len(flat))
    ]


def sample_of(tensor: Tensor, start: int = 0) -> Sample:
    """The sample of elements `start:start + numel` of a parameter, equal to the core's."""
    return sample_of_array(to_numpy(tensor), start) if tensor.is_cpu else sample_by_torch(tensor, start)


def sample_by_torch(tensor: Tensor, start: int = 0) -> Sample:
    """The same on any device.

    >>> tensor = torch.linspace(-1, 1, 5)
    >>> sample_by_torch(tensor, 3).places.tolist() == sample_of(tensor, 3).places.tolist()
    True
    """
    flat, signature, near = tensor.detach().reshape(-1), 0, []
    wanted = num_sampled(flat.numel())
    for first in range(0, flat.numel(), _CHUNK):
        part = flat[first : first + _CHUNK]
        signature += int(_mixed(_bits_of(_one_nan(part + 0.0)).mul_(_signed(GOLDEN)).add_(_signed(GOLDEN))).sum())
        sizes = part.abs()
        sizes = torch.where((sizes > 0) & torch.isfinite(sizes), sizes, torch.inf)
        found = torch.topk(sizes, min(wanted, part.numel()), largest=False)
        near.append(first + found.indices[torch.isfinite(found.values)])
    places = torch.cat(near) if near else torch.empty(0, dtype=torch.int64)
    values, at = flat[places].double().cpu().numpy(), places.cpu().numpy()
    kept, _ = nearest(values, np.arange(len(values)), wanted)
    return Sample.of_piece(signature % 2**64, at[kept], values[kept], flat.numel(), start)


def _signed(bits: int) -> int:
    """The same 64 bits as a signed number."""
    bits %= 2**64
    return bits - 2**64 if bits >= 2**63 else bits


def _shifted(keys: Tensor, by: int) -> Tensor:
    """Shifted to the right, as if unsigned."""
    return (keys >> by).bitwise_and_((1 << (64 - by)) - 1)


def _mixed(keys: Tensor) -> Tensor:
    """`crossframe.recording.hashing.mix`, in place."""
    keys.bitwise_xor_(_shifted(keys, 30)).mul_(_signed(MULTIPLIERS[0]))
    keys.bitwise_xor_(_shifted(keys, 27)).mul_(_signed(MULTIPLIERS[1]))
    return keys.bitwise_xor_(_shifted(keys, 31))


def _element_keys(start: int, stop: int, device: torch.device) -> Tensor:
    places = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=device)
    return _mixed(places.mul_(_signed(GOLDEN)).add_(_signed(name_key(""))))


def _one_nan(values: Tensor) -> Tensor:
    """`crossframe.recording.hashing.one_nan`."""
    return torch.where(values.isnan(), torch.nan, values)


def _bits_of(values: Tensor) -> Tensor:
    """The bits of floats, as numbers of 64 bits without a sign."""
    width = values.element_size()
    bits = values.contiguous().view(_BITS[width]).to(torch.int64, copy=True)
    return bits.bitwise_and_((1 << 8 * width) - 1) if width < 8 else bits
