"""Bounds for pairs of runs with different precision: float32 against bfloat16 parameters, autocast or mixed precision.

With u the unit roundoff of the coarser dtype, the coarser run differs from the finer one by

- casts of values. A cast to nearest changes a value by at most u relative to it, so norm(cast(x) - x) <= u * norm(x). Initial
  parameters are bitwise equal after the cast.
- rounding of results. Rounding to nearest has a root mean square error of 1/sqrt(12) = 0.29 units in the last place. Perturbed
  runs of the coarser run move each result by one unit up, down or not at all, 0.82 units: their spread s covers the rounding,
  with the factor of `crossframe.verdict.perturbed_runs.spread`. Perturbed runs of the finer run do not show this rounding.
- casts of parameters. Perturbed runs cast parameters to the same values. For one sample, the effect of a cast is about that of
  rounding a result, 0.29 / 0.82 of the perturbation, and larger where terms cancel: s is used as its bound. The rounding of n
  samples is independent, so their mean averages it to 1/sqrt(n), while the cast is common to all samples. So for losses,
  gradients and quantities that depend on them, the effect of casts is at most sqrt(n) * s.
- a reduction between R ranks in the coarser dtype, which perturbed runs do not change: R roundings of sums of R gradients, each
  at most sqrt(R) times as large as the mean, if they are uncorrelated.

The limit is the sum: factor * s + sqrt(n) * s + u * norm(x), and R**1.5 * u * norm(x) for a reduction.

If only products differ, such as those of TF32 from those of float32, all results are stored in one dtype, of unit roundoff v,
and both factors of a product are rounded to u: by sqrt(2) * 0.29 units of u. Perturbed runs of the finer run move such a factor
by 0.82 units of v, and to first order the effect is proportional to that, so their spread is multiplied by

    sqrt(2) * 0.29 u / (0.82 v)

which is 4096 for TF32 in float32. Perturbed runs of the coarser run are not used: a move of a unit of v mostly vanishes when
the factor is rounded, and now and then moves it by a whole unit of u. Directions are not tested, because no perturbed run shows
the one that the rounding of weights has.

Casts of parameters have a direction, which does not vanish in an average over samples. The perturbed runs of the finer run
measure it (`crossframe.verdict.perturbed_runs.directions`). Without them, only directions of functions whose input and output are
recorded are tested.

A discrete decision, such as the expert of a sample, can differ. A parameter whose gradient is zero at one step but not at all
steps was not used at that step and is not judged there.
"""

import math

from crossframe.dtypes import coarser, unit_roundoff
from crossframe.recording.event_format import BACKWARD, NORM, REDUCE, STATE, UPDATE
from crossframe.verdict.measure.bounds_by_dtype import reduces_in
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import ACTIVATION, Quantity

_ROUNDED = 1 / math.sqrt(12)
"""The standard deviation of rounding to nearest, in units in the last place."""
_MOVED = math.sqrt(2 / 3)
"""The standard deviation of the moves of a perturbed run, in units in the last place: up, down, or not at all."""


class Implied:
    """The bounds that the coarser dtype of a pair adds to the spread of perturbed runs."""

    def __init__(self, pair: Pair) -> None:
        assert pair.coarser is not None
        self._pair, self._run = pair, (pair.a, pair.b)[pair.coarser]
        self.by_products = pair.by_products
        self.unit_roundoff = unit_roundoff(pair.dtype)
        stored = (pair.a, pair.b)[1 - pair.coarser].manifest.params.values()
        self.units_of_casts = _ROUNDED * self.unit_roundoff / min(unit_roundoff(param.dtype) for param in stored)
        """The standard deviation of a cast of a parameter, in units in the last place of the finer run's parameters."""

    def times_spread(self, quantity: Quantity) -> float:
        """The effect of casts of parameters, as a multiple of the spread."""
        if quantity.kind == ACTIVATION:
            return 1.0
        return math.sqrt(self._pair.terms * self._run.num_microbatches * self._run.manifest.world_size)

    @property
    def scale(self) -> float:
        """The multiple of the spread that covers the rounding of coarser products."""
        stored = unit_roundoff(self._run.manifest.dtype)
        return scale_of_products(self.unit_roundoff, stored) if self.by_products else 1.0

    def casts(self, quantity: Quantity) -> float:
        """The bound on the effect of casting the quantity itself, and of its reduction."""
        assert self._pair.coarser is not None
        size = quantity.norms[1 - self._pair.coarser]
        first, second = quantity.dtypes
        own = unit_roundoff(coarser(first, second)) * size if first != second else 0.0
        if quantity.phase in (REDUCE, NORM):
            own += self._reduction * size
        return own

    @property
    def _reduction(self) -> float:
        ranks = self._run.manifest.world_size
        return ranks * math.sqrt(ranks) * unit_roundoff(reduces_in(self._run)) if ranks > 1 else 0.0

    def unused(self, quantity: Quantity) -> bool:
        """Whether either run did not use the parameter at this step, but does at other steps."""
        if quantity.kind not in (BACKWARD, REDUCE, STATE, UPDATE):
            return False
        step, name = quantity.step, quantity.parameter
        return any(
            sizes.of.get(step, {}).get(name) == 0.0 and any(of[name] for of in sizes.of.values())
            for sizes in self._pair.sizes
        )


def scale_of_products(rounded: float, stored: float) -> float:
    """The multiple of the finer run's spread that covers the rounding of the factors of products.

    Args:
        rounded, stored: unit roundoff of the factors and of the stored values.

    >>> round(scale_of_products(2.0**-11, 2.0**-24))
    4096
    """
    return math.sqrt(2) * _ROUNDED * rounded / (_MOVED * stored)


def describe_precisions(pair: Pair, names: tuple[str, str]) -> str:
    """The dtypes in which each side computes, stores parameters and reduces, as a clause."""
    text = []
    for name, recording in zip(names, (pair.a, pair.b), strict=True):
        computes, stored = recording.manifest.dtype, coarser(*(p.dtype for p in recording.manifest.params.values()))
        products = recording.manifest.products_in
        also = [f"products in {products}"] if products != computes else []
        also += [f"parameters in {stored}"] if stored != computes else []
        also += [f"reductions in {reduces_in(recording)}"] if reduces_in(recording) != computes else []
        text.append(f"{name} computes in {computes}" + (f" (with {' and '.join(also)})" if also else ""))
    return " and ".join(text)
