"""What a check counts: cases that agree, that differ for a stated reason, and that differ without one."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

KEPT_CASES = 3


@dataclass
class Tally:
    """The outcome of one rule.

    Attributes:
        agreed: cases in which both sides said the same.
        explained: cases that differ, by the reason; a check names a reason only where it has verified it.
        examples: one case for each reason.
        unexplained: number of cases that differ and should not, or that could not be tried.
        failures: the first of them, each as a line that reproduces it.
    """

    agreed: int = 0
    explained: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    unexplained: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def num_cases(self) -> int:
        """Cases tried."""
        return self.agreed + self.explained.total() + self.unexplained

    def compare(self, ours: Any, theirs: Any, case: Any, who: str = "torch") -> bool:
        """Count one case; `case`, or each part of a tuple, is turned into text only where the sides differ.

        >>> tally = Tally()
        >>> tally.compare(2, 2, "5 elements, rank 0"), tally.compare(1, 0, "5 elements, rank 3")
        (True, False)
        >>> tally.failures
        ['5 elements, rank 3: ours 1, torch 0']
        """
        if ours == theirs:
            self.agreed += 1
            return True
        self.fail(f"{_text(case)}: ours {ours!r}, {who} {theirs!r}")
        return False

    def explain(self, reason: str, case: Any) -> None:
        """Count a case that differs for a reason that the check has just verified on it."""
        if reason not in self.explained:
            self.examples[reason] = _text(case)
        self.explained[reason] += 1

    def fail(self, line: str) -> None:
        """Count a case that differs without a reason."""
        self.unexplained += 1
        if len(self.failures) < KEPT_CASES:
            self.failures.append(line)

    def add(self, other: "Tally") -> None:
        """Take in what another part of the same check counted."""
        self.agreed += other.agreed
        self.explained += other.explained
        self.examples = other.examples | self.examples
        self.unexplained += other.unexplained
        self.failures = (self.failures + other.failures)[:KEPT_CASES]


def _text(case: Any) -> str:
    return ", ".join(map(str, case)) if type(case) is tuple else str(case)


class Tallies(dict[str, Tally]):
    """A tally for each rule that a check covers; one for any other is an error of the check."""

    def __init__(self, rules: Iterable[str]) -> None:
        super().__init__({rule: Tally() for rule in rules})
