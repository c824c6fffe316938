"""Bounds on rounding, measured on perturbed runs for each quantity.

A perturbed run repeats a run with different rounding (`crossframe.recording.perturbed_runs`). For each quantity, the k perturbed
runs have distances t_1 ... t_k from the original run. Their root mean square s is the spread, and the bound on the other
recording's distance is

    d <= factor * s,     factor = margin * max over quantities and i of  t_i / rms(t_j, j != i)

The maximum, over all quantities of one kind, is the distance of the most eccentric perturbed run, measured by the others. If the
other recording were one more perturbed run, it would exceed all k of them with probability at most 1 / (k + 1), by
exchangeability. The margin lowers this probability. If a quantity moves in one direction only, t_i is the magnitude of a normal
variable, and the ratio has Student's distribution with k degrees of freedom, whose tail decreases as x^-k; with more directions
it decreases faster. So the probability of exceeding `margin` times the maximum is at most margin^-k / (k + 1), and

    margin = ((k + 1) * FALSE_POSITIVE_RATE / kinds)^(-1 / k)

gives FALSE_POSITIVE_RATE per comparison with this number of kinds of quantities. Directions (`crossframe.verdict.direction`)
count as one more kind. More perturbed runs allow a smaller margin. No constant is fitted to faults.

[Note: unsteady elements] An optimizer that divides a gradient by its magnitude turns a gradient near zero into a full step with
an arbitrary sign, whatever the spread of the perturbed runs. So an update is judged by its steady elements: those whose gradient
exceeded its rounding, or was exactly zero, in both recordings at every step so far, without the few that differ most
(`trimmed_distance`). Once a step was not recorded, the steady elements are unknown, and updates are judged by the half of their
elements that differ least (`inner_distance`).

For sketches (`crossframe.recording.sketch`), distances are those of their sums. A few wrong elements affect few sums, so the same
measures exclude them. Steady elements are unknown.

[Note: zeros] Rounding makes an element exactly zero on one side only if the element is as small as its own error (underflow,
terms that cancel, a threshold such as that of ReLU), or where it flips a decision such as the expert of a token. So zeros in
place of large elements are evidence, whatever put them there. The perturbed runs show what rounding does: with r the share of
zeros in a squared distance, E(r) is the mean of theirs. The number of elements near a threshold, and of decisions that are nearly
equal, is proportional to the size of the rounding, so for a correct recording at a distance d, E(r) is at most d / s times
theirs. Then sqrt(r / E(r)) has at most the tail of Student's distribution with k degrees of freedom, as above, and exceeds its
1 % limit with a probability of 1 / 100. A quantity is decisive without further runs if it does and the zeros exceed the limit by
themselves: such a stage adds at most a hundredth of the rate, as in `decisive`. Where the perturbed runs have many zeros, as
after ReLU in bfloat16, no r is that large, and more runs are needed.

A distance is never taken to be smaller than one unit in the last place of a typical element: even where all perturbed runs agree,
another implementation can round to the neighbouring value.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np

from crossframe.dtypes import unit_roundoff
from crossframe.errors import RecordingError
from crossframe.recording import Recording
from crossframe.recording.event_format import BACKWARD, FORWARD, NORM, PARAMETERS, REDUCE, STATE, UNSHARDED, UPDATE
from crossframe.verdict.direction import Casts, Directions, Tally, directions_of
from crossframe.verdict.measure.judge import Judgement, judge
from crossframe.verdict.measure.metrics import distance, inner_distance, ratio, trimmed_distance
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import ACTIVATION, LATE_UPDATE, Quantity, finite
from crossframe.verdict.measure.walk import walk
from crossframe.verdict.precision import Implied
from crossframe.verdict.student import student_limit

FALSE_POSITIVE_RATE = 1e-3
"""The probability that a correct pair is called a bug, if perturbed runs round as the other recording does."""
MIN_RUNS = 2

Measure = Callable[[np.ndarray, np.ndarray], float]
SUFFICIENT_RUNS = 8
"""The number of perturbed runs from which on any quantity beyond its limit is a bug."""
_EARLIER = 0.01
"""The rate of a stage after which perturbed runs may be added, as a share of that of the last stage."""
MEASURES: dict[str, Measure] = {
    ACTIVATION: distance,
    FORWARD: distance,
    BACKWARD: distance,
    REDUCE: distance,
    NORM: distance,
    STATE: distance,
    UPDATE: trimmed_distance,
    LATE_UPDATE: inner_distance,
    UNSHARDED: inner_distance,  # parameters that a loop edits between steps: earlier updates and the edit
}
"""The distance measure of each kind of quantity. Each kind has its own factor."""
SHARE = FALSE_POSITIVE_RATE / (len(MEASURES) + 1)
"""The false-positive rate of each kind of quantity, and of all directions together."""

Key = tuple[int, str, str, int]
"""(step, kind, name, microbatch): identifies a quantity in all recordings of a run."""


def margin(num_runs: int) -> float:
    """The factor by which another recording's distance may exceed that of the most eccentric perturbed run.

    >>> [round(margin(k), 1) for k in (2, 3, 4, 8)]
    [57.7, 13.6, 6.7, 2.4]
    """
    return ((num_runs + 1) * SHARE) ** (-1 / num_runs)


def decisive(num_runs: int) -> float:
    """The multiple of its limit that a quantity must reach to be called a bug; below it, more perturbed runs are needed.

    Runs are added in stages. By the tail above, exceeding `factor` times the limit has a probability of factor^-k times the rate.
    With factor = 100^(1/k) before the last stage, such a stage adds a hundredth of the rate, so all stages together stay within
    1.01 times the rate.

    >>> [round(decisive(k), 1) for k in (2, 4, 8)]
    [10.0, 3.2, 1.0]
    """
    return 1.0 if num_runs >= SUFFICIENT_RUNS else _EARLIER ** (-1 / num_runs)


def eccentricity(distances: np.ndarray) -> float:
    """The largest distance in units of the root mean square of the others.

    >>> eccentricity(np.array([3.0, 1.0, 1.0]))
    3.0
    """
    squares = np.square(distances)
    largest = squares.max()
    others = (squares.sum() - largest) / (squares.size - 1)
    return math.sqrt(largest / others) if others else 1.0


@dataclass(frozen=True)
class Spread:
    """The spread of the perturbed runs of one run.

    Attributes:
        run: name of the recording.
        num_runs: number of perturbed runs.
        factors: by kind, the multiple of the spread that is allowed.
        of: the spread of each quantity.
        numel: the number of elements of each quantity.
        zeros: the mean share of zeros in the squared distance of each quantity, if any. See [Note: zeros].
        tallies: the directions in which each perturbed run differs (`crossframe.verdict.direction`).
    """

    run: str
    num_runs: int
    factors: dict[str, float]
    of: dict[Key, float]
    numel: dict[Key, int]
    zeros: dict[Key, float] = field(default_factory=dict)
    tallies: tuple[Tally, ...] = ()

    def limit(self, quantity: Quantity, more: float = 0.0) -> float | None:
        """The largest allowed distance of another recording; None if the perturbed runs did not record the quantity.

        At another world size, an activation can have another number of samples and another microbatch; its limit scales with the
        square root of the number of elements.

        Args:
            more: a multiple of the spread that is allowed in addition to the factor.
        """
        if (place := self._place(quantity)) is None:
            return None
        return (self.factors[quantity.kind] + more) * self._spread(place, quantity)

    def zeros_by_rounding(self, quantity: Quantity, apart: float) -> float:
        """The share of zeros that rounding has on average in the square of this distance. See [Note: zeros]."""
        place = self._place(quantity)
        return 0.0 if place not in self.zeros else self.zeros[place] * apart / self._spread(place, quantity)

    def _spread(self, place: Key, quantity: Quantity) -> float:
        return self.of[place] * math.sqrt(quantity.numel / max(self.numel[place], 1))

    def _place(self, quantity: Quantity) -> Key | None:
        step, kind, name, _ = place = key_of(quantity)
        return next((each for each in (place, (step, kind, name, 0)) if each in self.of), None)


def spread_of(recording: Recording, perturbed: Sequence[Recording], *, sketched: bool = False) -> Spread:
    """Measure the spread of a run's perturbed runs.

    Args:
        sketched: use sketches of large tensors.

    Raises:
        RecordingError: fewer than `MIN_RUNS` perturbed runs.
    """
    if len(perturbed) < MIN_RUNS:
        raise RecordingError(
            f"{recording.directory}: expected {MIN_RUNS} perturbed runs or more, got {len(perturbed)}: --perturbed-runs 4"
        )
    name, pairs = (
        recording.directory.name,
        [Pair(recording, perturbed_run, sketched=sketched) for perturbed_run in perturbed],
    )
    # The spread of gradients comes first because it determines which elements of updates are steady.
    before = _measured(name, pairs, (REDUCE,), None)
    rest = _measured(name, pairs, tuple(phase for phase in _COMPUTED if phase != REDUCE), before)
    both = zip(before.tallies, rest.tallies, strict=True)
    tallies = tuple(Tally(first.of | second.of) for first, second in both)
    return Spread(
        name,
        len(perturbed),
        before.factors | rest.factors,
        before.of | rest.of,
        before.numel | rest.numel,
        before.zeros | rest.zeros,
        tallies,
    )


_COMPUTED = (UNSHARDED, FORWARD, BACKWARD, REDUCE, NORM, STATE, UPDATE)
_KNOWN: "WeakKeyDictionary[Recording, dict[bool, Spread]]" = WeakKeyDictionary()


def known_spread(recording: Recording, *, sketched: bool = False) -> Spread | None:
    """The spread of a recording's own perturbed runs, measured once; None if it has none."""
    known = _KNOWN.setdefault(recording, {})
    if sketched not in known:
        perturbed = recording.perturbed_runs()
        if not perturbed:
            return None
        known[sketched] = spread_of(recording, perturbed, sketched=sketched)
    return known[sketched]


