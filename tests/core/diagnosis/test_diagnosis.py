"""Hypotheses on arrays alone: each finds what was put in, with rounding on top, and nothing in what is unrelated."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.recording import Batch
from crossframe.recording.batches import batch_of
from crossframe.verdict.diagnosis.batches import batch_difference
from crossframe.verdict.diagnosis.factor_fits import counts_of, factor_of, name_of
from crossframe.verdict.diagnosis.factor_hypotheses import is_shifted
from crossframe.verdict.diagnosis.fit import (
    Claim,
    Contrast,
    Fit,
    accepted,
    best,
    factor_between,
    is_uninformative,
    roundoff_of,
    sum_roundoff,
)
from crossframe.verdict.diagnosis.kernel_fits import convolved, kernel_reordered, paddings_of
from crossframe.verdict.diagnosis.module_fits import (
    ERF_GELU,
    FUNCTIONS,
    TANH_GELU,
    branch_of,
    dropout_of,
    functions_of,
    norm_epsilons,
    rounded_epsilons,
    two_masks_of,
)
from crossframe.verdict.diagnosis.moment_deviations import Moment, moment_deviations
from crossframe.verdict.diagnosis.movement_fits import read_elsewhere, reorderings, same_as, shift_of, transposition_of
from crossframe.verdict.diagnosis.optimizer_rules import AdamW, Average
from crossframe.verdict.diagnosis.rank_fits import (
    absent_ranks,
    low_reduction,
    mixed_ranks,
    on_grid,
    weighted_ranks,
)
from crossframe.verdict.diagnosis.tied_weights import rows_looked_up, uses_of
from crossframe.verdict.diagnosis.update_deviations import Update, follow_one_rule, update_deviations
from crossframe.verdict.measure.metrics import norm
from tests.core.helpers import synthetic
from tests.core.helpers.random_layouts import QUICK

SEEDS = st.integers(0, 2**32 - 1)
SHAPES = st.sampled_from([(7,), (12, 5), (8, 8), (3, 4, 6), (64,)])
NOISE = 1e-7


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def contrast(right: np.ndarray, wrong: np.ndarray, seed: int = 0) -> Contrast:
    """Both sides with a relative rounding of NOISE an element, and as the limit what that may reach, twice."""
    rng = np.random.default_rng((seed, 1))
    right, wrong = (x * (1 + NOISE * rng.uniform(-1, 1, x.shape)) for x in (right, wrong))
    return Contrast(right, wrong, 2 * NOISE * norm(right), 2.0**-24)


@QUICK
@given(SEEDS, SHAPES, st.sampled_from([0.5, 2.0, -1.0, 1.001, 3**0.5, 1e-3, 4e4]))
def test_a_factor_is_found_to_the_rounding_of_the_sides(seed: int, shape: tuple[int, ...], value: float) -> None:
    x = drawn(seed, *shape)
    found = factor_of(contrast(x, value * x, seed))
    assert found is not None
    assert abs(found.value - value) <= found.error <= 1e-5 * max(1, abs(value))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (8.0, "the world size"),
        (0.125, "1 / the world size"),
        (8**0.5, "the square root of the world size"),
        (1 / 8**0.5, "1 / the square root of the world size"),
        (2.0, "the number of replicas"),
        (24.0, "(the world size times the accumulation steps)"),
        (64.0, "the square of the world size"),
        (7.0, None),
        (1.0, None),
    ],
)
def test_a_factor_is_called_by_what_the_run_counts(value: float, said: str | None) -> None:
    counts = {"the world size": 8.0, "the number of replicas": 2.0, "the accumulation steps": 3.0}
    assert name_of(value * (1 + 1e-9), 1e-7, counts) == said
    assert name_of(value * (1 + 1e-13), 0.0, counts) == said


def test_counts_are_those_of_the_run() -> None:
    made = synthetic.manifest(6, replicate=2, terms=96, settings={"batch_size": 12})
    assert counts_of(made, 5) == {
        "the world size": 6,
        "the number of replicas": 2,
        "the number of shards": 3,
        "the accumulation steps": 5,
        "the samples of a microbatch": 12,
        "the terms of a mean": 96,
    }
    assert counts_of(synthetic.manifest(2, terms=None), 1) == {"the world size": 2}


def test_equal_counts_are_all_named() -> None:
    counts = {"the world size": 2.0, "the accumulation steps": 2.0}
    assert name_of(2.0, 1e-9, counts) == "the world size or the accumulation steps"
    assert name_of(0.5, 1e-9, counts) == "1 / the world size or 1 / the accumulation steps"


def test_a_factor_that_may_be_several_numbers_is_called_by_none() -> None:
    counts = {"the world size": 2.0, "the accumulation steps": 3.0}
    assert name_of(1.9, 0.2, counts) is None  # the square root of 3 is as near
    assert name_of(1.998, 0.004, counts) == "the world size"


def test_a_factor_gets_no_name_from_a_coarse_limit() -> None:
    counts = {"the world size": 2.0}
    assert name_of(0.1447, 0.12, counts) is None  # 1 / 4 lies within
    rng = np.random.default_rng(0)
    factors = np.exp(rng.uniform(np.log(0.05), np.log(20), 4000))
    for counts in ({"the world size": 4.0}, {"the world size": 8.0, "the accumulation steps": 3.0}):
        for share in (1e-3, 1e-2, 0.05, 0.5):
            named = sum(name_of(value, share * value, counts) is not None for value in factors)
            assert named <= 4000 * 0.05 + 5 * np.sqrt(4000 * 0.05), (counts, share)


def test_of_numbers_that_are_alike_nobody_knows_whether_one_was_added() -> None:
    losses = np.array([5.51, 5.54])
    assert is_shifted(Contrast(losses, losses + 0.01, 1e-6), 1e-4)
    assert is_shifted(Contrast(losses, losses * 1.002, 1e-6), 1e-4)  # nor whether they were multiplied by one
    assert not is_shifted(Contrast(losses, losses * 2, 1e-6), 1e-4)
    assert is_shifted(Contrast(losses[:1], losses[:1] * 2, 1e-6), 1e-4)
    assert not is_shifted(Contrast(np.array([1.0, 5.0]), np.array([1.01, 5.05]), 1e-6), 1e-6)


def test_a_factor_is_likely_to_be_nearer_than_the_limit_says() -> None:
    """The limit is far beyond what these sides were rounded by: 1000 times, and the names of constants nearby with it."""
    x, rng = drawn(0, 400), np.random.default_rng(1)
    wrong = 2 * x * (1 + 1e-4 * rng.uniform(-1, 1, 400))
    found = factor_of(Contrast(x, wrong, 0.1 * norm(x)))
    assert found is not None and found.error > 0.3
    assert abs(found.value - 2) <= found.noise < 1e-3
    assert (
        one := factor_of(Contrast(x[:1], wrong[:1], 0.1 * norm(x[:1])))
    ) and one.noise > 0.3  # of one number nothing can be said


@QUICK
@given(SEEDS, st.sampled_from([(12, 5), (8, 8), (3, 4, 6), (2, 2, 3, 3), (12,)]), st.data())
def test_an_order_of_axes_is_found(seed: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    x = drawn(seed, *shape)
    said, moved = data.draw(st.sampled_from(list(reorderings(x))))
    found = transposition_of(contrast(x, moved.reshape(shape), seed))
    assert found is not None and found.residual <= 4 * NOISE * norm(x), said
    # Several of them may do the same; the one that is said does this.
    assert np.array_equal(dict(reorderings(x))[found.text].reshape(shape), moved.reshape(shape))


@QUICK
@given(SEEDS, st.integers(8, 90), st.integers(1, 4), st.booleans())
def test_a_shift_is_found_with_its_direction(seed: int, numel: int, by: int, late: bool) -> None:
    x = drawn(seed, numel)
    line = np.concatenate([drawn(seed + 1, by), x, drawn(seed + 2, by)])
    y = line[:numel] if late else line[2 * by :]
    found = shift_of(contrast(x, y, seed))
    assert found is not None
    assert (found.by, found.overlap) == (by if late else -by, numel - by)


def test_a_shift_of_one_ranks_elements_takes_them_from_the_elements_ahead() -> None:
    x = drawn(0, 40)
    y = x.copy()
    y[20:30] = x[17:27]
    assert shift_of(Contrast(x, y, 0.0)) is None
    found = shift_of(Contrast(x, y, 0.0), 20, 30)
    assert found is not None and (found.by, found.overlap) == (3, 10)


def test_a_few_elements_that_reappear_are_no_shift() -> None:
    x, y = drawn(0, 40), drawn(1, 40)
    y[30:] = x[:10]
    assert shift_of(Contrast(x, y, 0.0), also=[30]) is None


@pytest.mark.parametrize(("start", "names"), [(5, "a"), (12, "a"), (35, "bc"), (40, "bc"), (48, None)])
def test_values_read_at_another_position_of_a_flat_tensor(start: int, names: str | None) -> None:
    values = {name: drawn(i, size) for i, (name, size) in enumerate({"a": 20, "b": 12, "c": 12}.items())}
    flat = np.concatenate([np.pad(each, (0, -len(each) % 16)) for each in values.values()])
    right, wrong = drawn(8, 16), flat[start : start + 16]
    found = read_elsewhere(Contrast(right, wrong, 1e-6), values)
    # From its first element on, a parameter was exchanged for another one.
    assert (None if found is None else "".join(found.names)) == names
    assert read_elsewhere(Contrast(right, drawn(9, 16), 1e-6), values) is None


def test_zeros_and_ones_lie_everywhere_and_say_nothing() -> None:
    x, ones = drawn(0, 6, 6), np.ones((6, 6))
    assert same_as(Contrast(x, np.zeros((6, 6)), 0.0), {"q": np.zeros((6, 6))}) is None
    noise = 1e-18 * drawn(1, 6, 6)
    assert same_as(Contrast(x, np.zeros((6, 6)), 1e-12), {"q": noise}) is None
    grads = [x, x.T]
    assert mixed_ranks(Contrast(np.mean(grads, axis=0), np.zeros((6, 6)), 1e-12), grads, [noise, noise.T]) is None
    assert transposition_of(Contrast(ones, ones + 1, 0.0)) is None
    assert read_elsewhere(Contrast(drawn(0, 4), np.ones(4), 0.0), {"q": np.ones(9)}) is None
    assert transposition_of(Contrast(0 * ones, -0.0 * ones, 0.0)) is None  # other bits, and no difference
    assert shift_of(Contrast(np.zeros(9), np.eye(9)[3], 0.0)) is None
    assert factor_of(Contrast(np.zeros(5), drawn(0, 5), 1e-9)) is None
    assert factor_of(Contrast(drawn(0, 5), np.zeros(5), 1e-9)) is None


@QUICK
@given(SEEDS, st.integers(2, 6), st.data())
def test_the_ranks_that_are_missing_from_a_sum_are_told(seed: int, num_ranks: int, data: st.DataObject) -> None:
    grads = [drawn(seed + i, 9, 4) for i in range(num_ranks)]
    missing = data.draw(st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks - 1))
    present = [grad for i, grad in enumerate(grads) if i not in missing]
    divisor = data.draw(st.sampled_from([num_ranks, len(present)]))
    found = absent_ranks(contrast(np.mean(grads, axis=0), np.sum(present, axis=0) / divisor, seed), grads)
    assert found is not None
    assert (found.ranks, found.divided_by) == (tuple(sorted(missing)), divisor)


def test_nobody_is_missing_from_a_sum_whose_right_side_is_no_mean_of_these() -> None:
    grads = [drawn(i, 9, 4) for i in range(3)]
    assert absent_ranks(contrast(drawn(7, 9, 4), grads[0] / 3), grads) is None
    assert absent_ranks(contrast(np.mean(grads, axis=0), 2 * np.mean(grads, axis=0)), grads) is None


@QUICK
@given(SEEDS, st.integers(2, 5), st.data())
def test_how_often_each_rank_counts_is_told(seed: int, num_ranks: int, data: st.DataObject) -> None:
    grads = [drawn(seed + i, 30) for i in range(num_ranks)]
    times = np.ones(num_ranks)
    rank = data.draw(st.integers(0, num_ranks - 1))
    times[rank] = data.draw(st.sampled_from([0.5, 1.001, 2.0, -1.0]))
    wrong = np.mean([t * grad for t, grad in zip(times, grads, strict=True)], axis=0)
    found = weighted_ranks(contrast(np.mean(grads, axis=0), wrong, seed), grads)
    assert found is not None and found.ranks == [rank]
    assert np.allclose(found.times, times, rtol=0, atol=found.uncertainty) and found.uncertainty < 1e-4
    assert weighted_ranks(contrast(np.mean(grads, axis=0), 2 * np.mean(grads, axis=0), seed), grads) is None
    absent = (sum(grads) - grads[0]) / num_ranks
    assert weighted_ranks(contrast(np.mean(grads, axis=0), absent, seed), grads) is None  # that has a name of its own


@QUICK
@given(SEEDS, st.integers(2, 5), st.data())
def test_R29_the_ranks_that_brought_in_another_parameter_are_told(
    seed: int, num_ranks: int, data: st.DataObject
) -> None:
    own, theirs = ([drawn(seed + i, 30) for i in range(first, first + num_ranks)] for first in (0, 100))
    mixed = data.draw(st.sets(st.integers(0, num_ranks - 1), min_size=1))
    wrong = np.mean([theirs[i] if i in mixed else own[i] for i in range(num_ranks)], axis=0)
    found = mixed_ranks(contrast(np.mean(own, axis=0), wrong, seed), own, theirs)
    assert found is not None and found.ranks == tuple(sorted(mixed))


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("way", ["cast", "sum", "mean"])
def test_a_sum_in_low_precision_is_told_by_what_it_leaves(low: str, num_ranks: int, way: str) -> None:
    grads = [drawn(i, 400).astype(np.float32) for i in range(num_ranks)]
    dtype = np.dtype(getattr(ml_dtypes, low, None) or low)
    cast = [grad.astype(dtype) for grad in grads]
    if way == "cast":
        wrong = np.mean([grad.astype(np.float64) for grad in cast], axis=0)
    elif way == "mean":
        wrong = np.mean(grads, axis=0, dtype=np.float64).astype(dtype)
    else:
        total = cast[1]
        for grad in [*cast[2:], cast[0]]:
            total = (total + grad).astype(dtype)
        wrong = total.astype(np.float64) / num_ranks
    right = np.asarray(np.mean(grads, axis=0, dtype=np.float64), np.float32)
    found = low_reduction(Contrast.of(right, wrong.astype(np.float32), 1e-7 * norm(right)), grads, num_ranks)
    assert found is not None and found.dtype == low and low in found.text, (low, num_ranks, way)


def test_a_sum_in_bfloat16_is_told_whatever_the_order_of_ranks_in_each_part_of_it() -> None:
    grads = [drawn(i, 300).astype(np.float32) for i in range(3)]
    cast: list[Any] = [grad.astype(ml_dtypes.bfloat16) for grad in grads]
    parts = [(cast[i] + cast[(i + 1) % 3]) + cast[(i + 2) % 3] for i in range(3)]
    total = np.concatenate([part[100 * i : 100 * (i + 1)] for i, part in enumerate(parts)]).astype(np.float64)
    right = np.asarray(np.mean(grads, axis=0, dtype=np.float64), np.float32)
    found = low_reduction(Contrast.of(right, (total / 3).astype(np.float32), 1e-7 * norm(right)), grads, 3)
    assert found is not None and found.text == "all elements of the sum are bfloat16 values"


def test_sums_of_replicas_that_were_cast_before_they_were_added_are_told() -> None:
    grads = [drawn(i, 200).astype(np.float32) for i in range(4)]
    right = np.asarray(np.mean(grads, axis=0, dtype=np.float64), np.float32)
    halves = [(first / 4 + second / 4).astype(ml_dtypes.bfloat16) for first, second in (grads[:2], grads[2:])]
    wrong = (halves[0].astype(np.float64) + halves[1].astype(np.float64)).astype(np.float32)
    sides = Contrast.of(right, wrong, 1e-7 * norm(right))
    found = low_reduction(sides, grads, 4, num_replicas=2)
    assert found is not None and "sums of replicas were cast to bfloat16" in found.text
    assert low_reduction(sides, grads, 4) is None
    mean = Contrast.of(right, right.astype(ml_dtypes.bfloat16).astype(np.float32), 1e-7 * norm(right))
    assert low_reduction(mean, grads, 4).text == "the mean was cast to bfloat16"


@pytest.mark.parametrize("factor", [2.0, -1.0])
def test_gradients_that_are_in_bfloat16_anyway_were_not_summed_in_it(factor: float) -> None:
    grads = [drawn(i, 30).astype(ml_dtypes.bfloat16) for i in range(2)]
    mean = np.mean([grad.astype(np.float64) for grad in grads], axis=0).astype(np.float32)
    for sides in ((mean, factor * mean), (factor * mean, mean)):
        assert low_reduction(Contrast.of(*sides, 0.2 * norm(mean)), grads, 2) is None
    # Nor is what the one side has a mean of the other's gradients, if that side is no mean at all.
    wide = [drawn(i, 30).astype(np.float32) for i in range(2)]
    low = np.mean([grad.astype(ml_dtypes.bfloat16).astype(np.float64) for grad in wide], axis=0).astype(np.float32)
    right = np.mean(wide, axis=0)
    assert low_reduction(Contrast.of(right, low, 1e-6), wide, 2) is not None
    assert low_reduction(Contrast.of(factor * right, low, 1e-6), wide, 2) is None
    near = (grads[1].astype(np.float32) * (1 + 2.0**-7)).astype(ml_dtypes.bfloat16)
    sums = [grads[0].astype(np.float32) + part.astype(np.float32) for part in (grads[1], near)]
    assert low_reduction(Contrast.of(*sums, 1e-6), None, 1, num_microbatches=2) is None


def test_a_mean_on_the_grid_of_bfloat16_needs_no_local_gradients() -> None:
    right = drawn(0, 300).astype(np.float32)
    wrong = right.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert on_grid(wrong, "bfloat16") == 1.0
    found = low_reduction(Contrast.of(right, wrong, 1e-6), None, 2)
    assert found is not None and found.dtype == "bfloat16"
    assert low_reduction(Contrast.of(right, wrong + np.float32(1e-3), 1e-6), None, 2) is None
    assert low_reduction(Contrast.of(right, wrong, 1e-6), None, 2, roundoff=2.0**-8) is None  # as it should be
    # Nor is it any coarser than the other side.
    beside = (wrong.astype(ml_dtypes.bfloat16).view(np.uint16) + 1).view(ml_dtypes.bfloat16).astype(np.float32)
    assert low_reduction(Contrast.of(wrong, beside, 1e-6), None, 2) is None


def test_a_sum_of_few_bfloat16_values_needs_no_local_gradients() -> None:
    wide = [drawn(i, 300).astype(np.float32) for i in range(2)]
    right, wrong = (
        np.sum(wide, axis=0),
        np.sum([each.astype(ml_dtypes.bfloat16).astype(np.float32) for each in wide], axis=0),
    )
    found = low_reduction(Contrast.of(right, wrong, 1e-6), None, 1, num_microbatches=2)
    assert found is not None and "of the elements of the mean are sums of 2 bfloat16 values" in found.text
    partly, other = np.where(np.arange(300) < 60, right, wrong), np.roll(wrong, 1)
    for values, num_microbatches in ((wrong, 1), (partly, 2), (other, 2)):
        sides = Contrast.of(right, values, 1e-6)
        assert low_reduction(sides, None, 1, num_microbatches=num_microbatches) is None


def tied(seed: int, lookups: float, head: float) -> tuple[np.ndarray, np.ndarray]:
    looked_up, rows = np.zeros((20, 6)), np.random.default_rng(seed).permutation(20)[:7]
    looked_up[rows] = drawn(seed + 1, 7, 6)
    of_head = drawn(seed + 2, 20, 6)
    of_head -= of_head.mean(axis=0)
    return lookups * looked_up + head * of_head, np.isin(np.arange(20), rows)


@pytest.mark.parametrize(("lookups", "head"), [each for each in product((0, 1, 2), repeat=2) if each[0] != each[1]])
@pytest.mark.parametrize("knows_rows", [True, False])
def test_R31_how_often_each_use_of_a_tied_weight_counts(lookups: int, head: int, knows_rows: bool) -> None:
    (right, rows), (wrong, _) = tied(3, 1, 1), tied(3, lookups, head)
    found = uses_of(contrast(right, wrong), rows if knows_rows else None)
    if not knows_rows and head != 1:
        assert found is None  # all rows differ
    else:
        assert found is not None and (found.looked_up, found.all_rows, found.num_rows) == (lookups, head, 7)


def test_a_tied_weight_of_which_both_uses_count_twice_is_no_matter_of_uses() -> None:
    (right, rows), (wrong, _) = tied(3, 1, 1), tied(3, 2, 2)
    assert uses_of(contrast(right, wrong), rows) is None


def test_an_embedding_alone_and_a_head_alone_are_not_tied() -> None:
    for lookups, head in ((1, 0), (0, 1)):
        right, rows = tied(3, lookups, head)
        assert uses_of(contrast(right, 2 * right), rows) is None
        assert uses_of(contrast(right, right + 0.1 * drawn(9, 20, 6)), rows) is None


def test_rows_are_found_among_an_embeddings_outputs() -> None:
    weight = drawn(0, 9, 4).astype(np.float32)
    tokens = np.array([[1, 5], [5, 8]])
    found = rows_looked_up(weight, weight[tokens])
    assert found is not None and np.flatnonzero(found).tolist() == [1, 5, 8]
    assert rows_looked_up(weight, weight[tokens] * np.float32(1.1)) is None
    assert rows_looked_up(weight, np.zeros((2, 5), np.float32)) is None


RULE = AdamW(rate=0.01, beta1=0.9, beta2=0.999, epsilon=1e-8, decay=0.1, count_m=3, count_v=3)


def updates(seed: int, changed: AdamW, *, scale: float = 1e-3, size: float = 1.0) -> tuple[Update, Update]:
    """An update by RULE and one by another rule, in float32."""
    before, m = (size * drawn(seed, 80)).astype(np.float32), (scale * drawn(seed + 1, 80)).astype(np.float32)
    v = (scale**2 * drawn(seed + 2, 80) ** 2).astype(np.float32)
    wide = [x.astype(np.float64) for x in (before, m, v)]
    made = [rule.updated(wide[0], wide[1], wide[2]).astype(np.float32).astype(np.float64) for rule in (RULE, changed)]
    right, wrong = (Update(wide[0], after, (wide[1], wide[2]), 2.0**-24) for after in made)
    return right, wrong


def changed(**fields: object) -> AdamW:
    return AdamW(**(vars(RULE) | fields))  # type: ignore[arg-type]


OTHER_RULES: list[tuple[str, AdamW, str]] = [
    ("weight_decay", changed(decay=0.0), "weight decay is missing"),
    ("weight_decay", changed(decay=0.3), "weight decay is 0.3"),
    ("weight_decay", changed(decay=10.0), "not multiplied by the learning rate"),
    ("weight_decay", changed(decay=-0.1), "wrong sign"),
    ("optimizer_epsilon", changed(epsilon_in_root=True), "added inside the square root"),
    ("optimizer_epsilon", changed(epsilon=1e-5), "epsilon is 1e-05 outside the square root"),
    ("optimizer_epsilon", changed(epsilon=1e-4, epsilon_in_root=True), "epsilon is 0.0001 inside the square root"),
    ("bias_correction", changed(count_m=None, count_v=None), "neither moment"),
    ("bias_correction", changed(count_m=None), "the first moment is not"),
    ("bias_correction", changed(count_v=None), "the second moment is not"),
    ("bias_correction", changed(count_m=4, count_v=4), "for step 4 instead of step 3"),
    ("lost_step", changed(count_m=1, count_v=1), "step count was lost"),
    ("constant_factor", changed(rate=0.011), "1.1 times that of"),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("signature", "rule", "said"), OTHER_RULES, ids=[said for *_, said in OTHER_RULES])
def test_an_update_by_another_rule_is_diagnosed(signature: str, rule: AdamW, said: str, seed: int) -> None:
    right, wrong = updates(100 * seed, rule)
    found = best(update_deviations(right, wrong, RULE, None, norm(right.after - wrong.after)))
    assert found is not None and (found.signature, said in found.evidence) == (signature, True), found
    assert (
        update_deviations(wrong, right, RULE, None, norm(right.after - wrong.after)) == []
        or signature == "constant_factor"
    )


def test_constants_that_were_rounded_are_no_departure() -> None:
    """Some take 1 - beta^t in the dtype at hand: 1 - float32(0.999) is off by 1.3e-5 of itself."""
    low = np.float32(0.999)
    first, rounded = changed(count_m=1, count_v=1), changed(count_m=1, count_v=1, beta2=1 - float(np.float32(1) - low))
    assert first.beta2 != rounded.beta2
    (_, right), (_, wrong) = updates(0, first, size=1e-4), updates(0, rounded, size=1e-4)
    assert update_deviations(right, wrong, first, None, norm(right.after - wrong.after)) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("stated", [0.0, 0.1])
def test_a_decay_below_the_resolution_is_not_named(stated: float, seed: int) -> None:
    """float32 resolves a decay to 2 * 2^-24 / 0.01 = 1.2e-5 here, in each of both updates."""
    rule = changed(decay=stated)
    (_, right), (_, wrong) = updates(seed, rule), updates(seed, changed(decay=stated + 2e-5))
    assert update_deviations(right, wrong, rule, None, norm(right.after - wrong.after)) == []
    assert follow_one_rule(right, wrong, rule)
    assert not follow_one_rule(right, updates(seed, changed(decay=stated + 0.05))[1], rule)


def test_no_rule_is_changed_that_neither_side_follows() -> None:
    right, wrong = updates(0, changed(decay=0.0))
    way, noise = right.way(RULE), 1e-4 * drawn(9, 80)
    noise -= way * (way @ noise) / (way @ way)  # it fits the stated rate
    scattered = Update(right.before, right.after + noise, right.moments, right.roundoff)
    assert best(update_deviations(right, wrong, RULE, None, norm(right.after - wrong.after))) is not None
    assert update_deviations(scattered, wrong, RULE, None, norm(scattered.after - wrong.after)) == []
    uphill = [replace(side, after=2 * side.before - side.after) for side in (right, wrong)]
    assert update_deviations(*uphill, RULE, None, norm(right.after - wrong.after), states_decay=False) == []


def test_a_schedules_rate_is_read_off_the_right_side() -> None:
    scheduled = changed(rate=0.0031)
    right, _ = updates(0, scheduled), None
    wrong = updates(0, changed(rate=0.0031, decay=0.0))[1]
    found = best(update_deviations(right[1], wrong, RULE, None, norm(right[1].after - wrong.after)))
    assert found is not None and found.signature == "weight_decay", found
    assert follow_one_rule(right[1], updates(9, scheduled)[1], RULE)
    assert not follow_one_rule(right[1], updates(9, changed(rate=0.0032))[1], RULE)


def test_a_parameter_of_zeros_has_no_decay() -> None:
    right, wrong = updates(0, changed(rate=0.011), size=0.0)
    found = best(update_deviations(right, wrong, RULE, None, norm(right.after - wrong.after)))
    assert found is not None and found.signature == "constant_factor", found


def test_a_count_that_was_lost_long_ago_is_told_where_it_is_counted() -> None:
    due, began = changed(count_m=4000, count_v=4000), changed(count_m=170, count_v=170)
    (_, right), (_, wrong) = updates(0, due), updates(0, began)
    counted = best(update_deviations(right, wrong, due, 170.0, norm(right.after - wrong.after)))
    assert counted is not None and counted.signature == "lost_step", counted
    assert "for step 170 instead of step 4000" in counted.evidence
    # Otherwise nothing is said: some step or other scales an update by any factor.
    assert update_deviations(right, wrong, due, None, norm(right.after - wrong.after)) == []


@QUICK
@given(SEEDS)
def test_an_update_by_no_rule_is_given_no_name(seed: int) -> None:
    right, wrong = updates(seed % 1000, RULE)
    after = wrong.after + 1e-4 * drawn(seed + 7, 80)
    assert update_deviations(right, Update(wrong.before, after, wrong.moments, wrong.roundoff), RULE, None, 1e-3) == []


Rule = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def moments(seed: int, other: Rule) -> tuple[Moment, Moment]:
    """A moment that keeps 0.9 of itself and one by another rule, in float32."""
    old, gradient, before = (drawn(seed + i, 60).astype(np.float32).astype(np.float64) for i in range(3))
    made = [0.9 * old + 0.1 * gradient, other(old, gradient, before)]
    right, wrong = (Moment(old, new.astype(np.float32).astype(np.float64), gradient, before, 2.0**-24) for new in made)
    return right, wrong


@pytest.mark.parametrize(
    ("signature", "said", "new"),
    [
        ("weight_decay", "includes 0.1 times the parameter", lambda m, g, p: 0.9 * m + 0.1 * (g + 0.1 * p)),
        ("constant_factor", "is 3 times the gradient", lambda m, g, p: 0.9 * m + 0.3 * g),
        ("constant_factor", "decay rate is 0.8", lambda m, g, p: 0.8 * m + 0.2 * g),
    ],
)
def test_a_moment_by_another_rule_is_diagnosed(signature: str, said: str, new: Rule) -> None:
    right, wrong = moments(0, new)
    found = best(moment_deviations(right, wrong, Average(0.9, 0.1), (), norm(right.new - wrong.new)))
    assert found is not None and found.signature == signature and said in found.evidence, found


def test_a_gain_that_was_rounded_is_no_departure() -> None:
    """1 - float32(0.999) again, as what a square is multiplied by."""
    low = np.float32(0.999)
    gain = float(np.float32(1) - low)
    old, gradient, before = np.zeros(60), drawn(1, 60), drawn(2, 60)
    made = [factor * gradient for factor in (0.001, gain)]
    right, wrong = (Moment(old, new, gradient, before, 2.0**-24) for new in made)
    found = moment_deviations(right, wrong, Average(0.999, 0.001), (), norm(made[0] - made[1]), squared=True)
    assert gain != 0.001 and found == []


def test_gradients_that_something_scaled_on_both_sides_are_no_departure() -> None:
    right, wrong = (
        Moment(side.old, side.new, side.gradient / 8, side.before, side.roundoff)
        for side in moments(0, lambda m, g, p: 0.9 * m + 0.1 * (g + 0.1 * p))
    )
    found = best(moment_deviations(right, wrong, Average(0.9, 0.1), (), norm(right.new - wrong.new)))
    assert found is not None and found.signature == "weight_decay", found
    noise, gradient = drawn(9, 60), right.gradient
    noise -= gradient * (gradient @ noise) / (gradient @ gradient)  # it fits the scale
    scattered = replace(right, new=right.new + 1e-3 * noise)
    assert moment_deviations(scattered, wrong, Average(0.9, 0.1), (), norm(right.new - wrong.new)) == []
    right, wrong = (replace(side, gradient=-side.gradient) for side in (right, wrong))  # no scale has a sign
    assert moment_deviations(right, wrong, Average(0.9, 0.1), (), norm(right.new - wrong.new)) == []


def test_clipping_that_is_not_recorded_scales_gradients_but_not_their_decay() -> None:
    gradient, before = drawn(3, 40), drawn(4, 40)
    right, wrong = (
        Moment(np.zeros(40), 0.125 * gradient + decay * before, gradient + 0.01 * before, before, 2.0**-53)
        for decay in (0.01, 0.02)
    )
    found = best(moment_deviations(right, wrong, Average(0.9, 1.0), (), norm(right.new - wrong.new), decay=0.01))
    assert found is not None and found.signature == "weight_decay", found
    assert "includes 0.02 times the parameter, while 0.01 times is stated" in found.evidence


NORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool]] = {
    "layer norm": ((5, 7, 16), (2,), True),
    "RMS norm": ((5, 7, 16), (2,), False),
    "batch norm": ((9, 4, 3, 3), (0, 2, 3), True),
    "group norm of 2 groups": ((9, 4, 3, 3), (2, 3, 4), True),
    "group norm of 1 group": ((9, 4, 3), (2, 3), True),
    "instance norm": ((9, 4, 3, 3), (2, 3), True),
    "layer norm over channels": ((9, 4, 3, 3), (1,), True),
    "RMS norm over channels": ((9, 4, 3, 3), (1,), False),
}
OF_CHANNELS = frozenset(NORMS) - {"layer norm", "RMS norm"}


def normed(kind: str, x: np.ndarray, w: np.ndarray, b: np.ndarray, epsilon: float, under_root: bool) -> np.ndarray:
    dims, centred = NORMS[kind][1:]
    full = x.shape
    if kind.startswith("group"):
        x = x.reshape(full[0], 2 if "2" in kind else 1, -1, *full[2:])
    x = x - x.mean(axis=dims, keepdims=True) if centred else x
    square = np.square(x).mean(axis=dims, keepdims=True)
    below = np.sqrt(square + epsilon) if under_root else np.sqrt(square) + epsilon
    shape = weight_shape(kind)
    return (x / below).reshape(full) * w.reshape(shape) + b.reshape(shape)


def weight_shape(kind: str) -> tuple[int, ...]:
    return (1, -1, *[1] * (len(NORMS[kind][0]) - 2)) if kind in OF_CHANNELS else (-1,)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(
    ("first", "second"), [((1e-5, True), (1e-6, True)), ((1e-3, True), (1e-3, False)), ((1e-5, True), (0.0, True))]
)
def test_epsilons_of_norms_are_read_off_their_outputs(kind: str, first: tuple, second: tuple) -> None:
    shape = NORMS[kind][0]
    x, (w, b) = 0.3 * drawn(1, *shape), drawn(2, 2, shape[1] if kind in OF_CHANNELS else shape[-1])
    outputs = [normed(kind, x, w, b, *each).astype(np.float32) for each in (first, second)]
    found = norm_epsilons(Contrast.of(outputs[0], outputs[1], 1e-7 * norm(outputs[0])), (x, x), w, b, 2.0**-24)
    assert found is not None and found.text == kind
    for epsilon, (value, under_root) in ((found.right, first), (found.wrong, second)):
        assert abs(epsilon.value - value) <= epsilon.uncertainty and epsilon.under_root == under_root, (kind, epsilon)
    assert norm_epsilons(Contrast.of(outputs[0], 1.001 * outputs[0] ** 3, 1e-7), (x, x), w, b, 2.0**-24) is None


def test_a_norm_over_the_last_dims_together() -> None:
    x, (w, b) = drawn(1, 6, 3, 4), drawn(2, 2, 3, 4)
    centred = x - x.mean((1, 2), keepdims=True)
    first, second = (centred / np.sqrt(centred.var((1, 2), keepdims=True) + each) * w + b for each in (1e-5, 1e-3))
    found = norm_epsilons(Contrast.of(first, second, 1e-12), (x, x), w, b, 2.0**-53)
    assert found is not None and found.text == "layer norm" and abs(found.wrong.value - 1e-3) < 1e-9


def test_an_input_of_another_shape_is_not_that_of_a_norm() -> None:
    x, first, second, weight = drawn(1, 4, 1, 40), drawn(2, 4, 6, 7), drawn(3, 4, 6, 7), np.ones(7)
    sides = Contrast.of(first, second, 1e-7)
    assert norm_epsilons(sides, (x, x), weight, None, 2.0**-24) is None
    assert rounded_epsilons(sides, (x, x), weight, None, "bfloat16") is None


def test_channels_and_samples_that_are_dropped_as_a_whole() -> None:
    x, rng = drawn(1, 8, 16, 5, 5), np.random.default_rng(0)
    for shape, p in (((8, 16, 1, 1), 0.2), ((8, 1, 1, 1), 0.3)):
        kept = rng.random(shape) >= p
        wrong = np.where(kept, x / (1 - p), 0.0)
        found = dropout_of(Contrast.of(x, wrong, 1e-12))
        assert found is not None and abs(1 - 1 / found.factor - p) < 1e-9, shape


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("late", [False, True], ids=["weight before the cast", "weight after the cast"])
def test_epsilons_within_the_rounding_of_bfloat16_are_found(kind: str, late: bool) -> None:
    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float32).astype(ml_dtypes.bfloat16)

    dim = 1 if kind in OF_CHANNELS else -1
    shape = NORMS[kind][0]
    x, w = rounded(0.05 * drawn(1, *shape)).astype(np.float64), rounded(drawn(2, shape[dim])).astype(np.float64)
    b, ones, zeros = np.zeros_like(w), np.ones_like(w), np.zeros_like(w)

    def output(epsilon: float) -> np.ndarray:
        if not late:
            return rounded(normed(kind, x, w, b, epsilon, True))
        first = rounded(normed(kind, x, ones, zeros, epsilon, True)).astype(np.float64)
        return rounded(first * w.reshape(weight_shape(kind)))

    outputs = [output(epsilon) for epsilon in (1e-6, 1e-5)]
    found = rounded_epsilons(Contrast.of(*outputs, 1e-2 * norm(outputs[0])), (x, x), w, None, "bfloat16")
    assert found is not None and (found.text, found.right.value, found.wrong.value) == (kind, 1e-6, 1e-5)
    other = rounded(outputs[0].astype(np.float64) * (1 + 0.004 * drawn(5, *shape)))
    assert rounded_epsilons(Contrast.of(outputs[0], other, 1.0), (x, x), w, None, "bfloat16") is None


@pytest.mark.parametrize(("first", "second"), list(product(FUNCTIONS, repeat=2)))
@pytest.mark.parametrize("gated", [False, True])
def test_activation_functions_are_told_apart(first: str, second: str, gated: bool) -> None:
    x, gate = 2 * drawn(0, 8, 40), drawn(1, 8, 40)
    outputs = [(FUNCTIONS[name](x) * (gate if gated else 1)).astype(np.float32) for name in (first, second)]
    found = functions_of(Contrast.of(outputs[0], outputs[1], 1e-6), (x, x), 2.0**-24, (gate, gate) if gated else None)
    if first == second:
        assert found is None
    else:
        assert found is not None and (found.right, found.wrong) == (first, second)


def test_gelu_is_looked_for_in_part_of_what_is_large() -> None:
    x = drawn(0, 100, 100)
    sides = Contrast.of(FUNCTIONS[ERF_GELU](x), FUNCTIONS[TANH_GELU](x), 1e-9)
    assert functions_of(sides, (x, x), 2.0**-53) is not None
    assert functions_of(sides, (-x, -x), 2.0**-53) is None


@QUICK
@given(SEEDS, st.sampled_from([0.1, 0.25, 0.5]), st.booleans())
def test_dropout_is_told_with_its_p(seed: int, p: float, of_a_branch: bool) -> None:
    x, rest = drawn(seed, 20, 30), drawn(seed + 1, 20, 30) if of_a_branch else np.zeros((20, 30))
    dropped = x * (np.random.default_rng(seed).random(x.shape) >= p) / (1 - p)
    found = dropout_of(contrast(x + rest, dropped + rest, seed), x if of_a_branch else None)
    assert found is not None
    assert 1 - 1 / found.factor == pytest.approx(p, abs=1e-5) and abs(found.share - p) < 0.15


def test_elements_that_are_missing_without_the_others_growing_as_much_are_no_dropout() -> None:
    x = drawn(0, 40, 40)
    kept = np.random.default_rng(0).random(x.shape) >= 0.4
    assert dropout_of(contrast(x, x * kept / 0.6)) is not None
    assert dropout_of(contrast(x, x * kept / 0.9)) is None


def test_two_masks_of_one_dropout_are_told() -> None:
    x, rng = drawn(0, 40, 40), np.random.default_rng(0)
    first, second = (x * (rng.random(x.shape) >= 0.2) / 0.8 for _ in range(2))
    found = two_masks_of(contrast(first, second))
    assert found is not None and found.share == pytest.approx(0.2, abs=0.05)  # five deviations of 1600 draws
    assert found.factor == pytest.approx(1 / (1 - found.share)) and found.numel == x.size
    assert found.residual < 1e-4
    # Masks of two shares, one that is the other one in part, the same one, and other values.
    third = x * (rng.random(x.shape) >= 0.7) / 0.8
    others = (third, first * (rng.random(x.shape) >= 0.2), first, np.where(second, np.cos(second), 0.0))
    assert all(two_masks_of(contrast(first, other)) is None for other in others)
    # A causal mask is no dropout: one side has all that the other has, and more.
    assert two_masks_of(contrast(np.tril(x), x)) is None


def test_a_branch_that_comes_in_another_number_of_times() -> None:
    x, branch = drawn(0, 9, 8), drawn(1, 9, 8)
    for factor in (0.0, 0.5, 2.0):
        found = branch_of(contrast(x + branch, x + factor * branch), branch)
        assert found is not None and abs(found.factor - factor) <= found.error
    assert branch_of(contrast(x + branch, x + np.tanh(branch)), branch) is None


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 1, 3, 2), (1, 0, 3, 2)])
def test_kernels_of_convolutions_in_another_order(order: tuple[int, ...]) -> None:
    x, weight, bias = drawn(0, 2, 3, 6, 6), drawn(1, 3, 3, 5, 5), drawn(2, 3)
    right, wrong = (convolved(x, w) + bias[:, None, None] for w in (weight, weight.transpose(order)))  # type: ignore[operator]
    found = kernel_reordered(contrast(right, wrong), (x, x), weight, bias, 2.0**-24)
    assert found is not None and right.shape == x.shape
    assert (
        kernel_reordered(contrast(right, right + 0.01 * drawn(5, *right.shape)), (x, x), weight, bias, 2.0**-24) is None
    )


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_that_pads_on_one_side_is_found(stride: int) -> None:
    x, weight, bias = drawn(1, 2, 3, 8, 8), drawn(2, 4, 3, 3, 3), drawn(3, 4)

    def output(before: int, x: np.ndarray = x) -> np.ndarray:
        padded = np.pad(x, ((0, 0), (0, 0), (before, 2 - before), (before, 2 - before)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))[:, :, ::stride, ::stride]
        return np.einsum("bihwyx,oiyx->bohw", windows, weight) + bias[:, None, None]

    sides = contrast(output(1), output(0))
    found = paddings_of(sides, (x, x), weight, bias, 2.0**-24)
    assert found is not None and found[:2] == (stride, (1, 0)) and found[2] < 1e-4 * sides.difference
    other = contrast(output(1), output(1) + 0.1 * drawn(4, *output(1).shape))
    assert paddings_of(other, (x, x), weight, bias, 2.0**-24) is None
    assert paddings_of(contrast(output(1), output(1, 2 * x)), (x, 2 * x), weight, bias, 2.0**-24) is None
    assert paddings_of(sides, (x[:, :2], x[:, :2]), weight, bias, 2.0**-24) is None


def test_a_square_kernel_transposed() -> None:
    x, weight = drawn(0, 4, 5, 8), drawn(1, 8, 8)
    found = kernel_reordered(contrast(x @ weight.T, x @ weight), (x, x), weight, None, 2.0**-24)
    assert found is not None and found[0] == "transposed"


def test_a_kernel_is_tried_with_the_input_of_each_side() -> None:
    x, weight, bias = drawn(0, 4, 5, 8), drawn(1, 8, 8), drawn(2, 8)
    y = x + 0.01 * drawn(3, *x.shape)
    right, wrong = x @ weight.T + bias, y @ weight + bias
    found = kernel_reordered(contrast(right, wrong), (x, y), weight, bias, 2.0**-24)
    assert found is not None and found[0] == "transposed" and found[1] < 1e-4
    for inputs in ((x, x), (y, y), (x[..., :7], y), (x, y[..., :7]), (x[:2], y), (x, y[:2])):
        assert kernel_reordered(contrast(right, wrong), inputs, weight, bias, 2.0**-24) is None
    assert kernel_reordered(contrast(right, wrong), (x, y), weight, None, 2.0**-24) is None
    # A transposed matrix that is not square fits no input.
    assert kernel_reordered(contrast(x @ weight[:6].T, wrong[..., :6]), (x, y), weight[:6], None, 2.0**-24) is None


def unrelated(seed: int, numel: int) -> Iterator[tuple[str, object]]:
    """What every hypothesis makes of a difference that has to do with nothing."""
    x = drawn(seed, numel, 4)
    sides = contrast(x, x + 10 ** float(np.random.default_rng(seed).uniform(-5, 1)) * drawn(seed + 1, numel, 4), seed)
    grads = [drawn(seed + 2, numel, 4), 2 * x - drawn(seed + 2, numel, 4)]
    others = [drawn(seed + i, numel, 4) for i in (5, 6)]
    yield "factor", factor_of(sides)
    yield "transposition", transposition_of(sides)
    yield "shift", shift_of(sides)
    yield "same", same_as(sides, {"q": others[0]})
    yield "absent", absent_ranks(sides, grads)
    yield "weighted", weighted_ranks(sides, grads)
    yield "mixed", mixed_ranks(sides, grads, others)
    yield "low", low_reduction(sides, grads, 2)
    yield "low without gradients", low_reduction(sides, None, 2)
    yield "uses", uses_of(sides, np.arange(numel) < 3)
    yield "epsilons", norm_epsilons(sides, (others[0], others[0]), drawn(seed, 4), None, 2.0**-24)
    yield "functions", functions_of(sides, (others[0], others[0]), 2.0**-24)
    yield "dropout", dropout_of(sides)
    yield "dropout of a branch", dropout_of(sides, others[0])
    yield "masks", two_masks_of(sides)
    yield "branch", branch_of(sides, others[0])


@QUICK
@given(SEEDS, st.integers(3, 30))
def test_an_unrelated_difference_fits_nothing(seed: int, numel: int) -> None:
    assert {name: found for name, found in unrelated(seed, numel) if found is not None} == {}


@QUICK
@given(SEEDS, st.floats(1.01, 1.9))
def test_a_difference_barely_beyond_its_limit_fits_nothing(seed: int, beyond: float) -> None:
    x, noise = drawn(seed, 60), drawn(seed + 1, 60)
    sides = Contrast(x, x + noise * beyond / norm(noise), 1.0)
    assert factor_of(sides) is None and shift_of(sides) is None and branch_of(sides, drawn(seed + 2, 60)) is None


def test_of_several_fits_the_exact_and_specific_goes_first() -> None:
    exact = Fit("weight_decay", "", 1e-9, 1e-8)
    assert best([Fit("constant_factor", "", 1e-12), exact]) is exact
    assert best([Fit("constant_factor", "", 1e-12, 1e-11), exact]) is exact
    assert best([Fit("dropout", "", 1e-3), smaller := Fit("constant_factor", "", 1e-4)]) is smaller
    assert best([Fit("dropout", "", 0.0), specific := Fit("stale_copy", "", 0.0)]) is specific
    assert best([]) is None


def test_stories_agree_within_what_was_fitted() -> None:
    assert Claim("decay", 0.1, 1e-3).same(Claim("decay", 0.101, 1e-3))
    assert not Claim("decay", 0.1, 1e-4).same(Claim("decay", 0.2, 1e-4))
    assert not Claim("decay", 0.1).same(Claim("epsilon", 0.1))


def fed(*steps: list[list[int]]) -> list[list[Batch]]:
    return [[Batch(f"{ids}", tuple(ids)) for ids in ranks] for ranks in steps]


FIRST, *LATER = [[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]
RIGHT = fed(FIRST, *LATER)


@pytest.mark.parametrize(
    ("other", "step", "said"),
    [
        (fed(FIRST, [[5, 4], [6, 7]], LATER[1]), 1, "ranks [0] received the same samples in a different order"),
        (fed([[2, 3], [0, 1]], *LATER), 0, "the ranks of b received the batches of ranks [1, 0] of a"),
        (
            fed([[0, 1], [0, 1]], [[4, 5], [4, 5]], [[8, 9], [8, 9]]),
            0,
            "the ranks of b received the batches of ranks [0, 0] of a: some twice, some never",
        ),
        (fed([[0, 1], [2, 2]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]), 0, "in b 1 samples were used more than once in the step"),
        (
            fed([[0, 2], [1, 3]], *LATER),
            0,
            "all ranks together received the same samples, distributed differently",
        ),
        (fed([[4, 5], [6, 7]], [[8, 9], [10, 11]], [[12, 13], [14, 15]]), 0, "b is 1 step ahead of a in the data"),
        (fed([[90, 91], [92, 93]], [[0, 1], [2, 3]], [[4, 5], [6, 7]]), 0, "b is 1 step behind a in the data"),
        (
            fed([[0, 1], [8, 9]], [[4, 5], [6, 7]], [[2, 3], [10, 11]]),
            0,
            "all steps together used the same samples in a different order",
        ),
        (fed([[0, 1], [2, 77, 78]], *LATER), 0, "of 4 samples in a and 5 in b, 3 are the same"),
        (fed(FIRST, LATER[0], [[90, 91], [92, 93]]), 2, "of 4 samples in a and 4 in b, 0 are the same"),
        (fed([[0, 1]], [[4, 5]], [[8, 9]]), 0, "of 4 samples in a and 2 in b, 2 are the same"),
        (
            [[Batch("other", (0, 1)), RIGHT[0][1]], *RIGHT[1:]],
            0,
            "ranks [0] received the same samples in the same order, but with different values",
        ),
        (
            fed([[0, 1, 4, 5], [2, 3, 6, 7]], [[8, 9], [10, 11]], [[12, 13], [14, 15]]),
            0,
            "b has the samples of steps 0 to 1 of a in one step: it left out 1 optimizer step",
        ),
        (
            fed(FIRST, [[4, 5, 8, 9], [6, 7, 10, 11]], [[12, 13], [14, 15]]),
            1,
            "b has the samples of steps 1 to 2 of a in one step: it left out 1 optimizer step",
        ),
        (fed([[0, 1, 2, 4]], [[4, 5, 6, 7]], [[8, 9, 10, 11]]), 0, "of 4 samples in a and 4 in b, 3 are the same"),
    ],
)  # fmt: skip
def test_how_batches_differ_is_said(other: list, step: int, said: str) -> None:
    found = batch_difference(RIGHT, other, ("a", "b"))
    assert found is not None and (found.step, found.text) == (step, said)
    assert (found.same_samples, found.lost_step) == ("different values" in said, "left out" in said)


TOKENS, MASK, LABELS = np.arange(12).reshape(4, 3), np.ones((4, 3)), np.arange(4)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        pytest.param([TOKENS, MASK, LABELS[::-1]], "only array 3 of b differs from that of a", id="order"),
        pytest.param(
            [TOKENS, MASK, TOKENS], "only array 3 of b differs from that of a", id="another array of the batch"
        ),
        pytest.param([TOKENS, 0 * MASK, LABELS + 1], "only arrays 2 and 3 of b differ from those of a", id="values"),
        pytest.param([TOKENS + 1, 0 * MASK, LABELS + 1], "of 4 samples in a and 4 in b, 0 are the same", id="all"),
        pytest.param([TOKENS, MASK, LABELS + 1, MASK], "of 4 samples in a and 4 in b, 0 are the same", id="more"),
    ],
)
def test_arrays_that_differ_next_to_the_same_are_numbered(arrays: list[np.ndarray], text: str) -> None:
    a, b = ([[batch_of([each])]] for each in ([TOKENS, MASK, LABELS], arrays))
    found = batch_difference(a, b, ("a", "b"))
    assert found is not None and found.text.endswith(text), found


def test_batches_that_are_the_same_differ_in_nothing() -> None:
    assert batch_difference(RIGHT, RIGHT, ("a", "b")) is None
    assert batch_difference(RIGHT, fed([[3, 2, 1, 0]], [[4, 5, 6, 7]], [[8, 9, 10, 11]]), ("a", "b")) is None


@pytest.mark.parametrize(
    ("residual", "difference", "tolerance", "expected"),
    [
        (1.0, 2.0, 1.0, True),
        (1.0 + 2.0**-52, 4.0, 1.0, False),
        (1.0, 2.0 - 2.0**-52, 1.0, False),
        (0.0, 2.0**-1074, 0.0, True),
        (0.0, 0.0, 0.0, False),
        (math.nan, 1.0, 1.0, False),
    ],
)
def test_a_hypothesis_is_accepted_up_to_its_limits(
    residual: float, difference: float, tolerance: float, expected: bool
) -> None:
    assert accepted(residual, difference, tolerance) is expected


def test_limits_of_fits_are_inside() -> None:
    one = np.array([1.0, 0.0])
    assert is_uninformative(np.array([0.0, 1.0]), 1.0) and not is_uninformative(np.array([0.0, 1.0]), 0.875)
    assert is_uninformative(np.array([3.0, 3.0])) and is_uninformative(np.zeros(0)) and not is_uninformative(one)
    assert Claim("x", 1.0, 0.25).same(Claim("x", 1.5, 0.25)) and not Claim("x", 1.0, 0.25).same(Claim("x", 1.5, 0.125))
    assert Claim("x").same(Claim("x")) and not Claim("x").same(Claim("x", 1.0)) and not Claim("x", 1.0).same(Claim("x"))
    assert factor_between(one, np.array([3.0, 5.0])) == 3.0 and factor_between(0 * one, one) == 0.0
    assert factor_between(np.array([np.inf, 1.0]), one) == 0.0 and factor_between(-one, one) == -1.0
    assert roundoff_of(np.zeros(1, np.int32)) == 0.0 and roundoff_of(np.zeros(1, np.float16)) == 2.0**-11
    assert sum_roundoff(10, 2.0**-8) == 10 * 2.0**-24 + 2 * 2.0**-8 and sum_roundoff(10, 2.0**-53) == 12 * 2.0**-53


def test_an_exact_fit_is_one_within_its_error() -> None:
    at, beyond = Fit("constant_factor", "", 1.0, 1.0), Fit("dropout", "", 1.0, 1.0 - 2.0**-53)
    assert best([beyond, at]) is at
    plain, part = (Fit("constant_factor", text, 1.0, 1.0, Claim(text)) for text in ("factor", "rate"))
    assert best([plain, part]) is part and best([part, plain]) is part
    assert best([Fit("dropout", "", 2.0), smaller := Fit("dropout", "", 1.0)]) is smaller


def test_parts_of_a_contrast() -> None:
    whole = Contrast(np.arange(6.0).reshape(2, 3), np.zeros((2, 3)), 0.5, 2.0**-24)
    part = whole.within(1, 4)
    assert part.right.tolist() == [1, 2, 3] and (part.limit, part.roundoff) == (0.5, 2.0**-24)
    assert whole.residual(np.ones((2, 3))) == math.sqrt(6) and whole.difference == math.sqrt(55)
    narrow = Contrast.of(np.zeros(2, np.float32), np.zeros(2), 1)
    assert (narrow.roundoff, type(narrow.limit)) == (2.0**-53, float)
