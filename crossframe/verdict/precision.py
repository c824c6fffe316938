"""Pairs of runs of which one rounds more: float32 against bfloat16 parameters, autocast or mixed precision.

With u the unit roundoff of the coarser dtype, the coarser run differs from the finer one by

- casts of values. A value that is cast to nearest moves by at most u of itself, so norm(cast(x) - x) <= u * norm(x). Initial
  parameters are equal in every bit after the cast.
- rounding of results. To nearest it errs by 1/sqrt(12) = 0.29 units in the last place, root mean square. Perturbed runs of the
  coarser run move each result by a unit up, down or not at all, 0.82 units: their spread s covers it, with the factor of
  `crossframe.verdict.envelope`. Perturbed runs of the finer run say nothing about the coarser one, and are not used.
- casts of parameters. Perturbed runs cast them to the same values. For one sample the effect of a cast is about that of rounding
  a result, 0.29 / 0.82 of what perturbed runs do, and more where terms cancel: it is taken to be at most s. But the rounding of
  n samples differs, and their mean averages it to 1/sqrt(n) of that, while the cast is common to all. So in losses, in gradients
  and in what follows from these, casts reach at most sqrt(n) * s.
- a reduction between R ranks in the coarser dtype, which perturbed runs do not move: R roundings of sums of R gradients, each
  at most sqrt(R) times as large as the mean, if they have nothing in common.

The limit is the sum of these: factor * s + sqrt(n) * s + u * norm(x), and R**1.5 * u * norm(x) for a reduction.

Directions that averages over samples show are not tested: casts of parameters have them. Those of a function whose input and
output are recorded are tested, with u for the cast of its weight.

A decision, such as which expert gets a sample, may fall otherwise. Where a parameter has a gradient of zero at a step and not at
all steps, it was not used there, and nothing is said about it.
"""

import math

from crossframe.dtypes import FLOATING, coarser, unit_roundoff
from crossframe.recording import Recording
from crossframe.recording.lines import BACKWARD, NORM, REDUCE, STATE, UPDATE
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import ACTIVATION, Quantity


class Implied:
    """What the coarser dtype of a pair implies, beside the spread of perturbed runs."""

    def __init__(self, pair: Pair) -> None:
        assert pair.coarser is not None
        self._pair, self._run = pair, (pair.a, pair.b)[pair.coarser]
        self.unit_roundoff = unit_roundoff(pair.dtype)

    def times_spread(self, quantity: Quantity) -> float:
        """How many times the spread casts of parameters may reach."""
        if quantity.kind == ACTIVATION:
            return 1.0
        accumulated = self._run.manifest.settings.get("accumulate") or 1
        return math.sqrt(self._pair.terms * accumulated * self._run.manifest.world_size)

    def casts(self, quantity: Quantity) -> float:
        """How far casts of the quantity itself may move it, and its reduction."""
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
        """Whether either run did not use a parameter at this step that it uses at others."""
        if quantity.kind not in (BACKWARD, REDUCE, STATE, UPDATE):
            return False
        step, name = quantity.step, quantity.parameter
        return any(
            sizes.of.get(step, {}).get(name) == 0.0 and any(of[name] for of in sizes.of.values())
            for sizes in self._pair.sizes
        )


def reduces_in(recording: Recording) -> str:
    """The dtype in which a recording reduces gradients, where it says so; else that in which it computes."""
    settings = recording.manifest.settings
    stated = settings.get("reduce_dtype") or settings.get("param_dtype")
    return stated if stated in FLOATING else recording.manifest.dtype


def precisions_in_words(pair: Pair, names: tuple[str, str]) -> str:
    """In which dtype each side computes, stores and reduces."""
    said = []
    for name, recording in zip(names, (pair.a, pair.b), strict=True):
        computes, stored = recording.manifest.dtype, coarser(*(p.dtype for p in recording.manifest.params.values()))
        also = [f"parameters in {stored}"] if stored != computes else []
        also += [f"reductions in {reduces_in(recording)}"] if reduces_in(recording) != computes else []
        said.append(f"{name} computes in {computes}" + (f" (with {' and '.join(also)})" if also else ""))
    return " and ".join(said)
