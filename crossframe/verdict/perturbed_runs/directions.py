"""Tests for differences within the spread of perturbed runs that have a direction.

In low precision, rounding is larger than many faults, element by element. But rounding has no direction: its average over
elements, microbatches, ranks and steps vanishes, while a fault that affects all of them alike remains. Four directions are tested
for each activation and each gradient. With a and b from the two recordings, d = b - a, and sums over everything that is averaged:

    slope     sum(d a) / sum(a a)              b is a multiple of a
    size      sum(d sign(a)) / sum(|a|)        the same, with less weight on large elements
    mean      sum(d) / (n rms(a))              a constant is added to all elements (activations only)
    channels  rms over the last dim of the mean of d over the others, / rms(a)     (activations only)

Two more are estimated from each side's own input, so that differences of the input cancel
(`crossframe.verdict.perturbed_runs.norms_and_gelus`):

    tanh      how much of a tanh GELU an erf GELU is
    gain      what a norm multiplies its normalised input by, for example with another epsilon

A seventh direction tests what scales all gradients alike, for example another loss. Its error is smaller than that of each slope:

    common    the median of the slopes of all local, or of all reduced, gradients

Each direction is also measured for each of k perturbed runs against their original run: x_1 ... x_k. Under the hypothesis that
the other recording differs only by rounding, x is one more draw with mean zero, and

    t = x / rms(x_1 ... x_k)

has at most the tail of Student's distribution with k degrees of freedom: exactly this tail if the original run does not round,
and a lighter one if the rounding of the original run is in numerator and denominator, or for a length with several components.

The error of a batch norm's gain at a step is its rounding of this batch, which is independent of that of another batch. For such
gains the mean square is taken over all perturbed runs and n steps, divided by the number of steps of the average, and t has k n
degrees of freedom. Steps count only as far as their statistics differ in low precision, since equal ones round alike. Other
directions carry a step's differences on to later steps, or their inputs repeat, such as embeddings.

If the runs differ in precision (`crossframe.verdict.measure.unequal_dtypes`), x also has a part from casts of parameters, which
the perturbed runs of the coarser run do not show. Those of the finer run do: each moves every parameter by one of its units. To
first order, a direction's effect is linear in these moves, so with c the standard deviation of a cast in units of the finer run
and y_1 ... y_k its perturbed runs,

    t = x / sqrt(mean(x_i^2) + c^2 mean(y_i^2))

Its tail is at most that of Student's distribution with the smaller number of degrees of freedom, for any ratio of the two
variances (M. Mickey, M. Brown, Bounds on the distribution functions of the Behrens-Fisher statistic, Ann. Math. Stat. 37, 1966).
Both terms exceed what they bound: a perturbed run moves a result by 0.82 units where rounding has 0.29. If the finer run has no
perturbed runs, only tanh and gain are tested: in their own inputs the effect of casts cancels, but for that of the norm's weight,
which is allowed for.

All tests of a comparison (directions x quantities x windows) share the family-wise error rate `share`, a part of the rate of
`crossframe.verdict.perturbed_runs.spread`. Each of the D directions gets an equal part, so that directions with few quantities
keep their power next to thousands of slopes: a direction with N tests is significant if its t has a probability below share / (D
N) (weighted Bonferroni, valid under any dependence). With few perturbed runs this requires a large t, but t grows with the number
of averaged elements.

For sketches (`crossframe.recording.sketch`), only the slope is tested. With the K sums S(d) and S(a), sum(S(d) S(a)) has mean
sum(d a) over keys and variance at most (|d|^2 |a|^2 + sum(d a)^2) / K, so the slope has a standard error of |d| / (16 |a|),
compared to |d| / (sqrt(n) |a|) for n elements. Perturbed runs use the same keys. In bfloat16, where |d| is about 1 % of |a|, this
is 0.06 % per step.

In float32, no direction is tested. There an average over n elements resolves 2^-24 / sqrt(n), which is less than the bias between
two implementations of exp or of a square root, and no perturbed run shows this bias.

A kernel may round a constant once, so that a correct result is off by a factor of up to 1 + u in one direction. So an effect must
also exceed the unit roundoff u of the dtype. A batch norm has constants of its own for each channel: the mean of n errors up to u
has a standard deviation of u / sqrt(3 n), and its gain must exceed five of them, 6e-7 by chance.

Averages are taken over the first step, the first 2, 4, 8 ... and all steps. The reported direction is the one that needs the
fewest steps, and among these the first quantity in causal order, because later steps carry a fault to all quantities.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from crossframe.dtypes import unit_roundoff
from crossframe.recording.event_format import BACKWARD, REDUCE
from crossframe.verdict.measure.quantities import ACTIVATION, Quantity, finite
from crossframe.verdict.perturbed_runs.norms_and_gelus import Estimates, Recogniser
from crossframe.verdict.perturbed_runs.students_distribution import student_limit

SLOPE, SIZE, MEAN, CHANNELS, TANH, GAIN, COMMON = "slope", "size", "mean", "channels", "tanh", "gain", "common"
DIRECTIONS = (SLOPE, SIZE, MEAN, CHANNELS, TANH, GAIN, COMMON)
OF_OWN_INPUT = (TANH, GAIN)
"""Directions that are estimated from each side's own input, so that differences of the input cancel."""
_COARSE = 2.0**-12
"""The smallest unit roundoff at which directions are tested: bfloat16 and float16, not float32."""
_MOST_CHANNELS = 1 << 14
_LEAST_EFFECT = {TANH: 0.5}
_LEAST_GRADIENTS = 4
"""The number of gradients from which on their common factor is tested."""

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
    channels: np.ndarray | None = None
    own_input: Estimates = field(default_factory=Estimates)

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
        if not self.numel:
            self.channels = other.channels
        else:
            self.channels = self.channels + other.channels if same else None  # type: ignore[operator]
        self.own_input += other.own_input
        for name in ("numel", "squares", "products", "sizes", "signed", "total", "rows"):
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
        if (gain := self.own_input.gain) is not None:
            yield GAIN, gain
        if (tanh := self.own_input.tanh) is not None:
            yield TANH, tanh
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
    _recogniser: Recogniser = field(default_factory=Recogniser)

    def note_weights(self, group: Sequence[Quantity]) -> None:
        """Note a parameter of the first recording, as a possible weight of a norm."""
        self._recogniser.note_weights(group)

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
            sums.own_input += self._recogniser.estimates(group)

    @property
    def keys(self) -> list[Key]:
        """The keys of `of`, and (kind, "") for all gradients of a kind together."""
        return [*self.of, (BACKWARD, ""), (REDUCE, "")]

    def directions(self, key: Key, stop: int) -> dict[str, float]:
        """The value of each direction that is defined for a key of `keys`, over all steps before `stop`."""
        kind, name = key
        if name:
            return dict(self.within(key, stop).directions(kind))
        of_each = (dict(self.within(each, stop).directions(kind)) for each in self.of if each[0] == kind)
        slopes = [values[SLOPE] for values in of_each if SLOPE in values]
        return {COMMON: float(np.median(slopes))} if len(slopes) >= _LEAST_GRADIENTS else {}

    def first_of(self, key: Key) -> Quantity:
        """The first of the quantities that a key of `keys` averages."""
        kind, name = key
        return self.first[key] if name else next(q for each, q in self.first.items() if each[0] == kind)

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
            COMMON: f"in {names[1]} is {times}",
        }[self.direction]
        q, which = self.quantity, "local" if self.quantity.kind == BACKWARD else "reduced"
        if self.direction == COMMON:
            what = f"the median {which} gradient"
        else:
            what = f"the {q.name}" if q.kind == ACTIVATION else f"the {which} gradient of {q.name}"
        return (
            f"{steps} {what} {text}: the effect is {abs(self.value) / max(self.error, 1e-300):.3g} standard errors of "
            f"{self.error:.1e} from zero, beyond the bound of {self.limit:.1e} ({self.num_runs} perturbed runs, "
            f"{self.num_tests} tests of directions)"
        )


