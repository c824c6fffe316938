"""One recording examined by itself: what is found where, and nothing in a right one."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from crossframe.inspection import inspect
from crossframe.inspection.agreement import Disagreement
from crossframe.inspection.growth import Growth
from crossframe.inspection.not_finite import NotFinite
from crossframe.inspection.optimizer import Departure, _Checked, _findings, _Notes
from crossframe.inspection.values import Range, values_of
from crossframe.recording import Recording, RecordingWriter, Schedule, create_recording
from crossframe.recording.event_format import encode, place
from crossframe.recording.sketch import sketches_of
from crossframe.verdict.measure.values import Side
from tests.core.helpers.synthetic import (
    LEARNING_RATE,
    SAMPLES,
    both,
    digest,
    edit_events,
    manifest,
    only,
    record,
    sample_grad,
)

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
    none = {key: [] for key in ("not_finite", "growing", "disagreements", "departures", "notes")}
    counts = {"recording": found.directory, "steps": 3, "values": found.num_values, "faulty": False}
    assert found.to_json() == counts | none


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
    nouns = {"parameters": "initial value", "reduce": "reduced gradient", "state": "exp_avg", "update": "updated value"}
    uses = {"parameters": "parameter", "reduce": "reduced_grad", "state": "exp_avg", "update": "parameter"}
    stated = [(0, "parameters"), (0, "update"), (1, "reduce"), (1, "state")]
    for step, phase in stated:
        fields = place(step, 0, phase, uses[phase], unit="block", name="block.w")
        line = encode("disagreement", fields | {"difference": difference, "axis": "tp", "ranks": [1, 3]})
        end = f'{{"event": "step", "step": {step}'
        edit_events(tmp_path, end, line + end)
    found = inspect(Recording.open(tmp_path))
    along = "of 'block.w' along the mesh axis 'tp'"
    assert [(each.step, each.name, each.ranks, each.difference, each.rounding) for each in found.disagreements] == [
        (step, f"{nouns[phase]} {along}", (1, 3), difference, rounding) for step, phase in stated
    ]
    assert found.is_faulty is not rounding


def test_a_range_of_a_sketch_has_no_ends():
    array = np.array([3.0, -4.0, np.nan, 0.0])
    whole = Range.of("input", Side(array))
    assert whole == Range("input", -4.0, 3.0, pytest.approx(5 / np.sqrt(3)), 1)
    sketched = Range.of("input", Side(None, sketches_of([array])[0]))
    assert sketched == Range("input", None, None, pytest.approx(5 / np.sqrt(4), rel=1e-6), 1)
    assert sketched.describe() == "input with a root mean square of 2.5, 1 elements not finite"
    none = np.zeros(0)
    assert Range.of("input", Side(none)) == Range.of("input", Side(None, sketches_of([none])[0]))
    assert Range.of("input", Side(none)) == Range("input", None, None, 0.0, 0)


def test_a_value_that_is_not_finite_states_its_microbatch_within_a_module():
    found = NotFinite(2, 1, (0, 3), "forward", "output of module 'a'", "a", "", 1, 4, True, (), (0, 3))
    assert found.describe() == (
        "step 2, ranks 0, 3, microbatch 1: the output of module 'a' is the first value that is not finite (1 of 4 elements); the "
        "optimizer left all parameters as they were, as a gradient scaler does; what causes it at steps 0 to 2 was not all "
        "recorded: record again with windows=[(0, 3)] (--window 0:3)"
    )
    assert "microbatch" not in replace(found, module="").describe() + replace(found, microbatch=0).describe()


def test_values_of_a_step_are_in_causal_order(tmp_path):
    """Of two ranks, each with its elements: 8 and 7 of the root unit, 10 and 8 of the block, whose shards are aligned."""
    buffers = lambda step, rank: {"block.var": np.array([1.0, step])}  # noqa: E731
    made = manifest(schedule=Schedule(dense=2, every=2))
    recording = record(tmp_path, made, tamper=at("backward", 1, 1, "embed", with_first(np.inf)), buffers=buffers)
    embed, bias, w, k = "'embed'", "'bias'", "'block.w'", "'block.k_bias'"
    pieces = {embed: (8, 4), bias: (0, 3), w: (10, 5), k: (0, 3)}
    whole = {embed: (12, 12), bias: (3, 3), w: (15, 15), k: (3, 3)}

    def of(what, names, numels):
        return [
            (f"{what} of {name}", rank, numels[name][rank], 0)
            for name in names
            for rank in (0, 1)
            if numels[name][rank]
        ]

    names = (embed, bias, w, k)
    activations = ("input of module 'block'", "output of module 'block'", "output of module 'the model'")
    forward = [(each, rank, 12, 0) for each in activations for rank in (0, 1)]
    backward = of("local gradient", names[::-1], whole)
    backward[-1] = ("local gradient of 'embed'", 1, 12, 1)

    def ended(what, numel):
        return [(what, rank, numel, 0) for rank in (0, 1)]

    step = [
        *of("unsharded value", names, whole),
        *forward,
        *ended("loss", 1),
        *backward,
        *of("reduced gradient", names[::-1], pieces),
        *ended("gradient norm", 1),
        *(each for name in names for each in of("exp_avg", [name], pieces)),
        *of("updated value", names, pieces),
        *ended("buffer 'block.var'", 2),
    ]

    def told(step):
        return [(value.name, value.rank, value.numel, value.num_not_finite) for value in values_of(recording, step)]

    assert told(1) == step
    assert told(0)[:6] == of("initial value", names, pieces) and len(told(0)) == 6 + len(step)
    assert {(value.step, value.microbatch) for value in values_of(recording, 1)} == {(1, 0)}


def test_a_step_without_tensors_has_losses_and_norms(tmp_path):
    recording = record(tmp_path, manifest(steps=3, schedule=Schedule(dense=1, every=2)))
    assert [(value.name, value.rank) for value in values_of(recording, 1)] == [
        ("loss", 0),
        ("loss", 1),
        ("gradient norm", 0),
        ("gradient norm", 1),
    ]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        pytest.param(("bias",), "'bias'", id="one"),
        pytest.param(("bias", "block.w"), "'bias' and 1 more", id="two"),
        pytest.param(("embed", "bias", "block.w"), "'embed' and 2 more", id="three"),
    ],
)
def test_parameters_that_the_loop_changes_are_counted(inspected, names, text):
    changed = lambda phase, step, rank, name, x: 2 * x if (phase, step) == ("unsharded", 1) and name in names else x  # noqa: E731
    (note,) = inspected(changed, schedule=Schedule(dense=3, every=1), settings={}).notes[:1]
    what = "parameters were changed after the update of the step before, alike on all ranks"
    assert note == f"step 1: {what}: {text}"


def test_a_skipped_step_is_known_from_sketches(tmp_path, monkeypatch):
    """The parameters of step 1 are those of step 0, and another step would be a fault."""
    monkeypatch.setattr("crossframe.recording.manifest.WHOLE", 0)
    made = manifest(detail="sketch")
    weights = {}

    def skips(phase, step, rank, name, array):
        if phase == "update":
            weights.setdefault((step, name), array.copy())
            return weights[min(step, 0), name] if step == 1 else array
        return array * np.inf if (phase, step) == ("reduce", 1) else array

    (found,) = inspect(record(tmp_path / "skips", made, tamper=skips)).not_finite
    assert found.skipped and found.step == 1
    moved = both(skips, only("update", "block.k_bias", lambda array: array + 1, step=1))
    (found,) = inspect(record(tmp_path / "moves", made, tamper=moved)).not_finite
    assert not found.skipped


def test_findings_as_json_are_described():
    inputs = (Range("input", -1.0, 2.0, 1.5, 0),)
    bad = NotFinite(2, 1, (0, 3), "forward", "output of module 'a'", "a", "", 1, 4, True, inputs, (0, 3))
    fields = {
        "step": 2,
        "microbatch": 1,
        "ranks": [0, 3],
        "phase": "forward",
        "name": "output of module 'a'",
        "module": "a",
    }
    fields |= {"parameter": "", "num_not_finite": 1, "numel": 4, "skipped": True, "unseen": (0, 3)}
    input_ = {"name": "input", "low": -1.0, "high": 2.0, "root_mean_square": 1.5, "num_not_finite": 0}
    assert bad.to_json() == fields | {"inputs": (input_,), "description": bad.describe()}
    apart = Disagreement(2, "norm", "gradient norm", (1, 2), math.inf, False)
    fields = {"step": 2, "phase": "norm", "name": "gradient norm", "ranks": [1, 2], "difference": None}
    assert apart.to_json() == fields | {"rounding": False, "by_majority": True, "description": apart.describe()}
    grows = Growth("loss", 0, 4, 1.0, 16.0, 2.0)
    fields = {"name": "loss", "start": 0, "stop": 4, "first": 1.0, "last": 16.0, "factor": 2.0}
    assert grows.to_json() == fields | {"description": grows.describe()}
    departs = Departure(3, "update", ("a", "b"), math.inf, "")
    fields = {"step": 3, "name": "update", "parameters": ["a", "b"], "share": None, "evidence": ""}
    assert departs.to_json() == fields | {"description": departs.describe()}


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


@pytest.mark.parametrize(("name", "unit"), [("embed", "(root)"), ("block.w", "block")])
def test_norms_that_explode_are_those_of_a_unit(inspected, name, unit):
    def large(phase, step, rank, of, x):
        return 1e5 * x if of == name and phase in ("reduce", "update") and step == 2 else x

    names = {each.name for each in inspected(large, settings={}).growing}
    assert names == {"gradient norm", f"gradient norm of unit '{unit}'", f"norm of the parameters of unit '{unit}'"}


def test_optimizers_without_a_known_rule_are_noted(inspected):
    assert "'Lion' is not known" in inspected(settings={"optimizer": "Lion"}).notes[0]


def momentum_run(directory, nesterov=1.0, buffer=1.0, **settings):
    """Three steps of SGD with momentum, whose updates and buffers are multiplied by these factors at the last one."""
    made = manifest(1, settings={"optimizer": "SGD", "lr": LEARNING_RATE, **settings})
    create_recording(directory, made)
    draw = np.random.default_rng(0).standard_normal
    value, moment = draw(15), np.zeros(15)
    with RecordingWriter(directory, made, 0) as writer:
        for step in range(3):
            writer.batch(step, digest(str(step)), [step])
            writer.loss(step, 1.0)
            gradient = draw(15)
            moment = 0.9 * moment + gradient
            way = gradient + 0.9 * moment if settings.get("momentum") else gradient
            last = step == 2
            if not step:
                writer.parameters(0, "block", {"block.w": (0, 15, value)})
            value = value - (nesterov if last else 1.0) * LEARNING_RATE * way
            writer.reduced_grads(step, "block", {"block.w": (0, 15, gradient)})
            writer.state(step, "block", "momentum_buffer", {"block.w": (0, 15, (buffer if last else 1.0) * moment)})
            writer.counts(step, {"block.w": float(step + 1)})
            writer.updated(step, "block", {"block.w": (0, 15, value)})
            writer.end_step(step)
    return inspect(Recording.open(directory))


def test_nesterov_momentum_is_no_departure(tmp_path):
    found = momentum_run(tmp_path / "right", momentum=0.9)
    assert (found.departures, found.notes) == ((), ())
    found = momentum_run(tmp_path / "rate", momentum=0.9, nesterov=1.5)
    assert found.departures == ()
    assert found.notes == ("step 2: the step is 1.5 times the one at the stated learning rate, as under a schedule",)


def test_a_buffer_without_stated_momentum_is_not_judged(tmp_path):
    found = momentum_run(tmp_path / "unstated", buffer=2.0)
    assert (found.departures, found.notes) == ((), ())
    (only,) = momentum_run(tmp_path / "stated", buffer=2.0, momentum=0.9).departures[:1]
    assert (only.step, only.name) == (2, "momentum_buffer")


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_parameters_in_a_narrower_dtype_are_no_change(inspected, monkeypatch, detail):
    monkeypatch.setattr("crossframe.recording.manifest.WHOLE", 0)
    narrow = lambda phase, step, rank, name, x: x.astype(np.float32) if phase == "unsharded" else x  # noqa: E731
    found = inspected(narrow, detail=detail, schedule=Schedule(dense=3, every=1))
    assert found.disagreements == () and not any("changed" in note for note in found.notes)


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


def findings(factors, *, error=0.0, slot="", groups=None, more=()):
    """(parameters, share, evidence) of each departure, and the notes, of factors by parameter."""
    settings = {} if groups is None else {"param_groups": [{"params": names} for names in groups]}
    notes, checked = _Notes(), [_Checked(name, factor, error) for name, factor in factors.items()]
    run = SimpleNamespace(manifest=SimpleNamespace(settings=settings))
    found = list(_findings(run, 3, slot, [*checked, *more], notes))
    assert all((each.step, each.name) == (3, slot or "update") for each in found)
    return [(each.parameters, each.share, each.evidence) for each in found], notes.sentences()


OTHERS = "times as large as for other parameters"


@pytest.mark.parametrize(
    ("factor", "error", "other", "differs"),
    [
        (1.0, 0.0, 1.0 + 0.99e-6, False),
        (1.0, 0.0, 1.0 + 1.01e-6, True),
        (1.0, 0.01, 1.0399, False),  # twice the errors of both
        (1.0, 0.01, 1.0401, True),
        (3.0, 0.01, 3.1199, False),  # relative to a factor of 3
        (3.0, 0.01, 3.1201, True),
    ],
)
def test_factors_differ_by_more_than_their_errors(factor, error, other, differs):
    found, _ = findings({"a": factor, "b": factor, "c": other}, error=error)
    assert [names for names, _, _ in found] == [("c",)] * differs


def test_the_factor_of_the_lower_half_is_usual():
    found, notes = findings({"a": 2.0, "b": 1.0, "c": 4.0, "d": 1.0, "e": 4.0, "f": 2.0, "g": 0.5, "h": 1.0})
    assert found == [
        (("a", "f"), 0.5, f"the step is 2 {OTHERS}"),
        (("c", "e"), 0.75, f"the step is 4 {OTHERS}"),
        (("g",), 0.5, f"the step is 0.5 {OTHERS}"),
    ]
    assert notes == []
    found, notes = findings({"a": 0.5, "b": 0.5, "c": 1.0, "d": 1.0}, slot="exp_avg")
    assert found == [(("c", "d"), 0.5, f"the input of the moment is 2 {OTHERS}")]
    assert notes == [
        "step 3: gradients were multiplied by 0.5 between the reduction and the optimizer, as clipping does"
    ]


def test_a_factor_next_to_zeros_is_stated_itself():
    found, notes = findings({"a": 0.0, "b": 0.0, "c": -3.0, "d": 0.0})
    assert found == [(("c",), 1.0, f"the step is -3 {OTHERS}")]
    assert notes == ["step 3: the step is 0 times the one at the stated learning rate, as under a schedule"]


def test_factors_are_compared_within_a_group():
    factors = {"a": 1.0, "b": 2.0, "c": 1.0, "d": 2.0, "e": 3.0}
    found, notes = findings(factors, groups=[["a", "c"], ["b", "d"]])
    assert found == [] and [note[:21] for note in notes] == ["step 3: the step is 2"]
    assert [names for names, _, _ in findings(factors, groups=[["a", "c", "b"], ["d"]])[0]] == [("b",)]


def test_departures_with_one_explanation_are_joined():
    more = [
        _Checked("x", share=0.25, evidence="why", follows=False),
        _Checked("y", share=0.5, evidence="", follows=False),
        _Checked("z", share=0.75, evidence="why", follows=False),
    ]
    assert findings({"a": 1.0}, more=more)[0] == [(("x", "z"), 0.75, "why"), (("y",), 0.5, "")]


def test_notes_count_the_other_steps():
    notes = _Notes()
    for step, slot, factor in ((4, "", 0.5), (4, "", 0.25), (5, "", 0.125), (6, "exp_avg", 3.0)):
        notes.add(step, slot, factor)
    rates, scales = notes.sentences()
    assert rates.startswith("step 4: the step is 0.5 times") and rates.endswith("(likewise at 1 more step)")
    assert scales.startswith("step 6: gradients were multiplied by 3 ") and scales.endswith("as clipping does")
    notes.add(7, "", 1.5)
    assert notes.sentences()[0].endswith("(likewise at 2 more steps)")


def test_a_buffer_that_is_not_finite_is_noted(tmp_path):
    """Training may not read it: an evaluation would."""

    def buffers(step, rank):
        return {"block.var": np.array([1.0, np.nan if step == 1 else step])}

    found = inspect(record(tmp_path / "run", buffers=buffers))
    assert not found.is_faulty
    assert any("step 1: the buffer 'block.var' holds 1 values that are not finite" in note for note in found.notes)
