"""Tests for differences within the spread of perturbed runs that have a direction.

In low precision, rounding is larger than many faults, element by element. But rounding has no direction: its average over
elements, microbatches, ranks and steps vanishes, while a fault that affects all of them alike remains. Four directions are tested
for each activation and each gradient. With a and b from the two recordings, d = b - a, and sums over everything that is averaged:

    slope     sum(d a) / sum(a a)              b is a multiple of a
    size      sum(d sign(a)) / sum(|a|)        the same, with less weight on large elements
    mean      sum(d) / (n rms(a))              a constant is added to all elements (activations only)
    channels  rms over the last dim of the mean of d over the others, / rms(a)     (activations only)

A fifth direction tests one hypothesis, a tanh GELU instead of an erf GELU. Where y = x Phi(x) for an earlier activation x, each
recording has its own estimate sum((y - erf(x)) h) / sum(h h) with h = tanh(x) - erf(x), which is 0 for erf and 1 for tanh:

    tanh      the estimate of b minus that of a; it must exceed 1/2, which no rounding of a constant does

A sixth direction tests norms, for example a different epsilon. Where y is a layer norm or RMS norm of its module's input up to a
factor g for each channel, each recording's g is estimated from its own input, so that differences of the input cancel:

    gain      sum((g of b - g of a) (g of a)) / sum(g of a squared)

Each direction is also measured for each of k perturbed runs against their original run: x_1 ... x_k. Under the hypothesis that
the other recording differs only by rounding, x is one more draw with mean zero, and

    t = x / rms(x_1 ... x_k)

has at most the tail of Student's distribution with k degrees of freedom: exactly this tail if the original run does not round,
and a lighter one if the rounding of the original run is in numerator and denominator, or for a length with several components.

All tests of a comparison (directions x quantities x windows) share the family-wise error rate `share`, a part of the rate of
`crossframe.verdict.envelope`. Each of the D directions gets an equal part, so that directions with few quantities keep their
power next to thousands of slopes: a direction with N tests is significant if its t has a probability below share / (D N)
(weighted Bonferroni, valid under any dependence). With few perturbed runs this requires a large t, but t grows with the number of
averaged elements.

For sketches (`crossframe.recording.sketch`), only the slope is tested. With the K sums S(d) and S(a), sum(S(d) S(a)) has mean
sum(d a) over keys and variance at most (|d|^2 |a|^2 + sum(d a)^2) / K, so the slope has a standard error of |d| / (16 |a|),
compared to |d| / (sqrt(n) |a|) for n elements. Perturbed runs use the same keys. In bfloat16, where |d| is about 1 % of |a|, this
is 0.06 % per step.

In float32, no direction is tested. There an average over n elements resolves 2^-24 / sqrt(n), which is less than the bias between
two implementations of exp or of a square root, and no perturbed run shows this bias.

A kernel may round a constant once, so that a correct result is off by a factor of up to 1 + u in one direction. So an effect must
also exceed the unit roundoff u of the dtype.

Averages are taken over the first step, the first 2, 4, 8 ... and all steps. The reported direction is the one that needs the
fewest steps, and among these the first quantity in causal order, because later steps carry a fault to all quantities.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from crossframe.dtypes import unit_roundoff
from crossframe.recording.lines import BACKWARD, OUTPUT, REDUCE
from crossframe.verdict.measure.quantities import ACTIVATION, Quantity, finite

SLOPE, SIZE, MEAN, CHANNELS, TANH, GAIN = "slope", "size", "mean", "channels", "tanh", "gain"
DIRECTIONS = (SLOPE, SIZE, MEAN, CHANNELS, TANH, GAIN)
OF_OWN_INPUT = (TANH, GAIN)
"""Directions that are estimated from each side's own input, so that differences of the input cancel."""
_COARSE = 2.0**-12
"""The smallest unit roundoff at which directions are tested: bfloat16 and float16, not float32."""
_MOST_CHANNELS = 1 << 14
_MOST_ELEMENTS = 1 << 15
"""The number of elements of a possible GELU that are used."""
_NEARBY = 4
"""The number of earlier activations of the same shape that are tried as the input of a GELU."""
_LEAST_EFFECT = {TANH: 0.5}

Key = tuple[str, str]
"""(kind, name) of a quantity, whose values are averaged over steps, microbatches and ranks."""


