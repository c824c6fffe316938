"""Inspects one recording."""

from dataclasses import dataclass

from crossframe.inspection.agreement import Disagreement, disagreements
from crossframe.inspection.growth import Growth, growth
from crossframe.inspection.not_finite import NotFinite, first_not_finite
from crossframe.inspection.optimizer import Departure, optimizer_deviations
from crossframe.inspection.values import values_of
from crossframe.recording import Recording


@dataclass(frozen=True)
class Inspection:
    """The findings in one recording.

    Attributes:
        directory: directory of the recording.
        num_steps: number of steps that were inspected.
        num_values: number of recorded values that were read.
        not_finite: the first value that is not finite, in the first step that was skipped because of it and in the first step
            that was not.
        growing: series that grow from step to step, the fastest first. Growth alone is not a fault.
        disagreements: values that ranks must share but do not, causes first.
        departures: steps that did not follow the optimizer's rule.
        notes: other observations, and what could not be inspected; one sentence each.
    """

    directory: str
    num_steps: int
    num_values: int
    not_finite: tuple[NotFinite, ...]
    growing: tuple[Growth, ...]
    disagreements: tuple[Disagreement, ...]
    departures: tuple[Departure, ...]
    notes: tuple[str, ...]

    @property
    def is_faulty(self) -> bool:
        """Whether there is a finding that a correct run does not have."""
        parted = any(not each.rounding for each in self.disagreements)
        return any(not each.skipped for each in self.not_finite) or parted or bool(self.departures)

    def to_json(self) -> dict:
        """The findings as a JSON object."""
        return {
            "recording": self.directory,
            "steps": self.num_steps,
            "values": self.num_values,
            "faulty": self.is_faulty,
            "not_finite": [each.to_json() for each in self.not_finite],
            "growing": [each.to_json() for each in self.growing],
            "disagreements": [each.to_json() for each in self.disagreements],
            "departures": [each.to_json() for each in self.departures],
            "notes": list(self.notes),
        }


def inspect(recording: Recording) -> Inspection:
    """Inspect one recording.

    Raises:
        RecordingError: a tensor is damaged.
    """
    steps = {step: list(values_of(recording, step)) for step in range(recording.num_steps)}
    not_finite, harmless = first_not_finite(recording, steps)
    parted, odd = disagreements(recording)
    departed, unexamined = optimizer_deviations(recording)
    return Inspection(
        str(recording.directory),
        recording.num_steps,
        sum(len(values) for values in steps.values()),
        tuple(not_finite),
        tuple(growth(recording, steps)),
        tuple(parted),
        tuple(departed),
        (*harmless, *odd, *unexamined),
    )
