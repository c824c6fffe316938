"""Alarms, and the rule that tells a new one from one that goes on."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from crossframe.monitoring.losses import MAX_EARLIER_LOSSES

QUIET_STEPS = MAX_EARLIER_LOSSES
"""An alarm that ended is raised again only after this many steps: then no loss of its time is compared with any more."""


class Kind(StrEnum):
    """The kinds of alarms."""

    NOT_FINITE = "not finite"
    RANKS = "ranks disagree"
    BASELINE = "baseline"
    LOSS = "loss"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Alarm:
    """Something that a healthy run does not show.

    Attributes:
        kind: the rule that was violated.
        step: the step that shows it.
        subject: a unit, a parameter, or "" for the whole run. Alarms of one kind and subject are one alarm while they go on.
        text: a sentence.
    """

    kind: Kind
    step: int
    subject: str
    text: str

    def describe(self) -> str:
        """The alarm in a sentence, with its kind.

        >>> Alarm(Kind.LOSS, 7, "", "step 7: the loss rose").describe()
        'loss: step 7: the loss rose'
        """
        return f"{self.kind}: {self.text}"

    def to_json(self) -> dict:
        """The alarm as a JSON object."""
        return {"kind": self.kind.value, "step": self.step, "subject": self.subject, "text": self.text}


class AlarmFilter:
    """Tells new alarms from those that go on."""

    def __init__(self) -> None:
        self._last: dict[tuple[Kind, str], int] = {}
        self._going_on: set[tuple[Kind, str]] = set()

    def new(self, step: int, kinds: Iterable[Kind], alarms: Iterable[Alarm]) -> list[Alarm]:
        """The new ones of the alarms of a step.

        Args:
            kinds: the rules that were applied to this step. Alarms of other kinds go on.
        """
        found, now = [], set()
        for alarm in alarms:
            key = (alarm.kind, alarm.subject)
            if key not in self._going_on and step - self._last.get(key, -QUIET_STEPS) >= QUIET_STEPS:
                found.append(alarm)
            now.add(key)
            self._last[key] = step
        judged = set(kinds)
        self._going_on = {key for key in self._going_on if key[0] not in judged} | now
        return found