@dataclass(frozen=True)
class Casts:
    """What is known of the casts of parameters, in a comparison of runs with different precision.

    Attributes:
        perturbed: the tallies of the perturbed runs of the finer run; empty if it has none.
        units: the standard deviation of a cast of a parameter to the coarser dtype, in units of the finer run's parameters.
    """

    perturbed: Sequence[Tally]
    units: float


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
    casts: Casts | None = None,
) -> Directions | None:
    """Test all directions of a comparison. Returns None for dtypes in which directions are not tested.

    Args:
        pair: the tally of both recordings.
        perturbed: for each recording with perturbed runs, their tallies against the original run. If both recordings have them,
            the wider spread is used, with the smaller number of degrees of freedom.
        dtype: the compute dtype of the runs.
        share: the family-wise error rate.
        casts: the casts of parameters, if the runs differ in precision.
    """
    resolution = unit_roundoff(dtype)
    if resolution < _COARSE:
        return None
    finer = casts.perturbed if casts else ()
    among = OF_OWN_INPUT if casts and not finer else DIRECTIONS
    num_runs = min(len(runs) for runs in (*perturbed, *([finer] if finer else [])))
    measured = [
        (key, stop, name, value, *errors[name])
        for stop in pair.windows
        for key in pair.keys
        if (values := pair.directions(key, stop)) and (errors := _errors(perturbed, casts, key, stop))
        for name, value in values.items()
        if name in among and name in errors
    ]
    if not measured:
        return Directions(None, {}, 0.0, 0)
    counts = Counter(name for _, _, name, *_ in measured)
    chances = {name: share / (len(counts) * count) for name, count in counts.items()}
    found, near = None, 0.0
    effects: dict[tuple[str, str], list[float]] = {}
    for key, stop, name, value, error, degrees in measured:
        smallest, cast = _LEAST_EFFECT.get(name, resolution), 0.0
        if name == GAIN:
            own = pair.within(key, stop).own_input
            smallest *= min(1.0, 5 / math.sqrt(3 * max(1, len(own.statistics))))
            cast = own.cast if casts else 0.0
        limit = max(student_limit(chances[name], degrees) * error + cast, smallest)
        if stop == pair.windows[-1]:
            effects.setdefault((key[0], name), []).append(limit)
        if abs(value) > smallest:
            near = max(near, abs(value) / limit)
        if found is None and abs(value) > limit:
            found = Found(pair.first_of(key), name, value, error, limit, stop, len(measured), num_runs)
    power: dict[str, dict[str, tuple[float, float]]] = {}
    for (kind, name), limits in effects.items():
        power.setdefault(kind, {})[name] = (min(limits), float(np.median(limits)))
    return Directions(found, power, near, len(measured))


