"""Initial values that differ: another start, one rank's own start, or values that were moved wrongly."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import ml_dtypes
import numpy as np
import pytest

from crossframe.recording import RecordingWriter
from crossframe.verdict import Verdict, compare
from crossframe.verdict.initial_values import differing_replica, unrelated_parameters
from crossframe.verdict.measure.pair import Pair
from tests.core.helpers import synthetic


def _starts(change, ranks=(0, 1, 2, 3)):
    """Initial values as `change` makes them, on these ranks."""

    def tamper(phase, step, rank, name, array):
        return change(name, array) if phase == "parameters" and rank in ranks else array

    return tamper


def _drawn(name, array):
    return np.random.default_rng([7, *name.encode()]).normal(size=array.shape)


def _compared(tmp_path, tamper, **made):
    runs = [
        synthetic.record(tmp_path / name, synthetic.manifest(**made), tamper=t)
        for name, t in (("a", None), ("b", tamper))
    ]
    return compare(*runs), compare(*runs[::-1])


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_another_seed_is_a_different_start(tmp_path, detail):
    for found in _compared(tmp_path, _starts(_drawn), detail=detail):
        assert found.verdict is Verdict.INCOMPARABLE
        assert "start with different values of 4 of 4 parameters, first 'embed', on all ranks" in found.reason


def test_a_rank_with_another_start_is_named(tmp_path):
    for found in _compared(tmp_path, _starts(_drawn, ranks=(2, 3)), world_size=4, replicate=2):
        assert found.verdict is Verdict.BUG
        assert "ranks 2 to 3 of b started with other values of 'embed' than rank 0" in found.reason


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda name, array: array.astype(ml_dtypes.bfloat16).astype(array.dtype), id="rounded"),
        pytest.param(lambda name, array: np.roll(array, 1), id="shifted"),
        pytest.param(lambda name, array: 2 * array, id="scaled"),
    ],
)
def test_values_that_were_moved_wrongly_are_a_bug(tmp_path, change):
    for found in _compared(tmp_path, _starts(change)):
        assert found.verdict is Verdict.BUG and found.first_divergence and found.first_divergence.phase == "parameters"


def test_parameters_without_recorded_initial_values_are_left_out(tmp_path, monkeypatch):
    own = RecordingWriter.parameters

    def without_embed(writer, step, unit, pieces):
        own(writer, step, unit, {name: piece for name, piece in pieces.items() if name != "embed"})

    monkeypatch.setattr(RecordingWriter, "parameters", without_embed)
    for found in _compared(tmp_path, _starts(_drawn)):
        assert found.verdict is Verdict.INCOMPARABLE
        assert "start with different values of 3 of 4 parameters, first 'bias', on all ranks" in found.reason


def correlated(correlations):
    """Changes initial values to ones that have this correlation with what they were."""

    def change(name, array):
        if name not in correlations:
            return array
        x, drawn = array.reshape(-1), np.arange(array.size) ** 2.0
        centred = np.linalg.qr(np.stack([np.ones(x.size), x, drawn], axis=1))[0]
        along, across = centred[:, 1] * np.sign(centred[:, 1] @ x), centred[:, 2]
        share = correlations[name]
        return (share * along + np.sqrt(1 - share**2) * across).reshape(array.shape) + 5.0

    return _starts(change)


@pytest.mark.parametrize(
    ("correlations", "found"),
    [
        pytest.param({"embed": 0.49}, ("embed",), id="less than half"),
        pytest.param({"embed": 0.51}, (), id="more than half"),
        pytest.param({"embed": 0.6, "bias": 0.2}, (), id="more than half of elements"),  # 7.8 of 15
        pytest.param({"embed": 0.4, "bias": 0.8}, ("embed", "bias"), id="less than half of elements"),  # 7.2 of 15
        pytest.param({}, (), id="equal"),
    ],
)
def test_unrelated_values_have_less_than_half_correlation(tmp_path, correlations, found):
    a = synthetic.record(tmp_path / "a")
    b = synthetic.record(tmp_path / "b", tamper=correlated(correlations))
    assert unrelated_parameters(Pair(a, b)) == unrelated_parameters(Pair(b, a)) == found


def test_moved_values_are_related_and_constants_are_not(tmp_path):
    a = synthetic.record(tmp_path / "a")
    ones = synthetic.record(tmp_path / "ones", tamper=_starts(lambda name, array: 0 * array + 1))
    assert unrelated_parameters(Pair(a, ones)) == tuple(synthetic.SHAPES)
    moved = synthetic.record(
        tmp_path / "moved",
        tamper=_starts(lambda name, array: array[::-1] if name == "bias" else _drawn(name, array)),
    )
    assert unrelated_parameters(Pair(a, moved)) == ()


def test_the_first_replica_that_starts_otherwise_is_named(tmp_path):
    made = synthetic.manifest(6, replicate=3)
    assert differing_replica(synthetic.record(tmp_path / "equal", made)) is None
    for ranks, names, found in (((4, 5), ("bias",), (2, "bias")), ((2, 3, 4, 5), ("block.w", "bias"), (1, "bias"))):
        tamper = _starts(lambda name, array, names=names: array + (name in names), ranks)
        assert differing_replica(synthetic.record(tmp_path / str(ranks), made, tamper=tamper)) == found
