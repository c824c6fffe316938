"""Every script of `scripts/`, a module for each subject, run with torch's fully_shard and with ours in the same ranks.

Where torch itself fails, tests of test_fully_shard.py state what ours gives instead.
"""

import pytest

from tests.on_torch.fsdp2 import scripts
from tests.on_torch.helpers.scenarios import cases, load

load(scripts)


def _differences(rank: int, world_size: int, name: str) -> str:
    return scripts.SCENARIOS[name].difference(rank, world_size)


@pytest.mark.parametrize("name", cases(scripts.SCENARIOS))
def test_R32_a_script_sees_what_it_sees_under_torch(ranks, name):
    num_ranks = scripts.SCENARIOS[name].num_ranks
    assert ranks.run(num_ranks, _differences, name) == [""] * num_ranks
