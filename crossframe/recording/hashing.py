"""Hashes of elements: element i of a parameter has the same key on every rank and in every layout.

The key of an element is mix(key of the name + (i + 1) * GOLDEN) modulo 2^64. Sketches have "" as the name, so that those of
parameters with different names can be compared. mix is the finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood, Fast splittable
pseudorandom number generators, OOPSLA 2014), and the key of a name is its BLAKE2b digest of 8 bytes, in little-endian order.
"""

import hashlib

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""The multipliers of mix. Backends that hash on an accelerator use the same constants."""
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ODD = np.uint64(GOLDEN)


def mix(keys: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64, element by element: a bijection of uint64."""
    keys = keys ^ (keys >> np.uint64(30))
    keys *= np.uint64(MULTIPLIERS[0])
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(MULTIPLIERS[1])
    keys ^= keys >> np.uint64(31)
    return keys


def element_hashes(array: np.ndarray) -> np.ndarray:
    """A uint64 hash of the bits of each element, in the array's shape, which does not depend on its place. -0.0 is 0.0."""
    positive = one_nan(np.ascontiguousarray(array + np.zeros((), array.dtype)))
    bits = positive.view(UNSIGNED[array.dtype.itemsize])
    return mix(bits.astype(np.uint64) * _ODD + _ODD).reshape(array.shape)  # a scalar has no dims


def one_nan(array: np.ndarray) -> np.ndarray:
    """The array with the same bits for every NaN; itself if it has none.

    The sign and payload of a NaN depend on the instruction that made it: 0 / 0 is negative on x86 and positive on Arm.
    """
    if array.dtype.kind in "iub" or not (nan := np.isnan(array)).any():
        return array
    return np.where(nan, np.full((), np.nan, array.dtype), array)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one dtype have the same bits; all NaNs are equal."""
    return a.tobytes() == b.tobytes() or one_nan(a).tobytes() == one_nan(b).tobytes()


def name_key(name: str, salt: str = "") -> int:
    """The key of a name. Keys of different salts are independent."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, salt=salt.encode()[:16]).digest()
    return int.from_bytes(digest, "little")


def element_keys(name: str, start: int, stop: int, salt: str = "") -> np.ndarray:
    """The keys of elements `start:stop` of a flattened parameter: uint64 of shape (stop - start,).

    >>> bool((element_keys("w", 0, 5)[2:] == element_keys("w", 2, 5)).all())
    True
    """
    places = np.arange(start + 1, stop + 1, dtype=np.uint64)
    places *= np.uint64(GOLDEN)
    places += np.uint64(name_key(name, salt))
    return mix(places)
