"""A tensor in two kilobytes: what tells two of them apart, and how far apart they are, without having them.

Element i of a parameter, wherever it lies, has a key (`crossframe.recording.hashing`). Of its bits the key makes

- a *fingerprint*: the sum of mix(key + bits * ODD) over all elements, modulo 2^64. Equal tensors have equal ones; others differ
  but for a chance of about 2^-64. Zero and minus zero are two values.
- a *sketch*: each element goes, with a sign, into one of `NUM_SUMS` sums; which, and with what sign, its key says (M. Charikar,
  K. Chen, M. Farach-Colton, Finding frequent items in data streams, ICALP 2002).

Both are sums over elements: ranks add up what each makes of its own piece, at any world size and in any layout, and nothing is
gathered. The sketch is linear, so the sketch of a - b is the difference of sketches, and the sum of its squares estimates
norm(a - b)^2: without bias over keys, with a standard deviation of at most sqrt(2 / NUM_SUMS) = 8.8 % of it, whatever a - b is
(the signs make the cross terms within a sum vanish on average, and two elements meet in a sum with chance 1 / NUM_SUMS). One
element alone is measured exactly. Sums of n elements in float64 in another order differ by up to about sqrt(n) * 2^-53 * norm:
see `resolution`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossframe.recording.hashing import element_keys, mix

NUM_SUMS = 256
SUM_SHIFT = 64 - (NUM_SUMS - 1).bit_length()
"""The highest bits of an element's key, from this one on, say into which sum it goes."""
ROW = NUM_SUMS + 3
"""Items of a sketch in a file, 8 bytes each: sums and squares as float64, fingerprint and num_not_finite as uint64."""
ROW_BYTES = 8 * ROW
SKETCHES = {"num_sums": NUM_SUMS, "keys": "blake2b, splitmix64"}
"""What a recording states of its sketches. Sketches that were made otherwise cannot be compared with those made here."""
WHOLE = 512
"""A tensor of so many elements is no larger than its sketch, and is recorded in full."""
FULL_NUMEL = 1_000_000
"""With the detail "auto", recorders sketch models of more elements."""
_ODD = np.uint64(0xD6E8FEB86659FD93)
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# Elements at a time, so that what is made of them stays in the cache.
_CHUNK = 1 << 15


@dataclass(frozen=True)
class Sketch:
    """What is kept of a tensor, or of a part of it.

    Attributes:
        numel: how many elements.
        dtype: theirs. Fingerprints are of bits, and say nothing between dtypes.
        fingerprint: below 2^64.
        sums: float64 of shape (NUM_SUMS,).
        squares: the sum of squares of all elements, in float64.
        num_not_finite: how many are NaN or infinite. These are in no sum.
    """

    numel: int
    dtype: str
    fingerprint: int
    sums: np.ndarray
    squares: float
    num_not_finite: int = 0

    def __add__(self, other: "Sketch") -> "Sketch":
        """That of two disjoint parts together, of one dtype."""
        assert self.dtype == other.dtype, (self.dtype, other.dtype)
        return Sketch(
            self.numel + other.numel,
            self.dtype,
            (self.fingerprint + other.fingerprint) % 2**64,
            self.sums + other.sums,
            self.squares + other.squares,
            self.num_not_finite + other.num_not_finite,
        )

    def to_row(self) -> np.ndarray:
        """All but numel and dtype, as it lies in a file: float64 of shape (ROW,), of which the last two are uint64."""
        row = np.empty(ROW)
        row[:NUM_SUMS], row[NUM_SUMS] = self.sums, self.squares
        row[NUM_SUMS + 1 :].view(np.uint64)[:] = self.fingerprint, self.num_not_finite
        return row

    @classmethod
    def from_row(cls, row: np.ndarray, numel: int, dtype: str) -> "Sketch":
        """What `to_row` wrote, and the rest.

        >>> one = sketches_of("w", [np.arange(3.0)])[0]
        >>> Sketch.from_row(one.to_row(), 3, "float64").equals(one)
        True
        """
        fingerprint, lost = row[NUM_SUMS + 1 :].view(np.uint64).tolist()
        return cls(numel, dtype, fingerprint, row[:NUM_SUMS], float(row[NUM_SUMS]), lost)

    @classmethod
    def from_json(cls, fields: dict[str, Any], numel: int, dtype: str, sums: np.ndarray) -> "Sketch":
        """As it was kept up to format 4: the sums, and an object with the rest."""
        return cls(numel, dtype, int(fields["fingerprint"], 16), sums, fields["squares"], fields["num_not_finite"])

    @property
    def norm(self) -> float:
        """The 2-norm of the finite elements, up to rounding."""
        return math.sqrt(self.squares)

    def equals(self, other: "Sketch") -> bool:
        """Whether every bit is equal."""
        return (self.numel, self.dtype, self.fingerprint) == (other.numel, other.dtype, other.fingerprint)

    def distance(self, other: "Sketch") -> float:
        """An estimate of norm(a - b); its square has a standard deviation of at most sqrt(2 / NUM_SUMS) of the right one."""
        return 0.0 if self.equals(other) else float(np.sqrt(np.square(self.sums - other.sums).sum()))

    @property
    def resolution(self) -> float:
        """Below this a distance may be rounding of the sums themselves, which other layouts add up in another order."""
        return math.sqrt(self.numel) * 2.0**-53 * self.norm


def sketches_of(name: str, arrays: Sequence[np.ndarray], start: int = 0) -> list[Sketch]:
    """The sketches of several arrays that lie alike, such as a parameter's values, its gradient and its moments.

    Args:
        name: canonical name of the parameter.
        arrays: elements `start:start + size` of it each, of any floating dtype; all of one size.

    >>> whole = np.arange(10.0)
    >>> a, b = (sketches_of("w", [part], at)[0] for part, at in ((whole[:4], 0), (whole[4:], 4)))
    >>> (a + b).equals(sketches_of("w", [whole])[0])
    True
    """
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    size = flat[0].size if flat else 0
    assert all(array.size == size for array in flat), [array.size for array in flat]
    sums = np.zeros((len(flat), NUM_SUMS))
    fingerprints, squares, lost = [0] * len(flat), [0.0] * len(flat), [0] * len(flat)
    for first in range(0, size, _CHUNK):
        last = min(first + _CHUNK, size)
        keys = element_keys(name, start + first, start + last)
        places = (keys >> np.uint64(SUM_SHIFT)).astype(np.intp)
        signs = 1.0 - 2.0 * (keys & np.uint64(1)).astype(np.float64)
        for i, array in enumerate(flat):
            values = array[first:last]
            bits = values.view(_BITS[values.dtype.itemsize]).astype(np.uint64)
            fingerprints[i] += int(mix(keys + bits * _ODD).sum(dtype=np.uint64))
            wide = values.astype(np.float64)
            finite = np.isfinite(wide)
            if not finite.all():
                lost[i] += int(wide.size - finite.sum())
                wide = np.where(finite, wide, 0.0)
            # Not by BLAS, whose threads wait for one another longer than a chunk takes, wherever cores are busy.
            squares[i] += float(np.einsum("i,i->", wide, wide))
            wide *= signs
            sums[i] += np.bincount(places, wide, NUM_SUMS)
    return [
        Sketch(size, flat[i].dtype.name, fingerprints[i] % 2**64, sums[i], squares[i], lost[i])
        for i in range(len(flat))
    ]
