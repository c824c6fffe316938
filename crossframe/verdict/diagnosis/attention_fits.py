"""Fits attention to its projections: the scale and the mask of scores, exchanged projections, shares in low precision.

The right side must be softmax(scale * q k) v, for some number of heads, rotary positions or none, a causal mask or none, and a
number of keys in each sample. The scale is 1 / sqrt(head width), or it is fitted together with a cap of the scores. The wrong
side is the same with one change.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from crossframe.verdict.diagnosis.fit import TINY, Contrast, accepted, rounded_in, sum_roundoff
from crossframe.verdict.measure.metrics import distance, norm

MOST_ELEMENTS = 1 << 20
MOST_KEYS = 128
"""The largest number of keys for which masked keys are looked for."""
MOST_HEADS = 64
SCREENED = 2
"""The number of samples that must agree before all samples are computed."""
_ROTARY = ((0.0, False), (1e4, False), (1e4, True), (5e5, False), (1e6, False))
"""(base, whether pairs are adjacent) of rotary positions; 0: none."""
_CAPS = (0.0, 50.0)
"""Caps of scores, as cap * tanh(scores / cap); 0: none. 50 is that of Gemma 2."""
_LOW = ("bfloat16", "float16")
_ALIKE = 0.99
"""The share of rows that must agree where scores are rounded: a sum in float32 rounds some of them to the neighbouring value."""


@dataclass(frozen=True)
class Projections:
    """The queries, keys and values of one side, of shapes (batch, T, q width), (batch, S, k width), (batch, S, v width).

    Attributes:
        by_head: whether heads are already a dim: (batch, heads, T, head width).
        after: weight (out, in) and bias of a linear map that follows; None without.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    after: tuple[np.ndarray, np.ndarray] | None = None

    def first(self, samples: int) -> "Projections":
        return replace(self, q=self.q[:samples], k=self.k[:samples], v=self.v[:samples])

    def until(self, positions: int) -> "Projections":
        return replace(self, q=self.q[:, :positions], k=self.k[:, :positions], v=self.v[:, :positions])

    def exchanged(self) -> "Projections":
        """With queries and keys exchanged."""
        return replace(self, q=self.k, k=self.q)