def _measured(run: str, pairs: Sequence[Pair], phases: tuple[str, ...], before: Spread | None) -> Spread:
    """The spread of the quantities of these phases.

    Args:
        before: the spread of the gradients, which determines the steady elements; None if not known yet.
    """
    found: dict[Key, list[float]] = {}
    numel: dict[Key, int] = {}
    zeros: dict[Key, float] = {}
    tallies = []
    for pair in pairs:
        tally = Tally()
        tallies.append(tally)
        steady = Steady(before.limit if before else None)
        for group in walk(pair, (*phases, REDUCE)):
            steady.note(group)
            if group[0].phase in phases:
                tally.add(group)
            if group[0].phase in phases and group[0].bound is not None:
                apart = max(_apart(steady.of(quantity)) for quantity in group)
                least = max(_resolution(quantity, pair.a.manifest.dtype) for quantity in group)
                place = key_of(group[0])
                numel[place] = group[0].numel
                found.setdefault(place, []).append(math.hypot(apart, least))
                if share := max(_share_of_zeros(steady.of(quantity)) for quantity in group):
                    zeros[place] = zeros.get(place, 0.0) + share / len(pairs)
    whole = {place: np.array(apart) for place, apart in found.items() if len(apart) == len(pairs)}
    factors = {}
    for kind in MEASURES:
        strayed = [eccentricity(apart) for place, apart in whole.items() if place[1] == kind]
        if strayed:
            factors[kind] = margin(len(pairs)) * max(strayed)
    of = {place: float(np.sqrt(np.mean(np.square(apart)))) for place, apart in whole.items()}
    return Spread(run, len(pairs), factors, of, numel, zeros, tuple(tallies))


