"""Samples: the elements of a parameter nearest to zero and their places, which tell in what order another model has its elements.

A sketch tells whether two parameters are equal element by element. If one model has transposed, split, stacked or joined what
the other one has, a sample tells whether and how:

- `signature` is the sum of a hash of each element modulo 2^64, which no order of elements changes. That of a joined or stacked
  array is the sum of those of its parts.
- The elements nearest to zero are the same in every order, so that two samples have the same elements, each with its place in
  both models. A rearrangement is the right one only if it takes each of them to its place. Floats are densest near zero: there
  few elements are equal, even of dtypes with few bits.

The samples of parts are merged, so each rank samples its own piece, at any world size and in any layout.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from crossframe.recording.hashing import element_hashes

ITEM = np.dtype([("place", "<u4"), ("value", "<f4")])
"""An element in a file: its place in the piece, and its value."""
_LEAST, _SHIFT = 64, 17
_CHUNK = 1 << 15


def num_sampled(size: int) -> int:
    """The number of elements in the sample of a piece: more for large ones, which may be many parameters in one.

    >>> num_sampled(4096), num_sampled(4096 * 14336)
    (64, 512)
    """
    return _LEAST + (size >> _SHIFT)


@dataclass(frozen=True)
class Sample:
    """The sample of a parameter or of a part of it.

    Attributes:
        signature: an int below 2^64.
        places: of the elements in the flattened parameter: int64, ascending.
        values: float32, rounded if the parameter has more bits.
        limit: the sample has all elements that are not 0 and nearer to 0 than this; inf: all.
        least: the element nearest to 0 that is not 0; 0 if there is none.
    """

    signature: int
    places: np.ndarray
    values: np.ndarray
    limit: float
    least: float

    @classmethod
    def of_piece(cls, signature: int, places: np.ndarray, values: np.ndarray, size: int, start: int) -> "Sample":
        """The sample of a piece from its elements nearest to zero.

        Args:
            places: in the piece.
            size: number of elements of the piece.
            start: of the piece in the parameter.
        """
        order = np.argsort(places)
        is_all = len(places) < num_sampled(size)
        limit = np.inf if is_all else float(np.abs(values).max())
        least = float(values[np.abs(values).argmin()]) if len(values) else 0.0
        return cls(signature, start + places[order].astype(np.int64), values[order].astype(np.float32), limit, least)

    def within(self, limit: float) -> "Sample":
        """The elements that are nearer to zero than a limit."""
        near = np.abs(self.values) < limit
        return replace(self, places=self.places[near], values=self.values[near], limit=min(limit, self.limit))

    def to_items(self, start: int) -> np.ndarray:
        """The sample of a piece that begins at `start`, as in a file: float64, whose bits are the signature and then `ITEM`s."""
        items = np.empty(1 + len(self.places))
        items[:1].view(np.uint64)[0] = self.signature
        items[1:].view(ITEM)["place"], items[1:].view(ITEM)["value"] = self.places - start, self.values
        return items

    @classmethod
    def from_items(cls, items: np.ndarray, start: int, stop: int) -> "Sample":
        """The sample of elements `start:stop` that `to_items` wrote; ValueError if it has places outside of the piece.

        >>> one = sample_of(np.arange(-3.0, 3.0), 5)
        >>> Sample.from_items(one.to_items(5), 5, 11).places.tolist()
        [5, 6, 7, 9, 10]
        """
        elements = items[1:].view(ITEM)
        if len(elements) > num_sampled(stop - start) or (elements["place"] >= stop - start).any():
            raise ValueError(f"expected a sample of elements {start}:{stop}, got other places")
        signature = int(items[:1].view(np.uint64)[0])
        return cls.of_piece(signature, elements["place"], elements["value"], stop - start, start)


def merged(parts: Iterable[Sample]) -> Sample:
    """The sample of a parameter from those of its pieces."""
    each = list(parts)
    limit = min((part.limit for part in each), default=np.inf)
    near = [part.within(limit) for part in each]
    places = np.concatenate([np.empty(0, np.int64), *(part.places for part in near)])
    values = np.concatenate([np.empty(0, np.float32), *(part.values for part in near)])
    order = np.argsort(places)
    least = min((part.least for part in each if part.least), key=abs, default=0.0)
    return Sample(sum(part.signature for part in each) % 2**64, places[order], values[order], limit, least)


def sample_of(values: np.ndarray, start: int = 0) -> Sample:
    """The sample of elements `start:start + size` of a flattened parameter, of any floating dtype.

    >>> sample = sample_of(np.array([3.0, -1.0, 0.0, 2.0]))
    >>> sample.places.tolist(), sample.values.tolist(), sample.limit
    ([0, 1, 3], [3.0, -1.0, 2.0], inf)
    """
    flat, signature = np.ascontiguousarray(values).reshape(-1), 0
    wanted = num_sampled(flat.size)
    places, limit = np.empty(0, np.int64), np.inf
    for first in range(0, flat.size, _CHUNK):
        part = flat[first : first + _CHUNK]
        signature += int(element_hashes(part).sum(dtype=np.uint64))
        sizes = np.abs(part.astype(np.float64))
        places = np.concatenate([places, first + np.flatnonzero((sizes > 0) & (sizes <= limit) & np.isfinite(sizes))])
        if len(places) > 2 * wanted:
            places, limit = nearest(flat, places, wanted)
    places, _ = nearest(flat, places, wanted)
    return Sample.of_piece(signature % 2**64, places, flat[places].astype(np.float32), flat.size, start)


def nearest(flat: np.ndarray, places: np.ndarray, wanted: int) -> tuple[np.ndarray, float]:
    """As many of these places as wanted, those of the elements nearest to zero, and the size of the last one."""
    sizes = np.abs(flat[places].astype(np.float64))
    order = np.lexsort((places, sizes))[:wanted]
    return places[order], float(sizes[order[-1]]) if len(order) else np.inf
