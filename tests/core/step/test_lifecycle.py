"""The law of a unit's life: every state with every move (R12, R17, R18, R21)."""

import itertools
from dataclasses import asdict, replace

import pytest

from crossframe.errors import CrossframeError, StateError
from crossframe.lifecycle import Activity, Exposure, Freshness, Move, Residency, UnitState, states
from tests.core.helpers.lifecycle import REACHABLE, START, reachable

ALL = states()
EVERY = list(itertools.product(ALL, Move))


def run(*moves: Move, state: UnitState = START) -> UnitState:
    for move in moves:
        state = state.after(move, "u")
    return state


def where(**fields: object) -> set[UnitState]:
    """The states that have these values."""
    return {state for state in ALL if all(getattr(state, name) == value for name, value in fields.items())}


FULL_AND_FRESH = where(residency=Residency.FULL, freshness=Freshness.SAME)
SHOWS_SHARDS = where(exposure=Exposure.SHARDED)
SUMMONED = where(exposure=Exposure.SUMMONED)
IDLE = where(activity=Activity.IDLE)
# The law again, as sets of states: where a move is legal, and what it changes. Edits of the shards are below.
LAW = {
    Move.GATHER: (SHOWS_SHARDS - FULL_AND_FRESH, {"residency": Residency.FULL, "freshness": Freshness.SAME}),
    Move.EXPOSE: (SHOWS_SHARDS & FULL_AND_FRESH, {"exposure": Exposure.FULL}),
    Move.CONCEAL: (where(exposure=Exposure.FULL), {"exposure": Exposure.SHARDED}),
    Move.RESHARD: (
        (SHOWS_SHARDS | SUMMONED) - where(residency=Residency.SHARD),
        {"residency": Residency.SHARD, "freshness": Freshness.SAME},
    ),
    Move.RESHARD_TO_GROUP: (SHOWS_SHARDS & FULL_AND_FRESH, {"residency": Residency.RESHARD_GROUP}),
    Move.BEGIN_FORWARD: (IDLE - SUMMONED, {"activity": Activity.FORWARD}),
    Move.END_FORWARD: (where(activity=Activity.FORWARD), {"activity": Activity.IDLE}),
    Move.BEGIN_BACKWARD: (set(ALL) - SUMMONED, {"activity": Activity.BACKWARD}),
    Move.END_BACKWARD: (where(activity=Activity.BACKWARD), {"activity": Activity.IDLE}),
    Move.SUMMON: (IDLE & SHOWS_SHARDS & FULL_AND_FRESH, {"exposure": Exposure.SUMMONED}),
    Move.DISMISS: (SUMMONED, {"exposure": Exposure.SHARDED}),
    Move.RESET: (set(ALL), asdict(START)),
}


@pytest.mark.parametrize("move", LAW)
def test_R12_every_move_is_legal_where_the_law_says_and_changes_what_it_says(move):
    legal, changes = LAW[move]
    assert {state for state in ALL if state.allows(move)} == legal
    for state in legal:
        assert state.after(move, "u") == replace(state, **changes)


def test_R12_an_edit_of_the_shards_makes_any_gathered_copy_stale():
    for state in ALL:
        assert state.allows(Move.EDIT_SHARDS) == (state in SHOWS_SHARDS & IDLE)
        if state.allows(Move.EDIT_SHARDS):
            copied = state.residency != Residency.SHARD
            after = replace(state, freshness=Freshness.STALE if copied else Freshness.SAME)
            assert state.after(Move.EDIT_SHARDS, "u") == after


def test_R12_the_states_are_all_but_a_stale_shard():
    every = set(itertools.starmap(UnitState, itertools.product(Residency, Freshness, Exposure, Activity)))
    assert len(ALL) == len(set(ALL))
    assert every - set(ALL) == {s for s in every if s.residency == Residency.SHARD and s.freshness == Freshness.STALE}


def test_R12_moves_lead_from_states_to_states_and_the_rest_is_refused():
    for state, move in EVERY:
        if state.allows(move):
            assert state.after(move, "u") in ALL
        else:
            with pytest.raises(StateError):
                state.after(move, "u")


def test_R12_what_the_module_shows_is_in_memory_and_fresh():
    assert {s.exposure for s in REACHABLE} == set(Exposure)
    for state in REACHABLE:
        if state.exposure == Exposure.FULL:
            assert state in FULL_AND_FRESH
        if (
            state.exposure == Exposure.SUMMONED
        ):  # on the ranks to which nothing is shown, memory may hold the shard alone
            assert state.freshness == Freshness.SAME and state.residency != Residency.RESHARD_GROUP


def test_R12_after_an_edit_of_the_shards_nothing_is_shown_before_a_gather():
    edited = {run(Move.EDIT_SHARDS, state=state) for state in REACHABLE if state.allows(Move.EDIT_SHARDS)}
    assert {state.residency for state in edited} == set(Residency)
    for state in edited:
        assert not state.allows(Move.EXPOSE) and not state.allows(Move.SUMMON) and state.allows(Move.GATHER)
        assert run(Move.GATHER, state=state).allows(Move.EXPOSE)


def test_R17_reset_leads_home_from_everywhere():
    assert {run(Move.RESET, state=state) for state in ALL} == {START}
    assert UnitState(Residency.SHARD, Freshness.SAME, Exposure.SHARDED, Activity.IDLE) == START


def test_R17_every_state_that_is_reached_can_get_home_without_a_reset():
    assert reachable(without=Move.RESET) == REACHABLE
    home = {START}
    while more := {
        s for s in REACHABLE - home if any(s.allows(m) and s.after(m, "u") in home for m in Move if m != Move.RESET)
    }:
        home |= more
    assert home == REACHABLE


