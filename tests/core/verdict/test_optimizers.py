"""Optimizers are known by what they do, and learning rates are compared at every step."""

import json

import pytest

from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from tests.core.helpers import synthetic
from tests.core.helpers.faulty import Faults, record


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_subclass_is_known_by_its_rule(tmp_path, optimizer):
    a = record(tmp_path / "a", optimizer=optimizer)
    called = {"optimizer": f"My{optimizer}"} | ({"momentum": 0.9} if optimizer == "SGD" else {})
    b = record(tmp_path / "b", noise=1, optimizer=optimizer, other=called)
    found = compare(a, b)
    assert found.verdict is Verdict.ROUNDING and not found.settings
    assert f"both follow the rule of {optimizer}" in found.notes[0]


def test_a_fault_of_a_subclass_is_named(tmp_path):
    a = record(tmp_path / "a")
    b = record(tmp_path / "b", Faults(adam_epsilon=1e-4), noise=1, other={"optimizer": "MyAdamW"})
    for pair in ((a, b), (b, a)):
        found = compare(*pair)
        assert found.diagnosis and found.diagnosis.signature == "optimizer_epsilon", found.reason


def test_one_known_optimizer_is_no_fault_of_another(tmp_path):
    a = record(tmp_path / "a")
    b = record(tmp_path / "b", Faults(decay=0.0, coupled=0.2), noise=1, optimizer="Adam", other={"weight_decay": 0.2})
    found = compare(a, b)
    assert found.verdict is Verdict.INCOMPARABLE and found.reason.startswith("optimizer differs")
    assert found.diagnosis and found.diagnosis.evidence == "weight decay differs: 0.1 in a, 0.2 in b."


@pytest.mark.parametrize("called", ["AdamW", ...], ids=["named", "unnamed"])
def test_a_decay_on_biases_is_named_where_none_is_stated(tmp_path, called):
    other = {"weight_decay": ..., "optimizer": called}
    a = record(tmp_path / "a", Faults(decays=lambda name: "bias" not in name), other=other)
    b = record(tmp_path / "b", noise=1, other=other)
    for pair, said in (((a, b), "0.1, while 0 is what"), ((b, a), "missing, while a decay of 0.1 is what")):
        found = compare(*pair)
        assert found.diagnosis and found.diagnosis.signature == "weight_decay", found.reason
        assert "bias" in str(found.first_divergence) and said in found.diagnosis.evidence


def rated(directory, rates):
    """A recording whose steps have these learning rates."""
    synthetic.record(directory)
    for rank in range(2):
        for step, rate in enumerate(rates):
            digest = f'{{"event": "step", "step": {step}, '
            synthetic.edit_events(directory, digest, f'{digest}"rates": {json.dumps([rate])}, ', rank=rank)
    return Recording.open(directory)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_schedule_that_differs_is_reported_first(tmp_path, step):
    a = rated(tmp_path / "a", [0.1, 0.1, 0.1])
    other = [0.1, 0.1, 0.1]
    other[step] = 0.2
    b = rated(tmp_path / "b", other)
    when = f" from step {step} on" if step else ""
    said = f"learning rate differs{when}: 0.1 in a, 0.2 in b"
    assert compare(a, b).settings == (said,) and compare(a, b).verdict is Verdict.EQUAL
    tampered = synthetic.record(
        tmp_path / "c", tamper=lambda p, s, r, n, x: x + 0.1 if (p, s, n) == ("update", step, "bias") else x
    )
    for rank in range(2):
        for at, rate in enumerate(other):
            line = f'{{"event": "step", "step": {at}, '
            synthetic.edit_events(tampered.directory, line, f'{line}"rates": {json.dumps([rate])}, ', rank=rank)
    found = compare(a, Recording.open(tampered.directory))
    assert found.verdict is Verdict.BUG and found.reason.startswith(said.replace(" in b", " in c"))
    assert found.diagnosis and found.diagnosis.signature == "constant_factor"


def test_numbers_within_a_bound_do_not_hide_another_learning_rate(tmp_path):
    """A bound that is too coarse to show a learning rate does not show that it is the same."""
    a, b = rated(tmp_path / "a", [0.1, 0.1, 0.1]), tmp_path / "b"
    synthetic.record(b, tamper=synthetic.jitter(1, 1e-15))
    assert compare(a, Recording.open(b)).verdict is Verdict.ROUNDING
    for rank in range(2):
        line = '{"event": "step", "step": 0, '
        synthetic.edit_events(b, line, f'{line}"rates": [0.2], ', rank=rank)
    found = compare(a, Recording.open(b))
    assert found.verdict is Verdict.INCOMPARABLE and found.first_divergence is None
    assert found.reason.startswith("learning rate differs: 0.1 in a, 0.2 in b; from the numbers alone: losses differ")


def test_a_later_schedule_excuses_no_earlier_difference(tmp_path):
    a, b = rated(tmp_path / "a", [0.1, 0.1, 0.1]), tmp_path / "b"
    synthetic.record(b, tamper=lambda p, s, r, n, x: 2 * x if (p, s, n) == ("update", 1, "bias") else x)
    for rank in range(2):
        line = '{"event": "step", "step": 2, '
        synthetic.edit_events(b, line, f'{line}"rates": [0.2], ', rank=rank)
    assert compare(a, Recording.open(b)).verdict is Verdict.BUG