class Steady:
    """Tracks which elements of parameters are steady during a walk. See [Note: unsteady elements]."""

    def __init__(self, limit: Callable[[Quantity], float | None] | None) -> None:
        """`limit` bounds reduced gradients; None: all elements are steady."""
        self._limit = limit
        self._unsteady: dict[str, np.ndarray] = {}

    def note(self, group: list[Quantity]) -> None:
        """Update the steady elements from a group of reduced gradients; ignores other groups."""
        if self._limit is None or group[0].phase != REDUCE or group[0].sketched:
            return
        limit, name = self._limit(group[0]), group[0].parameter
        if limit is None:
            return
        element = limit / math.sqrt(group[0].a.size)
        for quantity in group:
            a, b = finite(quantity.a), finite(quantity.b)
            # Exact zeros, such as rows of an embedding that were not looked up, are not rounding and stay steady.
            small = ((np.abs(a) <= element) | (np.abs(b) <= element)) & ((a != 0) | (b != 0))
            self._unsteady[name] = small | self._unsteady.get(name, False)

    def num_unsteady(self, parameter: str) -> int:
        return int(np.sum(self._unsteady.get(parameter, 0)))

    def of(self, quantity: Quantity) -> Quantity:
        """Return an update with its unsteady elements replaced by those of the first recording.

        Returns other quantities unchanged, and also late updates: their inner half must not consist of replaced elements.
        """
        unsteady = self._unsteady.get(quantity.parameter)
        if quantity.kind != UPDATE or unsteady is None or quantity.sketched:
            return quantity
        hides = unsteady & np.isfinite(quantity.b.astype(np.float64))
        return replace(quantity, b=np.where(hides, quantity.a, quantity.b))


