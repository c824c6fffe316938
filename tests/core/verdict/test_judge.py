"""One quantity judged, located and put in words; one gradient found to be noise."""

import math
from dataclasses import replace

import numpy as np
import pytest

from crossframe.layout import PerParamLayout
from crossframe.param_map import identity_map
from crossframe.params import ParamSpec
from crossframe.recording import Schedule
from crossframe.recording.sketch import sketches_of
from crossframe.verdict import Verdict, compare
from crossframe.verdict.divergence_text import describe
from crossframe.verdict.measure.judge import Judgement, judge
from crossframe.verdict.measure.locate import locate
from crossframe.verdict.measure.metrics import distance, norm
from crossframe.verdict.measure.zero_gradient import (
    GradientSizes,
    gradient_sizes,
    terms_of,
    zero_gradient_elements,
    zero_gradient_parameters,
)
from tests.core.helpers import synthetic
from tests.core.helpers.quantities import quantity

NAN, INF = math.nan, math.inf


def said(judgement, manifest=None):
    return describe(judgement, locate(judgement, manifest or synthetic.manifest()), ("torch", "jax"))


def test_a_difference_that_is_just_the_bound_is_within():
    assert not judge(quantity([0.0, 3.0], [0.0, 4.0], scale=2.0)).beyond
    assert judge(quantity([0.0, 3.0], [0.0, 4.0], scale=2.0, bound=np.nextafter(0.5, 0))).beyond


def test_equal_means_bits_and_dtype():
    same = judge(quantity([1.0, 2.0], [1.0, 2.0]))
    assert (same.equal, same.difference, same.beyond, same.one_sided, same.both_not_finite) == (True, 0, 0, 0, 0)
    zeros = np.zeros(2, np.float64), np.zeros(2, np.int64)  # the same bytes
    for bound in (0.5, None):
        for a, b in (zeros, (np.zeros(2), -np.zeros(2)), (np.ones(2, np.float32), np.ones(2))):
            found = judge(quantity(a, b, bound=bound))
            assert (found.equal, found.difference, found.beyond) == (False, 0.0, bound is None)
            assert (found.one_sided, found.both_not_finite) == (False, False)


def test_what_is_not_finite_on_both_sides_is_told_apart_from_what_is_so_on_one():
    cases = [
        ([NAN, 1.0], [NAN, 1.0], (True, False, True, 0.0)),
        ([NAN, 1.0], [-NAN, 1.0], (True, False, True, 0.0)),
        ([NAN, 1.0], [NAN, 1.25], (False, False, True, 0.25)),
        ([INF, 1.0], [INF, 1.25], (False, False, True, 0.25)),
        ([INF, 1.0], [-INF, 1.0], (False, True, False, INF)),
        ([NAN, 1.0], [INF, 1.0], (False, True, False, INF)),
        ([2.0, 1.0], [2.0, NAN], (False, True, False, INF)),
        ([INF, 1.0], [2.0, 1.0], (False, True, False, INF)),
        ([NAN, 1.0, 3.0], [NAN, NAN, 3.0], (False, True, True, INF)),
    ]
    for a, b, expected in cases:
        found = judge(quantity(a, b))
        assert (found.equal, found.one_sided, found.both_not_finite, found.difference) == expected, (a, b)
        assert found.beyond == found.one_sided, (a, b)


@pytest.mark.parametrize("lost", [0, 1])
def test_sketches_are_judged_as_elements(lost):
    array = np.array([1.0, 2.0, 3.0, 4.0])
    array[:lost] = NAN
    a, b = sketches_of([array, array + np.array([0.0, 0.0, 0.0, 0.5])])

    def judged(other, **fields):
        return judge(quantity(a.sums, other.sums, sketches=(a, other), **fields))

    same = judged(a, bound=None)
    assert same == Judgement(same.quantity, True, 0.0, False, False, lost > 0)
    for scale, bound, beyond in ((1.0, 0.5, False), (0.99, 0.5, True), (1.0, None, True)):
        found = judged(b, scale=scale, bound=bound)
        assert found == Judgement(found.quantity, False, 0.5 / scale, beyond, False, lost > 0, 0.5 / scale)
    fewer = judged(replace(b, num_not_finite=lost + 1))
    assert fewer == Judgement(fewer.quantity, False, INF, True, True, False, INF)


