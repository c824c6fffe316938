"""One hypothesis at a time, tried on a difference that is made for it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossframe.recording.event_format import FORWARD, REDUCE, UNSHARDED, UPDATE
from crossframe.verdict import compare
from crossframe.verdict.diagnosis import count_hypotheses
from crossframe.verdict.diagnosis.case import Case, case_of
from crossframe.verdict.diagnosis.fit import sum_roundoff
from crossframe.verdict.diagnosis.layer_hypotheses import modules_exchanged, shifted_positions
from crossframe.verdict.diagnosis.movement_hypotheses import stale_copy
from crossframe.verdict.diagnosis.optimizer_hypotheses import change_of_update
from crossframe.verdict.diagnosis.rank_hypotheses import missing_rank
from crossframe.verdict.measure.pair import Pair
from tests.core.helpers import synthetic
from tests.core.helpers.quantities import quantity

LIMIT, UNKNOWN = 1e-9, {"optimizer": "Lion"}
START = synthetic.initial("embed", "float64")
INPUT_OF_BLOCK = {"phase": FORWARD, "module": "block", "use": "input", "parameter": "", "rank": 0}
MOVED = np.random.default_rng(5).normal(size=START.shape)


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """A case of two recordings without an optimizer's rule, whose values of one quantity are given."""

    def case(first: np.ndarray, second: np.ndarray, *, more: float = 0.0, limit: float = LIMIT, **fields: Any) -> Case:
        change = synthetic.only("parameters", "embed", lambda array: array + more)
        pair = Pair(
            synthetic.record(tmp_path / "a", synthetic.manifest(2, settings=UNKNOWN)),
            synthetic.record(tmp_path / "b", synthetic.manifest(2, settings=UNKNOWN), tamper=change),
        )
        return case_of(pair, quantity(first, second, **fields), lambda each: limit)

    return case


@pytest.mark.parametrize(
    ("wrong", "more", "expected"),
    [
        pytest.param(2.5 * MOVED, 0.0, ("constant_factor", "rate", 2.5), id="larger"),
        pytest.param(0.5 * MOVED, 0.0, ("constant_factor", "rate", 0.5), id="smaller"),
        pytest.param(MOVED - 0.1 * START, 0.0, ("weight_decay", "decay of update", -0.1), id="decay"),
        pytest.param(np.tanh(MOVED), 0.0, None, id="another function"),
        pytest.param(-MOVED, 0.0, None, id="another sign"),
        pytest.param(2.5 * MOVED, 0.1, None, id="larger from another start"),
        pytest.param(MOVED - 0.1 * START, 0.1, None, id="decay from another start"),
    ],
)
def test_updates_from_equal_parameters_are_explained(made, wrong, more, expected):
    case = made(START + MOVED, START + more + wrong, more=more, phase=UPDATE, parameter="embed")
    found = list(change_of_update(case))
    assert [(fit.signature, fit.claim.kind) for fit in found] == ([expected[:2]] if expected else [])
    for fit in found:
        assert fit.claim.value == pytest.approx(expected[2]) and fit.claim.error < LIMIT
        assert (fit.residual, fit.error) == (pytest.approx(0, abs=LIMIT), 0)


def test_an_update_of_zero_is_no_factor(made):
    case = made(START, START + MOVED, phase=UPDATE, parameter="embed")
    assert not list(change_of_update(case)) and not list(change_of_update(case.swap()))


def test_what_is_no_update_has_another_explanation(made):
    assert not list(change_of_update(made(START + MOVED, START + 2 * MOVED, phase=REDUCE, parameter="embed")))


@pytest.mark.parametrize("batch", [(), (1,), (2, 5)])
@pytest.mark.parametrize("by", [1, -1])
def test_positions_are_found_in_activations_with_and_without_a_batch(made, batch, by):
    """The row instead of that before the table is unknown."""
    tokens, rows = np.random.default_rng(3).normal(size=(*batch, 3, 3)), START[[1, 2, 3] if by > 0 else [3, 0, 1]]
    case = made(tokens + START[:3], tokens + rows, **INPUT_OF_BLOCK)
    (fit,) = shifted_positions(case)
    assert fit.signature == "shifted_positions"
    assert f"b looks up each position in 'embed' 1 row {'later' if by > 0 else 'earlier'} than a" in fit.evidence


def test_positions_need_two_dims(made):
    case = made(START[0], START[1], **INPUT_OF_BLOCK)
    assert not list(shifted_positions(case))


