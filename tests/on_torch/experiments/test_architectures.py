"""Architectures of transformers under torch's FSDP and ours."""

import json
import re

import pytest
import torch
from rich.console import Console

from crossframe.errors import UsageError
from experiments.bench.architectures.run import _different, run_architectures
from experiments.bench.architectures.small_models import build, units_of


def test_a_model_is_equal_in_all_variants_and_its_answers_are_written(tmp_path):
    assert run_architectures(Console(quiet=True), ["opt"], output=tmp_path / "found.md") == 0
    answers = json.loads((tmp_path / "found.json").read_text())
    assert [(each["variant"], each["outcome"]) for each in answers] == [
        ("FSDP2", "equal"),
        ("FSDP2, bfloat16", "equal"),
        ("FSDP1", "equal"),
    ]
    assert "Equal in every bit in all variants, causal: opt." in (tmp_path / "found.md").read_text()


def test_unknown_architectures_are_named():
    with pytest.raises(UsageError, match="no_model"):
        run_architectures(Console(quiet=True), ["gpt2", "no_model"])


def test_units_are_the_blocks():
    model = build("masked", "bert")
    assert units_of(model) == list(reversed(model.get_submodule("bert.encoder.layer")))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lambda x: x, None, id="equal"),
        pytest.param(lambda x: torch.nextafter(x, x + 1), "step 0: w differs by", id="one unit in the last place"),
        pytest.param(lambda x: x[:1], r"step 0: w: \(2,\) in torch, \(1,\) in ours", id="another shape"),
        pytest.param(lambda x: None, r"step 0: w: \(2,\) in torch, None in ours", id="no gradient"),
    ],
)
def test_the_first_difference_is_named(change, expected):
    value = torch.tensor([1.0, float("nan")])
    found = _different([{"w": value}], [{"w": change(value)}])
    if expected is None:
        assert found is None
    else:
        assert found is not None and re.search(expected, found)
