"""The verdict by sketches is the verdict by elements, and says where as closely as sketches can."""

from functools import cache

import numpy as np
import pytest

from crossframe.errors import RecordingError
from crossframe.inspection import inspect
from crossframe.layout import FlatLayout, PerParamLayout
from crossframe.param_map import identity_map
from crossframe.params import ParamSpec
from crossframe.recording import Recording, RecordingWriter, create_recording
from crossframe.recording.event_format import perturbed_run_folder
from crossframe.recording.sketch import WHOLE, sketches_of
from crossframe.verdict import Verdict, compare
from crossframe.verdict.measure.causal_order import walk
from crossframe.verdict.measure.pair import Pair
from tests.core.helpers import synthetic
from tests.core.helpers.synthetic import both

SHAPES = {"": {"embed": (40, 30), "bias": (3,)}, "block": {"block.w": (50, 30), "block.k_bias": (3,)}}
NOISE = 1e-6


@pytest.fixture(autouse=True, scope="module")
def large():
    """Two of the parameters are large enough to be sketched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "UNITS", SHAPES)
        patch.setattr(synthetic, "SHAPES", {n: shape for unit in SHAPES.values() for n, shape in unit.items()})
        yield


def made(world_size=2, *, detail="full", dtype="float32", kind="flat", **other):
    def layout(params):
        specs = tuple(ParamSpec(name, shape, dtype) for name, shape in params.items())
        return (
            FlatLayout(specs, world_size, keep_original=True) if kind == "flat" else PerParamLayout(specs, world_size)
        )

    units = tuple((unit, layout(params)) for unit, params in SHAPES.items())
    maps = identity_map(synthetic.SHAPES)
    return synthetic.manifest(world_size, dtype=dtype, units=units, param_map=maps, detail=detail, **other)


def jitter(seed):
    return synthetic.jitter(seed, NOISE)


def at(phase, name, change, *, step=0, rank=None):
    def tamper(where, when, who, what, array):
        return change(array) if (where, when, what) == (phase, step, name) and rank in (None, who) else array

    return tamper


def run(folder, manifest, *, perturbed_runs=0, tamper=None):
    synthetic.record(folder, manifest, tamper=tamper)
    for i in range(1, perturbed_runs + 1):
        synthetic.record(folder / perturbed_run_folder(i), manifest, tamper=jitter(i))
    return Recording.open(folder)


@pytest.mark.parametrize("kind", ["flat", "per_param"])
def test_ranks_sketches_add_up_to_that_of_the_whole(tmp_path, kind):
    for world_size in (1, 2, 3):
        full = run(tmp_path / f"full{world_size}", made(world_size, kind=kind))
        sketch = run(tmp_path / f"sketch{world_size}", made(world_size, kind=kind, detail="sketch"))
        for phase, use in (("reduce", ""), ("state", "exp_avg"), ("update", "")):
            for name in ("embed", "block.w"):
                found = sketch.sketch(phase, 1, name, use=use)
                expected = sketches_of([full.full(phase, 1, name, use=use)])[0]
                assert found.equals(expected)
                np.testing.assert_allclose(found.sums, expected.sums, rtol=0, atol=expected.resolution)
        assert sketch.full("update", 1, "bias").shape == (3,)  # small: whole
        with pytest.raises(RecordingError, match="recorded as a sketch, which does not have its elements"):
            sketch.full("update", 1, "embed")


def test_other_worlds_and_layouts_are_equal_by_their_fingerprints(tmp_path):
    # Gradients of one element each, so that no sum depends on the number of ranks.
    a = run(tmp_path / "a", made(1, detail="sketch", dtype="float64"))
    b = run(tmp_path / "b", made(1, detail="full", dtype="float64", kind="per_param"))
    found = compare(a, b)
    assert found.verdict is Verdict.EQUAL
    assert compare(b, a).verdict is Verdict.EQUAL


CASES = {
    "clean": None,
    "initial": at("parameters", "embed", lambda x: x + np.eye(*x.shape, dtype=x.dtype), rank=1),
    "gather": at("unsharded", "block.w", lambda x: np.roll(x, 1), rank=1),
    "output": at("output", "block", lambda x: x * 1.01),
    "local": at("backward", "block.w", lambda x: x * 2, rank=1),
    "reduce": at("reduce", "block.w", lambda x: x * 2),
    "small": at("reduce", "bias", lambda x: x * 2),
    "norm": at("norm", "", lambda x: x * 1.5),
    "state": at("state", "embed", lambda x: x * 0.9, step=1),
    "update": at("update", "embed", lambda x: x - 0.05, step=2),
    "slice": at("update", "embed", lambda x: x + 1, step=1, rank=1),
    "nan": at(
        "reduce", "embed", lambda x: np.where(np.arange(x.size).reshape(x.shape) == 7, np.nan, x).astype(x.dtype)
    ),
}
ONE_RANK = ("initial", "gather", "local", "slice", "nan")


@pytest.fixture(scope="module")
def recorded_pair(large, tmp_path_factory):
    """Makes a recording with four perturbed runs and one of a case, each once."""

    @cache
    def recording(case, detail):
        folder = tmp_path_factory.mktemp("recorded") / "run"
        if case is None:
            return run(folder, made(detail=detail), perturbed_runs=4)
        return run(folder, made(detail=detail), tamper=both(jitter(99), CASES[case]) if CASES[case] else jitter(99))

    return lambda case, detail: (recording(None, detail), recording(case, detail))


@pytest.fixture(scope="module")
def verdict_of_elements(recorded_pair):
    """Compares the full recordings of a case, once."""
    return cache(lambda case: compare(*recorded_pair(case, "full")))


@pytest.mark.parametrize("recorded", [False, True], ids=["compared", "recorded"])
@pytest.mark.parametrize("case", CASES)
def test_the_verdict_is_that_of_the_elements(recorded_pair, verdict_of_elements, case, recorded):
    """Sketched when it is compared, or sketched by the recorder."""
    pair = recorded_pair(case, "sketch" if recorded else "full")
    sketched, full = compare(*pair, sketched=not recorded), verdict_of_elements(case)
    assert sketched.verdict is full.verdict is (Verdict.BUG if CASES[case] else Verdict.ROUNDING), sketched.reason
    unnamed = sketched.diagnosis is None and case not in ("clean", "small", "norm")
    assert ("record step" in sketched.reason and "densely and in full" in sketched.reason) == unnamed, sketched.reason
    if full.first_divergence:
        ours, theirs = sketched.first_divergence, full.first_divergence
        assert ours is not None
        for field in ("step", "phase", "unit", "parameter", "event"):
            assert getattr(ours, field) == getattr(theirs, field), (field, ours, theirs)
        if case in ONE_RANK:  # else all are off, and either may be the worst
            assert ours.rank == theirs.rank
            assert ours.start <= theirs.start and ours.stop >= theirs.stop


def test_a_rank_of_another_layout_is_not_named(tmp_path):
    a = run(tmp_path / "a", made(2, detail="sketch"), perturbed_runs=4)
    b = run(tmp_path / "b", made(3, detail="sketch"), tamper=both(jitter(9), CASES["update"]))
    found = compare(a, b)
    assert found.verdict is Verdict.BUG
    where = found.first_divergence
    assert where is not None and (where.rank, where.parameter, where.start, where.stop) == (None, "embed", 0, 1200)


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.ROUNDING), (1 + 2.0**-20, Verdict.BUG)])
def test_sketched_initial_values_of_two_dtypes_are_equal_up_to_a_rounding(tmp_path, factor, verdict):
    coarse = run(
        tmp_path / "a", made(detail="sketch"), tamper=at("parameters", "block.w", lambda x: x * np.float32(factor))
    )
    fine = run(tmp_path / "b", made(detail="sketch", dtype="float64"))
    for pair in ((coarse, fine), (fine, coarse)):
        (quantity,) = (
            q for group in walk(Pair(*pair)) for q in group if (q.phase, q.name) == ("parameters", "block.w")
        )
        assert quantity.bound == 2.0**-24 and quantity.scale == max(quantity.norms) > 0
        found = compare(*pair)
        assert (found.verdict is Verdict.BUG) is (verdict is Verdict.BUG), found.reason
        if verdict is Verdict.BUG:
            assert (found.first_divergence.phase, found.first_divergence.parameter) == ("parameters", "block.w")


def test_a_backend_may_sketch_for_itself(tmp_path):
    manifest = made(1, detail="sketch", steps=1)
    create_recording(tmp_path, manifest)
    values = np.linspace(-1, 1, 1200, dtype=np.float32)
    with RecordingWriter(tmp_path, manifest, 0) as writer:
        writer.batch(0, synthetic.digest(""), [0])
        writer.loss(0, 0.0)
        writer.updated(0, "", {"embed": (0, 1200, sketches_of([values])[0])})
        output = sketches_of([values])[0]
        writer.activation(0, 0, "block", "output", output, (2, 600))
        with pytest.raises(RecordingError, match="expected the shape of 1200 sketched elements, got None"):
            writer.activation(0, 1, "block", "output", output)
        with pytest.raises(RecordingError, match="expected 1100 elements, 0:1100 of 1200, got 1200"):
            writer.updated(0, "", {"embed": (0, 1100, sketches_of([values])[0])})
        writer.end_step(0)
    recording = Recording.open(tmp_path)
    assert recording.sketch("update", 0, "embed").equals(sketches_of([values])[0])
    found = recording.activation_sketch(0, 0, 0, "block", "output")
    assert found is not None and found.equals(output)
    with pytest.raises(RecordingError, match="the output of 'block' at step 0 was recorded as a sketch"):
        recording.activation(0, 0, 0, "block", "output")
    assert values.size > WHOLE


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_a_step_that_a_scaler_skipped_is_found_by_inspect(tmp_path, detail):
    kept = {}

    def skip_the_second(phase, step, rank, name, array):
        if phase == "reduce" and step == 1:
            array = np.where(np.arange(array.size).reshape(array.shape) == 0, np.inf, array).astype(array.dtype)
        if phase == "update":
            array = kept.setdefault((rank, name), array) if step < 2 else array
        return array

    found = inspect(run(tmp_path / "run", made(detail=detail), tamper=skip_the_second)).not_finite
    assert [(each.step, each.skipped) for each in found] == [(1, True)]
