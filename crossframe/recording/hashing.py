"""Hashes of elements: the same number for element i of a parameter on whichever rank, in whatever layout, it lies.

An element's key is mix(key of the name + (i + 1) * GOLDEN), all modulo 2^64, where mix is the finaliser of SplitMix64 (G. Steele,
D. Lea, C. Flood, Fast splittable pseudorandom number generators, OOPSLA 2014), and the key of a name is its BLAKE2b of 8 bytes,
the least one first.
"""

import hashlib

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def mix(keys: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser, element by element: uint64 to uint64, one to one. Works in place where it can."""
    keys = keys ^ (keys >> np.uint64(30))
    keys *= np.uint64(0xBF58476D1CE4E5B9)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(0x94D049BB133111EB)
    keys ^= keys >> np.uint64(31)
    return keys


def name_key(name: str, salt: str = "") -> int:
    """The key of a name. Another salt gives keys that have nothing to do with these."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, salt=salt.encode()[:16]).digest()
    return int.from_bytes(digest, "little")


def element_keys(name: str, start: int, stop: int, salt: str = "") -> np.ndarray:
    """The keys of elements `start:stop` of a parameter taken as one row-major line: uint64 of shape (stop - start,).

    >>> bool((element_keys("w", 0, 5)[2:] == element_keys("w", 2, 5)).all())
    True
    """
    places = np.arange(start + 1, stop + 1, dtype=np.uint64)
    places *= np.uint64(_GOLDEN)
    places += np.uint64(name_key(name, salt))
    return mix(places)
