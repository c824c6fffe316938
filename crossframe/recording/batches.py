"""What a batch is known by, where a loop does not say it: a digest of all its values, and a number for each of its samples.

Both go by values alone: int32 or int64, float32 or float64 of the same numbers, and arrays in any order give the same, so that a
loop in torch and one in JAX agree on what they were fed.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

_CHUNK = 1 << 16


def digest_of(arrays: Iterable[np.ndarray]) -> str:
    """The sha256 of a batch in hex: of the shapes and values of all its arrays.

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


def row_ids(arrays: Iterable[np.ndarray]) -> tuple[int, ...]:
    """A number below 2^63 for each sample of a batch: of its rows' values, so that a sample is known wherever it is fed.

    Args:
        arrays: those with a leading dim of samples are read: as many as the first array that has dims. Without one there are
            no samples. Samples of equal values have equal numbers.

    >>> batch = np.random.default_rng(0).normal(size=(4, 3))
    >>> row_ids([batch])[2:] == row_ids([batch[2:]])
    True
    """
    given = [np.asarray(array) for array in arrays]
    sizes = [array.shape[0] for array in given if array.ndim]
    found = [0] * (sizes[0] if sizes else 0)
    for array in given:
        if array.ndim and array.shape[0] == len(found):
            for i, row in enumerate(array):
                # The sum does not ask for the order of arrays.
                found[i] += _number(row)
    return tuple(number % 2**63 for number in found)


def _number(row: np.ndarray) -> int:
    digest = hashlib.blake2b(repr(row.shape).encode(), digest_size=8)
    digest.update(_wide(np.atleast_1d(row)))
    return int.from_bytes(digest.digest(), "little")


def _wide(values: np.ndarray) -> bytes:
    """The bytes of values in the widest dtype of their kind, which holds them exactly. What is of no such kind goes as it is."""
    if values.dtype.kind in "biu":
        values = values.astype(np.int64)
    elif values.dtype.kind in "fV":  # numpy has bfloat16 and the like as void
        values = values.astype(np.float64)
    return np.ascontiguousarray(values).tobytes()