def test_an_element_at_its_share_of_the_bound_is_not_off():
    # bound * scale / sqrt(numel) = 0.5 * 4 / 2 = 1.
    found = judge(quantity([0.0] * 4, [1.0, 0.0, 3.0, 1.0], scale=4.0, rank=0))
    where = locate(found, synthetic.manifest())
    assert (where.start, where.stop) == (2, 3)


@pytest.mark.parametrize("bound", [0.5, None])
def test_an_element_that_is_not_finite_on_both_sides_is_not_off(bound):
    found = judge(quantity([INF, 0.0, 0.0, NAN], [INF, 0.0, 3.0, -NAN], rank=0, bound=bound))
    where = locate(found, synthetic.manifest())
    assert (where.start, where.stop) == (2, 3)


def test_of_what_is_not_finite_on_one_side_only_that_is_off():
    found = judge(quantity([NAN, 0.0, 1.0, 9.0], [NAN, INF, 1.0, 1.0], rank=0))
    where = locate(found, synthetic.manifest())
    assert (where.start, where.stop) == (1, 2)


def test_a_sign_of_zero_that_was_lost_is_off_where_equal_bits_are_asked_for():
    found = judge(quantity([0.0, 1.0, 0.0], [0.0, 1.0, -0.0], bound=None))
    where = locate(found, synthetic.manifest())
    assert (where.parameter, where.start, where.stop) == ("bias", 2, 3)


@pytest.mark.parametrize("bound", [0.1, None])
def test_the_worst_element_decides_on_the_rank(bound):
    # Flat over two ranks: 12 elements of embed and 3 of bias, so rank 0 holds embed 0:8 and rank 1 the rest.
    for off, expected in (([1.0, 5.0, 9.0], (0, 2, 8)), ([1.0, 2.0, -9.0], (1, 11, 12))):
        b = np.zeros(12)
        b[[2, 7, 11]] = off[0], off[1], off[2]
        if expected[0] == 0:
            b[[7, 11]] = b[[11, 7]]
        where = locate(judge(quantity(np.zeros(12), b, bound=bound, parameter="embed")), synthetic.manifest())
        assert (where.rank, where.start, where.stop) == expected


def test_what_a_rank_has_alone_is_located_on_it_in_full():
    b = np.zeros(12)
    b[[2, 11]] = 1.0, 9.0
    where = locate(judge(quantity(np.zeros(12), b, parameter="embed", rank=0)), synthetic.manifest())
    assert (where.rank, where.start, where.stop) == (0, 2, 12)


def test_a_replica_is_counted_in_shards():
    b = np.zeros(12)
    b[2] = 1.0
    made = synthetic.manifest(6, replicate=3)
    where = locate(judge(quantity(np.zeros(12), b, parameter="embed", replica=2)), made)
    assert where.rank == 4


def test_a_parameter_cut_on_another_dim_is_located_in_all_its_runs():
    # (2, 4) cut on dim 1: rank 0 holds elements 0, 1, 4, 5.
    layout = PerParamLayout((ParamSpec("w", (2, 4), "float64"),), 2, dims=(1,))
    made = replace(synthetic.manifest(), units=(("", layout),), param_map=_map("w"))
    b = np.zeros(8)
    b[[1, 2, 4, 7]] = 9.0, 5.0, 5.0, 5.0
    where = locate(judge(quantity(np.zeros(8), b, parameter="w")), made)
    assert (where.rank, where.start, where.stop) == (0, 1, 5)


def _map(*names):
    return identity_map(dict.fromkeys(names, (2, 4)))


def test_a_place_as_json():
    where = locate(judge(quantity([0.0], [2.0], phase="forward", parameter="", rank=1)), synthetic.manifest())
    assert where.to_json() == {
        "step": 0, "phase": "forward", "rank": 1, "unit": "", "parameter": None, "start": None, "stop": None,
        "event": "optimizer", "ranks": [], "module": None, "buffer": None,
    }  # fmt: skip