def _errors(
    perturbed: Sequence[Sequence[Tally]], casts: Casts | None, key: Key, stop: int
) -> dict[str, tuple[float, int]]:
    """The standard error and its degrees of freedom of each measured direction; of both recordings' errors the larger one."""
    found: dict[str, tuple[float, int]] = {}
    degrees = min(len(runs) for runs in perturbed)
    for runs in perturbed:
        for name, error in _root_mean_squares([run.directions(key, stop) for run in runs]).items():
            found[name] = max((error, degrees), found.get(name, (0.0, degrees)))
    if GAIN in found and all(runs[0].within(key, stop).own_input.statistics for runs in perturbed):
        found[GAIN] = max(_gain_error(runs, key, stop) for runs in perturbed)
    if casts is None or not casts.perturbed:
        return found
    degrees = min(degrees, len(casts.perturbed))
    by_casts = _root_mean_squares([run.directions(key, stop) for run in casts.perturbed])
    return {
        name: error if name in OF_OWN_INPUT else (math.hypot(error[0], casts.units * by_casts[name]), degrees)
        for name, error in found.items()
        if name in OF_OWN_INPUT or name in by_casts
    }


def _gain_error(runs: Sequence[Tally], key: Key, stop: int) -> tuple[float, int]:
    """The standard error of a batch norm's gain, whose errors at different steps are independent, and its degrees of freedom."""
    sums = runs[0].of[key]
    of_step = max(len(each.own_input.statistics) for each in sums.values())
    in_all, in_window = (
        max(1.0, len(runs[0].within(key, end).own_input.statistics) / of_step) for end in (max(sums) + 1, stop)
    )
    by_step = [_root_mean_squares([dict(run.of[key][step].directions(key[0])) for run in runs]) for step in sums]
    squares = [values[GAIN] ** 2 for values in by_step if GAIN in values]
    return math.sqrt(sum(squares) / len(squares) / in_window), int(len(runs) * in_all)


def _root_mean_squares(values: Sequence[dict[str, float]]) -> dict[str, float]:
    """The root mean square over runs of each direction that all of them have."""
    return {
        name: math.sqrt(sum(of[name] ** 2 for of in values) / len(values))
        for name in values[0]
        if all(name in of for of in values)
    }
