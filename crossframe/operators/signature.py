"""Signatures of operator inputs and outputs, which tell whether two traces have the same value.

A signature answers two questions without the elements.

*Are they equal bit for bit?* `bits` is a hash of the elements in row-major order, as float64, so that reshapes and exact casts do
not change it. `multiset` is the sum of a hash of each element modulo 2^64, which transposition does not change either.

*Are they equal except for rounding?* Let r be the root mean square of x. `features` are means over elements of functions of x /
r: x / r itself, and cos(w x / r) and sin(w x / r) for w in `FREQUENCIES`, which is the empirical characteristic function. They
depend neither on the order of the elements nor on a positive factor. Let y = x + e with norm(e) <= t * norm(x). The mean of a
function f with |f'| <= w changes by

    |mean f(y / s) - mean f(x / r)| <= w * mean |y / s - x / r| <= w * norm(y / s - x / r) / sqrt(n)

where s is the root mean square of y. Since |s - r| <= t * r and norm(y) = s * sqrt(n),

    norm(y / s - x / r) <= norm(y - x) / r + norm(y) * |1 / s - 1 / r| <= 2 * t * sqrt(n)

so a feature changes by at most 2 * w * t, and the norm by at most the fraction t. Elements that are not finite, or as large as
those of masks, are counted and left out.

Features can only show that values differ, since different values may have similar features. If both tensors have the same shape,
their sketches estimate norm(x - y) (`crossframe.recording.sketch`) and decide, unless it is so large that the elements must be in
another order.
"""

import base64
import hashlib
from dataclasses import dataclass

import numpy as np

from crossframe.recording.hashing import GOLDEN, mix
from crossframe.recording.sketch import sketches_of

FREQUENCIES = (0.5, 1.0, 2.0, 4.0)
HUGE = 1e8
"""Elements of at least this size are taken for those of a mask."""
PARTS = (2, 3)
"""Numbers of equal parts into which values are cut."""
RELATED = 0.5
"""Two tensors of one shape whose relative distance is at most this have their elements in the same order."""
_SLOPES = np.array([1.0, *FREQUENCIES, *FREQUENCIES])


@dataclass(frozen=True)
class Signature:
    """A summary of the values of a tensor.

    Attributes:
        shape, dtype: shape and dtype of the tensor.
        num_left_out: number of elements that are not finite, or at least `HUGE`.
        norm: norm of the other elements.
        features: see the docstring of the module.
        bits, multiset: hashes in hex.
        sums: sums of the sketch, float32 in base64; "" if only bits are compared.
        parts: signatures of the halves and of the thirds along the last dim; () if only bits are compared, or there are none.
    """

    shape: tuple[int, ...]
    dtype: str
    num_left_out: int
    norm: float
    features: tuple[float, ...]
    bits: str
    multiset: str
    sums: str = ""
    parts: tuple[tuple["Signature", ...], ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements of the tensor."""
        return int(np.prod(self.shape, dtype=np.int64))

    def is_close(self, other: "Signature", tolerance: float) -> bool:
        """Whether both may be the same values up to norm(x - y) <= tolerance * norm(x), in any order of elements."""
        if self.multiset == other.multiset and self.numel == other.numel:
            return True
        size = max(self.norm, other.norm)
        if self.sums and other.sums and self.shape == other.shape:
            distance = float(np.linalg.norm(_decoded(self.sums) - _decoded(other.sums)))
            if distance <= RELATED * size:
                return distance <= tolerance * size and self.num_left_out == other.num_left_out
        near = abs(self.norm - other.norm) <= tolerance * size
        return near and self.is_multiple(other, tolerance)

    def is_multiple(self, other: "Signature", tolerance: float) -> bool:
        """Like `is_close`, up to a positive factor.

        >>> x = np.arange(6.0).reshape(2, 3)
        >>> signature_of(x).is_multiple(signature_of(-2 * x), 1e-6), signature_of(x).is_multiple(signature_of(2 * x.T), 1e-6)
        (False, True)
        """
        if self.numel != other.numel or self.num_left_out != other.num_left_out:
            return False
        moved = np.abs(np.array(self.features) - np.array(other.features))
        return bool((moved <= 2 * _SLOPES * tolerance + 1e-12).all())

    def to_json(self) -> list:
        """The signature as JSON."""
        numbers = [self.num_left_out, self.norm, list(self.features), self.bits, self.multiset, self.sums]
        return [list(self.shape), self.dtype, *numbers, [[part.to_json() for part in cut] for cut in self.parts]]

    @classmethod
    def from_json(cls, fields: list) -> "Signature":
        """The signature that `to_json` wrote."""
        shape, dtype, num_left_out, norm, features, *texts, parts = fields
        cuts = tuple(tuple(map(cls.from_json, cut)) for cut in parts)
        bits, multiset, sums = texts
        return cls(tuple(shape), dtype, num_left_out, norm, tuple(features), bits, multiset, sums, cuts)


def _decoded(sums: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(sums), np.float32)


def signature_of(array: np.ndarray, dtype: str = "", *, sketched: bool = True, cut: bool = True) -> Signature:
    """The signature of an array of numbers or booleans.

    Args:
        dtype: dtype of the tensor, if that of the array differs.
        sketched: whether it is also compared up to rounding, not only bit for bit.
        cut: whether its parts are compared too, if `sketched`.

    >>> x = np.arange(6.0).reshape(2, 3)
    >>> signature_of(x).bits == signature_of(x.reshape(6)).bits, signature_of(x).bits == signature_of(x.T).bits
    (True, False)
    >>> signature_of(x).multiset == signature_of(x.T).multiset
    True
    """
    # Adding zero turns -0.0 into 0.0, which is the same value.
    wide = np.ascontiguousarray(array, np.float64).reshape(-1) + 0.0
    wide = np.where(np.isnan(wide), np.nan, wide)
    kept = wide[np.abs(wide) < HUGE]
    size = float(np.sqrt(np.mean(np.square(kept)))) if kept.size else 0.0
    unit = kept / size if size else kept
    features = [np.mean(unit)] if kept.size else [0.0]
    for wave in (np.cos, np.sin):
        features += [np.mean(wave(frequency * unit)) if kept.size else 0.0 for frequency in FREQUENCIES]
    sums = b""
    if sketched:
        (sketch,) = sketches_of([np.where(np.abs(wide) < HUGE, wide, 0.0)])
        sums = sketch.sums.astype(np.float32).tobytes()
    return Signature(
        tuple(np.shape(array)),
        dtype or array.dtype.name,
        int(wide.size - kept.size),
        size * float(np.sqrt(kept.size)),
        tuple(float(feature) for feature in features),
        hashlib.blake2b(wide.tobytes(), digest_size=8).hexdigest(),
        f"{_multiset(wide):016x}",
        base64.b64encode(sums).decode(),
        _parts(array, dtype) if sketched and cut else (),
    )


def _parts(array: np.ndarray, dtype: str) -> tuple[tuple[Signature, ...], ...]:
    """The signatures of the parts of a tensor of at least two dims. One program may pack several tensors, such as query, key and
    value, into one."""
    width = array.shape[-1] if array.ndim > 1 else 0
    cuts = [np.split(array, number, -1) for number in PARTS if width > number and width % number == 0]
    return tuple(tuple(signature_of(part, dtype, cut=False) for part in cut) for cut in cuts)


def _multiset(wide: np.ndarray) -> int:
    return int(mix(wide.view(np.uint64) + np.uint64(GOLDEN)).sum(dtype=np.uint64))
