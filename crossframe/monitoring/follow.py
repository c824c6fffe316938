"""Follows a recording while it is being written, and judges each of its steps once."""

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from crossframe.inspection.agreement import disagreements_at
from crossframe.inspection.not_finite import first_not_finite
from crossframe.inspection.optimizer import optimizer_deviations_at
from crossframe.inspection.values import Value, values_of
from crossframe.monitoring.alarm import Alarm, AlarmFilter, Kind
from crossframe.monitoring.baseline import BaselineRule
from crossframe.monitoring.gradients import GradientRule
from crossframe.monitoring.losses import LossRule
from crossframe.monitoring.parameters import ParameterRule
from crossframe.monitoring.updates import UpdateRule
from crossframe.recording import Manifest, Recording
from crossframe.recording.event_format import REDUCE, UPDATE
from crossframe.recording.known_settings import FORWARD_ONLY
from crossframe.recording.live import LiveRecording
from crossframe.verdict.diagnosis.stated_optimizer import ADAM, ADAMW

_EVERY_STEP = (Kind.NOT_FINITE, Kind.RANKS, Kind.LOSS, Kind.BASELINE)
_RECORDED_STEP = (*_EVERY_STEP, Kind.GRADIENT, Kind.OPTIMIZER)
_LOSSES = 512


@dataclass(frozen=True)
class StepScalars:
    """The numbers of a step.

    Attributes:
        loss: mean over ranks.
        grad_norm: as the loop computed it; None if it did not, or if the step was not recorded.
        gradients, parameters: the norms of each unit, "" for the root; empty if the step was not recorded.
    """

    step: int
    loss: float
    grad_norm: float | None = None
    gradients: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, float] = field(default_factory=dict)


