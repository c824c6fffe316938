"""The states that a unit can reach."""

from crossframe.lifecycle import Move, UnitState

START = UnitState()


def reachable(without: Move | None = None) -> set[UnitState]:
    """Every state that moves lead to from the start."""
    found, waiting = {START}, [START]
    while waiting:
        state = waiting.pop()
        for move in Move:
            if move != without and state.allows(move) and (following := state.after(move, "u")) not in found:
                found.add(following)
                waiting.append(following)
    return found


REACHABLE = reachable()
