"""Identifies a batch if the training loop does not: a digest of all its values, a number for each of its samples, and two for
each of its arrays.

All depend on values alone. The same numbers as int32 or int64, or as float32 or float64, and the same arrays in any order, give
the same result, so that loops in torch and JAX agree on their batches. A mask, an array of samples and positions that is zero at
padding, makes the numbers of samples and arrays independent of how far a microbatch is padded; the digest has the padding too.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

_CHUNK = 1 << 16


@dataclass(frozen=True)
class Batch:
    """The batch of a rank at a step.

    Attributes:
        digest: its sha256 in hex.
        sample_ids: the ids of its samples in the data.
        inputs: two numbers for each of its arrays (`inputs_of`); empty if they were not recorded.
    """

    digest: str
    sample_ids: tuple[int, ...]
    inputs: tuple[tuple[int, int], ...] = ()

    @property
    def is_unknown(self) -> bool:
        """Whether none was seen, as where a step is computed from parameters alone."""
        return self.digest == digest_of(())

    def has_samples_of(self, other: "Batch") -> bool:
        """Whether a model is called with the same samples, perhaps in another order, in other microbatches, or with further
        arrays, which one of the models could derive from the others. Numbers, arrays without dims, may differ."""
        if self.digest == other.digest:
            return True
        if len(self.sample_ids) != len(other.sample_ids) or not self.inputs or not other.inputs:
            return False
        if len(self.inputs) != len(other.inputs):
            return self.is_in_order_of(other)
        rows = [sorted(number for number, _ in each.inputs) for each in (self, other)]
        return rows[0] == rows[1] and sorted(self.sample_ids) == sorted(other.sample_ids)

    def has_rows_of(self, other: "Batch") -> bool:
        """Whether both are the same samples in the same order, though the numbers of padded ones differ: one recorder did not
        know which array is the mask."""
        ours, theirs = set(self.sample_ids), set(other.sample_ids)
        pairs = list(zip(self.sample_ids, other.sample_ids, strict=False))
        is_in_order = all(x == y or (x not in theirs and y not in ours) for x, y in pairs)
        return self.digest == other.digest and len(self.sample_ids) == len(other.sample_ids) and is_in_order

    def is_in_order_of(self, other: "Batch") -> bool:
        """Whether all arrays of the batch with fewer arrays are in the other one too, with their rows in the same order."""
        fewer, more = sorted((Counter(self.inputs), Counter(other.inputs)), key=Counter.total)
        return fewer.total() > 0 and fewer <= more


def batch_of(
    microbatches: Sequence[Sequence[np.ndarray]],
    masks: Sequence[int | None] = (),
    *,
    digest: str | None = None,
    sample_ids: Iterable[int] | None = None,
) -> Batch:
    """The batch of a rank at a step, from the arrays of each microbatch.

    Args:
        masks: the index of the mask in each microbatch; empty if there are none.
        digest, sample_ids: what the loop states instead. If it states the digest, its arrays are not identified.

    >>> tokens = np.arange(6).reshape(3, 2)
    >>> batch_of([tokens[:2][None], tokens[2:][None]]).sample_ids == batch_of([[tokens]]).sample_ids
    True
    """
    if sample_ids is None:
        sample_ids = [number for arrays, mask in zip_longest(microbatches, masks) for number in row_ids(arrays, mask)]
    inputs = () if digest else inputs_of(microbatches, masks)
    return Batch(digest or digest_of(each for arrays in microbatches for each in arrays), tuple(sample_ids), inputs)


def digest_of(arrays: Iterable[np.ndarray]) -> str:
    """The sha256 of the shapes and values of all arrays of a batch, in hex.

    >>> tokens, images = np.arange(6).reshape(2, 3), np.ones((2, 4))
    >>> digest_of([tokens, images]) == digest_of([images.astype("float32"), tokens.astype("int32")])
    True
    """
    parts = []
    for array in arrays:
        digest = hashlib.sha256(repr(tuple(array.shape)).encode())
        flat = np.asarray(array).reshape(-1)
        for first in range(0, flat.size, _CHUNK):
            digest.update(_wide(flat[first : first + _CHUNK]))
        parts.append(digest.digest())
    return hashlib.sha256(b"".join(sorted(parts))).hexdigest()


def row_ids(arrays: Iterable[np.ndarray], mask: int | None = None) -> tuple[int, ...]:
    """A number below 2^63 for each sample of a batch, which depends on the values of its rows only.

    Args:
        arrays: the arrays of the batch. The first array that has dims determines the number of samples, and arrays with that
            leading dim are read; if none has dims there are no samples. Samples with equal values have equal numbers.
        mask: the index of the mask among the arrays.

    >>> batch = np.random.default_rng(0).normal(size=(4, 3))
    >>> row_ids([batch])[2:] == row_ids([batch[2:]])
    True
    """
    given = [np.asarray(array) for array in arrays]
    sizes = [array.shape[0] for array in given if array.ndim]
    found, kept = [0] * (sizes[0] if sizes else 0), _kept(given, mask)
    for array in given:
        if array.ndim and array.shape[0] == len(found):
            for i, row in enumerate(_rows(array, kept)):
                # A sum does not depend on the order of the arrays.
                found[i] += _number(row)
    return tuple(number % 2**63 for number in found)


def inputs_of(
    microbatches: Sequence[Sequence[np.ndarray]], masks: Sequence[int | None] = ()
) -> tuple[tuple[int, int], ...]:
    """Two numbers below 2^63 for each array that a model is called with: of its distinct rows, and of their order too.

    They do not depend on how a batch is divided into microbatches. A row that is the same in every microbatch, such as positions,
    counts once. Arrays without dims have none: a number that a loop computes, such as the tokens of all ranks, is no sample.

    Args:
        microbatches: the arrays of each call, in the same order.
        masks: the index of the mask in each call; empty if there are none.

    >>> tokens, positions = np.arange(12).reshape(4, 3), np.arange(3)[None]
    >>> whole = inputs_of([[tokens, positions]])
    >>> whole == inputs_of([[tokens[:2], positions], [tokens[2:], positions]])
    True
    >>> [x == y for x, y in zip(whole[0], inputs_of([[tokens[::-1]]])[0])]
    [True, False]
    """
    found = []
    kept = [_kept(arrays, mask) for arrays, mask in zip_longest(microbatches, masks)]
    for arrays in zip_longest(*microbatches):
        rows: dict[int, None] = {}
        for array, keep in zip(arrays, kept, strict=True):
            if array is not None and np.ndim(array):
                rows.update(dict.fromkeys(map(_number, _rows(np.asarray(array), keep))))
        if not rows:
            continue
        order = hashlib.blake2b(digest_size=8)
        for number in rows:
            order.update(number.to_bytes(8, "little"))
        found.append((sum(rows) % 2**63, int.from_bytes(order.digest(), "little") % 2**63))
    return tuple(found)


def _kept(arrays: Sequence[np.ndarray], mask: int | None) -> np.ndarray | None:
    """Which positions of each sample are no padding; None if there is none. A mask with gaps states something else."""
    keep = None if mask is None else np.asarray(arrays[mask]) != 0
    if keep is None or keep.ndim != 2 or keep.all():
        return None
    num_edges = np.diff(np.pad(keep, ((0, 0), (1, 1)))).sum(1)
    return keep if (num_edges == 2).all() else None


def _rows(array: np.ndarray, keep: np.ndarray | None) -> Iterator[np.ndarray]:
    """The samples of an array, without padding if it has the positions of the mask."""
    for i, row in enumerate(array):
        yield row if keep is None or array.shape[:2] != keep.shape else row[keep[i]]


def _number(row: np.ndarray) -> int:
    digest = hashlib.blake2b(repr(row.shape).encode(), digest_size=8)
    digest.update(_wide(np.atleast_1d(row)))
    return int.from_bytes(digest.digest(), "little")


def _wide(values: np.ndarray) -> bytes:
    """The bytes of values in the widest dtype of their kind, which holds them exactly. Other kinds are not converted."""
    if values.dtype.kind in "biu":
        values = values.astype(np.int64)
    elif values.dtype.kind in "fV":  # numpy treats bfloat16 and similar dtypes as void
        values = values.astype(np.float64)
    return np.ascontiguousarray(values).tobytes()
