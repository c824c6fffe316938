"""How far rounding drove runs like these apart: measured on perturbed runs, quantity by quantity.

A perturbed run is the run once more, with other rounding (`crossframe.recording.twins`). At every quantity q the k perturbed
runs lie at distances t_1 ... t_k from the run. Their root mean square s is the spread, and the other recording is held against

    d <= factor * s,     factor = margin * max over q and i of  t_i / rms(t_j, j != i)

The maximum, over all quantities of one kind, is how far the most eccentric perturbed run strays when it is judged by the others.
Were the other recording one more perturbed run, its chance to stray further than all k of them is at most 1 / (k + 1): of k + 1
like things each is the most extreme as often. The margin makes that rare enough. Where a quantity moves in one direction alone,
t_i is the size of a normal variable, and the ratio has Student's distribution with k degrees of freedom, whose tail falls as
x^-k; where it moves in many directions it falls faster. So going beyond `margin` times the maximum has a chance of at most
margin^-k / (k + 1), and

    margin = ((k + 1) * FALSE_ALARMS / kinds)^(-1 / k)

makes that FALSE_ALARMS a comparison of so many kinds of quantities. Directions (`crossframe.verdict.direction`) count as one kind
more. More perturbed runs allow a smaller margin. Nothing here is fitted
to any fault.

[Note: unsteady elements] An optimizer that divides a gradient by its size turns one that is next to zero into a whole step,
this way or that. Whether one does is a matter of luck and not of how far the perturbed runs lie apart. So an update is judged by
its steady elements: those whose gradient stood out from what rounding makes of it, or was just zero, in both recordings, at every
step so far, but for the few that lie furthest apart (`trimmed_distance`). Once a step was not recorded nobody knows which those
are, and updates are judged by the half of their elements that lie least apart (`inner_distance`).

Where only sketches are there (`crossframe.recording.sketch`), distances are those of their sums: a few elements that are off are
in a few sums, so that the same measures leave them out. Which elements are steady nobody knows then.

A distance is never taken to be smaller than one unit in the last place of one typical element: what all perturbed runs agree
upon may still fall to its neighbour in another implementation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np

from crossframe.dtypes import unit_roundoff
from crossframe.errors import RecordingError
from crossframe.recording import Recording
from crossframe.recording.lines import BACKWARD, FORWARD, NORM, PARAMETERS, REDUCE, STATE, UNSHARDED, UPDATE
from crossframe.verdict.direction import OF_OWN_INPUT, Directions, Tally, directions_of
from crossframe.verdict.measure.judge import Judgement, judge
from crossframe.verdict.measure.metrics import distance, inner_distance, ratio, trimmed_distance
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import ACTIVATION, LATE_UPDATE, Quantity, finite
from crossframe.verdict.measure.walk import walk
from crossframe.verdict.precision import Implied

FALSE_ALARMS = 1e-3
"""The rate of right pairs that are called a bug, where perturbed runs round as the other recording does."""
LEAST_TWINS = 2

Measure = Callable[[np.ndarray, np.ndarray], float]
ENOUGH = 8
"""With so many perturbed runs a quantity beyond its limit is a bug, however near to the limit it is."""
MEASURES: dict[str, Measure] = {
    ACTIVATION: distance,
    FORWARD: distance,
    BACKWARD: distance,
    REDUCE: distance,
    NORM: distance,
    STATE: distance,
    UPDATE: trimmed_distance,
    LATE_UPDATE: inner_distance,
    UNSHARDED: inner_distance,  # of parameters that a loop edits between steps: what earlier updates made of them, and the edit
}
"""By kind of quantity, how distances are measured. Each kind has a factor of its own."""
SHARE = FALSE_ALARMS / (len(MEASURES) + 1)
"""The rate of each kind of quantity, and of all directions together."""

Place = tuple[int, str, str, int]
"""What is the same thing in all recordings of a run: (step, kind, name, microbatch)."""


def margin(num_twins: int) -> float:
    """How much further than the most eccentric of so many perturbed runs another recording may lie.

    >>> [round(margin(k), 1) for k in (2, 3, 4, 8)]
    [57.7, 13.6, 6.7, 2.4]
    """
    return ((num_twins + 1) * SHARE) ** (-1 / num_twins)


def decisive(num_runs: int) -> float:
    """How many times its limit a quantity must reach to be called a bug with so few perturbed runs; nearer, more are needed.

    Runs are added in stages. By the tail above, going beyond `factor` times the limit has a chance of factor^-k of the rate; with
    factor = 100^(1/k) before the last stage, that stage adds a hundredth of the rate, and all stages together keep within 1.01
    times it.

    >>> [round(decisive(k), 1) for k in (2, 4, 8)]
    [10.0, 3.2, 1.0]
    """
    return 1.0 if num_runs >= ENOUGH else 100.0 ** (1 / num_runs)


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
    """Where the perturbed runs of one run lie.

    Attributes:
        run: what the recording is called.
        num_twins: how many.
        factors: by kind, how many times the spread is allowed.
        of: the spread, by place.
        numel: how many elements lie so far apart, by place.
        tallies: the directions in which each perturbed run differs (`crossframe.verdict.direction`).
    """

    run: str
    num_twins: int
    factors: dict[str, float]
    of: dict[Place, float]
    numel: dict[Place, int]
    tallies: tuple[Tally, ...] = ()

    def limit(self, quantity: Quantity, more: float = 0.0) -> float | None:
        """How far another recording may lie there; None where the perturbed runs were not recorded. At another world size an
        activation may have more samples, and be of another microbatch: its limit is that of as many elements.

        Args:
            more: how many times the spread is allowed beside the factor.
        """
        step, kind, name, _ = place = place_of(quantity)
        place = place if place in self.of else (step, kind, name, 0)
        if place not in self.of:
            return None
        return (self.factors[kind] + more) * self.of[place] * math.sqrt(quantity.numel / max(self.numel[place], 1))


def spread_of(recording: Recording, twins: Sequence[Recording], *, sketched: bool = False) -> Spread:
    """Measure the perturbed runs of a run.

    Args:
        sketched: by sketches of everything large.

    Raises:
        RecordingError: fewer than two.
    """
    if len(twins) < LEAST_TWINS:
        raise RecordingError(
            f"{recording.directory}: expected {LEAST_TWINS} perturbed runs or more, got {len(twins)}: --perturbed-runs 4"
        )
    name, pairs = recording.directory.name, [Pair(recording, twin, sketched=sketched) for twin in twins]
    # Which elements of updates are steady, the spread of gradients says: it comes first.
    before = _measured(name, pairs, (REDUCE,), None)
    rest = _measured(name, pairs, tuple(phase for phase in _COMPUTED if phase != REDUCE), before)
    both = zip(before.tallies, rest.tallies, strict=True)
    tallies = tuple(Tally(first.of | second.of) for first, second in both)
    return Spread(
        name, len(twins), before.factors | rest.factors, before.of | rest.of, before.numel | rest.numel, tallies
    )


_COMPUTED = (UNSHARDED, FORWARD, BACKWARD, REDUCE, NORM, STATE, UPDATE)
_KNOWN: "WeakKeyDictionary[Recording, dict[bool, Spread]]" = WeakKeyDictionary()


def known_spread(recording: Recording, *, sketched: bool = False) -> Spread | None:
    """The spread of a recording's own perturbed runs, measured once; None if it has none."""
    known = _KNOWN.setdefault(recording, {})
    if sketched not in known:
        twins = recording.twins()
        if not twins:
            return None
        known[sketched] = spread_of(recording, twins, sketched=sketched)
    return known[sketched]