def test_divergences_in_words():
    loss = quantity([1.0], [3.0], phase="forward", parameter="", rank=1, step=4)
    agrees = "more than the bound of 5.0e-01; all of its causes agree"
    assert said(judge(loss)) == f"at step 4 the loss of rank 1 differs by 2.0e+00 between torch and jax, {agrees}"
    mean = judge(replace(loss, rank=None))
    assert said(mean) == f"at step 4 the mean loss over ranks differs by 2.0e+00 between torch and jax, {agrees}"
    nouns = {
        "parameters": "initial value",
        "backward": "local gradient",
        "reduce": "reduced gradient",
        "update": "updated value",
    }
    for phase, noun in nouns.items():
        for unit, shown in (("", "the root unit"), ("block", "unit 'block'")):
            of = judge(quantity([0.0] * 3, [0.0, 3.0, 0.0], phase=phase, unit=unit, rank=0))
            assert said(of).startswith(
                f"at step 0 the {noun} of 'bias' ({shown}, elements 1:2, rank 0) differs by 3.0e+00"
            )
    moved = judge(quantity([0.0] * 3, [0.0, 3.0, 0.0], phase="parameters", bound=None, rank=0))
    assert said(moved).endswith(" rank 0) is not bitwise equal in torch and jax: data was moved incorrectly")


def test_the_side_that_is_not_finite_is_named():
    good, bad = [1.0, 2.0], [1.0, INF]
    for a, b, end in (
        (good, bad, "in jax and finite in torch"),
        (bad, good, "in torch and finite in jax"),
        (bad, [NAN, 2.0], "in different elements in torch and jax"),
    ):
        for bound in (0.5, None):
            found = judge(quantity(a, b, rank=0, bound=bound))
            assert said(found).endswith(f"rank 0) is not finite (NaN or infinity) {end}")


def test_norms():
    assert norm(np.array([-3.0])) == 3.0
    assert norm(np.array([-3.0, 4.0])) == 5.0
    assert math.isnan(norm(np.array([1.0, NAN])))
    assert distance(np.array([1e308]), np.array([-1e308])) == INF


# Gradients that are noise.


def sizes(embed, typical=1.0):
    """Of these sizes at steps 0, 1, ...: `embed`; every other parameter's gradient is typical."""
    return GradientSizes(
        {step: dict.fromkeys(synthetic.SHAPES, typical) | {"embed": size} for step, size in enumerate(embed)},
        dict.fromkeys(range(len(embed)), typical),
    )


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return synthetic.record(tmp_path_factory.mktemp("noise") / "run")


LIMIT = 16 * 2.0**-53  # terms * u
ABOVE = float(np.nextafter(LIMIT, 1))


@pytest.mark.parametrize(
    ("a", "b", "noise"),
    [
        ([LIMIT, LIMIT], [LIMIT, LIMIT], True),
        ([ABOVE, LIMIT], [LIMIT, LIMIT], False),
        ([LIMIT, ABOVE], [LIMIT, LIMIT], False),
        ([LIMIT, LIMIT], [LIMIT, ABOVE], False),
        ([0.0, 0.0], [0.0, 0.0], False),
        ([0.0, 0.0], [0.0, 1e-300], True),
        ([1e-300, 0.0], [0.0, 0.0], True),
    ],
)
def test_noise_is_at_most_terms_times_roundoff_on_both_sides_at_every_step(recording, a, b, noise):
    found = zero_gradient_parameters(recording, recording, (0, 1), (sizes(a), sizes(b)))
    assert found == (("embed",) if noise else ())


def test_noise_is_relative_to_the_typical_gradient_of_its_own_recording(recording):
    small, large = sizes([1.0], typical=1.0), sizes([1.0], typical=2 / LIMIT)
    assert zero_gradient_parameters(recording, recording, (0,), (large, large)) == ("embed",)
    assert zero_gradient_parameters(recording, recording, (0,), (small, large)) == ()
    assert zero_gradient_parameters(recording, recording, (0,), (large, small)) == ()