class Envelope:
    """Judges the quantities of one walk by the spread of the perturbed runs of either recording, or of both."""

    def __init__(
        self,
        spreads: Sequence[tuple[int, Spread]],
        noise: tuple[str, ...] = (),
        implied: Implied | None = None,
        finer: Spread | None = None,
    ) -> None:
        """
        Args:
            spreads: (0 or 1, the spread of a or b).
            noise: parameters whose gradients are not judged.
            implied: additional rounding of the coarser dtype, if the dtypes differ.
            finer: the spread of the finer run, if the dtypes differ and it has perturbed runs.
        """
        self._sides, self.spreads = tuple(side for side, _ in spreads), tuple(spread for _, spread in spreads)
        self.noise, self._implied, self._finer = noise, implied, finer
        self._steady = Steady(self._limit)
        self._updated = [0, 0]
        self._chaos: dict[int, list[float]] = {}
        self._tally = Tally()

    @classmethod
    def of(cls, pair: Pair) -> "Envelope | None":
        """The envelope of a pair; None if neither recording has perturbed runs, or if the coarser one has none."""
        sides = [side for side in (0, 1) if pair.coarser in (None, side)]
        known = ((side, known_spread((pair.a, pair.b)[side], sketched=pair.sketched)) for side in sides)
        found = [(side, spread) for side, spread in known if spread is not None]
        if not found:
            return None
        implied = finer = None
        if pair.coarser is not None:
            implied = Implied(pair)
            finer = known_spread((pair.a, pair.b)[1 - pair.coarser], sketched=pair.sketched)
        return cls(found, _noise(pair, found), implied, finer)

    def limit(self, quantity: Quantity) -> float:
        """The largest allowed norm(a - b); inf if the perturbed runs did not record the quantity."""
        limit = self._limit(quantity)
        return math.inf if limit is None else limit

    def judge(self, group: list[Quantity]) -> list[Judgement]:
        """Judge each quantity of a group by its limit."""
        self._tally.note_weights(group)
        if group[0].bound is None or group[0].phase == PARAMETERS or group[0].parameter in self.noise:
            return [judge(quantity) for quantity in group]
        self._steady.note(group)
        self._note_chaos(group)
        self._tally.add(group)
        return [self._judge_one(quantity, self.limit(quantity)) for quantity in group]

    def _limit(self, quantity: Quantity) -> float | None:
        # The larger limit: one framework may round more often than the other's perturbed runs show.
        implied = self._implied
        more = implied.times_spread(quantity) if implied else 0.0
        both = zip(self._sides, self.spreads, strict=True)
        found = ((side, spread.limit(quantity, more)) for side, spread in both)
        # A spread is measured in what its run recorded.
        limits = [limit * quantity.by[side] for side, limit in found if limit is not None]
        if not limits:
            return None
        if implied and implied.unused(quantity):
            return math.inf
        return max(limits) + (implied.casts(quantity) if implied else 0.0)

    def _judge_one(self, quantity: Quantity, limit: float) -> Judgement:
        """Judge one quantity by its limit, relative to the quantity's scale."""
        steady = self._steady.of(quantity)
        if quantity.phase == UPDATE:
            self._updated[0] += quantity.numel - self._steady.num_unsteady(quantity.parameter)
            self._updated[1] += quantity.numel
        bound = ratio(limit, steady.scale)
        judged = judge(replace(steady, bound=bound))
        if judged.one_sided:
            return judged
        apart, own = _apart(steady), judge(quantity)
        difference = ratio(apart, steady.scale)
        beyond, near = difference > bound, difference <= decisive(self.num_runs) * bound
        return replace(
            judged,
            equal=own.equal,
            difference=difference,
            beyond=beyond,
            whole=own.whole,
            undecided=beyond and near and not self._stands_at_zeros(steady, apart, limit),
        )

    def _stands_at_zeros(self, quantity: Quantity, apart: float, limit: float) -> bool:
        """Whether zeros in place of large elements exceed the limit by themselves. See [Note: zeros]."""
        share, both = _share_of_zeros(quantity), zip(self._sides, self.spreads, strict=True)
        by_rounding = max(spread.zeros_by_rounding(quantity, apart / quantity.by[side]) for side, spread in both)
        return math.sqrt(share) * apart > limit and share > student_limit(_EARLIER, self.num_runs) ** 2 * by_rounding

    def directions(self, dtype: str) -> Directions | None:
        """The results of the tests of directions for all quantities judged so far; None in dtypes without such tests."""
        casts = None
        if self._implied is not None:
            finer = self._finer.tallies if self._finer else ()
            casts = Casts(finer, self._implied.units_of_casts)
        return directions_of(self._tally, [spread.tallies for spread in self.spreads], dtype, SHARE, casts)

    @property
    def num_runs(self) -> int:
        """The smallest number of perturbed runs of any spread."""
        return min(spread.num_runs for spread in self.spreads)

    @property
    def judged_share(self) -> float:
        """The share of the updated elements judged so far that were steady; 1 if there were none."""
        return self._updated[0] / self._updated[1] if self._updated[1] else 1.0

    def _note_chaos(self, group: list[Quantity]) -> None:
        place = key_of(group[0])
        if place[1] == REDUCE:
            squares = self._chaos.setdefault(place[0], [0.0, 0.0])
            squares[0] += max(spread.of.get(place, 0.0) for spread in self.spreads) ** 2
            squares[1] += max(quantity.norms[0] for quantity in group) ** 2

    @property
    def saturated_from(self) -> int | None:
        """The first step at which the gradients of the perturbed runs are as far from the original run's as these are from zero,
        so that the runs are unrelated; None if there is no such step yet."""
        return min((step for step, (apart, signal) in self._chaos.items() if apart >= signal), default=None)

    def describe(self) -> str:
        """
        >>> Envelope([(0, Spread("torch", 4, {}, {}, {}))]).describe()
        '4 perturbed runs of torch'
        """
        return " and ".join(f"{spread.num_runs} perturbed runs of {spread.run}" for spread in self.spreads)


