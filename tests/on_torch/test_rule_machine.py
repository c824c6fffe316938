"""The engine on real ranks beside the numpy reference, any operations in any order; see `machine.py`."""

import pytest

from tests.on_torch.machine import Counts, drive

# Programs by world size, each of up to STEPS operations.
EXAMPLES = {2: 40, 3: 12, 4: 15}
STEPS = 25


@pytest.mark.parametrize("world_size", EXAMPLES)
def test_R12_R17_R25_the_engine_does_what_the_reference_does(ranks, world_size):
    counts = Counts()
    drive(ranks, world_size, EXAMPLES[world_size], STEPS, counts)
    print(counts.describe())
