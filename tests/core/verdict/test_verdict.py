"""What two recordings are said to be, and where they part."""

# pyright: reportOptionalMemberAccess=false, reportOptionalOperand=false, reportOperatorIssue=false, reportCallIssue=false
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from crossframe.layout import FlatLayout
from crossframe.param_map import identity_map
from crossframe.recording import Recording, RecordingWriter, Schedule
from crossframe.verdict import Verdict, bounds_for, compare
from crossframe.verdict.measure.causal_order import walk
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.zero_gradient import terms_of
from crossframe.verdict.unrecorded_causes import Unrecorded
from tests.core.helpers import synthetic
from tests.core.helpers.synthetic import only


def jitter(size):
    """Changes everything that is computed by about `size`, relative, as another order of sums does."""

    def change(phase, step, rank, name, array):
        if phase in ("parameters", "unsharded"):
            return array
        noise = np.random.default_rng([step, *phase.encode(), *name.encode()]).uniform(-size, size, array.shape)
        return (array * (1 + noise)).astype(array.dtype)

    return change


def versus(tmp_path, tamper=None, *, a=None, b=None):
    """The verdict on a clean recording and one that was tampered with."""
    a, b = a or synthetic.manifest(), b or synthetic.manifest(framework="jax")
    return compare(synthetic.record(tmp_path / "a", a), synthetic.record(tmp_path / "b", b, tamper=tamper))


def place(verdict):
    first = verdict.first_divergence
    assert first is not None
    return first.step, first.phase, first.event, first.unit, first.parameter, first.rank, (first.start, first.stop)


def test_equal(tmp_path):
    found = versus(tmp_path)
    assert found.verdict is Verdict.EQUAL
    assert found.first_divergence is None
    assert found.max_relative_loss_difference == found.max_relative_parameter_difference == 0.0
    assert (found.a, found.b, found.dtype, found.world_size, found.steps) == ("torch", "jax", "float64", 2, 3)


def test_an_output_that_differs_is_found_before_the_loss_that_it_causes(tmp_path):
    def one(phase, step, rank, name, array):
        if (phase, rank, name) == ("output", 1, "block"):
            array[2, 1:3] += 1e-6
        return array * (1 + 1e-6) if phase == "forward" else array

    found = versus(tmp_path, one)
    assert found.verdict is Verdict.BUG
    assert place(found) == (0, "forward", "output", "block", None, 1, (9, 11))
    assert found.to_json()["first_divergence"]["module"] == "block"
    assert "the output of unit 'block' (microbatch 0, elements 9:11, rank 1)" in found.reason


def test_of_outputs_only_those_of_one_world_are_compared_and_only_in_one_order_of_axes(tmp_path):
    def other(phase, step, rank, name, array):
        return array.T if phase == "output" else array

    three = versus(tmp_path / "3", other, b=synthetic.manifest(3, framework="jax"))
    assert three.verdict is Verdict.ROUNDING
    two = versus(tmp_path / "2", other)
    assert two.verdict is Verdict.EQUAL
    assert two.notes[0].startswith("at step 0 the output of module 'block' has shape (3, 4) in torch and (4, 3) in jax")
    assert "and so does 1 more activation;" in two.notes[0]
    later = versus(tmp_path / "later", synthetic.both(other, only("forward", "", lambda loss: 2 * loss)))
    assert later.verdict is Verdict.BUG and "the output of module 'block' has shape" in later.reason


def test_rounding(tmp_path):
    found = versus(tmp_path, jitter(1e-14))
    assert found.verdict is Verdict.ROUNDING
    assert found.first_divergence is None
    # Uniform in +-1e-14: the largest of 3 x 2 losses is nearly as large, and no norm exceeds it.
    for largest in (found.max_relative_loss_difference, found.max_relative_parameter_difference):
        assert largest is not None and 1e-16 < largest <= 1.1e-14
    assert len(found.loss_differences) == 3
    assert [step for step, _ in found.parameter_differences] == [0, 1, 2]


def test_a_doubled_reduction_is_found(tmp_path):
    found = versus(tmp_path, only("reduce", "block.w", lambda grad: 2 * grad))
    assert found.verdict is Verdict.BUG
    # 15 elements of block.w over two ranks: the flat unit has 15, 1 of alignment, 3, 1 of padding; 10 on each rank.
    worst = int(np.argmax(np.abs(_reduced("block.w"))))
    rank = 0 if worst < 10 else 1
    span = (0, 10) if rank == 0 else (10, 15)
    assert place(found) == (0, "reduce", "reduce_scatter", "block", "block.w", rank, span)
    assert "at step 0 the reduced gradient of 'block.w' (unit 'block'" in found.reason
    assert "differs by 1.0e+00 between torch and jax" in found.reason