@pytest.mark.parametrize(
    ("shares", "noise", "mean_losses", "explained"),
    [
        pytest.param((0.4, 0.6), 0.0, False, True, id="shares"),
        pytest.param((0.4, 0.6), 0.0, True, True, id="losses recorded as means"),
        pytest.param((0.4, 0.7), 0.0, False, False, id="more than all"),
        pytest.param((1.2, -0.2), 0.0, False, False, id="a negative share"),
        pytest.param((0.4, 0.6), 0.1, False, False, id="other gradients"),
    ],
)
@pytest.mark.parametrize("order", [1, -1], ids=["one rank first", "two ranks first"])
def test_a_mean_over_all_terms_is_told_from_one_of_the_means_of_ranks(
    tmp_path, shares, noise, mean_losses, explained, order
):
    settings = {"losses": "mean"} if mean_losses else {}
    means = synthetic.record(tmp_path / "means", synthetic.manifest(2, settings=settings))
    losses = means.losses()[0]

    def over_all_terms(phase: str, step: int, rank: int, name: str, array: np.ndarray) -> np.ndarray:
        if phase == "forward" and step == 0:
            return np.array([np.dot(shares, losses)])
        if phase in ("backward", "reduce") and step == 0:
            grads = [
                np.mean([synthetic.sample_grad(0, sample, name) for sample in (r, r + 2, r + 4)], 0) for r in (0, 1)
            ]
            return np.tensordot(shares, grads, 1) + noise * np.cos(np.arange(array.size)).reshape(array.shape)
        return array

    of_one = synthetic.record(tmp_path / "terms", synthetic.manifest(1, settings=settings), tamper=over_all_terms)
    found = compare(*(of_one, means)[::order])
    assert found.first_divergence is not None and found.first_divergence.event == "loss"
    assert found.diagnosis is None or found.diagnosis.signature == "uneven_weights"
    assert (found.diagnosis is not None) is explained, found.reason
    if found.diagnosis is not None:
        text = "terms averages over all terms, means averages the means of ranks, which have shares of 0.4, 0.6 of them"
        assert text in found.diagnosis.evidence


@pytest.mark.parametrize(
    ("rank", "is_said"), [pytest.param(0, True, id="another rank"), pytest.param(1, False, id="its owner")]
)
def test_zeros_that_another_rank_gathered_are_missing(made, rank, is_said):
    values = np.array([1.0, 2.0, 3.0])
    case = made(values, np.zeros(3), phase=UNSHARDED, parameter="bias", rank=rank)
    assert [fit.signature for fit in missing_rank(case)] == ["missing_rank"] * is_said


@pytest.mark.parametrize(("size", "is_said"), [(3.5, True), (4.5, False)])
def test_added_gradients_fit_within_four_roundings(made, size, is_said):
    """In float32, whose unit roundoff is 2^-24."""
    before = np.mean([synthetic.sample_grad(0, sample, "embed") for sample in range(synthetic.SAMPLES)], axis=0)
    now = synthetic.sample_grad(1, 0, "embed").astype(np.float32)
    both = now.astype(np.float64) + before
    wrong = both + size * 2.0**-24 * np.linalg.norm(both) * (MOVED / np.linalg.norm(MOVED))
    fits = list(stale_copy(made(now, wrong.astype(np.float32), limit=0.0, phase=REDUCE, parameter="embed", step=1)))
    assert [fit.claim.kind for fit in fits] == ["added"] * is_said


@pytest.mark.parametrize(
    ("fields", "is_said"),
    [
        pytest.param({}, True, id="input"),
        pytest.param({"use": "output"}, False, id="output"),
        pytest.param({"module": ""}, False, id="batch"),
        pytest.param({"rank": None}, False, id="samples of other ranks"),
    ],
)
def test_another_module_has_the_input_of_this_one(tmp_path, fields, is_said):
    a = synthetic.record(tmp_path / "a")
    b = synthetic.record(tmp_path / "b", tamper=synthetic.only("input", "block", lambda array: array + 1))
    first = b.activation(0, 0, 0, "block", "input")
    made = quantity(first, first[::-1], **INPUT_OF_BLOCK | {"module": "other"} | fields)
    found = list(modules_exchanged(case_of(Pair(a, b), made, lambda each: LIMIT)))
    assert [fit.signature for fit in found] == ["mixed_parameters"] * is_said


def test_a_factor_of_norms_is_named_at_another_world_size(tmp_path):
    twice = synthetic.only("norm", "", lambda array: 2 * array)
    a = synthetic.record(tmp_path / "a", synthetic.manifest(1))
    found = compare(a, synthetic.record(tmp_path / "b", synthetic.manifest(2), tamper=twice))
    assert found.diagnosis is not None and "b has 2 times the values of a (the world size)" in found.diagnosis.evidence


@pytest.mark.parametrize(
    ("right", "wrong", "lost"),
    [
        pytest.param(110.0, 0.0, 0, id="lost"),
        pytest.param(110.0, 0.9, 0, id="lost up to rounding"),
        pytest.param(110.0, 1.1, None, id="more than rounding"),
        pytest.param(90.0, 0.0, None, id="not clear from the right gradient"),
    ],
)
def test_lost_microbatches_are_found_by_span(made, monkeypatch, right, wrong, lost):
    """Both gradients, with parts outside of the span of the second microbatch's inputs, in units of the rounding."""
    case = made(START, START, phase=REDUCE, parameter="embed")
    inputs, roundoff = [np.eye(5)[:2], np.eye(5)[2:4]], 1e-6
    inside = np.ones((2, 2)) @ inputs[1]
    unit = sum_roundoff(2, roundoff) * np.linalg.norm(inside) * np.sqrt(2)
    sides = tuple(inside + times * unit * np.eye(5)[:2] / np.sqrt(2) for times in (right, wrong))
    monkeypatch.setattr(Case, "compute_roundoff", roundoff)
    monkeypatch.setattr(type(case.right), "num_microbatches", 2)
    monkeypatch.setattr(count_hypotheses, "_inputs", lambda *_: inputs)
    monkeypatch.setattr(count_hypotheses, "_gradients", lambda *_: sides)
    (*found,) = count_hypotheses.lost_by_span(case)
    assert [fit.claim.value for fit in found] == ([] if lost is None else [lost])