def test_R18_nobody_is_shown_full_parameters_in_a_forward_or_backward_nor_twice():
    for state in ALL:
        if state.activity != Activity.IDLE or state.exposure == Exposure.SUMMONED:
            assert not state.allows(Move.SUMMON)
    for state in REACHABLE & SUMMONED:
        assert state.activity == Activity.IDLE
        assert not state.allows(Move.BEGIN_FORWARD) and not state.allows(Move.BEGIN_BACKWARD)


FULL_FORWARD = (Move.BEGIN_FORWARD, Move.GATHER, Move.EXPOSE, Move.CONCEAL, Move.END_FORWARD)


def test_R14_a_step_that_reshards_after_forward():
    between = run(*FULL_FORWARD, Move.RESHARD)
    assert between == START
    assert run(Move.BEGIN_BACKWARD, Move.GATHER, Move.EXPOSE, Move.CONCEAL, Move.RESHARD, Move.END_BACKWARD) == START


def test_R12_R14_after_a_forward_that_keeps_memory_full_the_module_shows_shards_and_an_edit_makes_the_copy_stale():
    kept = run(*FULL_FORWARD)
    assert kept == UnitState(Residency.FULL)
    assert not kept.allows(Move.GATHER)
    stale = run(Move.EDIT_SHARDS, state=kept)
    assert stale == UnitState(Residency.FULL, Freshness.STALE)
    assert not stale.allows(Move.EXPOSE) and not stale.allows(Move.SUMMON) and not stale.allows(Move.RESHARD_TO_GROUP)
    assert run(Move.GATHER, state=stale) == kept and run(Move.RESHARD, state=stale) == START


def test_R08_a_smaller_group_holds_its_shard_between_forward_and_backward():
    between = run(*FULL_FORWARD, Move.RESHARD_TO_GROUP)
    assert between == UnitState(Residency.RESHARD_GROUP)
    assert not between.allows(Move.EXPOSE) and not between.allows(Move.SUMMON)
    assert run(Move.GATHER, state=between) == UnitState(Residency.FULL)
    assert run(Move.RESHARD, state=run(Move.EDIT_SHARDS, state=between)) == START


def test_R19_R21_summoning_returns_to_the_memory_that_was_there_and_unseen_ranks_free_theirs_at_once():
    assert run(Move.GATHER, Move.SUMMON, Move.DISMISS) == run(*FULL_FORWARD)
    unseen = run(Move.GATHER, Move.SUMMON, Move.RESHARD)
    assert unseen == UnitState(exposure=Exposure.SUMMONED)
    assert run(Move.DISMISS, state=unseen) == START


def test_R12_a_refusal_names_the_unit_the_state_and_the_move():
    said = set()
    for state, move in EVERY:
        if not state.allows(move):
            with pytest.raises(StateError) as refused:
                state.after(move, "blocks.3")
            message = str(refused.value)
            assert message.startswith("unit 'blocks.3': cannot ")
            assert state.describe() in message
            said.add((move, message.removeprefix("unit 'blocks.3': cannot ").partition(" while memory")[0]))
    # Every move but the reset, which is never refused, has words of its own.
    assert len(said) == len({words for _, words in said}) == len(Move) - 1
    assert (Move.GATHER, "all-gather") in said and (Move.END_BACKWARD, "end a backward") in said


def test_R12_states_are_described_each_in_its_own_words():
    assert len({state.describe() for state in ALL}) == len(ALL)
    assert START.describe() == (
        "while memory holds the shard alone, the module shows sharded parameters and the unit is idle"
    )
    stale = UnitState(Residency.FULL, Freshness.STALE, Exposure.SUMMONED, Activity.BACKWARD)
    assert stale.describe() == (
        "while memory holds the full parameters (stale), the module shows summoned full parameters "
        "and the unit is in its backward"
    )


@pytest.mark.parametrize(
    ("moves", "refused", "advice"),
    [
        ((Move.BEGIN_FORWARD, Move.GATHER), Move.SUMMON, ": not during forward; wait until it is over"),
        ((Move.BEGIN_BACKWARD, Move.GATHER), Move.SUMMON, ": not during backward; wait until it is over"),
        ((Move.GATHER, Move.SUMMON), Move.SUMMON, ": they are unsharded already; use the context that is open"),
        ((Move.GATHER, Move.SUMMON), Move.BEGIN_FORWARD, ": leave summon_full_params before running the module"),
        ((Move.GATHER, Move.SUMMON), Move.BEGIN_BACKWARD, ": leave summon_full_params before running the module"),
        (
            (Move.GATHER, Move.SUMMON),
            Move.EDIT_SHARDS,
            ": write into the full parameters, or leave summon_full_params first",
        ),
        ((Move.BEGIN_FORWARD,), Move.EDIT_SHARDS, ": wait until its forward is over"),
        ((Move.BEGIN_BACKWARD,), Move.EDIT_SHARDS, ": wait until its backward is over"),
        ((), Move.END_FORWARD, "the unit is idle"),
        ((), Move.SUMMON, "the unit is idle"),
    ],
)
def test_R18_a_refusal_says_which_and_what_to_do(moves, refused, advice):
    with pytest.raises(StateError) as error:
        run(*moves, refused)
    assert str(error.value).endswith(advice)


def test_a_refusal_is_the_kind_of_error_that_torch_raises():
    with pytest.raises(StateError) as error:
        run(Move.DISMISS)
    for kind in (CrossframeError, AssertionError, RuntimeError, ValueError):
        assert isinstance(error.value, kind)
