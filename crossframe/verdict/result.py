"""What a comparison returns."""

import math
from dataclasses import dataclass, field

from crossframe.verdict.diagnosis import Diagnosis
from crossframe.verdict.direction import Directions
from crossframe.verdict.kinds import Verdict
from crossframe.verdict.measure.locate import Divergence


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of a group of quantities, the same thing on several ranks: that of the worst.

    Attributes:
        name: parameter, "input of MODULE", "exp_avg of PARAMETER"; "" of a loss and of a norm.
        difference: relative.
        used: how much of what rounding may reach it is; more than 1 is outside. None where nothing is known of that; inf where
            bits are asked for, and differ.
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
    """What a comparison found.

    Attributes:
        a, b: what the recordings are called (`labels`).
        world_size: of both, or (of a, of b) where they differ.
        steps: how many steps were compared.
        max_relative_loss_difference: over steps and ranks; inf where only one side is finite; None if not compared.
        max_relative_parameter_difference: over recorded steps and parameters, without `zero_gradient_parameters`.
        zero_gradient_parameters: what differs for no reason (`crossframe.verdict.measure.zero_gradient`).
        first_divergence: the first quantity outside its bound, None where there is none.
        reason: the verdict's ground, in a sentence.
        loss_differences: the largest over ranks, a step.
        parameter_differences: (step, the largest over parameters), a recorded step.
        envelope_used: how much of what perturbed runs allow was used up where it was most; more than 1 is outside. None without
            perturbed runs.
        judged_share: which part of all updated elements could be judged (`crossframe.verdict.envelope`). None without perturbed
            runs.
        judged: everything that was compared, causes first.
        diagnosis: what the first divergence looks like; None where nothing known does.
        settings: what the two state differently (`crossframe.verdict.measure.comparable.differing_settings`), a sentence each.
        notes: what else is not alike and makes no difference: samples in another order, gradients recorded before clipping and
            after it; a sentence each.
        parted: the judgement of the quantity that `first_divergence` is in.
        directions: tests of direction inside the spread of perturbed runs; None where there were none.
        bits: what the first quantity that differs in bits says, or why bits are no evidence, in a clause; None where all bits are
            equal.
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
    envelope_used: float | None = None
    judged_share: float | None = None
    judged: tuple[Judged, ...] = field(default=(), repr=False)
    diagnosis: Diagnosis | None = None
    settings: tuple[str, ...] = ()
    parted: Judged | None = field(default=None, repr=False)
    directions: Directions | None = field(default=None, repr=False)
    bits: str | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict:
        """The verdict as a JSON object. A difference that is not finite, or was not taken, is null."""
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
            "bits": self.bits,
            "power": self.directions.to_json() if self.directions else None,
            "notes": list(self.notes),
            "reason": self.reason,
        }


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