def _reduced(name):
    return np.mean([synthetic.sample_grad(0, sample, name) for sample in range(synthetic.SAMPLES)], axis=0).reshape(-1)


def test_the_range_is_the_smallest_that_holds_what_is_off(tmp_path):
    def change(grad):
        grad.reshape(-1)[[4, 7]] += 1e-3
        return grad

    found = versus(tmp_path, only("reduce", "block.w", change), b=synthetic.manifest(kind="per_param"))
    # Rows of 3, 3 of 5 rows on rank 0.
    assert place(found) == (0, "reduce", "reduce_scatter", "block", "block.w", 0, (4, 8))


def test_a_flipped_bit_in_the_initial_parameters(tmp_path):
    def flip(array):
        array.reshape(-1)[9:10].view(np.uint64)[:] ^= 1
        return array

    found = versus(tmp_path, only("parameters", "embed", flip))
    assert found.verdict is Verdict.BUG
    assert place(found) == (0, "parameters", "all_gather", "", "embed", 1, (9, 10))
    assert "not bitwise equal" in found.reason


def test_a_loss_that_is_off(tmp_path):
    found = versus(tmp_path, only("forward", "", lambda loss: loss * (1 + 1e-11), step=1, rank=1))
    assert found.verdict is Verdict.BUG
    assert place(found) == (1, "forward", "loss", "", None, 1, (None, None))
    assert found.max_relative_loss_difference == pytest.approx(1e-11, rel=1e-4)


def test_a_local_gradient_that_is_off(tmp_path):
    found = versus(tmp_path, only("backward", "embed", lambda grad: grad + 1e-6 * np.eye(4, 3), rank=1))
    assert place(found) == (0, "backward", "backward", "", "embed", 1, (0, 9))


def test_the_backward_is_walked_from_its_beginning(tmp_path):
    def everywhere(phase, step, rank, name, array):
        return array * 1.5 if phase == "backward" else array

    assert place(versus(tmp_path, everywhere))[3:5] == ("block", "block.w")


def test_an_optimizer_that_is_off(tmp_path):
    found = versus(tmp_path, only("update", "bias", lambda value: value * (1 + 1e-9), step=2))
    assert found.verdict is Verdict.BUG
    assert place(found)[:5] == (2, "update", "optimizer", "", "bias")
    assert (found.max_relative_parameter_difference or 0.0) > 1e-11


def test_a_zero_gradient_is_reported_apart(tmp_path):
    def amplified(phase, step, rank, name, array):
        if name == "block.k_bias" and phase in ("reduce", "backward"):
            return -array
        if name == "block.k_bias" and phase == "update":
            return array + synthetic.LEARNING_RATE
        return jitter(1e-15)(phase, step, rank, name, array)

    for dtype in ("float64", "float32"):
        made = [synthetic.manifest(dtype=dtype, framework=framework) for framework in ("torch", "jax")]
        found = versus(tmp_path / dtype, amplified, a=made[0], b=made[1])
        assert found.zero_gradient_parameters == ("block.k_bias",)
        assert found.first_divergence is None
        assert (found.max_relative_parameter_difference or 0.0) < bounds_for(dtype).parameter
        assert found.verdict in (Verdict.ROUNDING, Verdict.EQUAL if dtype == "float32" else Verdict.ROUNDING)


def test_the_terms_of_a_gradient_are_those_stated_or_the_rows_of_activations(tmp_path):
    def vectors(phase, step, rank, name, array):
        return array[0] if phase in ("input", "output") else array

    for i, (expected, made, tamper) in enumerate(
        (
            (16, synthetic.manifest(terms=16), None),
            (3, synthetic.manifest(terms=None), None),
            (1, synthetic.manifest(terms=None), vectors),
            (1, synthetic.manifest(terms=None, schedule=Schedule(dense=0, every=1)), None),
        )
    ):
        assert terms_of(synthetic.record(tmp_path / str(i), made, tamper=tamper)) == expected


def test_a_zero_gradient_that_turns_nan_on_one_side_is_a_bug(tmp_path):
    found = versus(tmp_path, only("update", "block.k_bias", lambda x: x * np.nan, step=1))
    assert found.verdict is Verdict.BUG
    assert place(found)[:5] == (1, "update", "optimizer", "block", "block.k_bias")


