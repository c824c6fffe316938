"""Properties of two recordings that are compared."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from crossframe.dtypes import numpy_dtype
from crossframe.recording import RecordingWriter, Schedule
from crossframe.recording.batches import Batch
from crossframe.recording.event_format import BACKWARD, PARAMETERS, UPDATE
from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from crossframe.verdict.measure.pair import Pair
from tests.core.helpers import synthetic
from tests.core.helpers.quantities import other_specs
from tests.core.helpers.synthetic import only


def pair(tmp_path, *made, **options):
    return Pair(*(synthetic.record(tmp_path / name, own, **options) for name, own in zip("ab", made, strict=True)))


def stored(made):
    """A change of parameters to the dtypes in which a manifest states that they are stored."""

    def change(phase, step, rank, name, array):
        is_stored = phase in (PARAMETERS, UPDATE)
        return array.astype(numpy_dtype(made.params[name].dtype)) if is_stored else array

    return change


def of_dtypes(tmp_path, *made):
    return Pair(
        *(synthetic.record(tmp_path / name, own, tamper=stored(own)) for name, own in zip("ab", made, strict=True))
    )


def test_total_updates_are_from_first_to_last_value(tmp_path):
    run = synthetic.record(tmp_path / "run", tamper=only(UPDATE, "bias", lambda x: x + np.inf, step=2))
    found, moved = Pair(run, run), run.full(UPDATE, 2, "embed") - run.full(PARAMETERS, 0, "embed")
    assert found.total_update_norm("embed") == pytest.approx(np.linalg.norm(moved), rel=1e-14)
    # What is not finite counts as zero.
    assert found.total_update_norm("bias") == pytest.approx(np.linalg.norm(run.full(PARAMETERS, 0, "bias")), rel=1e-14)


@pytest.mark.parametrize("write", ["parameters", "updated"])
def test_updates_need_a_first_and_a_last_value(tmp_path, monkeypatch, write):
    monkeypatch.setattr(RecordingWriter, write, lambda *args: None)
    assert pair(tmp_path, None, None).total_update_norm("embed") == 0.0


def test_an_update_that_overflows_is_not_known(tmp_path):
    def huge(phase, step, rank, name, array):
        return (
            np.full_like(array, {PARAMETERS: -1e308, UPDATE: 1e308}[phase]) if phase in (PARAMETERS, UPDATE) else array
        )

    assert pair(tmp_path, None, None, tamper=huge).total_update_norm("embed") == 0.0


def test_the_last_of_fewer_replicas_is_used_repeatedly(tmp_path):
    one, three = synthetic.manifest(2), synthetic.manifest(6, replicate=3)
    assert pair(tmp_path / "1", one, three).replicas == [(0, 0), (0, 1), (0, 2)]
    assert pair(tmp_path / "2", three, one).replicas == [(0, 0), (1, 0), (2, 0)]
    assert pair(tmp_path / "3", three, three).replicas == [(0, 0), (1, 1), (2, 2)]


TF32 = {"dtype": "float32", "settings": {"program": {"device": "cuda H100", "matmul": "high"}}}


@pytest.mark.parametrize(
    ("first", "second", "coarser", "dtype"),
    [
        pytest.param({}, {}, None, "float64", id="equal"),
        pytest.param({"dtype": "float32"}, {"dtype": "bfloat16"}, 1, "bfloat16", id="computed in bfloat16"),
        pytest.param({"dtype": "float32"}, {}, 0, "float32", id="computed in float32"),
        pytest.param(
            {"dtype": "bfloat16"},
            {"dtype": "bfloat16", "units": synthetic.manifest(dtype="float32").units},
            0,
            "bfloat16",
            id="stored in bfloat16",
        ),
    ],
)
def test_the_coarser_run_is_measured(tmp_path, first, second, coarser, dtype):
    for i, (a, b) in enumerate(((first, second), (second, first))):
        found = of_dtypes(tmp_path / str(i), synthetic.manifest(**a), synthetic.manifest(**b))
        expected = None if coarser is None else (1 - coarser if i else coarser)
        assert (found.coarser, found.dtype, found.by_products) == (expected, dtype, False)
        assert found.measured == ((0, 1) if expected is None else (expected,))
        assert found.bounds == bounds_for(dtype) and found.rounds_in == dtype


def test_a_parameter_in_a_coarser_dtype_widens_bounds(tmp_path):
    found = of_dtypes(tmp_path, other_specs("block", dtype="float32"), synthetic.manifest(kind="per_param"))
    assert (found.dtype, found.coarser) == ("float32", 0)
    same = of_dtypes(tmp_path / "same", *[other_specs("block", dtype="float32")] * 2)  # it does not differ
    assert (same.dtype, same.coarser) == ("float64", None)


def test_finer_products_are_measured(tmp_path):
    exact, tf32 = synthetic.manifest(dtype="float32"), synthetic.manifest(**TF32)
    for i, (made, coarser) in enumerate((((exact, tf32), 1), ((tf32, exact), 0))):
        found = pair(tmp_path / str(i), *made)
        assert (found.coarser, found.measured, found.dtype) == (coarser, (1 - coarser,), "tf32")
        assert found.by_products and found.bounds == bounds_for("tf32")
    both = pair(tmp_path / "both", tf32, tf32)
    assert (both.coarser, both.by_products, both.dtype) == (None, False, "float32")
    other = pair(tmp_path / "other", tf32, synthetic.manifest(dtype="bfloat16"))  # more than products differ
    assert (other.coarser, other.by_products, other.dtype) == (1, False, "bfloat16")


def test_steps_are_whole_until_one_was_not_recorded(tmp_path):
    every, second = synthetic.manifest(), synthetic.manifest(schedule=Schedule(dense=1, every=2))
    found = pair(tmp_path / "1", every, second)
    assert (found.num_steps, found.steps, found.whole_until) == (3, (0, 2), 1)
    found = pair(tmp_path / "2", every, every)
    assert (found.num_steps, found.steps, found.whole_until) == (3, (0, 1, 2), 3)


def test_other_frameworks_or_models_are_two_programs(tmp_path):
    made = synthetic.manifest()
    found = [
        pair(tmp_path / str(i), made, replace(made, **other)).two_programs
        for i, other in enumerate(({}, {"framework": "jax"}, {"model": "other"}))
    ]
    assert found == [False, True, True]


def test_typical_local_gradients_are_over_all_parameters(tmp_path, monkeypatch):
    own = RecordingWriter.local_grads

    def without_bias(writer, step, unit, pieces):
        own(writer, step, unit, {name: piece for name, piece in pieces.items() if name != "bias"})

    monkeypatch.setattr(RecordingWriter, "local_grads", without_bias)
    found = pair(tmp_path, None, None, tamper=only(BACKWARD, "embed", lambda x: 3 * x, rank=1))
    for rank in (0, 1):
        grads = np.concatenate(
            [found.a.local(0, rank, name).reshape(-1) for name in synthetic.SHAPES if name != "bias"]
        )
        assert found.typical_local(0, rank) == pytest.approx(np.sqrt(np.mean(grads**2)), rel=1e-14)


@pytest.mark.parametrize(
    ("ours", "theirs", "reordered"),
    [
        pytest.param(("x", (1, 2)), ("x", (1, 2)), False, id="equal"),
        pytest.param(("x", (1, 2)), ("y", (1, 2)), True, id="another digest"),
        pytest.param(("x", (1, 2)), ("x", (2, 1)), True, id="another order"),
        pytest.param(("x", (1, 2)), ("x", ()), False, id="samples not known in b"),
        pytest.param(("x", ()), ("x", (1, 2)), False, id="samples not known in a"),
    ],
)
def test_samples_are_reordered_on_any_rank(tmp_path, ours, theirs, reordered):
    found = pair(tmp_path, None, None)
    batches = {found.a: [Batch("w", (7, 8)), Batch(*ours)], found.b: [Batch("w", (7, 8)), Batch(*theirs)]}
    for run, own in batches.items():
        run.batch = lambda step, rank, own=own: own[rank] if step == 1 else None
    assert found.reordered(1) is reordered
    found.a = SimpleNamespace(manifest=SimpleNamespace(world_size=3), batch=found.a.batch)
    assert not found.reordered(1)
