"""Initial values that differ: another start, one rank's own start, or values that were moved wrongly."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import ml_dtypes
import numpy as np
import pytest

from crossframe.recording import RecordingWriter
from crossframe.verdict import Verdict, compare
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