@dataclass
class Sums:
    """Sums over the elements of one quantity."""

    numel: int = 0
    squares: float = 0.0
    products: float = 0.0
    sizes: float = 0.0
    signed: float = 0.0
    total: float = 0.0
    rows: int = 0
    way: float = 0.0
    along: float = 0.0
    channels: np.ndarray | None = None
    gains: np.ndarray | None = None

    @classmethod
    def of(cls, quantity: Quantity) -> "Sums":
        """The sums of a quantity's elements, or of its sketch, which only has a slope."""
        a = finite(quantity.a)
        d = finite(quantity.b) - a
        if quantity.sketched:
            return cls(a.size, float(np.vdot(a, a)), float(np.vdot(d, a)))
        own = cls(
            a.size, float(np.vdot(a, a)), float(np.vdot(d, a)), float(np.abs(a).sum()), float(np.vdot(d, np.sign(a)))
        )
        if quantity.kind == ACTIVATION:
            own.total = float(d.sum())
            if a.ndim > 1 and 1 < a.shape[-1] <= _MOST_CHANNELS:
                own.channels, own.rows = d.reshape(-1, a.shape[-1]).sum(axis=0), a.size // a.shape[-1]
        return own

    def __iadd__(self, other: "Sums") -> "Sums":
        same = self.channels is not None and other.channels is not None and self.channels.shape == other.channels.shape
        if other.gains is not None:
            self.gains = other.gains if self.gains is None else self.gains + other.gains
        if not self.numel:
            self.channels = other.channels
        else:
            self.channels = self.channels + other.channels if same else None  # type: ignore[operator]
        for name in ("numel", "squares", "products", "sizes", "signed", "total", "rows", "way", "along"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def directions(self, kind: str) -> Iterator[tuple[str, float]]:
        """Yield (direction, value) for each direction that is defined for this kind of quantity."""
        if not self.squares:
            return
        yield SLOPE, self.products / self.squares
        if not self.sizes:
            return
        yield SIZE, self.signed / self.sizes
        if self.gains is not None:
            first, second = self.gains[0] / self.gains[1], self.gains[2] / self.gains[3]
            yield GAIN, float(np.vdot(second - first, first) / np.vdot(first, first))
        if self.way:
            yield TANH, self.along / self.way
        if kind == ACTIVATION:
            typical = math.sqrt(self.squares / self.numel)
            yield MEAN, self.total / self.numel / typical
            if self.channels is not None:
                yield CHANNELS, float(np.sqrt(np.mean(np.square(self.channels / self.rows)))) / typical


@dataclass
class Tally:
    """The sums of a pair of recordings, by quantity and step."""

    of: dict[Key, dict[int, Sums]] = field(default_factory=dict)
    first: dict[Key, Quantity] = field(default_factory=dict)
    _recent: dict[tuple[int, int], list[Sequence[Quantity]]] = field(default_factory=dict)
    _gelu_of: dict[str, str] = field(default_factory=dict)
    _centred: dict[str, bool | None] = field(default_factory=dict)

    def add(self, group: Sequence[Quantity]) -> None:
        """Add a group: the same quantity on several ranks."""
        kind = group[0].kind
        if kind not in (ACTIVATION, BACKWARD, REDUCE) or group[0].bound in (None, math.inf):
            return
        if kind == REDUCE:
            group = group[:1]  # replicas of one gradient
        key = kind, group[0].name
        self.first.setdefault(key, group[0])
        sums = self.of.setdefault(key, {}).setdefault(group[0].step, Sums())
        for quantity in group:
            if quantity.a.shape == quantity.b.shape and quantity.a.size:
                sums += Sums.of(quantity)
        if kind == ACTIVATION and not group[0].sketched:
            self._note_functions(group, sums)

    def _note_functions(self, group: Sequence[Quantity], sums: Sums) -> None:
        """Add the sums of an activation that is a GELU of an earlier one, or a norm of its module's input."""
        at, name = (group[0].step, group[0].microbatch), group[0].name
        recent = self._recent.setdefault(at, [])
        if len(self._recent) > 1:
            self._recent = {at: recent}
        alike = [each for each in recent if each[0].a.shape == group[0].a.shape][-_NEARBY:]
        if name not in self._gelu_of:
            found = (
                each[0].name for each in alike if _is_gelu(each[0].a, group[0].a) and _is_gelu(each[0].b, group[0].b)
            )
            self._gelu_of[name] = next(found, "")
        if self._gelu_of[name]:
            given = next((each for each in alike if each[0].name == self._gelu_of[name]), ())
            for x, y in zip(given, group, strict=False):
                first, second = (_estimate(*both) for both in ((x.a, y.a), (x.b, y.b)))
                sums.way += first[1]
                # From the other recording's own inputs, whose sum of squares is nearly the same.
                sums.along += second[0] * (first[1] / second[1] if second[1] else 0.0) - first[0]
        given = next(
            (each for each in recent if group[0].use == OUTPUT and each[0].name == f"input of {group[0].module}"), ()
        )
        for x, y in zip(given, group, strict=False):
            if x.a.shape == y.a.shape and y.a.ndim > 1 and y.a.shape[-1] > 1:
                if name not in self._centred:
                    self._centred[name] = _norm_of(x.a, y.a)
                if (centred := self._centred[name]) is not None:
                    gains = np.array([*_gains(x.a, y.a, centred), *_gains(x.b, y.b, centred)])
                    sums.gains = gains if sums.gains is None else sums.gains + gains
        recent.append(group)

    def within(self, key: Key, stop: int) -> Sums:
        """The sums of one quantity over all steps before `stop`."""
        found = Sums()
        for step, sums in self.of.get(key, {}).items():
            if step < stop:
                found += sums
        return found

    @property
    def windows(self) -> list[int]:
        steps = sorted({step for by_step in self.of.values() for step in by_step})
        counts = [1 << i for i in range(len(steps).bit_length())]
        return sorted({steps[min(count, len(steps)) - 1] + 1 for count in [*counts, len(steps)] if steps})


@dataclass(frozen=True)
class Found:
    """A significant direction.

    Attributes:
        quantity: the first of the averaged quantities.
        direction: one of DIRECTIONS.
        value: the relative effect.
        error: its standard error, from the perturbed runs.
        limit: the significance threshold for abs(value).
        stop: the average is over the steps before this one.
        num_tests, num_runs: the number of tests of the comparison, and of perturbed runs.
    """

    quantity: Quantity
    direction: str
    value: float
    error: float
    limit: float
    stop: int
    num_tests: int
    num_runs: int

    def describe(self, names: Sequence[str]) -> str:
        """The effect with its value, standard error and threshold, as a sentence."""
        steps = "at step 0" if self.stop == 1 else f"over the steps before {self.stop}"
        times = f"{1 + self.value:.4f} times that of {names[0]}"
        text = {
            SLOPE: f"in {names[1]} is {times}",
            SIZE: f"in {names[1]} has a magnitude {times}",
            MEAN: f"in {names[1]} is shifted by {self.value:+.2g} of its magnitude in all elements",
            GAIN: f"in {names[1]} is {1 + self.value:.4f} times the output of {names[0]} for the same input",
            TANH: f"in {names[1]} is shifted by {self.value:.3f} times the difference between a tanh GELU and an erf GELU",
            CHANNELS: f"in {names[1]} is shifted by {self.value:.2g} of its magnitude, by channel",
        }[self.direction]
        q = self.quantity
        what = (
            f"the {q.name}"
            if q.kind == ACTIVATION
            else f"the {'local' if q.kind == BACKWARD else 'reduced'} gradient of {q.name}"
        )
        return (
            f"{steps} {what} {text}: the effect is {abs(self.value) / max(self.error, 1e-300):.3g} standard errors of "
            f"{self.error:.1e} from zero, beyond the bound of {self.limit:.1e} ({self.num_runs} perturbed runs, "
            f"{self.num_tests} tests of directions)"
        )


@dataclass(frozen=True)
class Directions:
    """The results of all tests of a comparison.

    Attributes:
        found: the first significant direction, or None.
        power: by kind of quantity and direction, the smallest relative effect over all steps that would be significant: (for the
            most sensitive quantity, for the median quantity).
        near: the largest effect as a share of its threshold, among effects that exceed the resolution.
        num_tests: the number of tests that share the error rate.
    """

    found: Found | None
    power: dict[str, dict[str, tuple[float, float]]]
    near: float
    num_tests: int

    def to_json(self) -> dict:
        return {
            kind: {name: {"least": least, "half": half} for name, (least, half) in by_name.items()}
            for kind, by_name in self.power.items()
        }


def directions_of(
    pair: Tally,
    perturbed: Sequence[Sequence[Tally]],
    dtype: str,
    share: float,
    among: Sequence[str] = DIRECTIONS,
    *,
    cast: float = 0.0,
) -> Directions | None:
    """Test all directions of a comparison. Returns None for dtypes in which directions are not tested.

    Args:
        pair: the tally of both recordings.
        perturbed: for each recording with perturbed runs, their tallies against the original run. If both recordings have them,
            the wider spread is used, with the smaller number of degrees of freedom.
        dtype: the compute dtype of the runs.
        share: the family-wise error rate.
        among: the directions to test.
        cast: a bound on the effect on a norm's gain of casting its weight on one side only.
    """
    resolution = unit_roundoff(dtype)
    if resolution < _COARSE or not perturbed:
        return None
    num_runs = min(len(runs) for runs in perturbed)
    measured = [
        (key, stop, name, value, spread)
        for stop in pair.windows
        for key in pair.of
        for name, value in pair.within(key, stop).directions(key[0])
        if name in among and (spread := _spread(perturbed, key, stop, name)) is not None
    ]
    if not measured:
        return Directions(None, {}, 0.0, 0)
    counts = Counter(name for _, _, name, _, _ in measured)
    least = {name: student_limit(share / (len(counts) * count), num_runs) for name, count in counts.items()}
    found, near = None, 0.0
    effects: dict[tuple[str, str], list[float]] = {}
    for key, stop, name, value, spread in measured:
        smallest = _LEAST_EFFECT.get(name, resolution)
        limit = max(least[name] * spread + (cast if name == GAIN else 0.0), smallest)
        if stop == pair.windows[-1]:
            effects.setdefault((key[0], name), []).append(limit)
        if abs(value) > smallest:
            near = max(near, abs(value) / limit)
        if found is None and abs(value) > limit:
            found = Found(pair.first[key], name, value, spread, limit, stop, len(measured), num_runs)
    power: dict[str, dict[str, tuple[float, float]]] = {}
    for (kind, name), limits in effects.items():
        power.setdefault(kind, {})[name] = (min(limits), float(np.median(limits)))
    return Directions(found, power, near, len(measured))


def _erf(x: np.ndarray) -> np.ndarray:
    """erf with an error of at most 1.5e-7 (Abramowitz and Stegun, 7.1.26), far below the resolution of low precision."""
    t = 1 / (1 + 0.3275911 * np.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.sign(x) * (1 - series * np.exp(-x * x))


def _gelu_by_erf(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def _estimate(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """sum((y - erf(x)) h) and sum(h h) with h = tanh(x) - erf(x)."""
    x, y = (finite(side).reshape(-1)[:_MOST_ELEMENTS] for side in (x, y))
    by_erf = _gelu_by_erf(x)
    way = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) - by_erf
    return float(np.vdot(y - by_erf, way)), float(np.vdot(way, way))


def _is_gelu(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether y is an erf or tanh GELU of x; these differ by at most 5e-4, less than rounding in low precision."""
    x, y = (finite(side).reshape(-1)[:512] for side in (x, y))
    apart, size = float(np.linalg.norm(y - _gelu_by_erf(x))), float(np.linalg.norm(y))
    return bool(size) and np.ptp(x) > 0 and apart <= 0.02 * size


def _gains(x: np.ndarray, y: np.ndarray, centred: bool) -> tuple[np.ndarray, np.ndarray]:
    """sum(y n) and sum(n n) by channel, where n is the normalised x; for a layer norm, which adds a bias, y minus its mean."""
    x, y = (finite(side).reshape(-1, side.shape[-1]) for side in (x, y))
    if centred:
        x, y = x - x.mean(axis=1, keepdims=True), y - y.mean(axis=0, keepdims=True)
    normed = x / np.sqrt(np.maximum(np.square(x).mean(axis=1, keepdims=True), np.finfo(np.float64).tiny))
    if centred:
        normed -= normed.mean(axis=0, keepdims=True)
    return (y * normed).sum(axis=0), np.square(normed).sum(axis=0)


def _norm_of(x: np.ndarray, y: np.ndarray) -> bool | None:
    """True if y is a layer norm of x, False if it is an RMS norm, None if it is neither."""
    for centred in (False, True):
        products, squares = _gains(x, y, centred)
        if not squares.all() or not products.all():
            continue
        flat = finite(y).reshape(-1, y.shape[-1])
        size = np.square(flat - flat.mean(axis=0) if centred else flat).sum()
        # The residual of y after fitting a factor for each channel.
        if size - np.square(products / np.sqrt(squares)).sum() <= 0.01 * size:
            return centred
    return None


def _spread(perturbed: Sequence[Sequence[Tally]], key: Key, stop: int, name: str) -> float | None:
    """The root mean square of a direction over perturbed runs, the larger one of both recordings; None if not measured."""
    found = []
    for runs in perturbed:
        values = [dict(run.within(key, stop).directions(key[0])).get(name) for run in runs]
        if all(value is not None for value in values):
            found.append(math.sqrt(sum(value**2 for value in values if value is not None) / len(values)))
    return max(found, default=None)


def student_limit(chance: float, degrees: int) -> float:
    """The t that |T| of Student's distribution exceeds with probability `chance`.

    >>> [round(student_limit(0.05, k), 3) for k in (1, 2, 4, 30)]
    [12.706, 4.303, 2.776, 2.042]
    >>> round(student_limit(1e-7, 4), 1)
    88.0
    """
    low, high = 0.0, 1.0
    while _student_tail(high, degrees) > chance and high < 1e12:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_tail(middle, degrees) > chance else (low, middle)
    return high


def _student_tail(t: float, degrees: int) -> float:
    """The probability that |T| > t (M. Abramowitz, I. Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(degrees))
    cosine = math.cos(angle)
    term = total = math.cos(angle) if degrees % 2 else 1.0
    for i in range(3 if degrees % 2 else 2, degrees, 2):
        term *= cosine**2 * (i - 1) / i
        total += term
    if degrees == 1:
        total = 0.0
    inside = math.sin(angle) * total
    return 1 - (2 / math.pi * (angle + inside) if degrees % 2 else inside)
