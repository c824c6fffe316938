"""Every history of small worlds: any order of lawful and unlawful operations, beside the simplest model (R12, R17-R24).

`python -m experiments spec` follows longer ones. A failure names the history; `replay(SETUP.pair(), history)` follows it again.
"""

import os
from functools import cache

import pytest

from crossframe.api import Api
from crossframe.errors import StateError
from crossframe.lifecycle import Activity, Exposure, Freshness, Move, Residency
from crossframe.plan import Strategy
from experiments.spec.histories import OPERATIONS, Disagreement, Explored, explore, replay
from tests.conftest import EXHAUSTIVE
from tests.core.helpers.lifecycle import REACHABLE
from tests.core.helpers.small_worlds import NAN, SEVEN, Setup

ONE, TWO = Api.FSDP1, Api.FSDP2
ZERO2, HYBRID2, NONE = Strategy.SHARD_GRAD_OP, Strategy.HYBRID_SHARD_ZERO2, Strategy.NO_SHARD
# With all sixteen summon requests, of which most are refused: one world of each kind, and both interfaces.
ALL_REQUESTS = (
    Setup("flat", 2, poison=NAN),
    Setup("one flat parameter", 1, 2, mixed=True, strategy=NONE, reshard_after_forward=False),
    Setup("per parameter", 2, api=TWO, mixed=True, reshard_after_forward=False),
    Setup("ragged", 3, mixed=True, reshard_after_forward=False, poison=SEVEN),
)
# With the summon requests that some unit grants.
SOME_REQUESTS = (
    Setup("flat", 3, mixed=True, strategy=ZERO2, reshard_after_forward=False),
    Setup("flat", 4, reshard_after_forward=2, mixed=True, api=TWO, poison=SEVEN),
    Setup("flat", 1, strategy=NONE, reshard_after_forward=False),
    Setup("one flat parameter", 3, strategy=ZERO2, reshard_after_forward=False, poison=NAN),
    Setup("one flat parameter", 2, 2, mixed=True),
    Setup("per parameter", 3, api=TWO, poison=SEVEN),
    Setup("per parameter", 1, 2, api=TWO, mixed=True),
    Setup("ragged", 2, 2, api=TWO, poison=NAN),
    Setup("ragged", 4, api=TWO, reshard_after_forward=2),
)
GRANTED = tuple(o for o in OPERATIONS if not o.startswith("summon") or o in ("summon w", "summon wg", "summon r"))
# One operation further. More ranks would only repeat what those of the shorter histories do.
LONG = (Setup("flat", 2, strategy=ZERO2, reshard_after_forward=False, poison=NAN),)
if not os.environ.get(EXHAUSTIVE):
    SOME_REQUESTS = SOME_REQUESTS[1::7]  # what reshards to fewer ranks
else:
    ALL_REQUESTS += (*SOME_REQUESTS, Setup("flat", 1, 3, strategy=NONE, reshard_after_forward=False))
    SOME_REQUESTS = ()
    LONG = (
        Setup("per parameter", 4, api=TWO, reshard_after_forward=2, poison=NAN),
        Setup("flat", 3, strategy=ZERO2, reshard_after_forward=False, poison=NAN),
    )
SHORT = (*((setup, OPERATIONS) for setup in ALL_REQUESTS), *((setup, GRANTED) for setup in SOME_REQUESTS))


def name(setup: Setup) -> str:
    words = [setup.kind, f"{setup.replicate}x{setup.shard}", setup.api.value, str(setup.reshard_after_forward)]
    return " ".join(words + ["mixed"] * setup.mixed + [f"poison {setup.poison}"] * (setup.poison is not None))


@cache
def explored(setup: Setup, length: int, operations: tuple[str, ...] = OPERATIONS) -> Explored:
    return explore(setup.pair(), length, operations)


@pytest.mark.parametrize(("setup", "operations"), [pytest.param(*each, id=name(each[0])) for each in SHORT])
def test_R12_every_history_of_three_operations(setup, operations):
    found = explored(setup, 3, operations)
    print(f"{name(setup)}: {found.describe()}")
    assert found.num_histories == len(operations) ** 3
    assert 0 < found.num_refused < found.num_tried and found.num_worlds > 300


@pytest.mark.exhaustive
@pytest.mark.parametrize("setup", LONG, ids=name)
def test_R12_every_history_of_four_operations(setup):
    found = explored(setup, 4, GRANTED)
    print(f"{name(setup)}: {found.describe()}")
    assert found.num_histories == len(GRANTED) ** 4


# Lawful moves that no history of the reference takes, each with the reason. Engines that run by hooks take them.
BUSY = frozenset(Activity) - {Activity.IDLE}
NOT_TAKEN = {
    "memory is freed behind a computation, never within it": lambda state, move: (
        move in (Move.RESHARD, Move.RESHARD_TO_GROUP) and state.activity in BUSY
    ),
    "computations of one unit do not nest: a forward is one call": lambda state, move: (
        move in (Move.BEGIN_FORWARD, Move.BEGIN_BACKWARD) and state.activity in BUSY
    ),
    "a computation ends with its parameters in memory, and concealed": lambda state, move: (
        move in (Move.END_FORWARD, Move.END_BACKWARD)
        and (state.residency, state.freshness, state.exposure) != (Residency.FULL, Freshness.SAME, Exposure.SHARDED)
    ),
    "within a computation only the user's code can raise, and it runs while the full parameters are shown": lambda state, move: (
        move is Move.RESET and state.activity in BUSY and state.exposure is not Exposure.FULL
    ),
}


def test_R12_every_lawful_move_was_taken_from_every_state_or_there_is_a_reason():
    taken = set().union(*(explored(setup, 3, operations).pairs for setup, operations in SHORT))
    lawful = {(state, move) for state in REACHABLE for move in Move if state.allows(move)}
    assert taken <= lawful
    print(f"{len(taken)} of {len(lawful)} lawful pairs of state and move were taken")
    unused = dict.fromkeys(NOT_TAKEN, 0)
    for state, move in lawful - taken:
        reasons = [reason for reason, holds in NOT_TAKEN.items() if holds(state, move)]
        assert len(reasons) == 1, (move, state, reasons)
        unused[reasons[0]] += 1
    assert all(unused.values()), unused
    assert not any(holds(*pair) for pair in taken for holds in NOT_TAKEN.values())
    assert {move for _, move in taken} == set(Move)


def test_a_history_is_followed_again_and_names_itself_where_the_world_is_wrong():
    pair = ALL_REQUESTS[0].pair()
    replay(pair, ["forward", "backward", "step", "summon w", "edit full", "exit"])
    assert list(pair.world.full_params()["w"][:, 0]) == [32, 32, 32, 32, 33]
    wrong = ALL_REQUESTS[0].pair()
    wrong.models["u"].lr = 0.25
    with pytest.raises(Disagreement, match=r"after \['backward', 'step'\].*its shard, 'w': expected"):
        explore(wrong, 2, ("backward", "step"))
    refusing = ALL_REQUESTS[0].pair()
    refusing.models["u"].refusal_of_use = lambda: StateError
    with pytest.raises(Disagreement, match=r"after \['unshard'\].*expected StateError, got None"):
        explore(refusing, 1)
