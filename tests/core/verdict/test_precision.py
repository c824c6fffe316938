"""Runs of which one rounds more: float32 against bfloat16."""

from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from crossframe.dtypes import numpy_dtype, unit_roundoff
from crossframe.recording import Schedule
from crossframe.recording.event_format import perturbed_run_folder
from crossframe.recording.known_settings import COMMAND
from crossframe.recording.program import PROGRAM
from crossframe.verdict import Verdict, compare
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.unequal_dtypes import Implied, scale_of_products
from crossframe.verdict.perturbed_runs.directions import GAIN, Casts, Tally, directions_of
from crossframe.verdict.perturbed_runs.spread import margin
from tests.core.helpers import synthetic
from tests.core.helpers.quantities import other_specs, quantity
from tests.core.helpers.synthetic import both, jitter

LOW, UNIT = numpy_dtype("bfloat16"), unit_roundoff("bfloat16")
UNIT32 = unit_roundoff("float32")


def made(dtype, **other):
    return synthetic.manifest(dtype=dtype, schedule=Schedule(dense=1, every=1), **other)


def times(phase, name, factor, steps=(0, 1, 2)):
    def change(at, step, rank, what, array):
        return (array * factor).astype(array.dtype) if (at, what) == (phase, name) and step in steps else array

    return change


@pytest.fixture
def pair(tmp_path):
    """A float32 run, and a bfloat16 run with perturbed runs: what is wrong in it is wrong in all of them."""

    def record(tamper=lambda *args: args[-1], *, perturbed=4, coarse=None, fine=None):
        coarse = coarse or made("bfloat16")
        a = synthetic.record(tmp_path / "a", fine or made("float32"))
        b = synthetic.record(tmp_path / "b", coarse, tamper=both(jitter(99, UNIT / 4), tamper))
        for i in range(1, perturbed + 1):
            synthetic.record(b.directory / perturbed_run_folder(i), coarse, tamper=both(jitter(i, UNIT), tamper))
        return a, b

    return record


def test_bfloat16_differs_from_float32_by_rounding(pair):
    a, b = pair()
    for found in (compare(a, b), compare(b, a)):
        assert found.verdict is Verdict.ROUNDING, found.reason
        assert found.dtype == "bfloat16"
        assert "a computes in float32" in found.reason and "b computes in bfloat16" in found.reason
        assert "the rounding of bfloat16 explains the difference" in found.reason
        assert any(said.startswith("dtype differs") for said in found.settings)


def test_effects_of_casts_add_up_over_microbatches(tmp_path):
    fine, effects = synthetic.record(tmp_path / "a", made("float32")), []
    for num in (1, 4):
        coarse = synthetic.record(tmp_path / f"b{num}", made("bfloat16", settings={"accumulate": num}))
        effects.append(Implied(Pair(fine, coarse)).times_spread(quantity(0, 0)))
    assert effects[1] == 2 * effects[0]  # the square root of their number


@pytest.mark.parametrize("coarser", [0, 1])
def test_the_coarser_dtype_adds_to_bounds_by_formula(coarser):
    """Casts of the quantity, casts of parameters over samples, and a reduction of R ranks (`unequal_dtypes`)."""

    def run(dtype, ranks, **settings):
        params = {"w": SimpleNamespace(dtype=dtype)}
        made = SimpleNamespace(dtype=dtype, params=params, world_size=ranks, settings=settings)
        return SimpleNamespace(manifest=made, num_microbatches=3)

    runs = [run("float32", 2), run("bfloat16", 4, reduce_dtype="float32")]
    if not coarser:
        runs.reverse()
    pair = SimpleNamespace(a=runs[0], b=runs[1], coarser=coarser, dtype="bfloat16", by_products=False, terms=5)
    implied = Implied(pair)
    assert implied.units_of_casts == pytest.approx(2.0**-8 / np.sqrt(12) / 2.0**-24, rel=1e-15)
    assert implied.scale == 1.0
    sides = np.array([3.0, 4.0], np.float32), np.array([6.0, 8.0], np.float32)
    finer, coarse = (5.0, 10.0)[1 - coarser], sides[coarser].astype(ml_dtypes.bfloat16)
    made = quantity(*sides, phase="update")
    assert implied.casts(made) == 0.0  # of equal dtypes
    mixed = replace(made, **{"ab"[coarser]: coarse})
    assert implied.casts(mixed) == 2.0**-8 * finer
    reduction = 4 * np.sqrt(4) * 2.0**-24 * finer
    for phase in ("reduce", "norm"):
        assert implied.casts(replace(made, phase=phase)) == pytest.approx(reduction, rel=1e-15)
        assert implied.casts(replace(mixed, phase=phase)) == pytest.approx(2.0**-8 * finer + reduction, rel=1e-15)
    assert implied.times_spread(made) == np.sqrt(5 * 3 * 4)
    assert implied.times_spread(replace(made, module="h", use="output")) == 1.0
    runs[coarser].manifest.world_size = 1
    assert implied.casts(replace(made, phase="reduce")) == 0.0


