"""The differences of the environments of two recordings, and whether they can explain a verdict."""

from dataclasses import dataclass

from crossframe.environment import (
    Difference,
    Effect,
    OddRanks,
    differences,
    odd_ranks,
    recorded_environment,
    recorded_environments,
)
from crossframe.environment.facts import (
    COMMAND,
    CONFIGURATION,
    FRAMEWORK,
    MACHINE,
    MODULES,
    PACKAGES,
    RANDOM,
    SOURCE,
    VARIABLES,
)
from crossframe.recording import Recording
from crossframe.recording.module_calls import called_module
from crossframe.verdict.measure.locate import Divergence
from crossframe.verdict.verdicts import Verdict

# Settings of the run are those of `crossframe.verdict.measure.comparable`.
_SECTIONS = (CONFIGURATION, RANDOM, PACKAGES, VARIABLES, MACHINE)
_OF_ONE_FRAMEWORK = (MODULES, FRAMEWORK, COMMAND, SOURCE)
"""Sections in which runs in two frameworks differ anyway."""
_MOST_IN_JSON = 50


@dataclass(frozen=True)
class Environments:
    """The differences of two environments that may change numbers.

    Attributes:
        differences: those first that most likely change the numbers.
        odd_ranks: (name of the run, ranks whose environment differs from that of its other ranks), in the same order.
        explanation: the first of them and why it changes numbers, as a sentence; "" if the numbers are equal or there is none.
    """

    differences: tuple[Difference, ...] = ()
    odd_ranks: tuple[tuple[str, OddRanks], ...] = ()
    explanation: str = ""

    def to_json(self) -> dict:
        """The differences as a JSON object."""
        return {
            "explanation": self.explanation or None,
            "differences": [each.to_json() for each in self.differences[:_MOST_IN_JSON]],
            "odd_ranks": [{"run": name} | odd.to_json() for name, odd in self.odd_ranks[:_MOST_IN_JSON]],
        }


def differing_environments(a: Recording, b: Recording) -> tuple[Difference, ...]:
    """The facts of the environments that may change numbers, ranked (`crossframe.environment.differences`).

    Raises:
        RecordingError: a damaged environment.
    """
    first, second = (recorded_environment(each.directory, each.manifest) for each in (a, b))
    same_framework = a.manifest.framework == b.manifest.framework
    found = differences(first, second, (*_OF_ONE_FRAMEWORK, *_SECTIONS) if same_framework else _SECTIONS)
    return tuple(each for each in found if each.effect is not Effect.HARDLY)


def environments_of(
    a: Recording, b: Recording, verdict: Verdict, where: Divergence | None, labels: tuple[str, str]
) -> Environments:
    """The differences of two environments, and which of them explains the verdict.

    A module with other options explains a difference that begins in it.
    """
    found = differing_environments(a, b)
    odd = tuple(
        (label, each)
        for label, run in zip(labels, (a, b), strict=True)
        for each in odd_ranks(recorded_environments(run.directory, run.manifest))
        if each.effect is not Effect.HARDLY
    )
    if verdict is Verdict.EQUAL or not (found or odd):
        return Environments(found, odd)
    module = None if where is None or where.module is None else called_module(where.module)
    here = [each for each in found if (each.section, each.name) == (MODULES, module)]
    number = len(found) + len(odd)
    more = f"; crossframe check lists {number - 1} more" if number > 1 else ""
    explains = "explains" if here else "may explain"
    if not here and odd and (not found or odd[0][1].effect.order <= found[0].effect.order):
        label, ranks = odd[0]
        text, reason = f"in {label} {ranks.describe()}", ranks.difference.reason
    else:
        first = here[0] if here else found[0]
        text, reason = first.describe(labels), first.reason
    return Environments(found, odd, f"{text}, which {explains} this: {reason}{more}")
