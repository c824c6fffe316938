"""Differences inside the spread of perturbed runs: found if they have a direction, and only then."""

import math
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from crossframe.dtypes import numpy_dtype
from crossframe.recording import Schedule
from crossframe.recording.event_format import perturbed_run_folder
from crossframe.recording.sketch import sketches_of
from crossframe.verdict import Verdict, compare, evidence
from crossframe.verdict.diagnosis import Diagnosis
from crossframe.verdict.findings import Findings
from crossframe.verdict.measure.judge import judge
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.perturbed_runs.directions import (
    CHANNELS,
    COMMON,
    GAIN,
    MEAN,
    SIZE,
    SLOPE,
    TANH,
    Casts,
    Directions,
    Found,
    Sums,
    Tally,
    directions_of,
)
from crossframe.verdict.perturbed_runs.students_distribution import student_limit
from tests.conftest import EXHAUSTIVE
from tests.core.helpers import synthetic
from tests.core.helpers.quantities import quantity
from tests.core.helpers.synthetic import both, jitter

RATE = 1e-4
NOISE = 0.01
"""Of an element; more than a unit in the last place of bfloat16."""


def activation(seed, effect=lambda a, noise: a + noise, *, steps=4, numel=4000, size=NOISE):
    """The tally of a pair of bfloat16 activations, the second with noise of its own."""
    tally = Tally()
    for step in range(steps):
        a = np.random.default_rng([1, step]).normal(size=(numel // 8, 8))
        noise = size * np.random.default_rng([2, seed, step]).normal(size=a.shape)
        sides = (side.astype(numpy_dtype("bfloat16")) for side in (a, effect(a, noise)))
        tally.add([quantity(*sides, phase="forward", step=step, module="block", use="output", parameter="")])
    return tally


def results(pair, runs, dtype, share) -> Directions:
    """The tests of a tally, which there are in bfloat16."""
    found = directions_of(pair, runs, dtype, share)
    assert found is not None
    return found


def perturbed(count=4):
    return [[activation(seed) for seed in range(100, 100 + count)]]


@pytest.mark.parametrize(
    ("effect", "values"),
    [
        pytest.param(lambda a: 1.1 * a, (0.1, 0.1, 0.0, 0.1), id="factor"),
        pytest.param(lambda a: a + 0.2, (0.0, 0.0, 0.1, 0.1), id="offset"),
        pytest.param(lambda a: np.add(a, [0.2, 0.0]), (0.05, 0.05, 0.05, 0.1 / math.sqrt(2)), id="one channel"),
    ],
)
def test_directions_are_shares_of_a_typical_element(effect, values):
    a = np.array([[2.0, -2.0], [2.0, -2.0]])
    sums = Sums.of(quantity(a, effect(a), phase="forward", module="block", use="output", parameter=""))
    found = dict(sums.directions("activation"))
    assert found == pytest.approx(dict(zip(("slope", "size", "mean", "channels"), values, strict=True)))


@pytest.mark.parametrize(
    ("direction", "effect", "value"),
    [
        pytest.param("slope", lambda a, noise: 1.02 * a + noise, 0.02, id="factor"),
        pytest.param("mean", lambda a, noise: a + noise + 0.02, 0.02, id="offset"),
        pytest.param("channels", lambda a, noise: a + noise + 0.1 * np.sign(np.arange(8) - 3.5), 0.1, id="channels"),
    ],
)
def test_an_effect_below_the_noise_of_an_element_is_found(direction, effect, value):
    found = results(activation(7, effect), perturbed(), "bfloat16", RATE).found
    assert found is not None and found.direction == direction
    assert abs(found.value - value) < 5 * found.error + 0.1 * value


def test_a_factor_below_the_distance_is_found_in_sketches():
    """A sketch of 256 sums resolves a sixteenth of the distance in one step, and less in several."""

    def tally(seed, factor=1.0):
        made = Tally()
        for step in range(16):
            a = np.random.default_rng([1, step]).normal(size=2000)
            b = factor * a + 0.1 * np.random.default_rng([2, seed, step]).normal(size=a.size)
            sketches = tuple(sketches_of([side.astype(numpy_dtype("bfloat16"))])[0] for side in (a, b))
            plain = quantity(sketches[0].sums, sketches[1].sums, phase="reduce", step=step, parameter="w")
            made.add([replace(plain, sketches=sketches)])
        return made

    runs = [[tally(seed) for seed in range(100, 108)]]
    found = results(tally(7, 1.05), runs, "bfloat16", RATE).found
    assert found is not None and found.direction == "slope" and abs(found.value - 0.05) < 5 * found.error
    assert 0.5 < found.error / (0.1 / 16 / math.sqrt(found.stop)) < 2
    assert results(tally(8), runs, "bfloat16", RATE).found is None


def test_what_is_below_the_resolution_of_the_dtype_is_not_reported():
    """However many elements are averaged: 0.003 is less than the unit roundoff of bfloat16, 0.0039."""
    result = results(activation(7, lambda a, noise: 1.003 * a + noise), perturbed(), "bfloat16", RATE)
    assert result.found is None
    assert all(half >= 2.0**-8 for by_name in result.power.values() for _, half in by_name.values())


def test_power_is_what_could_have_been_found():
    result = results(activation(7), perturbed(), "bfloat16", RATE)
    least, _ = result.power["activation"]["slope"]
    for factor, is_found in ((1 + 2 * least, True), (1 + least / 2, False)):
        effect = lambda a, noise, factor=factor: factor * a + noise  # noqa: E731
        assert (results(activation(7, effect), perturbed(), "bfloat16", RATE).found is not None) is is_found


def test_a_gelu_by_tanh_is_estimated_from_own_inputs():
    """Both lie 3e-4 apart where bfloat16 rounds by 4e-3; and the inputs of both sides differ."""

    def tally(seed, of):
        made = Tally()
        for step in range(4):
            x = np.random.default_rng([1, step]).normal(size=(500, 16))
            wide = [x, x + 0.001 * np.random.default_rng([2, seed, step]).normal(size=x.shape)]
            given = [side.astype(numpy_dtype("bfloat16")) for side in wide]
            gave = [f(side.astype(np.float64)).astype(side.dtype) for f, side in zip((by_erf, of), given, strict=True)]
            for sides, module in ((given, "up"), (gave, "act")):
                made.add([quantity(*sides, phase="forward", step=step, module=module, use="output", parameter="")])
        return made

    runs = [[tally(seed, by_erf) for seed in range(100, 108)]]
    found = results(tally(7, by_tanh), runs, "bfloat16", RATE).found
    assert found is not None and found.direction == "tanh" and abs(found.value - 1) < 0.1
    assert found.quantity.module == "act"
    assert results(tally(8, by_erf), runs, "bfloat16", RATE).found is None


@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_an_epsilon_in_a_norm_is_told_from_own_inputs(centred):
    """What came in differs by more than the epsilon does: of inputs whose mean square is 1, one of 0.02 takes 1 %."""

    def norm(x, epsilon):
        x = x.astype(np.float64)
        x = x - x.mean(axis=1, keepdims=True) if centred else x
        return (x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + epsilon) * WEIGHT).astype(
            numpy_dtype("bfloat16")
        )

    def tally(seed, epsilon=1e-5):
        made = Tally()
        for step in range(4):
            x = np.random.default_rng([1, step]).normal(size=(500, 16))
            wide = [x, x * (1 + 0.05 * np.random.default_rng([2, seed]).normal()) + 0.1]
            given = [side.astype(numpy_dtype("bfloat16")) for side in wide]
            gave = [norm(side, e) for side, e in zip(given, (1e-5, epsilon), strict=True)]
            for sides, use in ((given, "input"), (gave, "output")):
                made.add([quantity(*sides, phase="forward", step=step, module="norm", use=use, parameter="")])
        return made

    runs = [[tally(seed) for seed in range(100, 108)]]
    found = results(tally(7, 0.02), runs, "bfloat16", RATE).found
    assert found is not None and found.direction in ("gain", "slope") and found.quantity.name == "output of norm"
    assert results(tally(8), runs, "bfloat16", RATE).found is None


WEIGHT = np.linspace(0.5, 2, 16)


def by_erf(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def by_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def test_clean_pairs_keep_the_family_wise_rate():
    """At a rate of 0.05, more than 6 of 40 have a chance of 3e-3, and more than 36 of 400 of 3e-4. The noise is far above the
    resolution, which else would leave nothing to chance."""
    pairs, most = (400, 36) if os.environ.get(EXHAUSTIVE) else (40, 6)
    alarms = 0
    for i in range(pairs):
        runs = [[activation(1000 * i + k, steps=2, numel=64, size=1.0) for k in range(1, 5)]]
        alarms += results(activation(1000 * i, steps=2, numel=64, size=1.0), runs, "bfloat16", 0.05).found is not None
    assert alarms <= most


def test_student_limits_are_those_of_tables():
    assert [round(student_limit(0.01, k), 3) for k in (2, 3, 4, 5, 10)] == [9.925, 5.841, 4.604, 4.032, 3.169]


def test_sums_of_parts_are_those_of_the_whole():
    a, b = np.random.default_rng(0).normal(size=(2, 6, 4))
    whole = Sums.of(quantity(a, b, module="m", use="output", phase="forward", parameter=""))
    parts = Sums()
    for i in (0, 3):
        parts += Sums.of(quantity(a[i : i + 3], b[i : i + 3], module="m", use="output", phase="forward", parameter=""))
    assert dict(parts.directions("activation")) == pytest.approx(dict(whole.directions("activation")))


def scaled(factor):
    """What the block gives, in another size: less than the noise of an element."""

    def change(phase, step, rank, name, array):
        return (
            (array.astype(np.float64) * factor).astype(array.dtype) if (phase, name) == ("output", "block") else array
        )

    return change


def test_a_direction_inside_the_spread_is_a_bug_there(tmp_path):
    made = synthetic.manifest(dtype="bfloat16", schedule=Schedule(dense=3, every=1))
    a = synthetic.record(tmp_path / "a", made)
    for i in range(1, 9):
        synthetic.record(a.directory / perturbed_run_folder(i), made, tamper=jitter(i, 0.02))
    clean = compare(a, synthetic.record(tmp_path / "clean", made, tamper=jitter(99, 0.02)))
    assert clean.verdict is Verdict.ROUNDING and clean.directions and clean.directions.found is None
    assert clean.to_json()["power"]["activation"]["slope"]["least"] > 2.0**-8
    found = compare(a, synthetic.record(tmp_path / "b", made, tamper=both(jitter(99, 0.02), scaled(1.05))))
    assert found.verdict is Verdict.BUG and "standard errors" in found.reason
    assert found.limit_used is not None and found.parted and found.parted.name == "output of block"


@pytest.mark.parametrize(
    ("direction", "signature", "ending"),
    [(GAIN, "norm_epsilon", ", as with another epsilon."), (TANH, "tanh_gelu", "."), ("slope", None, None)],
)
def test_a_direction_that_is_one_cause_names_it(tmp_path, monkeypatch, direction, signature, ending):
    pair, found = _pair_with_direction(tmp_path, direction)
    monkeypatch.setattr(evidence, "diagnose", lambda *args: None)
    limits = SimpleNamespace(limit=None)

    def concluded(where=None):
        directions = Directions(found, {}, 0.0, 1)
        return evidence.evidence_from_direction(pair, Findings(), directions, limits, where, ("a", "b"))

    told = concluded()
    assert told is not None and told.verdict is Verdict.BUG and told.first.beyond
    assert told.reason == found.describe(("a", "b"))
    assert told.diagnosis == (None if signature is None else Diagnosis(signature, told.reason + ending))
    assert evidence.evidence_from_direction(pair, Findings(), None, limits, None, ("a", "b")) is None
    # What is outside of its spread at an earlier step explains the direction.
    assert concluded(SimpleNamespace(step=1)) is not None and concluded(SimpleNamespace(step=0)) is None


@pytest.mark.parametrize(("step", "is_cause"), [(1, True), (0, False)])
def test_a_direction_is_located_at_the_first_bits_of_its_step(tmp_path, monkeypatch, step, is_cause):
    pair, found = _pair_with_direction(tmp_path, "slope")
    monkeypatch.setattr(evidence, "diagnose", lambda *args: None)
    first = judge(quantity([1.0, 2], [1.0, 2.1], phase="reduce", step=step, parameter="bias"))
    findings = Findings()
    findings.in_bits = first
    told = evidence.evidence_from_direction(
        pair, findings, Directions(found, {}, 0.0, 1), SimpleNamespace(limit=None), None, ("a", "b")
    )
    assert told is not None and (told.first is first) is is_cause
    clause = "; in bits the first difference is reduced gradient (bias)"
    assert told.reason == found.describe(("a", "b")) + clause * is_cause


def _pair_with_direction(folder, direction):
    """A pair of recordings, and a direction of a gradient before step 2."""
    pair = Pair(*(synthetic.record(folder / name) for name in "ab"))
    gradient = quantity(np.ones(3), np.full(3, 1.02), phase="reduce", step=1, parameter="bias")
    return pair, Found(gradient, direction, 0.02, 0.001, 0.01, 2, 1, 4)


def test_a_factor_common_to_all_gradients_is_found():
    """One of 4 % in each of 60 gradients, whose own slopes have an error of 0.7 %."""

    def tally(seed, factor=1.0):
        made = Tally()
        for i in range(60):
            a = np.random.default_rng([1, i]).normal(size=200)
            b = factor * a + 0.1 * np.random.default_rng([2, seed, i]).normal(size=a.size)
            sides = (side.astype(numpy_dtype("bfloat16")) for side in (a, b))
            made.add([quantity(*sides, phase="reduce", parameter=f"w{i}")])
        return made

    runs = [[tally(seed) for seed in range(100, 104)]]
    found = results(tally(7, 1.04), runs, "bfloat16", RATE).found
    assert found is not None and found.direction == "common" and abs(found.value - 0.04) < 0.005
    assert "the median reduced gradient in b is 1.04" in found.describe(("a", "b"))
    assert results(tally(8), runs, "bfloat16", RATE).found is None


A = np.array([[1.0, -2.0, 3.0], [0.0, 4.0, -5.0]])
D = np.array([[0.5, 0.25, 0.0], [1.0, -0.5, 0.125]])


def of_module(a, b, **other):
    return quantity(a, b, **({"phase": "forward", "module": "h", "use": "output", "parameter": ""} | other))


def test_sums_are_those_of_the_formulas():
    """sum(a a) = 55, sum(d a) = 0.5 - 0.5 - 2 - 0.625, sum(|a|) = 15, sum(d sign(a)) = 0.5 - 0.25 - 0.5 - 0.125."""
    sums = Sums.of(of_module(A, A + D))
    assert (sums.numel, sums.squares, sums.products, sums.sizes, sums.signed) == (6, 55.0, -2.625, 15.0, -0.375)
    assert sums.total == 1.375 and sums.rows == 2
    assert sums.channels is not None and sums.channels.tolist() == [1.5, -0.25, 0.125]
    rms = math.sqrt(55 / 6)
    expected = {SLOPE: -2.625 / 55, SIZE: -0.375 / 15, MEAN: 1.375 / 6 / rms}
    expected[CHANNELS] = math.sqrt((0.75**2 + 0.125**2 + 0.0625**2) / 3) / rms
    assert dict(sums.directions("activation")) == pytest.approx(expected, rel=1e-14)
    gradient = Sums.of(quantity(A, A + D, phase="reduce"))
    assert gradient.channels is None and gradient.total == 0.0
    assert dict(gradient.directions("reduce")) == pytest.approx({SLOPE: -2.625 / 55, SIZE: -0.375 / 15}, rel=1e-14)
    assert dict(Sums.of(of_module(0 * A, D)).directions("activation")) == {}
    a, b = sketches_of([A, A + D])
    sketched = Sums.of(of_module(a.sums, b.sums, sketches=(a, b)))
    slope = np.vdot(b.sums - a.sums, a.sums) / np.vdot(a.sums, a.sums)
    assert dict(sketched.directions("activation")) == pytest.approx({SLOPE: slope}, rel=1e-14)


def test_sums_leave_out_elements_that_are_not_finite():
    a, b = np.array([1.0, np.nan, 2.0]), np.array([2.0, np.inf, 2.0])
    sums = Sums.of(quantity(a, b, phase="reduce"))
    assert (sums.squares, sums.products, sums.signed) == (5.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("shape", "has_channels"),
    [((2, 1 << 14), True), ((2, (1 << 14) + 1), False), ((2, 2), True), ((4, 1), False), ((4,), False)],
)
def test_channels_are_those_of_a_last_dim(shape, has_channels):
    sums = Sums.of(of_module(np.ones(shape), np.ones(shape)))
    assert (sums.channels is not None) is has_channels and sums.rows == has_channels * shape[0]


def test_sums_add_up_but_for_other_channels():
    one, other, sums = Sums.of(of_module(A, A + D)), Sums.of(of_module(A.T, A.T + D.T)), Sums()
    for added, channels in ((one, [1.5, -0.25, 0.125]), (one, [3.0, -0.5, 0.25]), (other, None), (one, None)):
        sums += added
        assert (None if sums.channels is None else sums.channels.tolist()) == channels
    assert (sums.numel, sums.squares, sums.products, sums.total, sums.rows) == (24, 220.0, -10.5, 5.5, 9)
    assert (sums.sizes, sums.signed) == (60.0, -1.5)


def test_a_tally_has_what_directions_are_tested_for():
    tally, made = Tally(), quantity(A, A + D, phase="backward", parameter="w")
    tally.add([made, replace(made, rank=1)])
    tally.add([replace(made, phase="reduce"), replace(made, phase="reduce", replica=1)])
    tally.add([replace(made, phase="reduce", parameter="v", b=(A + D)[:1])])
    for other in ({"phase": "state"}, {"bound": None}, {"bound": math.inf}):
        tally.add([replace(made, parameter="other", **other)])
    assert tally.keys == [("backward", "w"), ("reduce", "w"), ("reduce", "v"), ("backward", ""), ("reduce", "")]
    numels = {key: by_step[0].numel for key, by_step in tally.of.items()}
    assert numels == {("backward", "w"): 12, ("reduce", "w"): 6, ("reduce", "v"): 0}
    assert tally.first_of(("reduce", "")).parameter == "w" and tally.first_of(("reduce", "v")).parameter == "v"


def test_windows_double_and_end_with_all_steps():
    tally = Tally()
    assert tally.windows == []
    for step in (0, 2, 5, 7, 9, 11):
        tally.add([quantity(A, A + D * (step == 11), phase="reduce", step=step)])
    assert tally.windows == [1, 3, 8, 12]
    key = ("reduce", "bias")
    assert [tally.directions(key, stop)[SLOPE] for stop in (11, 12)] == [0.0, pytest.approx(-2.625 / 330, rel=1e-14)]


def test_four_gradients_have_a_common_direction():
    tally = Tally()
    for i, factor in enumerate((1.1, 1.4, 1.2, 1.9)):
        assert tally.directions(("reduce", ""), 1) == {}
        tally.add([quantity(A, factor * A, phase="reduce", parameter=str(i))])
    assert tally.directions(("reduce", ""), 1) == {COMMON: pytest.approx(0.3, rel=1e-12)}
    assert tally.directions(("backward", ""), 1) == {}


def of_values(*by_stop):
    """A tally of one gradient with these values of directions before steps 1, 2, ..."""
    return SimpleNamespace(
        keys=[("reduce", "w")],
        windows=list(range(1, 1 + len(by_stop))),
        directions=lambda key, stop: by_stop[stop - 1],
        first_of=lambda key: quantity(A, A, parameter="w"),
    )


U16 = 2.0**-8
"""The unit roundoff of bfloat16."""


def test_directions_are_found_beyond_their_share_of_chance():
    """Four tests of two directions, each with half of the share: share / (2 * 2) for each test."""
    error, degrees = math.sqrt((0.01**2 + 0.02**2) / 2), 2
    limit = student_limit(0.1 / 4, degrees) * error
    runs = [of_values(*[{SLOPE: x, SIZE: 0.0}] * 2) for x in (0.01, -0.02)]
    for value, found in ((0.999 * limit, False), (-1.001 * limit, True)):
        pair = of_values({SLOPE: 0.0, SIZE: 0.5 * U16}, {SLOPE: value, SIZE: 0.5 * U16})
        result = results(pair, [runs], "bfloat16", 0.1)
        assert result.num_tests == 4 and result.near == pytest.approx(abs(value) / limit, rel=1e-12)
        assert result.power == {"reduce": {SLOPE: (limit, limit), SIZE: (U16, U16)}}
        assert (result.found is not None) is found
        if result.found:
            assert (result.found.direction, result.found.stop, result.found.num_runs) == (SLOPE, 2, 2)
            assert (result.found.value, result.found.error, result.found.limit) == (value, error, limit)
    assert directions_of(pair, [runs], "float32", 0.1) is None
    untested = results(pair, [[of_values({MEAN: 1.0}, {MEAN: 1.0})]], "bfloat16", 0.1)
    assert untested == Directions(None, {}, 0.0, 0)


def test_the_wider_spread_and_fewer_runs_count():
    narrow, wide = [of_values({SLOPE: 0.01})] * 5, [of_values({SLOPE: 0.02})] * 3
    for perturbed in ([narrow, wide], [wide, narrow]):
        result = results(of_values({SLOPE: 10.0}), perturbed, "bfloat16", 0.1)
        assert result.found and (result.found.error, result.found.num_runs) == (pytest.approx(0.02, rel=1e-14), 3)
        assert result.found.limit == pytest.approx(student_limit(0.1, 3) * 0.02, rel=1e-14)


def test_casts_add_to_the_coarser_runs_spread():
    runs, pair = [of_values({SLOPE: 0.03})] * 4, of_values({SLOPE: 10.0})
    result = directions_of(pair, [runs], "bfloat16", 0.1, Casts([of_values({SLOPE: 0.01})] * 3, 4.0))
    assert result and result.found and result.found.error == pytest.approx(0.05, rel=1e-14)  # of 0.03 and 4 * 0.01
    assert (result.found.num_runs, result.found.limit) == (3, pytest.approx(student_limit(0.1, 3) * 0.05, rel=1e-14))
    for finer in ([], [of_values({SIZE: 0.01})]):  # nothing tells the effect of casts
        assert directions_of(pair, [runs], "bfloat16", 0.1, Casts(finer, 4.0)) == Directions(None, {}, 0.0, 0)