def _noise(pair: Pair, found: Sequence[tuple[int, Spread]]) -> tuple[str, ...]:
    """Parameters whose gradient is noise, such as a bias before a batch norm.

    At every recorded step, such a gradient is no larger than the spread of the perturbed runs, and in the other recording no
    larger than the rounding of a sum that is zero (`crossframe.verdict.measure.zero_gradient`). The magnitude of this noise
    depends on the framework.

    Args:
        found: (side, spread of its perturbed runs).
    """
    most = min(pair.terms * unit_roundoff(pair.dtype), 1.0)

    def is_noise(name: str, side: int, spread: Spread) -> bool:
        own, other = pair.sizes[side], pair.sizes[1 - side]
        root = math.sqrt(pair.a.manifest.params[name].numel)
        apart = [spread.of.get((step, REDUCE, name, 0), 0.0) for step in pair.steps]
        return all(
            0.0 < own.of[step][name] * root <= at and 0.0 < other.of[step][name] <= most * other.typical[step]
            for step, at in zip(pair.steps, apart, strict=True)
        )

    names = [name for name, spec in pair.a.manifest.params.items() if spec.requires_grad and spec.numel]
    return tuple(name for name in names if pair.steps and any(is_noise(name, *each) for each in found))


def key_of(quantity: Quantity) -> Key:
    return quantity.step, quantity.kind, quantity.name, quantity.microbatch


def _apart(quantity: Quantity) -> float:
    return MEASURES[quantity.kind](finite(quantity.a), finite(quantity.b))


def _share_of_zeros(quantity: Quantity) -> float:
    """The share of a squared distance at elements that are exactly zero on one side only; 0 for sketches."""
    if quantity.sketched or not (zeros := (quantity.a == 0) != (quantity.b == 0)).any():
        return 0.0
    a, b = finite(quantity.a), finite(quantity.b)
    whole = _apart(quantity)
    return (MEASURES[quantity.kind](np.where(zeros, a, 0.0), np.where(zeros, b, 0.0)) / whole) ** 2 if whole else 0.0


def _resolution(quantity: Quantity, dtype: str) -> float:
    # Losses and norms are recorded as float64 whatever their compute dtype.
    stored = dtype if quantity.kind in (FORWARD, NORM) else quantity.dtypes[0]
    return 2 * unit_roundoff(stored) * quantity.typical