@pytest.mark.parametrize(
    ("sizes", "unused"),
    [
        pytest.param(([1.0, 0.0], [1.0, 1.0]), True, id="in a"),
        pytest.param(([1.0, 1.0], [1.0, 0.0]), True, id="in b"),
        pytest.param(([0.0, 0.0], [1.0, 1.0]), False, id="never used"),
        pytest.param(([0.0, 1.0], [1.0, 1.0]), False, id="at another step"),
    ],
)
def test_parameters_unused_at_a_step_are_not_judged(sizes, unused):
    of = [SimpleNamespace(of={step: {"bias": size} for step, size in enumerate(each)}) for each in sizes]
    run = SimpleNamespace(manifest=SimpleNamespace(dtype="bfloat16", params={"bias": SimpleNamespace(dtype="float32")}))
    implied = Implied(SimpleNamespace(a=run, b=run, coarser=1, dtype="bfloat16", by_products=False, sizes=of))
    for phase in ("backward", "reduce", "state", "update"):
        assert implied.unused(replace(quantity([1.0], [1.0], phase=phase), step=1)) is unused
        assert not implied.unused(replace(quantity([1.0], [1.0], phase=phase), step=7))
    assert not implied.unused(replace(quantity([1.0], [1.0], phase="forward"), step=1))


@pytest.mark.parametrize(
    ("tamper", "phase", "name"),
    [
        pytest.param(times("reduce", "block.w", 0.0), "reduce", "block.w", id="lost_gradient"),
        pytest.param(times("backward", "embed", 0.5), "backward", "embed", id="lost_microbatch"),
        pytest.param(times("output", "block", 1.5), "forward", "output of block", id="scale"),
        pytest.param(times("update", "block.w", 1.5), "update", "block.w", id="update"),
    ],
)
def test_a_fault_in_the_coarser_run_is_located(pair, tamper, phase, name):
    found = compare(*pair(tamper))
    assert found.verdict is Verdict.BUG, found.reason
    assert "the rounding of bfloat16 does not explain the difference" in found.reason
    assert found.first_divergence is not None and found.parted is not None
    assert (found.first_divergence.step, found.first_divergence.phase, found.parted.name) == (0, phase, name)


def test_initial_values_are_equal_after_the_cast(pair):
    found = compare(*pair(times("parameters", "block.w", 1 + 2.0**-6)))
    assert found.verdict is Verdict.BUG and found.first_divergence
    assert (found.first_divergence.phase, found.first_divergence.parameter) == ("parameters", "block.w")


def test_only_perturbed_runs_of_the_coarser_run_count(pair):
    """Those of the finer one show nothing of its rounding. The command is that of the run to record again."""
    coarse, fine = (made(d, settings={COMMAND: f"train.py --dtype {d}"}) for d in ("bfloat16", "float32"))
    a, b = pair(perturbed=0, coarse=coarse, fine=fine)
    for i in range(1, 5):
        synthetic.record(a.directory / perturbed_run_folder(i), fine, tamper=jitter(i, 1e-6))
    found = compare(a, b)
    assert found.verdict is Verdict.INCONCLUSIVE and found.limit_used is None
    assert "`train.py --dtype bfloat16`" in found.reason and "is not known" in found.reason


