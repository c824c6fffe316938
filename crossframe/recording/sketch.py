"""Sketches: a summary of a tensor in two kilobytes that tells whether two tensors are equal, and estimates their distance.

Element i of a flattened tensor has the same key on every rank and in every tensor (`crossframe.recording.hashing`), so that the
sketches of parameters with different names can be compared. A summary has two parts:

- a *fingerprint*: the sum of mix(key + bits * ODD) over all elements, modulo 2^64. Equal tensors have equal fingerprints, and
  others have equal ones with a probability of about 2^-64. 0 and -0 are different values, all NaNs are equal.
- a *sketch*: `NUM_SUMS` sums. The key of an element determines the sum to which it is added, and its sign there (M. Charikar, K.
  Chen, M. Farach-Colton, Finding frequent items in data streams, ICALP 2002).

Both are sums over elements, so each rank summarizes its own piece and the results are added, at any world size and in any
layout, without a gather. The sketch is linear: the sketch of a - b is the difference of the sketches, and the sum of its squares
estimates norm(a - b)^2. The estimate is unbiased over keys, and its standard deviation is at most sqrt(2 / NUM_SUMS) = 8.8 % of
the value for any a - b, since the signs make cross terms vanish on average and two elements share a sum with probability 1 /
NUM_SUMS. All tensors have the same keys, so that the errors of two tensors with the same a - b are equal. A difference in a
single element is measured exactly. Sums of n elements in float64 in another order differ by about sqrt(n) * 2^-53 * norm: see
`resolution`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from crossframe.errors import RecordingError
from crossframe.recording.hashing import UNSIGNED, element_keys, mix, one_nan
from crossframe.recording.sample import Sample

NUM_SUMS = 256
ODD = 0xD6E8FEB86659FD93
SUM_SHIFT = 64 - (NUM_SUMS - 1).bit_length()
"""The bits of an element's key from this one on are the index of its sum."""
ROW = NUM_SUMS + 3
"""Items of a sketch in a file, 8 bytes each: sums and squares as float64, fingerprint and num_not_finite as uint64."""
ROW_BYTES = 8 * ROW
SKETCHES = {"num_sums": NUM_SUMS, "keys": "splitmix64"}
"""The method of the sketches of a recording. Sketches of different methods cannot be compared."""
SKETCHES_BY_NAME = {"num_sums": NUM_SUMS, "keys": "blake2b, splitmix64"}
"""The method up to format 6, where keys depend on the name of the tensor too."""
WHOLE = 512
"""Tensors of at most this many elements are recorded in full, since their sketches would hardly be smaller."""
FULL_NUMEL = 1_000_000
"""With detail "auto", recorders sketch models of more elements than this."""
# Elements that are processed at a time, so that intermediate arrays stay in the cache.
_CHUNK = 1 << 15


