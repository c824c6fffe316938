"""Judges the quantities of a comparison by the spread of perturbed runs (`crossframe.verdict.perturbed_runs.spread`).

[Note: zeros] Rounding makes an element exactly zero on one side only if the element is as small as its own error (underflow,
terms that cancel, a threshold such as that of ReLU), or where it flips a decision such as the expert of a token. So zeros in
place of large elements are evidence, whatever put them there. The perturbed runs show what rounding does: with r the share of
zeros in a squared distance, E(r) is the mean of theirs, and at least that of all quantities of the kind, because a rare decision
may flip in none of them. The number of elements near a threshold, and of decisions that are nearly equal, is proportional to the
size of the rounding, so for a correct recording at a distance d, E(r) is at most d / s times theirs. Then sqrt(r / E(r)) has at
most the tail of Student's distribution with k degrees of freedom, as a distance has, and exceeds its 1 % limit with a probability
of 1 / 100. A quantity is decisive without further runs if it does and the zeros exceed the limit by themselves: such a stage adds
at most a hundredth of the rate, as in `decisive`. Where the perturbed runs have many zeros, as after ReLU in bfloat16, no r is
that large, and more runs are needed. A decision that flips in less than 1 % of all runs and quantities may go unseen: this is an
assumption of the limits as a whole.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from crossframe.dtypes import unit_roundoff
from crossframe.recording.event_format import PARAMETERS, REDUCE, UPDATE
from crossframe.verdict.measure.judge import Judgement, judge
from crossframe.verdict.measure.metrics import ratio
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import Quantity
from crossframe.verdict.measure.unequal_dtypes import Implied
from crossframe.verdict.perturbed_runs.directions import Casts, Directions, Tally, directions_of
from crossframe.verdict.perturbed_runs.spread import SHARE, Spread, distance_of, key_of, known_spread, share_of_zeros
from crossframe.verdict.perturbed_runs.steady_elements import Steady
from crossframe.verdict.perturbed_runs.students_distribution import student_limit

SUFFICIENT_RUNS = 8
"""The number of perturbed runs from which on any quantity beyond its limit is a bug."""
_EARLIER = 0.01
"""The rate of a stage after which perturbed runs may be added, as a share of that of the last stage."""


def decisive(num_runs: int) -> float:
    """The multiple of its limit that a quantity must reach to be called a bug; below it, more perturbed runs are needed.

    Runs are added in stages. By the tail of Student's distribution, exceeding `factor` times the limit has a probability of
    factor^-k times the rate. With factor = 100^(1/k) before the last stage, such a stage adds a hundredth of the rate, so all
    stages together stay within 1.01 times the rate.

    >>> [round(decisive(k), 1) for k in (2, 4, 8)]
    [10.0, 3.2, 1.0]
    """
    return 1.0 if num_runs >= SUFFICIENT_RUNS else _EARLIER ** (-1 / num_runs)


class Limits:
    """Judges the quantities of one comparison by the spread of the perturbed runs of either recording, or of both."""

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
        self._steady = Steady(self._limit, [spread.unsteady for spread in self.spreads])
        self._updated = [0, 0]
        self._chaos: dict[int, list[float]] = {}
        self._tally = Tally()

    @classmethod
    def of(cls, pair: Pair) -> "Limits | None":
        """The limits of a pair; None if neither recording has perturbed runs, or not the one that has to have them."""
        known = ((side, known_spread((pair.a, pair.b)[side], sketched=pair.sketched)) for side in pair.measured)
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
        scale = implied.scale if implied else 1.0
        limits = [scale * limit * quantity.by[side] for side, limit in found if limit is not None]
        if not limits:
            return None
        if implied and implied.unused(quantity):
            return math.inf
        return max(limits) + (implied.casts(quantity) if implied else 0.0)

    def _judge_one(self, quantity: Quantity, limit: float) -> Judgement:
        """Judge one quantity by its limit, relative to the quantity's scale."""
        steady = self._steady.of(quantity)
        if quantity.phase == UPDATE:
            self._updated[0] += quantity.numel - self._steady.num_unsteady(quantity)
            self._updated[1] += quantity.numel
        bound = ratio(limit, steady.scale)
        judged = judge(replace(steady, bound=bound))
        if judged.one_sided:
            return judged
        apart, own = distance_of(steady), judge(quantity)
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
        share, both = share_of_zeros(quantity), zip(self._sides, self.spreads, strict=True)
        by_rounding = max(spread.zeros_by_rounding(quantity, apart / quantity.by[side]) for side, spread in both)
        return math.sqrt(share) * apart > limit and share > student_limit(_EARLIER, self.num_runs) ** 2 * by_rounding

    def directions(self, dtype: str) -> Directions | None:
        """The results of the tests of directions for all quantities judged so far; None in dtypes without such tests."""
        if self._implied is not None and self._implied.by_products:
            return None
        casts = None
        if self._implied is not None:
            finer = self._finer.tallies if self._finer else ()
            casts = Casts(finer, self._implied.units_of_casts)
        return directions_of(self._tally, [spread.tallies for spread in self.spreads], dtype, SHARE, casts)

    def usual_share(self, kind: str) -> float:
        """The share of its bound that a quantity of a kind exceeds with a probability of 1 % at most, if perturbed runs round as
        the other recording does: by Student's distribution, from its own spread alone."""
        return min(student_limit(_EARLIER, self.num_runs) / spread.factors[kind] for spread in self.spreads)

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
        >>> Limits([(0, Spread("torch", 4, {}, {}, {}))]).describe()
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
