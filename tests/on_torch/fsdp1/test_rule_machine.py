"""The engine on real ranks beside the numpy reference, any operations in any order; see `rule_machine.py`."""

import os
from typing import Any

import pytest

from tests.conftest import EXHAUSTIVE
from tests.on_torch.programs.rule_machine import EXPLAINED, Counts, Setup, drive
from tests.on_torch.programs.rule_machine_programs import BACKWARD, EVALUATE, TRAIN, Program, follow, forward

# Programs by world size, each of up to STEPS rules; more with pytest --exhaustive and by
# `python -m tests.on_torch.programs.rule_machine`.
EXAMPLES = {2: 15, 3: 4, 4: 4} if EXHAUSTIVE in os.environ else {2: 7, 3: 2, 4: 2}
STEPS = 20

WRITEBACK, WITH_GRADS = (True, False, False, False), (True, False, False, True)


def summon(flags: tuple[bool, ...]) -> tuple[str, dict[str, Any]]:
    return "summon", {"unit": "", "recurse": True, "flags": flags}


UNSYNCED = ("backward", {"which": 0, "syncs": False})
LEAVE = ("leave", {"failed": False})
EDIT = {"unit": "", "name": "w", "value": 1, "by": None}
FORGET = {"unit": "a", "name": "w"}


@pytest.mark.parametrize("world_size", EXAMPLES)
def test_R12_R17_R25_the_engine_does_what_the_reference_does(ranks, world_size):
    counts = Counts()
    drive(ranks, world_size, EXAMPLES[world_size], STEPS, counts)
    print(counts.describe())
    assert counts.done.total() > 10 * EXAMPLES[world_size]
    assert 0 < counts.refused.total() < counts.done.total() / 2


# The smallest program that needs each exception.
EXCEPTIONS: dict[str, tuple[Setup, Program]] = {
    "trains anew": (Setup(strategy="SHARD_GRAD_OP"), [*EVALUATE, forward(skipped=("b",))]),
    "evaluates stale": (Setup(), [*EVALUATE, ("edit", {**EDIT, "how": "fill"}), *EVALUATE]),
    "gathers ahead": (
        Setup(strategy="SHARD_GRAD_OP", mixed=("bfloat16", None)),
        [forward(detached=("a",)), summon(WRITEBACK), LEAVE, UNSYNCED],
    ),
    "learns late": (Setup(), [forward(raises=("backward", "a")), BACKWARD]),
    "fails when refused": (Setup(), [forward(), UNSYNCED, forward(), summon(WRITEBACK), BACKWARD, LEAVE, *EVALUATE]),
    "shows own gradients": (Setup(strategy="NO_SHARD"), [*TRAIN, summon(WRITEBACK)]),
    "replaces the only copy": (
        Setup(strategy="NO_SHARD"),
        [summon((False, False, False, False)), ("edit", {**EDIT, "how": "data"}), LEAVE],
    ),
    "asks its shard group": (
        Setup(4, "HYBRID_SHARD"),
        [*TRAIN, *(("forget_grad", {**FORGET, "by": rank}) for rank in (0, 1)), summon(WITH_GRADS)],
    ),
    "one gradient of a unit": (
        Setup(),
        [
            *TRAIN,
            ("forget_grad", {**FORGET, "by": 0}),
            summon(WITH_GRADS),
            ("edit_grad", {**FORGET, "value": 1, "by": None, "how": "fill"}),
            LEAVE,
            *TRAIN,
        ],
    ),
}


@pytest.mark.parametrize("key", EXPLAINED)
def test_R12_R17_R20_R22_what_is_excepted_differs_as_stated(ranks, key):
    setup, program = EXCEPTIONS[key]
    assert follow(ranks, setup, program).explained[key] > 0
    with pytest.raises(AssertionError, match="expected"):
        follow(ranks, setup, program, straight=key)


# Faults that the machine found, which are mended.
MENDED: dict[str, tuple[Setup, Program]] = {
    "R12: after a backward that keeps full parameters the module shows the user's own": (
        Setup(strategy="SHARD_GRAD_OP"),
        [forward(), UNSYNCED, ("edit", {**EDIT, "how": "fill"})],
    ),
    "R17: what a failed backward leaves in use can be cleared": (
        Setup(),
        [*TRAIN, forward(raises=("backward", "a")), BACKWARD, ("zero_grad", {"how": "model"}), *EVALUATE],
    ),
    "R17: and moved": (Setup(), [forward(raises=("backward", "a")), BACKWARD, ("convert", {})]),
    "R15: full gradients go along in a move": (Setup(), [forward(), UNSYNCED, ("convert", {}), *TRAIN]),
    "R25: data replaced where nothing is sharded is seen": (
        Setup(strategy="NO_SHARD"),
        [*EVALUATE, ("edit", {**EDIT, "how": "data"}), *EVALUATE],
    ),
    "R18: a step after a refused backward reduces": (Setup(), [forward(), summon(WRITEBACK), BACKWARD, LEAVE, *TRAIN]),
}


@pytest.mark.parametrize("what", MENDED)
def test_R12_R15_R17_R18_R25_what_was_mended(ranks, what):
    follow(ranks, *MENDED[what])
