"""The result of a comparison."""

import math
from dataclasses import dataclass, field

from crossframe.verdict.diagnosis import Diagnosis
from crossframe.verdict.environments import Environments
from crossframe.verdict.measure.locate import Divergence
from crossframe.verdict.perturbed_runs.directions import Directions
from crossframe.verdict.verdicts import Verdict


@dataclass(frozen=True, slots=True)
class Judged:
    """The worst judgement of a group: the same quantity on several ranks.

    Attributes:
        name: parameter, "input of MODULE", "exp_avg of PARAMETER"; "" for a loss or a norm.
        difference: relative difference.
        used: the difference as a share of its bound; more than 1 is outside. None without a bound; inf if bitwise equality is
            required and violated.
    """

    step: int
    phase: str
    event: str
    unit: str
    name: str
    difference: float
    used: float | None
    beyond: bool
    equal: bool


@dataclass(frozen=True)
class PairVerdict:
    """The result of comparing two recordings.

    Attributes:
        a, b: names of the recordings (`labels`).
        world_size: of both recordings, or (of a, of b) if they differ.
        steps: number of compared steps.
        max_relative_loss_difference: over steps and ranks; inf if only one side is finite; None if not compared.
        max_relative_parameter_difference: over recorded steps and parameters, without `zero_gradient_parameters`.
        zero_gradient_parameters: parameters whose gradient is only rounding (`crossframe.verdict.measure.zero_gradient`), with
            the number of elements where that is so of some.
        first_divergence: the first quantity outside its bound, or None.
        reason: the reason for the verdict, as a sentence.
        loss_differences: per step, the largest over ranks.
        parameter_differences: per recorded step, (step, the largest over parameters).
        limit_used: the largest share of its limit that any quantity uses; more than 1 is outside. None without perturbed runs.
        judged_share: the share of all updated elements that could be judged (`perturbed_runs.steady_elements`). None without
            perturbed runs.
        judged: all compared quantities in causal order.
        diagnosis: the hypothesis that explains the first divergence, or None.
        settings: differing settings (`crossframe.verdict.measure.comparable.differing_settings`), one sentence each.
        notes: differences that do not affect the comparison, such as reordered samples, or gradients recorded before clipping on
            one side and after it on the other; one sentence each.
        environments: the differences of the environments.
        parted: the entry of `judged` for `first_divergence`.
        directions: the tests of direction within the spread of perturbed runs; None if there were none.
        unrecorded: of a different computation, which steps or causes before `first_divergence` were not recorded, and how to
            record them, as a clause; None if all were.
        bits: the first bitwise difference, and why it is not evidence if so, as a clause; None if all bits are equal.
    """

    a: str
    b: str
    dtype: str
    world_size: int | tuple[int, int]
    steps: int
    verdict: Verdict
    reason: str
    max_relative_loss_difference: float | None = None
    max_relative_parameter_difference: float | None = None
    zero_gradient_parameters: tuple[str, ...] = ()
    first_divergence: Divergence | None = None
    loss_differences: tuple[float, ...] = field(default=(), repr=False)
    parameter_differences: tuple[tuple[int, float], ...] = field(default=(), repr=False)
    limit_used: float | None = None
    judged_share: float | None = None
    judged: tuple[Judged, ...] = field(default=(), repr=False)
    diagnosis: Diagnosis | None = None
    settings: tuple[str, ...] = ()
    parted: Judged | None = field(default=None, repr=False)
    directions: Directions | None = field(default=None, repr=False)
    unrecorded: str | None = None
    bits: str | None = None
    notes: tuple[str, ...] = ()
    environments: Environments = field(default_factory=Environments)

    def to_json(self) -> dict:
        """The verdict as a JSON object. A difference that is not finite or was not computed is null."""
        worlds = self.world_size
        return {
            "a": self.a,
            "b": self.b,
            "dtype": self.dtype,
            "world_size": worlds if isinstance(worlds, int) else list(worlds),
            "steps": self.steps,
            "verdict": self.verdict.value,
            "max_relative_loss_difference": _number(self.max_relative_loss_difference),
            "max_relative_parameter_difference": _number(self.max_relative_parameter_difference),
            "zero_gradient_parameters": list(self.zero_gradient_parameters),
            "first_divergence": self.first_divergence.to_json() if self.first_divergence else None,
            "diagnosis": self.diagnosis.to_json() if self.diagnosis else None,
            "settings": list(self.settings),
            "environment": self.environments.to_json(),
            "unrecorded": self.unrecorded,
            "bits": self.bits,
            "power": self.directions.to_json() if self.directions else None,
            "notes": list(self.notes),
            "reason": self.reason,
        }


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