def test_float32_against_float64_is_judged_by_bounds(tmp_path):
    a = synthetic.record(tmp_path / "a")
    b = synthetic.record(tmp_path / "b", synthetic.manifest(dtype="float32"))
    found = compare(a, b)
    assert found.verdict is Verdict.ROUNDING and found.dtype == "float32", found.reason
    c = synthetic.record(tmp_path / "c", b.manifest, tamper=times("backward", "embed", 0.99))
    found = compare(a, c)
    assert found.verdict is Verdict.BUG and found.first_divergence and found.first_divergence.parameter == "embed"


def test_a_parameter_stored_in_a_coarser_dtype_is_rounding(tmp_path):
    """One parameter of a float64 run lies in float32: what it causes is of float32's size."""

    def narrow(phase, step, rank, name, array):
        return array.astype(np.float32) if name.startswith("block.") else array

    a = synthetic.record(tmp_path / "a", synthetic.manifest(kind="per_param"))
    found = compare(a, synthetic.record(tmp_path / "b", other_specs("block", dtype="float32"), tamper=narrow))
    assert found.verdict is Verdict.ROUNDING and found.dtype == "float32", found.reason


def test_an_expert_without_samples_at_one_step_is_no_lost_gradient(pair):
    """Which expert gets a sample may be decided otherwise; a gradient of zero at all steps is lost."""
    unused = both(*(times(phase, "block.w", 0.0, steps=(1,)) for phase in ("backward", "reduce")))
    found = compare(*pair(unused))
    assert found.first_divergence is None or found.first_divergence.phase not in ("backward", "reduce"), found.reason


def test_casts_of_parameters_stay_below_their_allowance():
    """Of the gradient of a mean over n samples, perturbed runs average away what they do to each; the cast of a weight stays.
    Without an allowance for that, the least factor would be too little."""
    generator = np.random.default_rng(0)

    def gradient(weight, x, moves=None):
        hidden = x @ weight
        if moves is not None:
            hidden = hidden * (1 + 2 * UNIT * moves.integers(-1, 2, hidden.shape))
        return x.T @ np.tanh(hidden) / len(x)

    reached = {}
    for n in (16, 256, 4096):
        ratios = []
        for _ in range(8):
            weight, x = generator.normal(size=(16, 8)), generator.normal(size=(n, 16))
            cast = weight.astype(LOW).astype(np.float64)
            run = gradient(cast, x)
            spread = np.sqrt(np.mean([np.sum((gradient(cast, x, generator) - run) ** 2) for _ in range(4)]))
            ratios.append(np.linalg.norm(gradient(weight, x) - run) / spread)
        reached[n] = max(ratios)
    assert all(most <= np.sqrt(n) for n, most in reached.items()), reached
    assert reached[4096] > margin(4)


