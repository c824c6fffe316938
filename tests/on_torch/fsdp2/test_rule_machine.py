"""fully_shard on real ranks beside the numpy reference, any operations in any order; see `rule_machine_fsdp2.py`."""

import os

import pytest

from tests.conftest import EXHAUSTIVE
from tests.on_torch.programs.rule_machine import Counts, drive
from tests.on_torch.programs.rule_machine_fsdp2 import EXPLAINED, Setup, SideBySide
from tests.on_torch.programs.rule_machine_programs import EVALUATE, TRAIN, Program, follow, forward

# Programs by world size, each of up to STEPS rules; more with pytest --exhaustive and by
# `python -m tests.on_torch.programs.rule_machine`.
EXAMPLES = {2: 7, 3: 3, 4: 3} if EXHAUSTIVE in os.environ else {2: 4, 3: 2, 4: 2}
STEPS = 15

BACKWARD = ("backward", {"which": 0, "syncs": True})
UNSYNCED = ("backward", {"which": 0, "syncs": False})
PARTIAL = ("backward", {"which": 0, "syncs": True, "all_reduces": False})
MOVE = ("convert", {"dtype": "float32"})
EDIT = ("edit", {"unit": "", "name": "w", "value": 1, "by": None})
RESHARD = ("reshard", {"unit": ""})
WITHOUT_V = forward(missing=((0, "a"), (1, "a")))


@pytest.mark.parametrize("world_size", EXAMPLES)
def test_R12_R15_R17_R25_fully_shard_does_what_the_reference_does(ranks, world_size):
    counts = Counts()
    drive(ranks, world_size, EXAMPLES[world_size], STEPS, counts, rules=SideBySide)
    print(counts.describe())
    assert counts.done.total() > 10 * EXAMPLES[world_size]


# The smallest program that needs each exception.
EXCEPTIONS: dict[str, tuple[Setup, Program]] = {
    "learns late": (Setup(), [forward(raises=("backward", "a")), BACKWARD]),
}


@pytest.mark.parametrize("key", EXPLAINED)
def test_R17_what_is_excepted_differs_as_stated(ranks, key):
    setup, program = EXCEPTIONS[key]
    assert follow(ranks, setup, program).explained[key] > 0
    with pytest.raises(AssertionError, match="expected"):
        follow(ranks, setup, program, straight=key)


# Faults that the machine and those who wrote it found, which are mended; and what short random programs seldom meet.
MENDED: dict[str, tuple[Setup, Program]] = {
    "R14, R20: on one shard edits of full parameters are lost": (
        Setup((2, 1)),
        [*EVALUATE, EDIT, RESHARD, *EVALUATE, *TRAIN],
    ),
    "R12: what a state dict brings is seen by the next evaluation": (
        Setup(),
        [
            *EVALUATE,
            ("load", {"value": 1, "assign": False}),
            *EVALUATE,
            ("load", {"value": 2, "assign": True}),
            *EVALUATE,
        ],
    ),
    "R12: unshard shows what an optimizer has made of the shards since": (
        Setup(),
        [*TRAIN, ("unshard", {"unit": "a"}), ("step", {}), ("unshard", {"unit": "a"})],
    ),
    "R12: an optimizer that steps before the first forward makes unsharded parameters stale": (
        Setup(),
        [("unshard", {"unit": "a"}), ("step", {}), forward(skipped=("a",))],
    ),
    "R15: gradients that wait keep their dtype in a move": (
        Setup(mixed=("bfloat16", "float32")),
        [*[forward(), UNSYNCED] * 3, MOVE, *TRAIN],
    ),
    "R28: partial sums go along in a move": (Setup((2, 1)), [forward(), PARTIAL, MOVE, *TRAIN]),
    "R28, R29: what one microbatch alone reaches has its gradient": (
        Setup((2, 1)),
        [forward(), PARTIAL, WITHOUT_V, BACKWARD],
    ),
    "R15, R29: so it has where full gradients wait in another dtype": (
        Setup(mixed=("bfloat16", "float32")),
        [forward(), UNSYNCED, WITHOUT_V, BACKWARD],
    ),
}


@pytest.mark.parametrize("what", MENDED)
def test_R12_R15_R28_R29_what_was_mended(ranks, what):
    follow(ranks, *MENDED[what])