def _measured(run: str, pairs: Sequence[Pair], phases: tuple[str, ...], before: Spread | None) -> Spread:
    """The spread of what is computed in some phases.

    Args:
        before: of the gradients, where it is known: it says which elements are steady.
    """
    found: dict[Place, list[float]] = {}
    numel: dict[Place, int] = {}
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
                place = place_of(group[0])
                numel[place] = group[0].numel
                found.setdefault(place, []).append(math.hypot(apart, least))
    whole = {place: np.array(apart) for place, apart in found.items() if len(apart) == len(pairs)}
    factors = {}
    for kind in MEASURES:
        strayed = [eccentricity(apart) for place, apart in whole.items() if place[1] == kind]
        if strayed:
            factors[kind] = margin(len(pairs)) * max(strayed)
    of = {place: float(np.sqrt(np.mean(np.square(apart)))) for place, apart in whole.items()}
    return Spread(run, len(pairs), factors, of, numel, tuple(tallies))


class Steady:
    """Which elements of parameters are steady: see the note above. A walk through one pair of recordings."""

    def __init__(self, limit: Callable[[Quantity], float | None] | None) -> None:
        """`limit` is of reduced gradients; None: all elements are steady."""
        self._limit = limit
        self._unsteady: dict[str, np.ndarray] = {}

    def note(self, group: list[Quantity]) -> None:
        """Look at reduced gradients as they come by."""
        if self._limit is None or group[0].phase != REDUCE or group[0].sketched:
            return
        limit, name = self._limit(group[0]), group[0].parameter
        if limit is None:
            return
        element = limit / math.sqrt(group[0].a.size)
        for quantity in group:
            a, b = finite(quantity.a), finite(quantity.b)
            # What no rounding reaches, such as rows of an embedding that were not looked up, has one right update.
            small = ((np.abs(a) <= element) | (np.abs(b) <= element)) & ((a != 0) | (b != 0))
            self._unsteady[name] = small | self._unsteady.get(name, False)

    def num_unsteady(self, parameter: str) -> int:
        """How many elements of a parameter are not."""
        return int(np.sum(self._unsteady.get(parameter, 0)))

    def of(self, quantity: Quantity) -> Quantity:
        """An update in which unsteady elements are as in the first recording; other quantities as they are, and so are updates of
        which nobody knows all unsteady elements: the half that counts of those must not be made of elements that were hidden."""
        unsteady = self._unsteady.get(quantity.parameter)
        if quantity.kind != UPDATE or unsteady is None or quantity.sketched:
            return quantity
        hides = unsteady & np.isfinite(quantity.b.astype(np.float64))
        return replace(quantity, b=np.where(hides, quantity.a, quantity.b))