@dataclass(frozen=True)
class Sketch:
    """The summary of a tensor or of a part of it.

    Attributes:
        numel: number of elements.
        dtype: dtype of the elements. Fingerprints depend on bits and cannot be compared between dtypes.
        fingerprint: an int below 2^64.
        sums: float64 of shape (NUM_SUMS,), or fewer of a golden (`crossframe.recording.golden_file`).
        squares: sum of squares of all finite elements, in float64.
        num_not_finite: number of elements that are NaN or infinite. These are in no sum.
        seed: the name on which the keys depend, up to format 6; "" since then.
        sample: of a parameter before the first step (`crossframe.recording.sample`).
    """

    numel: int
    dtype: str
    fingerprint: int
    sums: np.ndarray
    squares: float
    num_not_finite: int = 0
    seed: str = ""
    sample: Sample | None = None

    def __add__(self, other: "Sketch") -> "Sketch":
        """The sketch of the union of two disjoint parts of one dtype, without a sample."""
        assert (self.dtype, self.seed) == (other.dtype, other.seed), (self, other)
        return Sketch(
            self.numel + other.numel,
            self.dtype,
            (self.fingerprint + other.fingerprint) % 2**64,
            self.sums + other.sums,
            self.squares + other.squares,
            self.num_not_finite + other.num_not_finite,
            self.seed,
        )

    def to_row(self) -> np.ndarray:
        """The sketch without numel and dtype, as in a file: float64 of shape (ROW,), whose last two items are uint64."""
        row = np.empty(ROW)
        row[:NUM_SUMS], row[NUM_SUMS] = self.sums, self.squares
        row[NUM_SUMS + 1 :].view(np.uint64)[:] = self.fingerprint, self.num_not_finite
        return row

    @classmethod
    def from_row(cls, row: np.ndarray, numel: int, dtype: str, seed: str) -> "Sketch":
        """The sketch from a row that `to_row` wrote, or from one with fewer sums (`folded`).

        >>> one = sketches_of([np.arange(3.0)])[0]
        >>> Sketch.from_row(one.to_row(), 3, "float64", "").equals(one)
        True
        """
        fingerprint, lost = row[-2:].view(np.uint64).tolist()
        return cls(numel, dtype, fingerprint, row[:-3], float(row[-3]), lost, seed)

    @classmethod
    def from_json(cls, fields: dict[str, Any], numel: int, dtype: str, sums: np.ndarray, seed: str) -> "Sketch":
        """The sketch as stored up to format 4: the sums, and an object with the rest."""
        fingerprint = int(fields["fingerprint"], 16)
        return cls(numel, dtype, fingerprint, sums, fields["squares"], fields["num_not_finite"], seed)

    def folded(self, num_sums: int) -> "Sketch":
        """The same sketch with fewer sums. The first bits of an element's key then determine its sum.

        >>> one = sketches_of([np.arange(3.0)])[0]
        >>> one.folded(8).sums.shape, one.folded(8).equals(one)
        ((8,), True)
        """
        if num_sums == self.sums.size:
            return self
        return replace(self, sums=self.sums.reshape(num_sums, -1).sum(axis=1))

    @property
    def norm(self) -> float:
        """The 2-norm of the finite elements, up to rounding."""
        return math.sqrt(self.squares)

    def equals(self, other: "Sketch") -> bool:
        """Whether all elements are equal bit for bit.

        Raises:
            RecordingError: the keys of the two depend on different names.
        """
        if self.seed != other.seed:
            raise RecordingError(
                f"expected sketches with the same keys, got keys of {self.seed!r} and of {other.seed!r}: up to format 6 they "
                "depend on the names of parameters; record both runs again with this version"
            )
        return (self.numel, self.dtype, self.fingerprint) == (other.numel, other.dtype, other.fingerprint)

    def distance(self, other: "Sketch") -> float:
        """An estimate of norm(a - b). Its square has a relative standard deviation of at most sqrt(2 / NUM_SUMS)."""
        if self.equals(other):
            return 0.0
        num_sums = min(self.sums.size, other.sums.size)
        return float(np.sqrt(np.square(self.folded(num_sums).sums - other.folded(num_sums).sums).sum()))

    @property
    def resolution(self) -> float:
        """Smaller distances may be rounding of the sums, whose order depends on the layout."""
        return math.sqrt(self.numel) * 2.0**-53 * self.norm


def sketches_of(arrays: Sequence[np.ndarray], start: int = 0, *, seed: str = "") -> list[Sketch]:
    """The sketches of several arrays of one layout, such as the values, the gradient and the moments of a parameter.

    Args:
        arrays: arrays of elements `start:start + size`, of any floating dtype; all of one size.
        seed: see `Sketch`.

    >>> whole = np.arange(10.0)
    >>> a, b = (sketches_of([part], at)[0] for part, at in ((whole[:4], 0), (whole[4:], 4)))
    >>> (a + b).equals(sketches_of([whole])[0])
    True
    """
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    size = flat[0].size if flat else 0
    assert all(array.size == size for array in flat), [array.size for array in flat]
    sums = np.zeros((len(flat), NUM_SUMS))
    fingerprints, squares, lost = [0] * len(flat), [0.0] * len(flat), [0] * len(flat)
    for first in range(0, size, _CHUNK):
        last = min(first + _CHUNK, size)
        keys = element_keys(seed, start + first, start + last)
        places = (keys >> np.uint64(SUM_SHIFT)).astype(np.intp)
        signs = 1.0 - 2.0 * (keys & np.uint64(1)).astype(np.float64)
        for i, array in enumerate(flat):
            values = array[first:last]
            wide = values.astype(np.float64)
            finite = np.isfinite(wide)
            if not finite.all():
                lost[i] += int(wide.size - finite.sum())
                values, wide = one_nan(values), np.where(finite, wide, 0.0)
            bits = values.view(UNSIGNED[values.dtype.itemsize]).astype(np.uint64)
            fingerprints[i] += int(mix(keys + bits * np.uint64(ODD)).sum(dtype=np.uint64))
            # Not with BLAS: on busy cores its threads wait for each other longer than a chunk takes.
            squares[i] += float(np.einsum("i,i->", wide, wide))
            wide *= signs
            sums[i] += np.bincount(places, wide, NUM_SUMS)
    return [
        Sketch(size, flat[i].dtype.name, fingerprints[i] % 2**64, sums[i], squares[i], lost[i], seed)
        for i in range(len(flat))
    ]
