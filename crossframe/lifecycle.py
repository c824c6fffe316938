"""The state machine of a unit (R12): its memory, its registered parameters, and the legal transitions.

A state has four independent parts:

- residency: the parameters in memory: only the shard, the reshard group's shard (R08), or all parameters.
- freshness: whether the unsharded parameters still equal the shards from which they were all-gathered.
- exposure: the parameters that the module registers: sharded, unsharded for computation, or summoned for the user.
- activity: idle, in forward, or in backward.

`_follow` defines the transitions, and `_TRANSITIONS` is its table. An engine calls `state.after(move, unit)`, which returns the
next state or raises a StateError that names the unit, the state and the move.
"""

import itertools
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import assert_never

from crossframe.errors import StateError


class Residency(IntEnum):
    """The parameters in a unit's memory."""

    SHARD = 0
    RESHARD_GROUP = 1
    FULL = 2


class Freshness(IntEnum):
    """Whether the unsharded parameters equal the shards; SAME without unsharded parameters."""

    SAME = 0
    STALE = 1


class Exposure(IntEnum):
    """The parameters that the unit's module registers."""

    SHARDED = 0
    FULL = 1
    SUMMONED = 2


class Activity(IntEnum):
    """The current phase of the unit."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2


class Move(IntEnum):
    """A transition of a unit."""

    GATHER = 0  # issue the all-gather and allocate its buffer
    EXPOSE = 1  # register the unsharded parameters for computation
    CONCEAL = 2  # register the shards again; unsharded memory may stay
    RESHARD = 3  # free the unsharded parameters
    RESHARD_TO_GROUP = 4  # keep only the reshard group's shard (R08)
    BEGIN_FORWARD = 5
    END_FORWARD = 6
    BEGIN_BACKWARD = 7
    END_BACKWARD = 8
    EDIT_SHARDS = 9  # an optimizer or a user wrote into the shards
    SUMMON = 10  # register the unsharded parameters for the user
    DISMISS = 11  # end of SUMMON
    RESET = 12  # back to the shard after an exception (R17)


@dataclass(frozen=True)
class UnitState:
    """One state of a unit. See the module's docstring."""

    residency: Residency = Residency.SHARD
    freshness: Freshness = Freshness.SAME
    exposure: Exposure = Exposure.SHARDED
    activity: Activity = Activity.IDLE

    def after(self, move: Move, unit: str) -> "UnitState":
        """Return the next state, or raise StateError."""
        following = self._moves[move]
        if following is None:
            raise StateError(f"unit {unit!r}: cannot {_SAYS[move]} {self.describe()}{_advice(self, move)}")
        return following

    @cached_property
    def _moves(self) -> "tuple[UnitState | None, ...]":
        # Indexed by move, as this is called at every transition of every unit.
        return _TRANSITIONS[self]

    def allows(self, move: Move) -> bool:
        """Whether the move is legal in this state."""
        return self._moves[move] is not None

    def __reduce__(self) -> tuple[type["UnitState"], tuple[IntEnum, ...]]:
        # Without the cached transitions.
        return UnitState, (self.residency, self.freshness, self.exposure, self.activity)

    def describe(self) -> str:
        """The state as a clause, for messages."""
        return (
            f"while memory holds {_HOLDS[self.residency]}"
            f"{' (stale)' if self.freshness else ''}, the module shows {_SHOWS[self.exposure]}"
            f" and the unit is {_DOES[self.activity]}"
        )


_HOLDS = {
    Residency.SHARD: "the shard alone",
    Residency.RESHARD_GROUP: "a reshard group's shard",
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
    Move.RESHARD_TO_GROUP: "reshard to a group",
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
    """Return the state after a move; None if it is illegal."""
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
            # Also while summoned: with rank0_only (R19), other ranks free theirs at once.
            held = residency != Residency.SHARD and exposure != Exposure.FULL
            return to(r=Residency.SHARD, f=Freshness.SAME) if held else None
        case Move.RESHARD_TO_GROUP:
            return to(r=Residency.RESHARD_GROUP) if sharded and full and not freshness else None
        case Move.BEGIN_FORWARD:
            # Recomputation in backward (activation checkpointing) does not begin a forward.
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
    """All states; only existing unsharded parameters can be stale."""
    every = itertools.product(Residency, Freshness, Exposure, Activity)
    return tuple(UnitState(*s) for s in every if not (s[0] == Residency.SHARD and s[1] == Freshness.STALE))


def _table() -> dict[UnitState, tuple[UnitState | None, ...]]:
    # One object per state, so that its cached transitions are shared.
    known = {state: state for state in states()}
    known_or_none = known | {None: None}
    return {state: tuple(known_or_none[_follow(state, move)] for move in Move) for state in known}


_TRANSITIONS = _table()
