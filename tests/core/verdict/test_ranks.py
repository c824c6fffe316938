"""All ranks that are off are said, and not the one alone that is off most."""

import pytest

from crossframe.verdict import compare
from tests.core.helpers import synthetic


@pytest.mark.parametrize("phase", ["backward", "reduce", "output", "update"])
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2), (2,)])
def test_every_rank_that_is_off_is_said(tmp_path, phase, ranks):
    name = "block" if phase == "output" else "block.w"

    def tamper(at, step, rank, what, array):
        return array * (2.0 + 0.1 * rank) if (at, what) == (phase, name) and rank in ranks else array

    a, b = synthetic.record(tmp_path / "a", synthetic.manifest(3)), synthetic.manifest(3)
    found = compare(a, synthetic.record(tmp_path / "b", b, tamper=tamper))
    where = found.first_divergence
    assert where and where.ranks == ranks and where.rank in ranks and where.to_json()["ranks"] == list(ranks)
    said = {1: "rank 2)", 2: "ranks 1 and 2, largest on rank ", 3: "ranks 0 to 2, largest on rank "}[len(ranks)]
    assert said in found.reason, found.reason