def rounded(x):
    """To 11 significant bits, as TF32."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~np.uint32(0x1FFF)).view(np.float32)


def test_rounding_of_products_stays_below_what_spreads_are_multiplied_by():
    """A net whose products round their factors differs from one whose products do not by about as much as that says."""
    generator = np.random.default_rng(0)

    def outputs(weights, x, cast, moves=None):
        found = [np.asarray(x, np.float32)]
        for weight in weights:
            y = np.tanh(cast(found[-1]) @ cast(weight))
            if moves is not None:
                y = y * (1 + 2.0**-23 * moves.integers(-1, 2, y.shape)).astype(np.float32)
            found.append(y.astype(np.float32))
        return found[1:]

    def apart(one, other):
        return np.array([np.linalg.norm(x.astype(np.float64) - y) for x, y in zip(one, other, strict=True)])

    for _ in range(4):
        weights = [generator.normal(size=(64, 64)).astype(np.float32) / 8 for _ in range(4)]
        x = generator.normal(size=(32, 64))
        run = outputs(weights, x, np.asarray)
        moved = [apart(outputs(weights, x, np.asarray, generator), run) for _ in range(4)]
        spread = scale_of_products(2.0**-11, UNIT32) * np.sqrt(np.mean(np.square(moved), axis=0))
        ratio = apart(run, outputs(weights, x, rounded)) / spread
        assert np.all((ratio < 2) & (ratio > 0.2)), ratio


ON_A_GPU = {"device": "cuda H100", "matmul": "high"}


@pytest.fixture
def products(tmp_path):
    """Two float32 runs, of which b rounds the factors of products to TF32. `of` has perturbed runs."""

    def record(*tampers, of="a"):
        kinds = {"a": made("float32"), "b": made("float32", settings={PROGRAM: ON_A_GPU})}
        changes = {"a": both(), "b": both(jitter(99, 2.0**-12), *tampers)}  # what TF32 rounds, in all runs of b alike
        runs = {name: synthetic.record(tmp_path / name, kinds[name], tamper=changes[name]) for name in kinds}
        for i in range(1, 5):
            at = runs[of].directory / perturbed_run_folder(i)
            synthetic.record(at, kinds[of], tamper=both(changes[of], jitter(i, UNIT32)))
        return runs["a"], runs["b"]

    return record


def test_products_in_tf32_differ_from_float32_by_rounding(products):
    a, b = products()
    for found in (compare(a, b), compare(b, a)):
        assert found.verdict is Verdict.ROUNDING, found.reason
        assert found.dtype == "tf32" and "b computes in float32 (with products in tf32)" in found.reason
        assert "the rounding of tf32 explains the difference" in found.reason


def test_a_fault_beside_products_in_tf32_is_located(products):
    found = compare(*products(times("reduce", "block.w", 0.5)))
    assert found.verdict is Verdict.BUG and found.parted is not None, found.reason
    assert found.first_divergence and (found.first_divergence.step, found.parted.name) == (0, "block.w")


def test_perturbed_runs_of_products_in_tf32_do_not_count(products):
    found = compare(*products(of="b"))
    assert found.verdict is Verdict.INCONCLUSIVE and "tf32 is too coarse for a bound" in found.reason, found.reason
    assert "record a again with perturbed runs" in found.reason


def normed(x, epsilon, weight):
    x = x.astype(np.float64)
    return x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + epsilon) * weight


def test_an_epsilon_is_found_across_precisions():
    """Of inputs whose mean square is 1, one of 0.1 takes 5 %, far less than what came in differs by."""
    low, weight = LOW, np.linspace(0.5, 2, 16)

    def tally(seed, epsilon=1e-5, fine=True):
        made = Tally()
        for step in range(4):
            x = np.random.default_rng([1, step]).normal(size=(500, 16))
            y = x * (1 + 0.1 * np.random.default_rng([2, seed, step]).normal(size=x.shape))
            given = [x if fine else x.astype(low), y.astype(low)]
            weights = [weight if fine else weight.astype(low), weight.astype(low)]
            gave = [normed(given[0], 1e-5 if fine else epsilon, weights[0].astype(np.float64))]
            gave += [normed(given[1], epsilon, weights[1].astype(np.float64))]
            gave = [out if fine and i == 0 else out.astype(low) for i, out in enumerate(gave)]
            for sides, use in ((given, "input"), (gave, "output")):
                made.add([quantity(*sides, phase="forward", step=step, module="norm", use=use, parameter="")])
        return made

    def found(epsilon):
        runs = [[tally(seed, epsilon, fine=False) for seed in range(100, 104)]]
        return directions_of(tally(7, epsilon), runs, "bfloat16", 1e-4, Casts((), 0.0))

    wrong, right = found(0.1), found(1e-5)
    assert wrong and wrong.found and wrong.found.direction == GAIN and wrong.found.quantity.name == "output of norm"
    assert right and right.found is None and set(right.power["activation"]) == {GAIN}


def differences_of_weights(seed, factor=1.0):
    """x (sum of w - sum of v), in float32 and in bfloat16: the casts of w and v change the result by a common factor.

    Returns the tally of the pair, those of the perturbed runs of the coarser run, and those of the finer run.
    """
    generator = np.random.default_rng(seed)
    weights = (1.5 + generator.uniform(-0.05, 0.05, 64)).astype(np.float32)
    signs = np.where(np.arange(64) % 2, 1.0, -1.0)
    weights[1::2] += np.float32(0.01)
    cast, x = weights.astype(LOW).astype(np.float64), generator.normal(size=(500, 8))
    wide, unit = weights.astype(np.float64), unit_roundoff("float32") * 2

    def rounded(values):
        moved = values * (1 + UNIT * generator.uniform(-1, 1, values.shape))
        return moved.astype(LOW)

    def tally(a, b):
        made = Tally()
        made.add([quantity(a, b, phase="forward", module="block", use="output", parameter="")])
        return made

    fine, coarse = x * (signs @ wide), x * (signs @ cast)
    moved = [wide + unit * generator.choice([-1.0, 1.0], 64) for _ in range(4)]
    return (
        tally(fine, rounded(factor * coarse)),
        [tally(coarse.astype(LOW), rounded(coarse)) for _ in range(4)],
        [tally(fine, x * (signs @ w)) for w in moved],
    )


def test_the_finer_run_shows_how_casts_of_parameters_add_up():
    """The coarser run's perturbed runs do not: by them alone, casts look like faults."""
    units = UNIT / unit_roundoff("float32") / np.sqrt(12)
    alone = measured = 0
    for seed in range(20):
        pair, runs, finer = differences_of_weights(seed)
        alone += directions_of(pair, [runs], "bfloat16", 1e-4).found is not None
        measured += directions_of(pair, [runs], "bfloat16", 1e-4, Casts(finer, units)).found is not None
    assert alone > 5 and measured == 0
    pair, runs, finer = differences_of_weights(0, factor=10.0)
    found = directions_of(pair, [runs], "bfloat16", 1e-4, Casts(finer, units)).found
    assert found is not None and found.direction == "slope"