@dataclass(frozen=True)
class Attention:
    """How the right side attends.

    Attributes:
        heads: the number of heads of queries.
        groups: the number of heads of keys and values.
        factor: of q k.
        base, adjacent: of rotary positions; a base of 0 without.
        cap: of scores; 0 without.
        keys: (batch, S), the keys that are not masked; None for all.
        window: the number of last keys that a query of causal attention sees; 0 for all.
        scrambled: whether heads are split without exchanging dims: (batch, T, width) read as (batch, heads, T, head width).
        scores_in, shares_in: dtypes in which scores and shares are rounded; "" for none.
    """

    heads: int
    groups: int
    causal: bool
    factor: float
    base: float = 0.0
    adjacent: bool = False
    cap: float = 0.0
    keys: np.ndarray | None = None
    window: int = 0
    scrambled: bool = False
    scores_in: str = ""
    shares_in: str = ""

    def of(self, given: Projections) -> np.ndarray:
        """The output of attention."""
        q, k, v = (
            self._split(x, n) for x, n in ((given.q, self.heads), (given.k, self.groups), (given.v, self.groups))
        )
        if self.base:
            q, k = (_rotated(x, self.base, self.adjacent) for x in (q, k))
        k, v = (np.repeat(x, self.heads // self.groups, axis=1) for x in (k, v))
        scores = self.factor * (q @ k.swapaxes(2, 3))
        if self.cap:
            scores = self.cap * np.tanh(scores / self.cap)
        if self.scores_in:
            scores = rounded_in(scores, self.scores_in)
        if self.causal:
            seen = np.tri(*scores.shape[2:], dtype=bool)
            if self.window:
                seen = np.triu(seen, 1 - self.window)
            scores = np.where(seen, scores, -np.inf)
        if self.keys is not None:
            scores = np.where(self.keys[: len(scores), None, None], scores, -np.inf)
        top = scores.max(axis=-1, keepdims=True)
        shares = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
        shares = shares / np.maximum(shares.sum(axis=-1, keepdims=True), TINY)
        if self.shares_in:
            shares = rounded_in(shares, self.shares_in)
        y = (shares @ v).swapaxes(1, 2)
        y = y.reshape(*y.shape[:2], -1)
        return y if given.after is None else y @ given.after[0].T + given.after[1]

    def _split(self, x: np.ndarray, heads: int) -> np.ndarray:
        if self.scrambled:
            return x.reshape(len(x), heads, x.shape[1], -1)
        return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


@dataclass(frozen=True)
class Change:
    """What the wrong side does otherwise.

    Attributes:
        kind: "scale", "causal", "keys", "exchanged", "scrambled", or the dtype of scores or shares.
        right, wrong: the attention of both sides.
    """

    kind: str
    right: Attention
    wrong: Attention
    residual: float
    error: float


def attention_of(sides: Contrast, inputs: Sequence[Projections], roundoff: float) -> Change | None:
    """What the wrong side's attention does otherwise; None if the right side is not attention of these projections.

    Each side is predicted from its own projections, so both must agree with their predictions up to the rounding of attention
    itself, however far the projections are apart.

    Args:
        inputs: of the right and the wrong side.
        roundoff: unit roundoff of the compute dtype.
    """
    x, given = sides.right, inputs[0]
    if given.k.shape[1] < 2:
        return None
    for find in (_masked, _fitted):
        for plain in _structures(x, given):
            error = _error(x, given, plain, roundoff)
            if (found := find(x, given, plain, error)) is not None:
                return _change(sides, inputs[1], found, error)
    return None


def _error(x: np.ndarray, given: Projections, right: Attention, roundoff: float) -> float:
    """The bound on the rounding of attention, in norm: two sums of products and a softmax over S terms; rotary positions add two
    products."""
    terms = given.q.shape[-1] // right.heads + given.k.shape[1] + 2 * bool(right.base)
    return 8 * sum_roundoff(terms, roundoff) * norm(x)


def _structures(x: np.ndarray, given: Projections) -> Iterator[Attention]:
    """The ways in which queries of this width may attend, with the usual factor."""
    wide, narrow, values = (each.shape[-1] for each in (given.q, given.k, given.v))
    square = given.q.shape[1] == given.k.shape[1]
    for heads in head_counts(wide):
        width = wide // heads
        groups = narrow // width
        if narrow % width or heads % groups or values % groups:
            continue
        out = values // groups * heads if given.after is None else len(given.after[0])
        if (*given.q.shape[:2], out) != x.shape:
            continue
        plain = Attention(heads, groups, True, 1 / math.sqrt(width))
        for cap in _CAPS:
            for base, adjacent in _ROTARY:
                if not base or (square and width % 2 == 0):
                    for causal in (True, False) if square else (False,):
                        yield replace(plain, causal=causal, base=base, adjacent=adjacent, cap=cap)


def head_counts(width: int) -> list[int]:
    """The numbers of heads with more than one element each.

    >>> head_counts(12)
    [1, 2, 3, 4, 6]
    """
    return [num for num in range(1, min(width // 2, MOST_HEADS) + 1) if width % num == 0]


def _fitted(x: np.ndarray, given: Projections, plain: Attention, tolerance: float) -> Attention | None:
    """The attention with the factor and the cap of scores that give x; None if no such values do.

    In causal attention the first position has the values of the first key, whatever the scores are, and the second one sees two
    keys: from all samples together these show both constants. Without a causal mask only a factor is fitted, without rotary
    positions.
    """
    if plain.cap:
        return None
    if plain.causal:
        few, start = given.until(2), x[:, :2]
        if distance(start[:, :1], plain.of(few)[:, :1]) > tolerance:
            return None
        found = _constants(start, few, plain, capped=True)
        if distance(start, found.of(few)) > tolerance:
            return None
        found = _masked(x, given, found, tolerance)
    else:
        if plain.base:
            return None
        few, start = given.first(SCREENED), x[:SCREENED]
        found = _constants(start, few, plain, capped=False)
        if 2 * distance(start, found.of(few)) > distance(start, replace(plain, factor=0.0).of(few)):
            return None
    if found is None:
        return None
    found = _constants(x, given, found, capped=plain.causal)
    return found if distance(x, found.of(given)) <= tolerance else None


def _constants(
    y: np.ndarray, given: Projections, start: Attention, *, capped: bool, seen: slice = slice(None)
) -> Attention:
    """The best-fitting factor and, if capped, cap of scores, by a coarse search followed by Gauss-Newton.

    The cap enters by the inverse of its square, in which attention without a cap is a regular point.

    Args:
        seen: the positions in y.
    """

    def made(constants: np.ndarray) -> Attention:
        cap = 1 / math.sqrt(constants[1]) if constants[1] > 1e-8 else 0.0
        return replace(start, factor=float(constants[0]), cap=cap)

    def of(constants: np.ndarray) -> np.ndarray:
        return made(constants).of(given)[:, seen]

    def apart(constants: np.ndarray) -> float:
        return distance(y, of(constants))

    bends = {start.cap and start.cap**-2, *((0.0, 0.01, 1.0) if capped else ())}
    now = min((np.array([start.factor * 2.0**i, bend]) for i in range(-8, 9) for bend in bends), key=apart)
    for _ in range(30):
        here = of(now)
        steps = (1e-6 * now[0], 1e-6 * max(now[1], 1e-3))[: 1 + capped]
        ways = [(of(now + h * np.eye(2)[i]) - here).reshape(-1) / h for i, h in enumerate(steps)]
        moved = np.zeros(2)
        moved[: len(ways)] = np.linalg.lstsq(np.stack(ways, axis=1), (y - here).reshape(-1), rcond=None)[0]
        reached = np.maximum(now + moved, now / 8)
        if not np.isfinite(reached).all() or apart(reached) >= distance(y, here):
            break
        now = reached
    return made(now)


def _masked(x: np.ndarray, given: Projections, right: Attention, tolerance: float) -> Attention | None:
    """The attention with the keys that it masks in each sample; None if it does not give x."""
    whole = right.of(given.first(SCREENED))
    if distance(x[:SCREENED], whole) <= tolerance and distance(x, right.of(given)) <= tolerance:
        return right
    if given.k.shape[1] > MOST_KEYS:
        return None
    if right.causal and not _starts_alike(x[:SCREENED], whole, tolerance):
        return None
    if _keys_of(x[:SCREENED], given.first(SCREENED), right, tolerance) is None:
        return _windowed(x, given, right, tolerance) if right.causal else None
    keys = _keys_of(x, given, right, tolerance)
    return None if keys is None else replace(right, keys=keys)


def _windowed(x: np.ndarray, given: Projections, right: Attention, tolerance: float) -> Attention | None:
    """The attention with a window and, in samples that do not agree with it alone, masked keys."""
    for window in range(2, given.k.shape[1]):
        found = replace(right, window=window)
        apart = np.sqrt(np.square(x - found.of(given)).sum(axis=(1, 2)))
        if norm(apart) <= tolerance:
            return found
        if apart.min() <= tolerance:
            keys = _keys_of(x, given, found, tolerance)
            return None if keys is None else replace(found, keys=keys)
    return None


def _starts_alike(x: np.ndarray, whole: np.ndarray, tolerance: float) -> bool:
    """Whether the second position, which sees two keys, agrees: the first keys of a sample are seldom masked."""
    return any(distance(one[1], other[1]) <= tolerance for one, other in zip(x, whole, strict=True))


def _keys_of(x: np.ndarray, given: Projections, right: Attention, tolerance: float) -> np.ndarray | None:
    """The keys of each sample, the first or the last ones, that give x; None if there are none."""
    num, places = given.k.shape[1], np.arange(given.k.shape[1])
    best, keys = np.full(len(x), np.inf), np.ones((len(x), num), bool)
    for count in range(num, 0, -1):
        for seen in (places < count, places >= num - count):
            found = replace(right, keys=np.broadcast_to(seen, keys.shape))
            apart = _distances(x, found.of(given), found, seen)
            better = apart < best / 2  # a mask that changes nothing is none
            best, keys[better] = np.where(better, apart, best), seen
    return keys if norm(best) <= tolerance else None


def _distances(x: np.ndarray, y: np.ndarray, found: Attention, seen: np.ndarray) -> np.ndarray:
    """The distance in each sample; without queries that see no key, whose result is arbitrary."""
    apart = x - y
    if found.causal:
        apart = apart[:, int(seen.argmax()) :]
    return np.sqrt(np.square(apart).sum(axis=(1, 2)))


def _change(sides: Contrast, given: Projections, right: Attention, tolerance: float) -> Change | None:
    """What the wrong side does otherwise with its projections; None if it does nothing otherwise, or something else."""
    seen = slice(None) if right.keys is None or not right.causal else slice(int(right.keys.argmax(axis=1).max()), None)
    part = Contrast(sides.right[:, seen], sides.wrong[:, seen], sides.limit, sides.roundoff)

    def fits(kind: str, wrong: Attention, given: Projections) -> Change | None:
        residual = part.residual(wrong.of(given)[:, seen])
        return (
            Change(kind, right, wrong, residual, tolerance) if accepted(residual, part.difference, tolerance) else None
        )

    if fits("", right, given):
        return None  # its projections differ
    if found := fits("scrambled", replace(right, scrambled=True), given):
        return found
    if given.q.shape == given.k.shape and (found := fits("exchanged", right, given.exchanged())):
        return found
    if found := fits("causal", replace(right, causal=not right.causal, window=0), given):
        return found
    if given.k.shape[1] <= MOST_KEYS:
        keys = _keys_of(sides.wrong, given, right, tolerance)
        if keys is not None and (found := fits("keys", replace(right, keys=keys), given)):
            return found
    for low in _LOW:
        for scores_in, shares_in in ((low, low), ("", low), (low, "")):
            wrong = replace(right, scores_in=scores_in, shares_in=shares_in)
            rows = part.wrong - wrong.of(given)[:, seen]
            apart = np.sqrt(np.square(rows).sum(axis=-1))
            share = float((apart <= tolerance / math.sqrt(apart.size)).mean())
            if share >= _ALIKE and 2 * norm(rows) <= part.difference:
                return Change(low, right, wrong, norm(rows), tolerance)
    wrong = _constants(part.wrong, given, right, capped=False, seen=seen)
    return fits("scale", wrong, given)


def _rotated(x: np.ndarray, base: float, adjacent: bool) -> np.ndarray:
    """Rotary positions (J. Su et al., RoFormer, 2021) of (batch, heads, T, width): of halves, or of adjacent pairs."""
    width = x.shape[-1]
    angles = np.arange(x.shape[2])[:, None] * base ** -(np.arange(0, width, 2) / width)
    cosine, sine = np.cos(angles), np.sin(angles)
    first, second = (x[..., 0::2], x[..., 1::2]) if adjacent else (x[..., : width // 2], x[..., width // 2 :])
    both = first * cosine - second * sine, second * cosine + first * sine
    return np.stack(both, axis=-1).reshape(x.shape) if adjacent else np.concatenate(both, axis=-1)
