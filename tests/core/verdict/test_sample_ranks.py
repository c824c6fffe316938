"""Which ranks of two recordings have the same samples, and what is compared if other ranks have them."""

from types import SimpleNamespace

import numpy as np
import pytest

from crossframe.recording.batches import batch_of
from crossframe.recording.known_settings import PER_RANK
from crossframe.verdict import Verdict, compare
from crossframe.verdict.measure.sample_ranks import are_redistributed, is_by_rank
from tests.core.helpers import synthetic

ROWS = np.arange(24.0).reshape(8, 3)


def recording(*steps, settings=None):
    """Of each step the rows of each rank."""
    batches = [[batch_of([[ROWS[rows]]]) for rows in ranks] for ranks in steps]
    return SimpleNamespace(
        manifest=SimpleNamespace(world_size=len(steps[0]), settings=settings or {}),
        num_steps=len(steps),
        batch=lambda step, rank: batches[step][rank],
    )


IN_ORDER = [0, 1], [2, 3]


@pytest.mark.parametrize(
    ("own", "other", "are_moved"),
    [
        pytest.param([IN_ORDER], [IN_ORDER], False, id="same"),
        pytest.param([IN_ORDER], [([1, 0], [3, 2])], False, id="order within ranks"),
        pytest.param([IN_ORDER], [([2, 3], [0, 1])], True, id="exchanged"),
        pytest.param([IN_ORDER], [([0, 2], [1, 3])], True, id="in turns"),
        pytest.param([IN_ORDER], [([0, 2], [1, 4])], False, id="others"),
        pytest.param([IN_ORDER], [([0, 2], [0, 3])], False, id="one twice"),
        pytest.param([IN_ORDER], [([0], [1, 2, 3])], False, id="other numbers"),
        pytest.param([IN_ORDER, IN_ORDER], [IN_ORDER, ([2, 3], [0, 1])], True, id="in a later step"),
        pytest.param([IN_ORDER, ([4, 5], [6, 7])], [([4, 5], [6, 7]), IN_ORDER], False, id="other steps"),
        pytest.param([IN_ORDER], [([0, 1, 2, 3],)], False, id="another world size"),
    ],
)
def test_samples_on_other_ranks(own, other, are_moved):
    a, b = recording(*own), recording(*other)
    assert are_redistributed(a, b) is are_redistributed(b, a) is are_moved
    assert is_by_rank(a, b) is (a.manifest.world_size == b.manifest.world_size and not are_moved)


def test_norms_over_own_samples_depend_on_ranks():
    a, b = recording(IN_ORDER), recording(([2, 3], [0, 1]), settings={PER_RANK: "BatchNorm"})
    assert not are_redistributed(a, b) and is_by_rank(a, b)


def test_values_that_changed_on_their_rank_were_not_moved():
    a, b = recording(([0, 1], [2, 3])), recording(([2, 3], [0, 1]))
    own = b.batch
    changed = SimpleNamespace(digest="", sample_ids=a.batch(0, 1).sample_ids, inputs=((1, 1),))
    changed.has_samples_of = lambda other: False
    b.batch = lambda step, rank: changed if rank else own(step, rank)
    assert not are_redistributed(a, b)


@pytest.mark.parametrize(
    ("others", "settings", "verdict"),
    [
        pytest.param({0: 0.5, 1: -0.5}, {}, Verdict.ROUNDING, id="one mean"),
        pytest.param(
            {0: 0.5, 1: -0.5}, {PER_RANK: ["blocks.0"]}, Verdict.ROUNDING, id="statistics of each rank's samples"
        ),
        pytest.param({0: 0.5, 1: -0.25}, {}, Verdict.BUG, id="another mean"),
    ],
)
def test_ranks_may_share_a_loss_otherwise(tmp_path, others, settings, verdict):
    """If its mean over ranks agrees, and so do reduced gradients, as where each rank has the loss of its own samples."""

    def tamper(phase, step, rank, name, array):
        return array + others.get(rank, 0.0) if (phase, name) == ("forward", "") else array

    made = synthetic.manifest(settings=settings)
    a, b = synthetic.record(tmp_path / "a", made), synthetic.record(tmp_path / "b", made, tamper=tamper)
    found = compare(a, b)
    assert found.verdict is verdict, found.reason
    assert any("ranks share the loss otherwise" in note for note in found.notes) is (verdict is Verdict.ROUNDING)