class Envelope:
    """What two recordings are held against: the spread of the perturbed runs of either, or of both. Walks one pair once."""

    def __init__(self, spreads: Sequence[Spread], noise: tuple[str, ...] = (), implied: Implied | None = None) -> None:
        """
        Args:
            noise: parameters whose gradients are not judged.
            implied: what one side's dtype implies, if it rounds more than the other side's.
        """
        self.spreads, self.noise, self._implied = tuple(spreads), noise, implied
        self._steady = Steady(self._limit)
        self._updated = [0, 0]
        self._chaos: dict[int, list[float]] = {}
        self._tally = Tally()

    @classmethod
    def of(cls, pair: Pair) -> "Envelope | None":
        """The envelope of a pair; None if neither recording has perturbed runs, or if one rounds more than the other and has
        none."""
        sides = [side for side in (0, 1) if pair.coarser in (None, side)]
        known = ((side, known_spread((pair.a, pair.b)[side], sketched=pair.sketched)) for side in sides)
        found = [(side, spread) for side, spread in known if spread is not None]
        implied = None if pair.coarser is None else Implied(pair)
        return cls([spread for _, spread in found], _noise(pair, found), implied) if found else None

    def limit(self, quantity: Quantity) -> float:
        """The largest distance that rounding may reach there; inf where the perturbed runs say nothing."""
        limit = self._limit(quantity)
        return math.inf if limit is None else limit

    def judge(self, group: list[Quantity]) -> list[Judgement]:
        """Hold both sides of each quantity against what the perturbed runs reach there."""
        if group[0].bound is None or group[0].phase == PARAMETERS or group[0].parameter in self.noise:
            return [judge(quantity) for quantity in group]
        self._steady.note(group)
        self._note_chaos(group)
        self._tally.add(group)
        return [self._held(quantity, self.limit(quantity)) for quantity in group]

    def _limit(self, quantity: Quantity) -> float | None:
        # The wider of both sides: what one framework rounds more often may lie outside the other's perturbed runs.
        implied = self._implied
        more = implied.times_spread(quantity) if implied else 0.0
        limits = [limit for spread in self.spreads if (limit := spread.limit(quantity, more)) is not None]
        if not limits:
            return None
        if implied and implied.unused(quantity):
            return math.inf
        return max(limits) * quantity.grown + (implied.casts(quantity) if implied else 0.0)

    def _held(self, quantity: Quantity, limit: float) -> Judgement:
        """One quantity against its limit, in the quantity's own scale."""
        steady = self._steady.of(quantity)
        if quantity.phase == UPDATE:
            self._updated[0] += quantity.numel - self._steady.num_unsteady(quantity.parameter)
            self._updated[1] += quantity.numel
        bound = ratio(limit, steady.scale)
        judged = judge(replace(steady, bound=bound))
        if judged.one_sided:
            return judged
        difference, own = ratio(_apart(steady), steady.scale), judge(quantity)
        return replace(judged, equal=own.equal, difference=difference, beyond=difference > bound, whole=own.whole)

    def directions(self, dtype: str) -> Directions | None:
        """What the tests of directions come to, of all that was judged so far; None in dtypes in which there are none."""
        tallies = [spread.tallies for spread in self.spreads]
        if self._implied is None:
            return directions_of(self._tally, tallies, dtype, SHARE)
        return directions_of(self._tally, tallies, dtype, SHARE, OF_OWN_INPUT, cast=self._implied.unit_roundoff)

    @property
    def num_runs(self) -> int:
        """How many perturbed runs the wider or only spread has, at least."""
        return min(spread.num_twins for spread in self.spreads)

    @property
    def judged_share(self) -> float:
        """How large a part of all updated elements, of those judged so far, was steady; 1 of none."""
        return self._updated[0] / self._updated[1] if self._updated[1] else 1.0

    def _note_chaos(self, group: list[Quantity]) -> None:
        place = place_of(group[0])
        if place[1] == REDUCE:
            squares = self._chaos.setdefault(place[0], [0.0, 0.0])
            squares[0] += max(spread.of.get(place, 0.0) for spread in self.spreads) ** 2
            squares[1] += max(quantity.norms[0] for quantity in group) ** 2

    @property
    def saturated_from(self) -> int | None:
        """The first step, of those judged so far, at which the perturbed runs' gradients are as far from the run's as those are
        from zero: the runs have nothing to do with one another any more. None: not yet."""
        return min((step for step, (apart, signal) in self._chaos.items() if apart >= signal), default=None)

    def in_words(self) -> str:
        """What was measured.

        >>> Envelope([Spread("torch", 4, {}, {}, {})]).in_words()
        '4 perturbed runs of torch'
        """
        return " and ".join(f"{spread.num_twins} perturbed runs of {spread.run}" for spread in self.spreads)


def _noise(pair: Pair, found: Sequence[tuple[int, Spread]]) -> tuple[str, ...]:
    """Parameters whose gradient is noise, as of a bias before a batch norm: at every recorded step it is no larger than the
    perturbed runs lie apart, and in the other recording no larger than rounding may leave of a sum that is zero
    (`crossframe.verdict.measure.zero_gradient`). How large such noise is differs between frameworks, and says nothing.

    Args:
        found: by side, the spread of its perturbed runs.
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


def place_of(quantity: Quantity) -> Place:
    """What the quantity is in all recordings of a run."""
    return quantity.step, quantity.kind, quantity.name, quantity.microbatch


def _apart(quantity: Quantity) -> float:
    return MEASURES[quantity.kind](finite(quantity.a), finite(quantity.b))


def _resolution(quantity: Quantity, dtype: str) -> float:
    # A loss and a norm are recorded as float64, in whatever dtype they were computed.
    stored = dtype if quantity.kind in (FORWARD, NORM) else quantity.dtypes[0]
    return 2 * unit_roundoff(stored) * quantity.typical