def test_a_gradient_that_is_exactly_zero_on_both_sides_is_still_compared(tmp_path):
    def unused(phase, step, rank, name, array):
        return np.zeros_like(array) if name == "bias" and phase in ("reduce", "backward") else array

    def moved(phase, step, rank, name, array):
        return array + 1e-3 if (phase, name) == ("update", "bias") else unused(phase, step, rank, name, array)

    a = synthetic.record(tmp_path / "a", tamper=unused)
    b = synthetic.record(tmp_path / "b", tamper=moved)
    found = compare(a, b)
    assert "bias" not in found.zero_gradient_parameters
    assert found.verdict is Verdict.BUG
    assert place(found)[4] == "bias"


@pytest.mark.parametrize("kind", ["flat", "per_param"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_other_world_sizes_and_layouts(tmp_path, kind, world_size):
    other = synthetic.manifest(world_size, kind=kind)
    clean = versus(tmp_path / "clean", b=other)
    assert clean.verdict is Verdict.ROUNDING
    assert clean.world_size == (2, world_size)
    doubled = versus(tmp_path / "doubled", only("reduce", "embed", lambda grad: 2 * grad), b=other)
    assert doubled.verdict is Verdict.BUG
    assert place(doubled)[:5] == (0, "reduce", "reduce_scatter" if world_size > 1 else "all_reduce", "", "embed")
    mean = versus(tmp_path / "mean", only("forward", "", lambda loss: loss + 1, step=2, rank=0), b=other)
    assert place(mean) == (2, "forward", "loss", "", None, None, (None, None))
    assert "the mean loss over ranks" in mean.reason


def test_every_replica_is_looked_at(tmp_path):
    b = synthetic.manifest(6, replicate=3)
    tamper = only("update", "embed", lambda value: value + (np.arange(12).reshape(4, 3) == 10), rank=5)
    assert place(versus(tmp_path / "x", tamper, b=b)) == (0, "update", "optimizer", "", "embed", 5, (10, 11))


def test_float32_beyond_its_bound_before_the_first_update_is_a_bug(tmp_path):
    made = [synthetic.manifest(dtype="float32", framework=framework) for framework in ("torch", "jax")]
    found = versus(tmp_path, only("reduce", "block.w", lambda grad: 2 * grad), a=made[0], b=made[1])
    assert found.verdict is Verdict.BUG
    assert place(found)[:2] == (0, "reduce")


@pytest.mark.parametrize(("phase", "step"), [("update", 0), ("reduce", 1)])
def test_float32_beyond_its_bound_after_an_update_is_inconclusive(tmp_path, phase, step):
    made = [synthetic.manifest(dtype="float32", framework=framework) for framework in ("torch", "jax")]
    found = versus(tmp_path, only(phase, "block.w", lambda x: 2 * x, step=step), a=made[0], b=made[1])
    assert found.verdict is Verdict.INCONCLUSIVE
    assert place(found)[:2] == (step, phase)
    assert "--dtype float64" in found.reason


def test_bfloat16_is_too_coarse_for_rounding_but_not_for_equal_or_moved_data(tmp_path):
    made = [synthetic.manifest(dtype="bfloat16", framework=framework) for framework in ("torch", "jax")]
    assert versus(tmp_path / "0", a=made[0], b=made[1]).verdict is Verdict.EQUAL
    found = versus(tmp_path / "1", jitter(0.01), a=made[0], b=made[1])
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.first_divergence is None
    found = versus(tmp_path / "2", only("reduce", "block.w", lambda x: 2 * x), a=made[0], b=made[1])
    assert found.verdict is Verdict.INCONCLUSIVE
    assert place(found)[:2] == (0, "reduce")
    found = versus(tmp_path / "3", only("parameters", "embed", lambda x: x * 2), a=made[0], b=made[1])
    assert found.verdict is Verdict.BUG


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_finite_on_one_side_is_a_bug(tmp_path, dtype, value):
    def spoil(array):
        array.reshape(-1)[5] = value
        return array

    made = [synthetic.manifest(dtype=dtype, framework=framework) for framework in ("torch", "jax")]
    found = versus(tmp_path, only("update", "block.w", spoil, step=1), a=made[0], b=made[1])
    assert found.verdict is Verdict.BUG
    assert place(found) == (1, "update", "optimizer", "block", "block.w", 0, (5, 6))
    assert "not finite (NaN or infinity) in jax and finite in torch" in found.reason
    assert found.to_json()["max_relative_parameter_difference"] is None
    json.dumps(found.to_json(), allow_nan=False)


def test_not_finite_on_both_sides(tmp_path):
    spoil = only("forward", "", lambda loss: loss * np.nan, step=1)

    a = synthetic.record(tmp_path / "a", tamper=spoil)
    found = compare(a, synthetic.record(tmp_path / "b", tamper=spoil))
    assert found.verdict is Verdict.EQUAL
    assert "from step 1 on (forward '') both sides contain NaN or infinity" in found.reason
    found = compare(a, synthetic.record(tmp_path / "c", tamper=synthetic.both(spoil, jitter(1e-15))))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "cannot be compared" in found.reason


def test_an_earlier_cause_wins(tmp_path):
    reduced = only("reduce", "embed", lambda grad: 2 * grad, step=1)
    updated = only("update", "bias", lambda value: 2 * value, step=1)
    assert place(versus(tmp_path, synthetic.both(reduced, updated)))[:2] == (1, "reduce")


def _renamed():
    units = synthetic.manifest().units
    params = tuple(replace(p, shape=(3, 5)) if p.name == "block.w" else p for p in units[1][1].params)
    return synthetic.manifest(units=(units[0], ("block", FlatLayout(params, 2, keep_original=True))))


def _fewer():
    return synthetic.manifest(units=synthetic.manifest().units[:1])


@pytest.mark.parametrize(
    ("b", "match"),
    [
        (_renamed(), "parameter 'block.w' has shape (5, 3) in a, (3, 5) in b"),
        (
            _fewer(),
            "parameter 'block.w' is only in a; parameter 'block.k_bias' is only in a; train the same parameters",
        ),
    ],
)
def test_other_parameters_are_incomparable(tmp_path, monkeypatch, b, match):
    a = synthetic.record(tmp_path / "a")
    shapes = {name: spec.shape for name, spec in b.params.items()}
    monkeypatch.setattr(synthetic, "SHAPES", shapes)
    found = compare(a, synthetic.record(tmp_path / "b", b))
    assert found.verdict is Verdict.INCOMPARABLE
    assert match in found.reason
    assert found.to_json()["max_relative_loss_difference"] is None


def test_a_weight_that_is_tied_in_one_run_only_is_named(tmp_path):
    own = synthetic.manifest()
    root, block = own.units
    specs = tuple(replace(spec, aliases=("bias",)) for spec in root[1].params if spec.name == "embed")
    layout = FlatLayout(specs, own.mesh.shard, keep_original=True)
    names = identity_map({name: shape for name, shape in synthetic.SHAPES.items() if name != "bias"})
    a = synthetic.record(tmp_path / "a", replace(own, units=((root[0], layout), block), param_map=names))
    b = synthetic.record(tmp_path / "b", own)
    for pair in ((a, b), (b, a)):
        found = compare(*pair)
        assert found.verdict is Verdict.INCOMPARABLE and found.reason.startswith("parameter 'bias' is only in b; train")
        assert found.diagnosis.signature == "tied_weight"
        said = (
            "'bias' is a parameter of its own in b, and another name of 'embed' in a; both start with different values."
        )
        assert found.diagnosis.evidence == said


SETTINGS = [
    ("learning rate", {"learning_rate": 0.2}, "update"),
    ("seed", {"seed": 5}, "backward"),
    ("accumulate", {"settings": {"accumulate": 2}}, "backward"),
    ("optimizer", {"settings": {"optimizer": "SGD"}}, "state"),
    ("weight decay", {"settings": {"weight_decay": 0.1}}, "state"),
    ("momentum", {"settings": {"momentum": 0.8}}, "state"),
    ("betas", {"settings": {"betas": [0.9, 0.99]}}, "state"),
    ("clip", {"settings": {"clip": 2.0}}, "state"),
    ("eps", {"settings": {"eps": 1e-6}}, "update"),
]
_STATED = {"optimizer": "AdamW", "weight_decay": 0.0, "momentum": 0.9, "betas": [0.9, 0.999], "clip": 1.0, "eps": 1e-8}


@pytest.mark.parametrize(("name", "fields", "phase"), SETTINGS)
def test_a_setting_explains_what_it_can_change(tmp_path, name, fields, phase):
    a = synthetic.manifest(settings=_STATED | {"accumulate": 1})
    b = synthetic.manifest(**(fields | {"settings": _STATED | {"accumulate": 1} | fields.get("settings", {})}))
    found = versus(tmp_path, only(phase, "block.w", lambda array: 3 * array), a=a, b=b)
    assert found.verdict is Verdict.INCOMPARABLE
    named = {"learning rate": "constant_factor", "weight decay": "weight_decay", "eps": "optimizer_epsilon"}
    assert (found.diagnosis.signature if found.diagnosis else None) == named.get(name)
    assert found.reason.startswith(f"{name} differs: ") and "from the numbers alone: at step 0" in found.reason
    assert found.first_divergence is not None and found.first_divergence.phase == phase
    assert found.to_json()["settings"] == [found.reason.partition("; from the numbers alone")[0]]


@pytest.mark.parametrize(("name", "fields", "phase"), SETTINGS)
def test_a_setting_without_effect_on_numbers_is_only_listed(tmp_path, name, fields, phase):
    a = synthetic.manifest(settings=_STATED | {"accumulate": 1})
    b = synthetic.manifest(**(fields | {"settings": _STATED | {"accumulate": 1} | fields.get("settings", {})}))
    found = versus(tmp_path, a=a, b=b)
    assert found.verdict is Verdict.EQUAL
    assert [each.partition(" differs")[0] for each in found.settings] == [name]


def _grouped(decays):
    """A recording's manifest with groups of their own for some parameters."""
    groups = [{"params": [name], "weight_decay": decay} for name, decay in decays.items()]
    return synthetic.manifest(settings={"optimizer": "AdamW", "weight_decay": 0.1, "param_groups": groups})


def test_an_option_of_some_parameters_explains_theirs(tmp_path):
    a, b = _grouped({"bias": 0.0, "block.k_bias": 0.0}), _grouped({"block.k_bias": 0.0})
    found = versus(tmp_path / "own", only("update", "bias", lambda array: 3 * array), a=a, b=b)
    assert found.verdict is Verdict.INCOMPARABLE
    words = "weight decay of 1 of 4 parameters (first 'bias') differs: 0.0 in a, 0.1 in b"
    assert found.reason.startswith(f"{words}; from the numbers alone")
    found = versus(tmp_path / "other", only("update", "embed", lambda array: 3 * array), a=a, b=b)
    assert found.verdict is Verdict.BUG and found.settings == (words,)


def test_groups_that_are_cut_otherwise_are_no_setting(tmp_path):
    b = _grouped({"bias": 0.0, "block.k_bias": 0.0, "embed": 0.1})
    assert not versus(tmp_path, a=_grouped({"block.k_bias": 0.0, "bias": 0.0}), b=b).settings


def test_a_setting_does_not_excuse_what_precedes_it(tmp_path):
    b = synthetic.manifest(learning_rate=0.2)
    found = versus(tmp_path / "rate", only("reduce", "block.w", lambda array: 3 * array), b=b)
    assert found.verdict is Verdict.BUG and found.first_divergence and found.first_divergence.phase == "reduce"
    found = versus(
        tmp_path / "seed", only("unsharded", "block.w", lambda array: 3 * array), b=synthetic.manifest(seed=5)
    )
    assert found.verdict is Verdict.BUG and found.first_divergence and found.first_divergence.phase == "unsharded"


@pytest.mark.parametrize("fields", [{"model": "other"}, {"steps": 2}])
def test_names_and_lengths_of_runs_may_differ(tmp_path, fields):
    found = versus(tmp_path / "right", b=synthetic.manifest(**fields))
    assert found.verdict is Verdict.EQUAL and len(found.settings) == 1
    found = versus(
        tmp_path / "wrong", only("reduce", "block.w", lambda array: 3 * array), b=synthetic.manifest(**fields)
    )
    assert found.verdict is Verdict.BUG


def _edit(directory, old, new):
    synthetic.edit_events(directory, old, new, rank=1)


def _with_other_batch(directory, tamper=None):
    """A run whose batch of rank 1 has another digest at step 1."""
    synthetic.record(directory, tamper=tamper)
    _edit(directory, synthetic.digest("[7, 9, 11]"), synthetic.digest("other"))
    return Recording.open(directory)


def test_other_batches_explain_differences_from_their_step_on(tmp_path):
    a = synthetic.record(tmp_path / "a")
    text = "the batch of rank 1 at step 1 differs between a and b"
    found = compare(a, _with_other_batch(tmp_path / "b", only("forward", "", lambda x: x + 1, step=1)))
    assert found.verdict is Verdict.INCOMPARABLE and found.reason.startswith(text)
    assert found.diagnosis and found.diagnosis.signature == "other_batches"
    assert found.first_divergence is None and "from the numbers alone: at step 1" in found.reason
    early = only("backward", "bias", lambda x: 2 * x, step=0)
    found = compare(a, _with_other_batch(tmp_path / "c", early))
    assert found.verdict is Verdict.BUG and found.first_divergence and found.first_divergence.step == 0
    initial = only("parameters", "bias", lambda x: 2 * x)
    assert compare(a, _with_other_batch(tmp_path / "d", initial)).verdict is not Verdict.EQUAL


def test_other_digests_do_not_make_equal_values_incomparable(tmp_path):
    found = compare(synthetic.record(tmp_path / "a"), _with_other_batch(tmp_path / "b"))
    assert found.verdict is Verdict.EQUAL
    assert found.settings == ("the batch of rank 1 at step 1 differs between a and b",)


def test_other_samples_at_another_world_size_are_incomparable(tmp_path):
    a = synthetic.record(tmp_path / "a")
    synthetic.record(tmp_path / "b", synthetic.manifest(3))
    _edit(tmp_path / "b", "[7, 10]", "[7, 12]")
    assert "at step 1 a and b have different samples" in compare(a, Recording.open(tmp_path / "b")).reason
    _edit(tmp_path / "b", "[1, 4]", "[1, 5]")
    assert (
        "at step 0 and 1 later step a and b have different samples" in compare(a, Recording.open(tmp_path / "b")).reason
    )
    _edit(tmp_path / "b", "[7, 12]", "[7]")
    found = compare(a, Recording.open(tmp_path / "b"))
    assert found.verdict is Verdict.INCOMPARABLE
    assert "at step 1 the ranks of b have [2, 1, 2] samples" in found.reason


def test_what_a_killed_run_left_can_be_compared(tmp_path):
    a = synthetic.record(tmp_path / "a")
    synthetic.write_run(tmp_path / "b", synthetic.manifest(), stop_before=2)
    found = compare(a, Recording.open(tmp_path / "b", partial=True))
    assert (found.verdict, found.steps) == (Verdict.EQUAL, 2)
    synthetic.write_run(tmp_path / "c", synthetic.manifest(), stop_before=0)
    found = compare(a, Recording.open(tmp_path / "c", partial=True))
    assert (found.verdict, found.reason) == (Verdict.INCOMPARABLE, "c has no complete step")


def test_steps_that_only_one_side_recorded_are_passed_over(tmp_path):
    sparse = synthetic.manifest(steps=5, schedule=Schedule(dense=0, every=3))
    dense = synthetic.manifest(steps=5, schedule=Schedule(dense=2, every=1))
    found = versus(tmp_path, only("update", "bias", lambda x: 2 * x, step=2), a=sparse, b=dense)
    assert found.verdict is Verdict.EQUAL
    assert [step for step, _ in found.parameter_differences] == [0, 3, 4]


@pytest.mark.parametrize(
    ("schedule", "phase", "step", "expected"),
    [
        (Schedule(1, 3), "reduce", 3, "it began at one of the steps 1 to 3: only losses were recorded before step 3; to "
         "locate it, record both again with windows=[(1, 4)] (--window 1:4)"),
        (Schedule(0, 1), "reduce", 2, "all recorded causes agree, but the inside of the step was not "
         "recorded; to locate it, record both again with windows=[(2, 3)] (--window 2:3)"),
        (Schedule(0, 1), "update", 2, "all of its causes agree"),
        (Schedule(3, 1), "reduce", 2, "all of its causes agree"),
    ],
)  # fmt: skip
def test_what_was_not_recorded_is_not_said_to_agree(tmp_path, schedule, phase, step, expected):
    made = synthetic.manifest(steps=5, schedule=schedule)
    found = versus(tmp_path, only(phase, "bias", lambda x: 2 * x, step=step), a=made, b=made)
    assert found.first_divergence is not None and found.first_divergence.step == step
    assert found.reason.partition("; ")[2] == expected


def test_steps_that_are_dense_already_need_no_window():
    texts = [Unrecorded(1, stop, again).describe() for stop in (2, 4) for again in (False, True)]
    inside, before = (
        "all recorded causes agree, but the inside of the step was not recorded",
        "it began at one of the steps 1 to 3: only losses were recorded before step 3",
    )
    assert texts == [
        inside,
        f"{inside}; to locate it, record both again with windows=[(1, 2)] (--window 1:2)",
        before,
        f"{before}; to locate it, record both again with windows=[(1, 4)] (--window 1:4)",
    ]


def test_another_count_of_optimizer_steps_is_a_bug(tmp_path):
    a = synthetic.record(tmp_path / "a")
    synthetic.record(tmp_path / "b")
    for rank in (0, 1):
        synthetic.edit_events(tmp_path / "b", '"counts": 2.0', '"counts": 3.0', rank=rank)
    found = compare(a, Recording.open(tmp_path / "b"))
    assert found.verdict is Verdict.BUG and found.first_divergence.step == 1
    assert found.reason.startswith("at step 1 the optimizer's count of steps of 'embed'"), found.reason
    assert "is 2 in a and 3 in b" in found.reason
    assert (found.first_divergence.event, found.first_divergence.parameter) == ("state", "embed")


def test_a_module_that_gave_another_dtype_ahead_of_a_divergence_is_told(tmp_path):
    """That alone is no bug: norms in float32 are common. But it is often the reason of one."""

    def narrowed(dtype):
        def change(phase, step, rank, name, array):
            return array.astype(np.float32).astype(dtype) if (phase, name) == ("output", "block") else array

        return change

    a = synthetic.record(tmp_path / "a", tamper=narrowed(np.float64))
    assert compare(a, synthetic.record(tmp_path / "b", tamper=narrowed(np.float32))).verdict is Verdict.ROUNDING
    doubled = only("reduce", "bias", lambda grad: 2 * grad)
    found = compare(a, synthetic.record(tmp_path / "c", tamper=synthetic.both(narrowed(np.float32), doubled)))
    assert found.reason.endswith("; before it, the output of block is float64 in a and float32 in c")


def test_a_verdict_as_json(tmp_path):
    found = versus(tmp_path, only("reduce", "bias", lambda grad: grad + np.array([0, 1, 0]))).to_json()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert set(found) == {
        "a", "b", "dtype", "world_size", "steps", "verdict", "max_relative_loss_difference",
        "max_relative_parameter_difference", "zero_gradient_parameters", "first_divergence", "diagnosis", "settings",
        "notes", "reason", "bits", "unrecorded", "power", "environment",
    }  # fmt: skip
    assert found["first_divergence"] == {
        "step": 0, "phase": "reduce", "rank": 1, "unit": "", "parameter": "bias", "start": 1, "stop": 2,
        "event": "reduce_scatter", "ranks": [1], "module": None, "buffer": None,
    }  # fmt: skip


@pytest.mark.parametrize(("growth", "expected"), [(30.0, Verdict.INCONCLUSIVE), (1e7, Verdict.BUG)])
def test_a_difference_that_grew_is_not_taken_for_one_that_jumped(tmp_path, growth, expected):
    # From 1e-13 at step 0 by a factor a step until it is outside: the smaller factor is what training does to rounding.
    def drift(phase, step, rank, name, array):
        return array * (1 + 1e-13 * growth**step) if phase == "update" else array

    found = versus(tmp_path, drift)
    assert found.first_divergence is not None and found.first_divergence.step > 0
    assert found.verdict is expected
    assert ("grew" in found.reason) == (expected is Verdict.INCONCLUSIVE)


def test_a_local_gradient_that_cancels_is_measured_by_what_rounding_leaves(tmp_path):
    # Of opposite signs, and far below u times the other gradients of the rank.
    a = synthetic.record(tmp_path / "a", tamper=only("backward", "block.w", lambda grad: grad * 1e-16))
    b = synthetic.record(tmp_path / "b", tamper=only("backward", "block.w", lambda grad: grad * -1e-16))
    assert compare(a, b).verdict is Verdict.ROUNDING


def test_a_setting_that_only_one_side_names_makes_no_other_run(tmp_path):
    named, other = {"optimizer": "AdamW", "weight_decay": 0.01}, {"optimizer": "AdamW"}
    for i, (a, b) in enumerate([(named, other), (other, named), (named, {}), ({}, named)]):
        found = versus(tmp_path / str(i), a=synthetic.manifest(settings=a), b=synthetic.manifest(settings=b))
        assert found.verdict is Verdict.EQUAL


def test_parameters_without_a_gradient_do_not_hide_the_others(tmp_path, monkeypatch):
    whole = RecordingWriter.reduced_grads

    def but_one(writer, step, unit, pieces):
        whole(writer, step, unit, {name: piece for name, piece in pieces.items() if name != "block.k_bias"})

    # The last parameter, the first one whose gradient is compared.
    assert list(synthetic.manifest().params)[-1] == "block.k_bias"
    monkeypatch.setattr(RecordingWriter, "reduced_grads", but_one)
    found = versus(tmp_path, only("reduce", "embed", lambda grad: 2 * grad))
    assert place(found)[:5] == (0, "reduce", "reduce_scatter", "", "embed")


def quantities(a, b, phase):
    """What is compared in this phase, one by one."""
    return [q for group in walk(Pair(a, b)) for q in group if q.phase == phase]


@pytest.mark.parametrize("terms", [(16, 4096), (4096, 16)])
def test_a_gradient_that_cancels_is_measured_by_the_longer_sum_and_by_the_others_of_its_rank(tmp_path, terms):
    tamper = only("backward", "embed", lambda grad: grad * 1e-20)
    a, b = (
        synthetic.record(tmp_path / name, synthetic.manifest(terms=each), tamper=tamper)
        for name, each in zip("ab", terms, strict=True)
    )
    scales = {q.rank: q.scale for q in quantities(a, b, "backward") if q.parameter == "embed"}
    for rank in range(2):
        grads = [a.local(0, rank, name).reshape(-1) for name in synthetic.SHAPES]
        typical = np.sqrt(np.mean(np.square(np.concatenate(grads))))
        assert scales[rank] == pytest.approx(bounds_for("float64").noise_scale(4096, typical, 12), rel=1e-12)


def test_how_far_training_went_is_taken_in_float64(tmp_path):
    # From 60,000 to -60,000 is farther than float16 reaches.
    ends = {"parameters": 60_000, "update": -60_000}

    def tamper(phase, step, rank, name, array):
        return np.full_like(array, ends[phase]) if name == "bias" and phase in ends else array

    a, b = (synthetic.record(tmp_path / name, synthetic.manifest(dtype="float16"), tamper=tamper) for name in "ab")
    scales = [q.scale for q in quantities(a, b, "update") if q.parameter == "bias"]
    assert scales == pytest.approx([120_000 * np.sqrt(3)] * 3)


@pytest.mark.parametrize("rate", [1e-3, 50.0])
def test_a_parameter_is_measured_by_the_first_recording(tmp_path, rate):
    manifests = {
        "a": synthetic.manifest(learning_rate=rate),
        "b": synthetic.manifest(framework="jax", learning_rate=rate),
    }
    found = versus(tmp_path, only("update", "block.w", lambda array: 3 * array, step=2), **manifests)
    a = Recording.open(tmp_path / "a")
    final, initial = a.full("update", 2, "block.w"), a.full("parameters", 0, "block.w")
    reach = (a.manifest.learning_rate or 0.0) * 3 * np.sqrt(15)
    scale = max(np.linalg.norm(final), np.linalg.norm(final - initial), reach)
    assert dict(found.parameter_differences)[2] == pytest.approx(2 * np.linalg.norm(final) / scale, rel=1e-12)
    assert dict(found.parameter_differences)[1] == 0.0


def test_recordings_are_called_by_what_tells_them_apart(tmp_path):
    a, b = synthetic.manifest(), synthetic.manifest(seed=5)
    for first, second, names in (
        (tmp_path / "x" / "run", tmp_path / "x" / "other", ("run", "other")),
        (tmp_path / "y" / "run", tmp_path / "z" / "run", (str(tmp_path / "y" / "run"), str(tmp_path / "z" / "run"))),
    ):
        found = compare(synthetic.record(first, a), synthetic.record(second, b))
        assert found.settings == (f"seed differs: 0 in {names[0]}, 5 in {names[1]}",)


@pytest.mark.parametrize(
    ("command", "again"),
    [
        (
            "python -m experiments train torch gpt --steps 9",
            r"`python -m experiments train torch gpt --steps 9 --output \S+ --overwrite --perturbed-runs 4`",
        ),
        (
            "crossframe record train.py --dense 2 -- --lr 1",
            r"`crossframe record train.py --dense 2 --output \S+ --top-up --perturbed-runs 4 -- --lr 1`",
        ),
        ("python train.py", r"`python train.py`, once each with CROSSFRAME_PERTURBED_RUN=1 to"),
        (None, r"record one of them again with perturbed runs \(--perturbed-runs 4\)"),
    ],
)
def test_without_perturbed_runs_the_command_that_settles_is_quoted(tmp_path, command, again):
    made = synthetic.manifest(dtype="bfloat16", settings={"command": command} if command else {})
    a, b = synthetic.record(tmp_path / "a", made), synthetic.record(tmp_path / "b", made, tamper=jitter(0.01))
    found = compare(a, b)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert re.search(again, found.reason), found.reason
