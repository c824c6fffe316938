"""The result of a check."""

from dataclasses import dataclass

from crossframe.environment import Difference, Effect, OddRanks


@dataclass(frozen=True)
class Check:
    """The differences of two runs, or of the ranks of one.

    Attributes:
        labels: names of the two sides; of one run, its name twice.
        differences: of the two runs, those first that most likely change the numbers.
        odd_ranks: (name of the run, ranks that differ from its others), in the same order.
        notes: what could not be compared, one sentence each.
    """

    labels: tuple[str, str]
    differences: tuple[Difference, ...] = ()
    odd_ranks: tuple[tuple[str, OddRanks], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def effect(self) -> Effect:
        """The most likely effect of all differences; HARDLY if there are none."""
        effects = [each.effect for each in (*self.differences, *(odd for _, odd in self.odd_ranks))]
        return min(effects, key=lambda effect: effect.order, default=Effect.HARDLY)

    def to_json(self) -> dict:
        """The result as a JSON object."""
        return {
            "a": self.labels[0],
            "b": self.labels[1],
            "effect": self.effect.value if self.differences or self.odd_ranks else None,
            "differences": [each.to_json() | {"description": each.describe(self.labels)} for each in self.differences],
            "odd_ranks": [{"run": name} | odd.to_json() for name, odd in self.odd_ranks],
            "notes": list(self.notes),
        }
