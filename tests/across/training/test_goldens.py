"""The parity runs of this repository agree with the golden that it has, and a fault in them is found."""

from dataclasses import replace

import pytest

from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from experiments.goldens.parity import GOLDEN, SETTINGS
from tests.across.helpers.recorded import record_with_jax, record_with_torch


@pytest.mark.parametrize("fault", [pytest.param("", marks=pytest.mark.exhaustive), "sum_gradients"])
def test_a_parity_run_is_checked_against_its_golden(ranks, tmp_path, fault):
    golden = Recording.open(GOLDEN)
    in_torch = record_with_torch(ranks, SETTINGS, tmp_path / "torch")
    in_jax = record_with_jax(replace(SETTINGS, fault=fault), tmp_path / "jax")
    assert compare(golden, in_torch, bitwise=False).verdict.agrees
    found = compare(golden, in_jax, bitwise=False)
    assert found.verdict is (Verdict.BUG if fault else Verdict.ROUNDING), found.reason