def batch_norm(x, epsilon):
    x = x.astype(np.float64)
    return (x - x.mean(axis=(0, 2, 3), keepdims=True)) / np.sqrt(x.var(axis=(0, 2, 3), keepdims=True) + epsilon)


def test_an_epsilon_of_a_batch_norm_is_found_across_precisions():
    """It takes 0.5 %, in a run that rounds the factor of each channel to bfloat16."""

    def tally(seed, epsilon=1e-5, weight="norm.weight"):
        made = Tally()
        made.note_weights([quantity(np.ones(8), np.ones(8), phase="parameters", parameter=weight)])
        for step in range(5):
            x = np.random.default_rng([1, step]).normal(scale=0.3, size=(8, 8, 6, 6))
            y, spread = (
                (x + 0.01 * np.random.default_rng([2, seed, step]).normal(size=x.shape)).astype(LOW),
                (1, 8, 1, 1),
            )
            factors = 1 + UNIT * np.random.default_rng([3, seed, step]).uniform(-1, 1, spread)
            gave = batch_norm(x, 1e-5), (batch_norm(y, epsilon) * factors).astype(LOW)
            for sides, use in (((x, y), "input"), (gave, "output")):
                made.add([quantity(*sides, phase="forward", step=step, module="norm", use=use, parameter="")])
        return made

    def found(epsilon, **options):
        runs = [[tally(seed, **options) for seed in range(100, 104)]]
        return directions_of(tally(7, epsilon, **options), runs, "bfloat16", 1e-4, Casts((), 0.0))

    wrong, right = found(1e-3), found(1e-5)
    assert wrong.found is not None and wrong.found.direction == GAIN and wrong.found.value < -0.003
    assert right.found is None and right.power["activation"][GAIN][0] < UNIT
    assert found(1e-3, weight="other.weight").num_tests == 0  # affine by channel, but no norm
