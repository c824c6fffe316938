"""All ranks that are off are said, and not the one alone that is off most."""

import numpy as np
import pytest

from crossframe.verdict import Verdict, compare
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


def test_zeros_of_a_parameter_alone_on_its_rank_are_no_missing_rank(tmp_path):
    made = synthetic.manifest(5)
    zeros = synthetic.only("reduce", "bias", np.zeros_like)
    a, b = synthetic.record(tmp_path / "a", made), synthetic.record(tmp_path / "b", made, tamper=zeros)
    assert [piece.name for piece in made.units[0][1].pieces(4)] == ["bias"]
    found = compare(a, b)
    assert found.first_divergence.parameter == "bias" and found.diagnosis is None


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_gradients_of_an_optimizer_that_reduces_are_compared_by_their_means(tmp_path, monkeypatch, detail):
    monkeypatch.setattr("crossframe.recording.manifest.WHOLE", 0)

    def own(phase, step, rank, name, array):
        if phase != "reduce":
            return array
        samples = range(step * synthetic.SAMPLES + rank, (step + 1) * synthetic.SAMPLES, 2)
        return np.mean([synthetic.sample_grad(step, each, name) for each in samples], axis=0).astype(array.dtype)

    one = synthetic.record(tmp_path / "one", synthetic.manifest(1, detail=detail))
    two = synthetic.record(tmp_path / "two", synthetic.manifest(2, replicate=2, detail=detail), tamper=own)
    found = compare(one, two)
    assert found.verdict in (Verdict.EQUAL, Verdict.ROUNDING), found.reason

    def wrong(phase, *at):
        return own(phase, *at) * (2 if phase == "reduce" else 1)

    doubled = synthetic.record(tmp_path / "doubled", synthetic.manifest(2, replicate=2, detail=detail), tamper=wrong)
    assert compare(one, doubled).first_divergence.phase == "reduce"
