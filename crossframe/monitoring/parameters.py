"""Finds units whose parameters jump, from the updated parameters of recorded steps.

A unit's parameters jump if their norm is `JUMP` times the largest of all earlier recorded steps, of which at least
`MIN_PAST_STEPS` were not zero. An optimizer changes a norm by such a factor in many steps, and a norm that starts at nearly zero
has grown after five recorded ones. A flipped bit in the exponent of one weight changes the norm at once, and the loss may not
show it.
"""

from collections.abc import Mapping

JUMP = 100.0
MIN_PAST_STEPS = 5


class ParameterRule:
    """Judges the parameters of units, one recorded step at a time."""

    def __init__(self) -> None:
        self._past: dict[str, tuple[float, int]] = {}

    def add(self, norms: Mapping[str, float]) -> dict[str, str]:
        """Add a step; returns what is wrong, as a clause, by unit.

        Args:
            norms: of the parameters of each unit. One that is not finite is left to another rule.
        """
        found: dict[str, str] = {}
        for unit, norm in norms.items():
            largest, num = self._past.get(unit, (0.0, 0))
            if num >= MIN_PAST_STEPS and norm >= JUMP * largest:
                found[unit] = (
                    f"jump: their norm is {norm:.3g}, {norm / largest:.3g} times the largest of {num} earlier steps: something "
                    "else than the optimizer wrote to them, or training diverges"
                )
            if norm > 0:
                self._past[unit] = max(largest, norm), num + 1
        return found
