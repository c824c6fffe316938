"""The life of a unit (R12): what its memory holds, what its module shows, and which moves are legal.

Four things move apart and are therefore kept apart:

- residency: what memory holds. Only the shard, a shard of a smaller group (R08), or everything.
- freshness: whether the gathered copy still equals the shards that it was gathered from.
- exposure: what the module shows its user. The sharded parameters, the full ones in use, or the full ones summoned.
- activity: what the unit is doing. Nothing, its forward, or its backward.

`_follow` is the whole law, and `_TRANSITIONS` its table. An engine holds one `UnitState`, asks `state.after(move, unit)` and
gets the next one, or a StateError that names the unit, the state and the move.
"""

import itertools
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import assert_never

from crossframe.errors import StateError


class Residency(IntEnum):
    """What a unit's memory holds."""

    SHARD = 0
    K_GROUP = 1
    FULL = 2


class Freshness(IntEnum):
    """Whether the gathered copy equals the shards. A unit that gathered nothing is SAME."""

    SAME = 0
    STALE = 1


class Exposure(IntEnum):
    """What the unit's module shows."""

    SHARDED = 0
    FULL = 1
    SUMMONED = 2


class Activity(IntEnum):
    """What the unit is in the middle of."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2


class Move(IntEnum):
    """What may happen to a unit."""

    GATHER = 0  # the all-gather is issued; its buffer exists
    EXPOSE = 1  # the module shows the full parameters, for use
    CONCEAL = 2  # the module shows the shards again; full memory may stay
    RESHARD = 3  # full memory is freed
    RESHARD_TO_GROUP = 4  # full memory is exchanged for a k-group's shard (R08)
    BEGIN_FORWARD = 5
    END_FORWARD = 6
    BEGIN_BACKWARD = 7
    END_BACKWARD = 8
    EDIT_SHARDS = 9  # an optimizer or a user wrote into the shards
    SUMMON = 10  # the user is shown the full parameters
    DISMISS = 11  # and no longer
    RESET = 12  # after an exception: back to the shard from anywhere (R17)


@dataclass(frozen=True)
class UnitState:
    """One state of a unit. See the module's docstring."""

    residency: Residency = Residency.SHARD
    freshness: Freshness = Freshness.SAME
    exposure: Exposure = Exposure.SHARDED
    activity: Activity = Activity.IDLE

    def after(self, move: Move, unit: str) -> "UnitState":
        """The state that follows, or StateError."""
        following = self._moves[move]
        if following is None:
            raise StateError(f"unit {unit!r}: cannot {_SAYS[move]} {self.describe()}{_advice(self, move)}")
        return following

    @cached_property
    def _moves(self) -> "tuple[UnitState | None, ...]":
        # By the number of the move: engines come here at every move of every unit.
        return _TRANSITIONS[self]

    def allows(self, move: Move) -> bool:
        """Whether the move is legal here."""
        return self._moves[move] is not None

    def __reduce__(self) -> tuple[type["UnitState"], tuple[IntEnum, ...]]:
        # What it knows of its moves does not travel.
        return UnitState, (self.residency, self.freshness, self.exposure, self.activity)

    def describe(self) -> str:
        """The state in words, for messages."""
        return (
            f"while memory holds {_HOLDS[self.residency]}"
            f"{' (stale)' if self.freshness else ''}, the module shows {_SHOWS[self.exposure]}"
            f" and the unit is {_DOES[self.activity]}"
        )


_HOLDS = {
    Residency.SHARD: "the shard alone",
    Residency.K_GROUP: "a smaller group's shard",
    Residency.FULL: "the full parameters",
}
_SHOWS = {
    Exposure.SHARDED: "sharded parameters",
    Exposure.FULL: "full parameters in use",
    Exposure.SUMMONED: "summoned full parameters",
}
_DOES = {Activity.IDLE: "idle", Activity.FORWARD: "in its forward", Activity.BACKWARD: "in its backward"}
_SAYS = {
    Move.GATHER: "all-gather",
    Move.EXPOSE: "expose the full parameters",
    Move.CONCEAL: "show the shards",
    Move.RESHARD: "reshard",
    Move.RESHARD_TO_GROUP: "reshard to a smaller group",
    Move.BEGIN_FORWARD: "begin a forward",
    Move.END_FORWARD: "end a forward",
    Move.BEGIN_BACKWARD: "begin a backward",
    Move.END_BACKWARD: "end a backward",
    Move.EDIT_SHARDS: "edit the shards",
    Move.SUMMON: "unshard the parameters for the user",
    Move.DISMISS: "end the unsharding for the user",
    Move.RESET: "reset",
}


