"""Measures how far perturbed runs are from their original run, for each quantity.

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

gives FALSE_POSITIVE_RATE per comparison with this number of kinds of quantities. Directions
(`crossframe.verdict.perturbed_runs.directions`) count as one more kind. More perturbed runs allow a smaller margin. No constant
is fitted to faults.

For sketches (`crossframe.recording.sketch`), distances are those of their sums. A few wrong elements affect few sums, so the same
measures exclude them. Steady elements are unknown.

A distance is never taken to be smaller than one unit in the last place of a typical element: even where all perturbed runs agree,
another implementation can round to the neighbouring value.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from crossframe.dtypes import unit_roundoff
from crossframe.errors import RecordingError
from crossframe.recording import Recording
from crossframe.recording.event_format import BACKWARD, BUFFERS, FORWARD, NORM, REDUCE, STATE, UNSHARDED, UPDATE
from crossframe.recording.golden_file import StoredSpread
from crossframe.verdict.measure.causal_order import walk
from crossframe.verdict.measure.metrics import distance, inner_distance, trimmed_distance
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import ACTIVATION, LATE_UPDATE, Quantity, finite
from crossframe.verdict.perturbed_runs.directions import Tally
from crossframe.verdict.perturbed_runs.steady_elements import NEVER, Since, Steady

FALSE_POSITIVE_RATE = 1e-3
"""The probability that a correct pair is called a bug, if perturbed runs round as the other recording does."""
MIN_RUNS = 2

Measure = Callable[[np.ndarray, np.ndarray], float]
MEASURES: dict[str, Measure] = {
    ACTIVATION: distance,
    FORWARD: distance,
    BACKWARD: distance,
    REDUCE: distance,
    NORM: distance,
    STATE: distance,
    UPDATE: trimmed_distance,
    LATE_UPDATE: inner_distance,
    BUFFERS: distance,
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
    [60.6, 14.0, 6.8, 2.4]
    """
    return ((num_runs + 1) * SHARE) ** (-1 / num_runs)


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
        zeros: the mean share of zeros in the squared distance of each quantity, and at least that of its kind. See [Note: zeros].
        tallies: the directions in which each perturbed run differs (`crossframe.verdict.perturbed_runs.directions`).
        unsteady: since which step the elements of parameters are unsteady in any perturbed run.
    """

    run: str
    num_runs: int
    factors: dict[str, float]
    of: dict[Key, float]
    numel: dict[Key, int]
    zeros: dict[Key, float] = field(default_factory=dict)
    tallies: tuple[Tally, ...] = ()
    unsteady: Since = field(default_factory=dict)

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
        return 0.0 if place is None else self.zeros[place] * apart / self._spread(place, quantity)

    def stored(self) -> StoredSpread:
        """The spread as numbers of a golden's file, without zeros and directions, which sketches do not have."""
        steps: dict[tuple[str, str, int, int], list[int]] = {}
        for (step, kind, name, microbatch), numel in self.numel.items():
            steps.setdefault((kind, name, microbatch, numel), []).append(step)
        keys = tuple((*key, tuple(at)) for key, at in steps.items())
        values = [self.of[step, kind, name, at] for kind, name, at, _, every in keys for step in every]
        return StoredSpread(self.num_runs, self.factors, keys, np.array(values, np.float32))

    @classmethod
    def of_stored(cls, run: str, stored: StoredSpread) -> "Spread":
        """The spread that `stored` returned."""
        places = [((step, kind, name, at), numel) for kind, name, at, numel, every in stored.keys for step in every]
        of = {place: float(value) for (place, _), value in zip(places, stored.values, strict=True)}
        zeros = dict.fromkeys(of, 0.0)
        return cls(run, stored.num_runs, dict(stored.factors), of, dict(places), zeros, (Tally(),) * stored.num_runs)

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
        rest.unsteady,
    )


_COMPUTED = (UNSHARDED, FORWARD, BACKWARD, REDUCE, NORM, STATE, UPDATE, BUFFERS)
_KNOWN: "WeakKeyDictionary[Recording, dict[bool, Spread]]" = WeakKeyDictionary()


def known_spread(recording: Recording, *, sketched: bool = False) -> Spread | None:
    """The spread of a recording's own perturbed runs, measured once or stored in a golden; None if it has none."""
    known = _KNOWN.setdefault(recording, {})
    if sketched not in known:
        if (stored := recording.stored_spread) is not None:
            return known.setdefault(sketched, Spread.of_stored(recording.directory.name, stored))
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
    unsteady: dict[str, np.ndarray] = {}
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
                apart = max(distance_of(steady.of(quantity)) for quantity in group)
                least = max(_resolution(quantity, pair.a.manifest.dtype) for quantity in group)
                place = key_of(group[0])
                numel[place] = group[0].numel
                found.setdefault(place, []).append(math.hypot(apart, least))
                if share := max(share_of_zeros(steady.of(quantity)) for quantity in group):
                    zeros[place] = zeros.get(place, 0.0) + share / len(pairs)
        for name, since in steady.since.items():
            unsteady[name] = np.minimum(since, unsteady.get(name, NEVER))
    whole = {place: np.array(apart) for place, apart in found.items() if len(apart) == len(pairs)}
    factors = {}
    for kind in MEASURES:
        strayed = [eccentricity(apart) for place, apart in whole.items() if place[1] == kind]
        if strayed:
            factors[kind] = margin(len(pairs)) * max(strayed)
    # A decision that no run flips in one quantity may flip there in another run, as often as in other quantities.
    means = {kind: np.mean([zeros.get(place, 0.0) for place in whole if place[1] == kind]) for kind in factors}
    zeros = {place: max(zeros.get(place, 0.0), float(means[place[1]])) for place in whole}
    of = {place: float(np.sqrt(np.mean(np.square(apart)))) for place, apart in whole.items()}
    return Spread(run, len(pairs), factors, of, numel, zeros, tuple(tallies), unsteady)


def key_of(quantity: Quantity) -> Key:
    """The key of a quantity."""
    return quantity.step, quantity.kind, quantity.name, quantity.microbatch


def distance_of(quantity: Quantity) -> float:
    """The distance of both sides, by the measure of the quantity's kind."""
    return MEASURES[quantity.kind](finite(quantity.a), finite(quantity.b))


def share_of_zeros(quantity: Quantity) -> float:
    """The share of a squared distance at elements that are exactly zero on one side only; 0 for sketches."""
    if quantity.sketched or not (zeros := (quantity.a == 0) != (quantity.b == 0)).any():
        return 0.0
    a, b = finite(quantity.a), finite(quantity.b)
    whole = distance_of(quantity)
    return (MEASURES[quantity.kind](np.where(zeros, a, 0.0), np.where(zeros, b, 0.0)) / whole) ** 2 if whole else 0.0


def _resolution(quantity: Quantity, dtype: str) -> float:
    # Losses and norms are recorded as float64 whatever their compute dtype.
    stored = dtype if quantity.kind in (FORWARD, NORM) else quantity.dtypes[0]
    return 2 * unit_roundoff(stored) * quantity.typical