class Follower:
    """Follows the recording of a run, which may still be written, and judges each step once it is complete on all ranks.

    Attributes:
        alarms: all alarms so far.
        notes: other observations, one sentence each.
        num_steps: number of steps that were judged.
        losses: the means over ranks of the last steps.
        last: the numbers of the last recorded step; None if there is none yet.
        changed_at: `time.monotonic` when the last new step was seen.

    Args:
        directory: of the recording.
        baseline: the rule that compares with it; None: there is none.

    Raises:
        RecordingError: there is no recording.
    """

    def __init__(self, directory: str | Path, baseline: BaselineRule | None = None) -> None:
        self._live = LiveRecording(directory)
        manifest = self._live.manifest
        self._baseline = baseline
        self._alarm_filter, self._losses_rule, self._updates = AlarmFilter(), LossRule(), UpdateRule()
        self._gradients, self._parameters = GradientRule(_epsilon(manifest)), ParameterRule()
        self._trains = not manifest.settings.get(FORWARD_ONLY)
        self._known: set[str] = set()
        self.alarms: list[Alarm] = []
        self.notes: list[str] = []
        self.num_steps = 0
        self.losses: deque[float] = deque(maxlen=_LOSSES)
        self.last: StepScalars | None = None
        self.changed_at = time.monotonic()

    @property
    def manifest(self) -> Manifest:
        """The manifest of the run."""
        return self._live.manifest

    @property
    def ended(self) -> bool:
        """Whether the run has ended its recording on all ranks."""
        return self._live.ended

    @property
    def steps_by_rank(self) -> list[int]:
        """The number of complete steps of each rank."""
        return self._live.steps_by_rank

    def advance(self) -> tuple[list[Alarm], list[StepScalars]]:
        """Judge the steps that were completed since the previous call; returns the new alarms, and the numbers of these steps.

        Raises:
            RecordingError: a line or a tensor is damaged, or another run has replaced the recording.
        """
        recording = self._live.read()
        alarms: list[Alarm] = []
        scalars: list[StepScalars] = []
        if recording.num_steps > self.num_steps:
            self.changed_at = time.monotonic()
        for step in range(self.num_steps, recording.num_steps):
            found, numbers = self._judge(recording, step)
            alarms += found
            scalars.append(numbers)
            self.num_steps = step + 1
        if self._baseline is not None and scalars:
            alarms += self._outside_baseline(recording, self._baseline)
        kept = 0 if self._baseline is None else self._baseline.num_steps
        for numbers in scalars:
            if numbers.step >= kept:
                self._live.forget(numbers.step)
        self.alarms += alarms
        return alarms, scalars

    def _judge(self, recording: Recording, step: int) -> tuple[list[Alarm], StepScalars]:
        values = list(values_of(recording, step))
        numbers = _scalars(recording, step, values)
        self.losses.append(numbers.loss)
        found = list(self._not_finite(recording, step, values))
        recorded = recording.is_recorded(step)
        if found:  # other rules would find its effects
            self.last = numbers if recorded else self.last
            return self._alarm_filter.new(step, (Kind.NOT_FINITE,), found), numbers
        found += self._ranks(recording, step)
        if self._trains and (text := self._losses_rule.add(numbers.loss)):
            found.append(Alarm(Kind.LOSS, step, "", f"step {step}: {text}"))
        if recorded:
            self.last = numbers
            found += self._gradient(recording, step, numbers)
            found += self._parameter(step, numbers)
            found += self._optimizer(recording, step)
        return self._alarm_filter.new(step, _RECORDED_STEP if recorded else _EVERY_STEP, found), numbers

    def _not_finite(self, recording: Recording, step: int, values: list[Value]) -> Iterable[Alarm]:
        found, harmless = first_not_finite(recording, {step: values})
        self._note("mask", harmless)
        for each in found:
            if each.skipped:
                self._note("skipped", [each.describe()])
            else:
                yield Alarm(Kind.NOT_FINITE, step, "", each.describe())

    def _ranks(self, recording: Recording, step: int) -> Iterable[Alarm]:
        found, notes = disagreements_at(recording, step)
        self._note("edited", notes)
        apart = [each for each in found if not each.rounding]
        self._note("rounding", [each.describe() for each in found if each.rounding])
        if apart:
            more = f"; and {len(apart) - 1} more values of this step" if len(apart) > 1 else ""
            yield Alarm(Kind.RANKS, step, "", apart[0].describe() + more)

    def _gradient(self, recording: Recording, step: int, numbers: StepScalars) -> Iterable[Alarm]:
        sizes: dict[str, int] = {}
        for name, spec in recording.manifest.params.items():
            if recording.has(REDUCE, step, name):
                unit = recording.manifest.unit_of[name]
                sizes[unit] = sizes.get(unit, 0) + spec.numel
        for unit, text in self._gradients.add(
            {unit: (norm, sizes[unit]) for unit, norm in numbers.gradients.items()}
        ).items():
            yield Alarm(Kind.GRADIENT, step, unit, f"step {step}: the gradient of unit {unit or '(root)'!r} {text}")

    def _parameter(self, step: int, numbers: StepScalars) -> Iterable[Alarm]:
        for unit, text in self._parameters.add(numbers.parameters).items():
            subject = f"parameters of {unit}"
            yield Alarm(
                Kind.OPTIMIZER, step, subject, f"step {step}: the parameters of unit {unit or '(root)'!r} {text}"
            )

    def _optimizer(self, recording: Recording, step: int) -> Iterable[Alarm]:
        for each in optimizer_deviations_at(recording, step):
            yield Alarm(Kind.OPTIMIZER, step, "", each.describe())
        unexpected = list(self._updates.add(recording, step))
        for is_lost in (False, True):
            some = [each for each in unexpected if each.lost is is_lost]
            if not some:
                continue
            more = f" and {len(some) - 1} more" if len(some) > 1 else ""
            text = f"step {step}: the parameter {some[0].parameter!r}{more} {some[0].text}"
            if is_lost:
                self._note("lost updates", [text])
            else:
                yield Alarm(Kind.OPTIMIZER, step, "moved", text)

    def _outside_baseline(self, recording: Recording, rule: BaselineRule) -> list[Alarm]:
        step, text, note = rule.add(recording)
        self._note("baseline", [note] if note else [])
        return [Alarm(Kind.BASELINE, step, "", text)] if text else []

    def _note(self, about: str, sentences: list[str]) -> None:
        """Keep the first note of each kind."""
        if sentences and about not in self._known:
            self._known.add(about)
            self.notes.append(sentences[0])


def _epsilon(manifest: Manifest) -> float | None:
    """The epsilon of Adam or AdamW; None if it is another optimizer."""
    if manifest.settings.get("optimizer") not in (ADAM, ADAMW):
        return None
    return float(manifest.settings.get("eps") or 1e-8)


def _scalars(recording: Recording, step: int, values: list[Value]) -> StepScalars:
    """The numbers of a step. Norms are those of the first replica."""
    losses = recording.losses_at(step)
    norms: dict[str, dict[str, float]] = {REDUCE: {}, UPDATE: {}}
    for value in values:  # those of gradients are in the order of backward
        if value.phase in norms and value.rank < recording.manifest.mesh.shard:
            of_unit, unit = norms[value.phase], recording.manifest.unit_of[value.parameter]
            of_unit[unit] = of_unit.get(unit, 0.0) + (math.nan if value.num_not_finite else value.norm**2)
    units = dict.fromkeys(unit for unit, _ in recording.manifest.units)
    roots = {phase: {unit: math.sqrt(own[unit]) for unit in units if unit in own} for phase, own in norms.items()}
    return StepScalars(step, float(np.mean(losses)), recording.grad_norm(step, 0), roots[REDUCE], roots[UPDATE])
