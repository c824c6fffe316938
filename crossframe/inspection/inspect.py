"""One recording in, what is wrong with it out."""

from dataclasses import dataclass

from crossframe.inspection.agreement import Disagreement, disagreements
from crossframe.inspection.growth import Growth, growth
from crossframe.inspection.not_finite import NotFinite, first_not_finite
from crossframe.inspection.optimizer import Departure, optimizer_departures
from crossframe.inspection.values import values_of
from crossframe.recording import Recording


@dataclass(frozen=True)
class Inspection:
    """What one recording shows of its run.

    Attributes:
        directory: of the recording.
        num_steps: that were examined.
        num_values: how many recorded values were read.
        not_finite: the first value that is not finite, of the first step that was skipped for it and of the first that was not.
        growing: what grows from step to step, the fastest first. That alone is no fault.
        disagreements: values that ranks must share and do not, causes first.
        departures: steps that did not follow the optimizer's rule.
        notes: what else was seen, and what could not be examined; a sentence each.
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
        """Whether anything was found that a right run does not have."""
        parted = any(not each.rounding for each in self.disagreements)
        return any(not each.skipped for each in self.not_finite) or parted or bool(self.departures)

    @property
    def exit_status(self) -> int:
        """The exit status of a command that found this, as of `crossframe.verdict.Verdict`: 0 nothing wrong, 1 a fault."""
        return int(self.is_faulty)

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
    """Examine one recording by itself.

    Raises:
        RecordingError: tensors that are damaged.
    """
    steps = {step: list(values_of(recording, step)) for step in range(recording.num_steps)}
    not_finite, harmless = first_not_finite(recording, steps)
    parted, odd = disagreements(recording)
    departed, unexamined = optimizer_departures(recording)
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