def _recorded(directory, **fields):
    return synthetic.record(directory, synthetic.manifest(**fields))


def test_each_recording_sums_its_own_number_of_terms(tmp_path, recording):
    more = _recorded(tmp_path / "more", terms=64)
    of = sizes([LIMIT]), sizes([4 * LIMIT])
    assert zero_gradient_parameters(recording, more, (0,), of) == ("embed",)
    assert zero_gradient_parameters(recording, more, (0,), (of[1], of[0])) == ()


def test_where_noise_would_pass_a_hundredth_it_is_not_told_apart(tmp_path):
    few, many = (_recorded(tmp_path / str(n), dtype="float32", terms=n) for n in (160_000, 170_000))
    of = sizes([1e-3]), sizes([1e-3])
    assert zero_gradient_parameters(few, few, (0,), of) == ("embed",)
    for a, b in ((few, many), (many, few), (many, many)):
        assert zero_gradient_parameters(a, b, (0,), of) == ()


def test_a_frozen_parameter_has_no_gradient_that_could_be_noise(tmp_path):
    params = [ParamSpec(n, shape, "float64", requires_grad=n != "embed") for n, shape in synthetic.SHAPES.items()]
    made = synthetic.manifest(
        units=tuple((n, PerParamLayout((p,), 2)) for n, p in zip(("", "x", "y", "z"), params, strict=True))
    )
    run = synthetic.record(tmp_path / "run", made)
    assert zero_gradient_parameters(run, run, (0,), (sizes([LIMIT]), sizes([LIMIT]))) == ()


def test_some_elements_of_a_bias_may_be_noise_that_the_optimizer_amplifies(tmp_path):
    """As those of keys in a bias of queries, keys and values."""

    def noisy(factor):
        def tamper(phase, step, rank, name, array):
            if name == "bias" and phase in ("reduce", "update", "state"):
                array[0] = factor * (1e-16 if phase == "reduce" else 1e-3)
            return array

        return tamper

    runs = [synthetic.record(tmp_path / str(factor), tamper=noisy(factor)) for factor in (1.0, -1.0)]
    both = [gradient_sizes(run) for run in runs]
    mask = zero_gradient_elements(*runs, (0, 1), (both[0], both[1]), "bias")
    assert mask is not None and mask.tolist() == [True] + [False] * (mask.size - 1)
    assert zero_gradient_elements(*runs, (0, 1), (both[0], both[1]), "embed") is None  # of two dims
    found = compare(*runs)
    assert found.verdict in (Verdict.EQUAL, Verdict.ROUNDING), found
    assert f"bias (1 of {mask.size} elements)" in found.zero_gradient_parameters


def test_gradients_are_measured_by_what_is_finite(tmp_path):
    def spoil(phase, step, rank, name, array):
        if (phase, name, step) == ("reduce", "bias", 1):
            array[1] = NAN
        return array

    run = synthetic.record(tmp_path / "run", tamper=spoil)
    found = gradient_sizes(run)
    for step in (0, 1):
        grads = {name: run.full("reduce", step, name).reshape(-1) for name in synthetic.SHAPES}
        every = np.concatenate(list(grads.values()))
        every = every[np.isfinite(every)]
        assert every.size == 33 - step
        assert found.typical[step] == pytest.approx(np.sqrt(np.mean(every**2)), rel=1e-12)
        for name, grad in grads.items():
            expected = INF if (name, step) == ("bias", 1) else np.sqrt(np.mean(grad**2))
            assert found.of[step][name] == pytest.approx(expected, rel=1e-12)


def test_where_the_loop_did_not_tell_the_rows_of_what_modules_saw_are_the_terms(tmp_path):
    made = synthetic.manifest(terms=None)
    assert terms_of(synthetic.record(tmp_path / "a", made)) == 3  # activations are (3, 4)
    assert terms_of(synthetic.record(tmp_path / "b", synthetic.manifest(terms=7))) == 7
    sparse = synthetic.manifest(terms=None, schedule=Schedule(dense=0, every=1))
    assert terms_of(synthetic.record(tmp_path / "c", sparse)) == 1
