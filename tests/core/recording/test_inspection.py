"""One recording examined by itself: what is found where, and nothing in a right one."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from crossframe.inspection import inspect
from crossframe.inspection.not_finite import NotFinite
from crossframe.inspection.optimizer import _Checked, _findings, _Notes
from crossframe.inspection.values import Range
from crossframe.recording import Recording, Schedule
from crossframe.recording.event_format import encode, place
from crossframe.recording.sketch import sketches_of
from crossframe.verdict.measure.values import Side
from tests.core.helpers.synthetic import LEARNING_RATE, SAMPLES, both, edit_events, manifest, record, sample_grad

SGD = {"optimizer": "SGD", "lr": LEARNING_RATE}


def at(phase, step, rank, name, change):
    """A tamper of one value; rank None: of all ranks."""

    def tamper(phase_, step_, rank_, name_, array):
        here = (phase_, step_, name_) == (phase, step, name) and rank in (None, rank_)
        return change(array) if here else array

    return tamper


def with_first(value):
    def change(array):
        array.reshape(-1)[0] = value
        return array

    return change


NAN_LOSS = at("forward", 0, 1, "", with_first(np.nan))


@pytest.fixture
def inspected(tmp_path):
    def examine(tamper=None, **options):
        made = manifest(options.pop("world_size", 2), **{"settings": SGD, **options})
        return inspect(record(tmp_path / "run", made, tamper=tamper))

    return examine


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("replicate", [1, 2])
def test_right_runs_have_no_findings(inspected, replicate, dtype):
    found = inspected(world_size=4, replicate=replicate, dtype=dtype)
    assert (found.not_finite, found.disagreements, found.departures, found.growing, found.notes) == ((), (), (), (), ())
    assert not found.is_faulty and found.num_values > 100


def test_nan_is_traced_to_the_module_that_made_it(inspected):
    found = inspected(both(at("output", 0, 1, "block", with_first(np.nan)), NAN_LOSS))
    (first,) = found.not_finite
    assert (first.step, first.ranks, first.name, first.num_not_finite) == (0, (1,), "output of module 'block'", 1)
    (entered, *weights) = first.inputs
    assert entered.name == "input of module 'block'" and entered.low is not None and entered.low < 0 < entered.high
    assert {each.name for each in weights} == {"unsharded value of 'block.w'", "unsharded value of 'block.k_bias'"}
    assert found.is_faulty
    json.dumps(found.to_json(), allow_nan=False)


def test_nan_in_a_gradient_names_the_parameter(inspected):
    found = inspected(
        both(at("backward", 0, 1, "block.w", with_first(np.inf)), at("reduce", 0, None, "block.w", with_first(np.inf)))
    )
    (first,) = found.not_finite
    assert (first.name, first.ranks) == ("local gradient of 'block.w'", (1,))
    assert [each.name for each in first.inputs] == ["input of module 'block'"]


def test_infinities_without_effect_are_a_note(inspected):
    found = inspected(at("output", 0, None, "block", with_first(-np.inf)))
    assert found.not_finite == () and not found.is_faulty
    assert "as in a mask" in found.notes[0]


def test_steps_recorded_too_thinly_name_a_window(inspected):
    found = inspected(at("forward", 2, 0, "", with_first(np.nan)), schedule=Schedule(dense=1, every=2))
    (first,) = found.not_finite
    assert (first.name, first.unseen) == ("loss", (1, 3))
    assert "--window 1:3" in first.describe()


@pytest.mark.parametrize(
    ("phase", "name", "options", "expected"),
    [
        pytest.param("unsharded", "block.w", {}, "unsharded value of 'block.w'", id="gathered"),
        pytest.param("norm", "", {}, "gradient norm", id="norm"),
        pytest.param("reduce", "embed", {"replicate": 2}, "reduced gradient of 'embed'", id="gradients of replicas"),
        pytest.param("update", "embed", {"replicate": 2}, "updated value of 'embed'", id="parameters of replicas"),
        pytest.param("state", "embed", {"replicate": 2}, "exp_avg of 'embed'", id="state of replicas"),
    ],
)
def test_ranks_that_disagree_are_named(inspected, phase, name, options, expected):
    found = inspected(at(phase, 0, 1, name, lambda array: array * 2), world_size=4 if options else 3, **options)
    first = found.disagreements[0]
    assert (first.step, first.name, first.difference, first.rounding) == (0, expected, pytest.approx(0.5), False)
    # Of two copies neither is in the majority.
    assert first.ranks == ((1, 3) if options else (1,)) and found.is_faulty


def own_gradient(phase, step, rank, name, array):
    """What a rank of two has of its own samples, before an optimizer that reduces gradients by itself."""
    if phase != "reduce":
        return array
    samples = range(step * SAMPLES + rank, (step + 1) * SAMPLES, 2)
    return np.mean([sample_grad(step, each, name) for each in samples], axis=0).astype(array.dtype)


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_an_optimizer_that_reduces_gradients_is_no_disagreement(inspected, monkeypatch, detail):
    monkeypatch.setattr("crossframe.recording.manifest.WHOLE", 0)
    found = inspected(own_gradient, replicate=2, detail=detail)
    assert found.disagreements == () and not found.is_faulty
    assert "the optimizer steps, which reduces them" in found.notes[0]


def test_gradients_that_nobody_reduces_part_the_parameters(inspected):
    apart = at("update", 0, 1, "embed", lambda array: array * 2)
    found = inspected(both(own_gradient, apart), replicate=2).disagreements
    assert [each.name for each in found if each.phase == "reduce"] == ["reduced gradient of 'embed'"] * 3


def test_replicas_that_differ_by_rounding_are_no_fault(inspected):
    found = inspected(at("reduce", 1, 0, "embed", lambda array: np.nextafter(array, np.inf)), world_size=4, replicate=2)
    assert found.disagreements[0].rounding and not found.is_faulty


def test_sketches_that_differ_between_replicas_have_the_estimated_difference(inspected, monkeypatch):
    monkeypatch.setattr("crossframe.recording.manifest.WHOLE", 0)
    found = inspected(at("reduce", 0, 1, "embed", lambda array: array * 2), world_size=4, replicate=2, detail="sketch")
    first = found.disagreements[0]
    # The sketch estimates a distance to about a tenth, of the norm of the rank's piece.
    assert (first.name, first.ranks) == ("reduced gradient of 'embed'", (1, 3))
    assert first.difference == pytest.approx(0.5, rel=0.2) and not first.rounding


@pytest.mark.parametrize(("difference", "rounding"), [(0.5, False), (1e-13, True)])
def test_model_ranks_that_disagree_are_named(tmp_path, difference, rounding):
    record(tmp_path, manifest(settings=SGD))
    lines = ""
    for phase, use, step in (("reduce", "reduced_grad", 1), ("state", "exp_avg", 1)):
        fields = place(step, 0, phase, use, unit="block", name="block.w")
        lines += encode("disagreement", fields | {"difference": difference, "axis": "tp", "ranks": [1, 3]})
    edit_events(tmp_path, '{"event": "step", "step": 1', lines + '{"event": "step", "step": 1')
    found = inspect(Recording.open(tmp_path))
    along = "of 'block.w' along the mesh axis 'tp'"
    assert [(each.step, each.name, each.ranks, each.difference, each.rounding) for each in found.disagreements] == [
        (1, f"{what} {along}", (1, 3), difference, rounding) for what in ("reduced gradient", "exp_avg")
    ]
    assert found.is_faulty is not rounding


def test_a_range_of_a_sketch_has_no_ends():
    array = np.array([3.0, -4.0, np.nan, 0.0])
    whole = Range.of("input", Side(array))
    assert whole == Range("input", -4.0, 3.0, pytest.approx(5 / np.sqrt(3)), 1)
    sketched = Range.of("input", Side(None, sketches_of([array])[0]))
    assert sketched == Range("input", None, None, pytest.approx(5 / np.sqrt(4), rel=1e-6), 1)
    assert sketched.describe() == "input with a root mean square of 2.5, 1 elements not finite"


def test_a_value_that_is_not_finite_states_its_microbatch_within_a_module():
    found = NotFinite(2, 1, (0, 3), "forward", "output of module 'a'", "a", "", 1, 4, True, (), (0, 3))
    assert found.describe() == (
        "step 2, ranks 0, 3, microbatch 1: the output of module 'a' is the first value that is not finite (1 of 4 elements); the "
        "optimizer left all parameters as they were, as a gradient scaler does; what causes it at steps 0 to 2 was not all "
        "recorded: record again with windows=[(0, 3)] (--window 0:3)"
    )
    assert "microbatch" not in replace(found, module="").describe() + replace(found, microbatch=0).describe()


def test_an_optimizer_is_examined_by_elements_alone(inspected, monkeypatch):
    monkeypatch.setattr("crossframe.recording.manifest.WHOLE", 0)
    found = inspected(detail="sketch")
    assert found.notes == ("the optimizer's steps were not examined: no two steps in a row were recorded in full",)


def test_ranks_fed_alike_are_noted(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.core.helpers.synthetic.digest", lambda text: "0" * 64)
    assert "ranks 0 and 1 were fed the same samples" in inspect(record(tmp_path / "run")).notes[0]


def test_an_update_twice_as_large_is_a_departure(inspected):
    found = inspected(lambda phase, step, rank, name, x: _moved(phase, step, name, x, 2.0))
    (only,) = found.departures
    assert (only.step, only.name, only.parameters) == (1, "update", ("block.w",))
    assert only.evidence == "the step is 2 times as large as for other parameters"


def test_rates_of_a_schedule_are_no_departure(inspected):
    found = inspected(lambda phase, step, rank, name, x: _moved(phase, step, "block.w", x, 0.5, of=name))
    assert found.departures == ()
    assert "step 1: the step is 0.5 times the one at the stated learning rate" in found.notes[0]


def test_a_parameter_that_strays_is_a_departure(inspected):
    found = inspected(at("update", 2, None, "embed", lambda array: array + np.arange(array.size).reshape(array.shape)))
    (only,) = found.departures
    assert (only.step, only.parameters) == (2, ("embed",)) and only.share > 0.5
    assert found.is_faulty


def test_losses_that_double_grow(inspected):
    rising = lambda phase, step, rank, name, x: x * 0 + 2.0**step if phase == "forward" else x  # noqa: E731
    found = inspected(rising, steps=9)
    assert [(each.name, each.start, each.stop, each.first, each.last) for each in found.growing] == [
        ("loss", 0, 8, 1, 256)
    ]
    assert found.growing[0].factor == pytest.approx(2.0)
    assert not found.is_faulty


def test_outputs_of_a_module_that_double_grow(inspected):
    rising = lambda phase, step, rank, name, x: x * 2.0**step if (phase, name) == ("output", "block") else x  # noqa: E731
    found = inspected(rising, steps=12, schedule=Schedule(dense=12, every=1))
    assert [(each.name, each.factor) for each in found.growing] == [
        ("norm of the output of module 'block'", pytest.approx(2.0, rel=0.2))
    ]


def test_the_fastest_growth_comes_first(inspected):
    rates = {("forward", ""): 2.0, ("output", "block"): 3.0, ("output", ""): 2.5}
    rising = lambda phase, step, rank, name, x: x * rates[phase, name] ** step if (phase, name) in rates else x  # noqa: E731
    factors = [each.factor for each in inspected(rising, steps=12, schedule=Schedule(dense=12, every=1)).growing]
    assert factors == [pytest.approx(each, rel=0.1) for each in (3.0, 2.5, 2.0)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([1e200], [math.sqrt(12) * 1e200], id="the square overflows"),
        pytest.param([1e308], [], id="the norm overflows"),
        pytest.param([1e200, np.nan], [], id="not all are finite"),
    ],
)
def test_gradients_explode_while_their_norm_is_finite(inspected, values, expected):
    """The embedding has 12 elements."""
    found = inspected(at("reduce", 2, None, "embed", lambda array: np.resize(values, array.shape))).growing
    assert [each.last for each in found if each.name == "gradient norm"] == [pytest.approx(each) for each in expected]


def test_optimizers_without_a_known_rule_are_noted(inspected):
    assert "'Lion' is not known" in inspected(settings={"optimizer": "Lion"}).notes[0]


def _moved(phase, step, name, x, factor, of=None):
    """At step 1 the update of a parameter (or of all, with `of`) multiplied; later values start from there."""
    target = of or name
    if phase != "update" or step < 1 or (of is None and name != "block.w"):
        return x
    grad = np.mean([sample_grad(1, s, target) for s in range(SAMPLES, 2 * SAMPLES)], axis=0)
    return x - (factor - 1) * LEARNING_RATE * grad


@pytest.mark.parametrize(("bias", "departs"), [(2.0, False), (2.01, True)])
def test_factors_of_a_group_are_compared_within_the_errors_of_both(bias, departs):
    """The step of a weight that is large next to it has few known digits, and so has the factor of the middle one."""
    checked = [_Checked(name, 2.0001 + 1e-4 * i, 3e-4) for i, name in enumerate(("block.w", "embed", "block.k_bias"))]
    checked += [_Checked("bias", bias, 1e-7), _Checked("bias again", 2.0, 1e-7)]
    found = list(_findings(SimpleNamespace(manifest=manifest()), 1, "", checked, _Notes()))
    assert [each.parameters for each in found] == [("bias",)] * departs


def test_a_buffer_that_is_not_finite_is_noted(tmp_path):
    """Training may not read it: an evaluation would."""

    def buffers(step, rank):
        return {"block.var": np.array([1.0, np.nan if step == 1 else step])}

    found = inspect(record(tmp_path / "run", buffers=buffers))
    assert not found.is_faulty
    assert any("step 1: the buffer 'block.var' holds 1 values that are not finite" in note for note in found.notes)