def _advice(state: UnitState, move: Move) -> str:
    if move == Move.SUMMON and state.exposure == Exposure.SUMMONED:
        return ": they are unsharded already; use the context that is open"
    if move == Move.SUMMON and state.activity:
        return f": not during {'forward' if state.activity == Activity.FORWARD else 'backward'}; wait until it is over"
    if move in (Move.BEGIN_FORWARD, Move.BEGIN_BACKWARD) and state.exposure == Exposure.SUMMONED:
        return ": leave summon_full_params before running the module"
    if move == Move.EDIT_SHARDS and state.exposure == Exposure.SUMMONED:
        return ": write into the full parameters, or leave summon_full_params first"
    if move == Move.EDIT_SHARDS and state.activity:
        return f": wait until its {'forward' if state.activity == Activity.FORWARD else 'backward'} is over"
    return ""


def _follow(state: UnitState, move: Move) -> UnitState | None:
    """The law, move by move: None where it is not legal."""
    residency, freshness, exposure, activity = state.residency, state.freshness, state.exposure, state.activity
    full, sharded, idle = residency == Residency.FULL, exposure == Exposure.SHARDED, activity == Activity.IDLE

    def to(r=residency, f=freshness, e=exposure, a=activity):
        return UnitState(r, f, e, a)

    match move:
        case Move.GATHER:
            return to(r=Residency.FULL, f=Freshness.SAME) if sharded and (not full or freshness) else None
        case Move.EXPOSE:
            return to(e=Exposure.FULL) if sharded and full and not freshness else None
        case Move.CONCEAL:
            return to(e=Exposure.SHARDED) if exposure == Exposure.FULL else None
        case Move.RESHARD:
            # Summoned as well: where one rank alone sees the full parameters (R19), the others free theirs at once.
            held = residency != Residency.SHARD and exposure != Exposure.FULL
            return to(r=Residency.SHARD, f=Freshness.SAME) if held else None
        case Move.RESHARD_TO_GROUP:
            return to(r=Residency.K_GROUP) if sharded and full and not freshness else None
        case Move.BEGIN_FORWARD:
            # What is computed again within a backward (activation checkpointing) begins no forward of the unit.
            return to(a=Activity.FORWARD) if exposure != Exposure.SUMMONED and idle else None
        case Move.END_FORWARD:
            return to(a=Activity.IDLE) if activity == Activity.FORWARD else None
        case Move.BEGIN_BACKWARD:
            return to(a=Activity.BACKWARD) if exposure != Exposure.SUMMONED else None
        case Move.END_BACKWARD:
            return to(a=Activity.IDLE) if activity == Activity.BACKWARD else None
        case Move.EDIT_SHARDS:
            held = Freshness.SAME if residency == Residency.SHARD else Freshness.STALE
            return to(f=held) if sharded and idle else None
        case Move.SUMMON:
            return to(e=Exposure.SUMMONED) if idle and full and not freshness and sharded else None
        case Move.DISMISS:
            return to(e=Exposure.SHARDED) if exposure == Exposure.SUMMONED else None
        case Move.RESET:
            return UnitState()
        case _:
            assert_never(move)


def states() -> tuple[UnitState, ...]:
    """Every state that memory can be in: a copy can be stale only where there is one."""
    every = itertools.product(Residency, Freshness, Exposure, Activity)
    return tuple(UnitState(*s) for s in every if not (s[0] == Residency.SHARD and s[1] == Freshness.STALE))


def _table() -> dict[UnitState, tuple[UnitState | None, ...]]:
    # One object a state, which knows its moves once it has been asked.
    known = {state: state for state in states()}
    known_or_none = known | {None: None}
    return {state: tuple(known_or_none[_follow(state, move)] for move in Move) for state in known}


_TRANSITIONS = _table()
