"""What is compared of two recordings, in which order, by what measure, and what is concluded."""

import json
from dataclasses import replace

import numpy as np
import pytest

from crossframe.errors import RecordingError
from crossframe.layout import PerParamLayout
from crossframe.recording import Recording, RecordingWriter, Schedule
from crossframe.recording.event_format import FORWARD, REDUCE, STATE, UPDATE
from crossframe.verdict import Verdict, bounds_for, compare
from crossframe.verdict.measure.causal_order import ALL, quantity_of, walk
from crossframe.verdict.measure.pair import Pair
from tests.core.helpers import faulty, synthetic
from tests.core.helpers.quantities import other_specs
from tests.core.helpers.synthetic import OTHER_LOSS, both, only

U = 2.0**-53


def pair(tmp_path, a=None, b=None, *, tamper_a=None, tamper=None):
    made = a or synthetic.manifest(), b or synthetic.manifest(framework="jax")
    return (
        synthetic.record(tmp_path / "a", made[0], tamper=tamper_a),
        synthetic.record(tmp_path / "b", made[1], tamper=tamper),
    )


def without(monkeypatch, method, name, directory, made=None, *, rank=None, tamper=None):
    """A recording in which one parameter was not handed to one method of the writer (on one rank)."""
    whole = getattr(RecordingWriter, method)
    turn = iter(range(10_000))

    def but_one(writer, step, unit, pieces):
        at = next(turn) // calls
        keep = {n: piece for n, piece in pieces.items() if n != name or rank not in (None, at)}
        whole(writer, step, unit, keep)

    calls = len(synthetic.UNITS) * (1 if method == "local_grads" else 3)  # a rank
    with monkeypatch.context() as patched:
        patched.setattr(RecordingWriter, method, but_one)
        return synthetic.record(directory, made, tamper=tamper)


def place(found):
    first = found.first_divergence
    assert first is not None
    return first.step, first.phase, first.parameter, first.rank


def quantities(a, b, phase, name):
    return [q for group in walk(Pair(a, b)) for q in group if (q.kind, q.parameter) == (phase, name)]


# What is walked.


def test_the_walk_is_in_causal_order(tmp_path):
    a, b = pair(tmp_path, *(synthetic.manifest(4, replicate=2, framework=f) for f in ("torch", "jax")))
    names = list(synthetic.SHAPES)
    groups = list(walk(Pair(a, b)))
    seen = [(q[0].step, q[0].phase, q[0].event, q[0].parameter) for q in groups]
    expected = [(0, "parameters", "all_gather", name) for name in names]
    for step in range(3):
        if step == 0:
            expected += [(0, "unsharded", "all_gather", name) for name in names for _ in "ab"]
            expected += [(0, "forward", event, "") for event in ("input", "output", "output")]
        expected.append((step, "forward", "loss", ""))
        if step == 0:
            expected += [(0, "backward", "backward", name) for name in names[::-1]]
        expected += [(step, "reduce", "reduce_scatter", name) for name in names[::-1]]
        expected.append((step, "norm", "grad_norm", ""))
        expected += [(step, "state", "state", name) for name in names for _ in ("step", "exp_avg")]
        expected += [(step, "update", "optimizer", name) for name in names]
    assert seen == expected
    assert [(q[0].use, q[0].module, q[0].unit) for q in groups if q[0].kind == "activation"] == [
        ("input", "block", ""), ("output", "block", "block"), ("output", "", "")
    ]  # fmt: skip
    for group in groups:
        alone = group[0].phase in ("unsharded", "forward", "backward", "norm")
        if group[0].use == "step":
            assert [q.rank for q in group] == [None]
            continue
        assert [q.rank for q in group] == (list(range(4)) if alone else [None] * 2)
        assert [q.replica for q in group] == ([0] * 4 if alone else [0, 1])
        if group[0].kind != "activation":
            assert {q.unit for q in group} == {"block" if group[0].parameter.startswith("block") else ""}


def test_the_last_replica_of_the_side_that_has_fewer_stands_for_the_rest(tmp_path):
    tamper = only("update", "embed", lambda value: value + 1, rank=5)
    a, b = synthetic.manifest(6, replicate=3), synthetic.manifest()
    found = compare(*pair(tmp_path, a, b, tamper_a=tamper))
    assert found.verdict is Verdict.BUG
    assert place(found) == (0, "update", "embed", 1)
    assert [q.replica for q in quantities(*pair(tmp_path / "more", a, b), "update", "embed")[:3]] == [0, 0, 0]


def test_a_step_that_one_side_did_not_record_densely_has_no_local_gradients(tmp_path):
    sparse = synthetic.manifest(schedule=Schedule(dense=0, every=1))
    for i, made in enumerate(((sparse, None), (None, sparse))):
        runs = pair(tmp_path / str(i), *made)
        assert {q.phase for group in walk(Pair(*runs)) for q in group} == {
            "parameters", "unsharded", "forward", "reduce", "norm", "state", "update"
        }  # fmt: skip
        assert compare(*runs).verdict is Verdict.EQUAL


@pytest.mark.parametrize("first", [True, False])
def test_R29_a_gradient_that_one_side_has_not_is_zero_there(tmp_path, monkeypatch, first):
    full = synthetic.record(tmp_path / "full")
    lacking = without(monkeypatch, "reduced_grads", "bias", tmp_path / "lacking")
    a, b = (lacking, full) if first else (full, lacking)
    found = compare(a, b)
    assert found.verdict is Verdict.BUG
    assert place(found)[:3] == (0, "reduce", "bias")
    for q in quantities(a, b, "reduce", "bias"):
        zeros, grad = (q.a, q.b) if first else (q.b, q.a)
        assert not zeros.any() and zeros.shape == grad.shape == (3,)
        assert grad.any()


def test_R29_a_gradient_that_one_rank_has_not_is_zero_on_it(tmp_path, monkeypatch):
    full = synthetic.record(tmp_path / "full")
    lacking = without(monkeypatch, "local_grads", "bias", tmp_path / "lacking", rank=1)
    assert place(compare(full, lacking)) == (0, "backward", "bias", 1)
    assert place(compare(lacking, full)) == (0, "backward", "bias", 1)
    # What rank 1 typically has is taken over the others.
    scales = [q.scale for q in quantities(lacking, full, "backward", "bias")]
    grads = [lacking.local(0, 1, n).reshape(-1) for n in synthetic.SHAPES if n != "bias"]
    typical = np.sqrt(np.mean(np.concatenate(grads) ** 2))
    assert scales[1] == pytest.approx(bounds_for("float64").noise_scale(16, typical, 3), rel=1e-12)


def test_a_parameter_without_an_update_does_not_hide_the_ones_after_it(tmp_path, monkeypatch):
    assert next(iter(synthetic.SHAPES)) == "embed"
    a, b = (
        without(monkeypatch, "updated", "embed", tmp_path / name, tamper=tamper)
        for name, tamper in (("a", None), ("b", only("update", "bias", lambda value: 2 * value)))
    )
    assert place(compare(a, b))[:3] == (0, "update", "bias")
    assert not quantities(a, b, "update", "embed")


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_parameter_is_gathered_as_it_began(tmp_path, monkeypatch, frozen):
    """It has no update, so the values before a step are the initial ones. Of others they are not known."""
    units = tuple(
        (
            unit,
            PerParamLayout(
                tuple(replace(p, requires_grad=not (frozen and p.name == "bias")) for p in layout.params), 2
            ),
        )
        for unit, layout in synthetic.manifest(kind="per_param").units
    )
    made = synthetic.manifest(units=units, schedule=Schedule(dense=3, every=1))

    def gathered(phase, step, rank, name, array):
        if name == "bias" and phase in ("update", "unsharded"):
            array = synthetic.initial("bias", "float64")
        return array + (wrong and (phase, step, rank, name) == ("unsharded", 1, 1, "bias"))

    runs = []
    for wrong in (False, True):
        runs.append(without(monkeypatch, "updated", "bias", tmp_path / f"{wrong}", made, tamper=gathered))
    found = compare(*runs)
    if frozen:
        assert found.verdict is Verdict.BUG and place(found) == (1, "unsharded", "bias", 1)
        assert "is not bitwise equal to the shards of True before the step" in found.reason
    else:
        assert found.verdict is Verdict.EQUAL


def test_an_update_that_one_side_has_not_is_an_error(tmp_path, monkeypatch):
    full = synthetic.record(tmp_path / "full")
    lacking = without(monkeypatch, "updated", "embed", tmp_path / "lacking")
    for a, b in ((full, lacking), (lacking, full)):
        with pytest.raises(RecordingError, match="embed"):
            compare(a, b)


def test_phases_are_walked_as_asked(tmp_path):
    def buffers(step, rank):
        return {"mean": np.full(2, float(step))}

    every = synthetic.record(tmp_path / "a", synthetic.manifest(schedule=Schedule(dense=3, every=1)), buffers=buffers)
    for phase in ALL:
        assert {group[0].phase for group in walk(Pair(every, every), (phase,), [0])} == {phase}
    second = synthetic.record(tmp_path / "b", synthetic.manifest(schedule=Schedule(dense=1, every=2)))
    for pair in (Pair(every, second), Pair(second, every)):
        assert {group[0].phase for group in walk(pair, steps=[1])} == {"parameters", "forward", "norm"}


def test_one_quantity_is_that_of_the_walk(tmp_path):
    both = Pair(*pair(tmp_path))
    walked = {(q.phase, q.name): q for group in walk(both, steps=[1]) for q in group}
    for phase, use, name in ((REDUCE, "", "bias"), (STATE, "exp_avg", "exp_avg of bias"), (UPDATE, "", "bias")):
        found, expected = quantity_of(both, phase, 1, "bias", use), walked[phase, name]
        assert found is not None and (found.phase, found.name, found.scale) == (phase, name, expected.scale)
        assert np.array_equal(found.a, expected.a)
    assert quantity_of(both, STATE, 1, "bias", "none") is quantity_of(both, UPDATE, 1, "none", "") is None


# By what it is measured.


def test_a_loss_is_measured_by_the_size_of_the_first_one_of_its_rank(tmp_path):
    def losses(factor):
        def tamper(phase, step, rank, name, array):
            return np.array([-2.0 * 8**rank * (factor if rank == 1 else 1)]) if phase == "forward" else array

        return tamper

    a, b = pair(tmp_path, tamper_a=losses(1.0), tamper=losses(3.0))
    assert [q.scale for q in quantities(a, b, "forward", "")] == [2.0, 16.0] * 3
    assert compare(a, b).loss_differences == (2.0,) * 3


@pytest.mark.parametrize("first", [True, False])
def test_of_a_loop_that_knows_the_mean_loss_alone_that_is_compared(tmp_path, first):
    apart = synthetic.record(tmp_path / "a")
    means = apart.losses().mean(axis=1)
    made = synthetic.manifest(framework="jax", settings={"losses": "mean"})
    alike = synthetic.record(
        tmp_path / "b",
        made,
        tamper=lambda phase, step, _rank, _name, x: x * 0 + means[step] if phase == "forward" else x,
    )
    pair = (apart, alike) if first else (alike, apart)
    assert compare(*pair).verdict is Verdict.EQUAL
    off = synthetic.record(
        tmp_path / "c",
        made,
        tamper=lambda phase, step, _rank, _name, x: x * 0 + 2 * means[step] if phase == "forward" else x,
    )
    found = compare(apart, off) if first else compare(off, apart)
    assert found.verdict is Verdict.BUG and place(found) == (0, "forward", None, None)


def test_losses_of_two_world_sizes_are_measured_by_their_mean(tmp_path):
    def at(phase, step, rank, name, array):
        return np.array([rank - 4.0]) if phase == "forward" else array

    a, b = pair(tmp_path, None, synthetic.manifest(3), tamper_a=at, tamper=at)
    made = [(q.a.item(), q.b.item(), q.scale) for q in quantities(a, b, "forward", "")]
    assert made == [(-3.5, -3.0, 3.5)] * 3


@pytest.mark.parametrize("phase", ["backward", "reduce"])
def test_a_gradient_is_measured_by_the_first_recording(tmp_path, phase):
    def scaled(factor):
        def tamper(at, step, rank, name, array):
            return array * factor[name] if at == phase and name in factor else array

        return tamper

    a, b = pair(tmp_path, tamper_a=scaled({"embed": 1e-20}), tamper=scaled({"embed": 1e-20, "block.w": 1e3, "bias": 3}))
    for q in quantities(a, b, phase, "bias"):
        assert q.scale == pytest.approx(np.linalg.norm(q.a), rel=1e-12)
    for q in quantities(a, b, phase, "embed"):
        every = [
            a.local(0, q.rank or 0, n) if phase == "backward" else a.full("reduce", q.step, n) for n in synthetic.SHAPES
        ]
        typical = np.sqrt(np.mean(np.concatenate([grad.reshape(-1) for grad in every]) ** 2))
        assert q.scale == pytest.approx(bounds_for("float64").noise_scale(16, typical, 12), rel=1e-12)


def test_a_parameter_is_measured_by_how_far_it_is_trained_in_the_end(tmp_path):
    # -100 at first, then 1, 2, 107: from first to last 207 an element, more than any of them.
    values = {("parameters", 0): -100.0, ("update", 0): 1.0, ("update", 1): 2.0, ("update", 2): 107.0}

    def tamper(phase, step, rank, name, array):
        return np.full_like(array, values[phase, step]) if name == "bias" and (phase, step) in values else array

    a, b = pair(tmp_path, tamper_a=tamper, tamper=tamper)
    assert [q.scale for q in quantities(a, b, "update", "bias")] == pytest.approx([207 * np.sqrt(3)] * 3)
    assert quantities(a, b, "update", "embed")[0].scale < 100


@pytest.mark.parametrize("phase", ["backward", "reduce", "update"])
def test_what_is_not_finite_on_both_sides_does_not_widen_a_scale(tmp_path, phase):
    def spoil(at, step, rank, name, array):
        if (at, name) == (phase, "bias"):
            array[:] = np.inf, 30.0, 40.0
        return array

    a, b = pair(tmp_path, tamper_a=spoil, tamper=spoil)
    for q in quantities(a, b, phase, "bias"):
        assert q.scale == pytest.approx(50.0, abs=5)  # what it is, or was trained by
    for q in quantities(a, b, phase, "embed"):
        assert np.isfinite(q.scale)


def test_initial_values_of_a_parameter_without_a_gradient_are_still_equal_bit_for_bit(tmp_path):
    found = compare(*pair(tmp_path, tamper=only("parameters", "block.k_bias", lambda value: value * (1 + 4 * U))))
    assert found.zero_gradient_parameters == ("block.k_bias",)
    assert found.verdict is Verdict.BUG
    assert place(found)[:3] == (0, "parameters", "block.k_bias")


# What is concluded.


def test_the_worst_of_a_group_is_named(tmp_path):
    def tamper(phase, step, rank, name, array):
        return array * (1 + (1, 3, 2)[rank]) if (phase, step) == ("forward", 0) else array

    made = (synthetic.manifest(3, framework=f) for f in ("torch", "jax"))
    found = compare(*pair(tmp_path, *made, tamper=tamper))
    assert place(found) == (0, "forward", None, 1)
    assert found.loss_differences == (3.0, 0.0, 0.0)
    assert found.max_relative_loss_difference == 3.0


def test_a_sign_of_zero_that_one_replica_lost_is_a_bug(tmp_path):
    def zeros(phase, step, rank, name, array):
        return np.zeros_like(array) if (phase, name) == ("parameters", "bias") else array

    def lost(phase, step, rank, name, array):
        return -zeros(phase, step, rank, name, array) if (phase, name, rank // 2) == ("parameters", "bias", 1) else zeros(
            phase, step, rank, name, array
        )  # fmt: skip

    made = (synthetic.manifest(4, replicate=2, framework=f) for f in ("torch", "jax"))
    found = compare(*pair(tmp_path, *made, tamper_a=zeros, tamper=lost))
    assert found.verdict is Verdict.BUG
    assert place(found) == (0, "parameters", "bias", 3)


@pytest.mark.parametrize(("phase", "name"), [("forward", ""), ("backward", "bias"), ("reduce", "embed")])
def test_one_difference_anywhere_is_not_equal(tmp_path, phase, name):
    found = compare(*pair(tmp_path, tamper=only(phase, name, lambda array: array * (1 + 8 * U), rank=0)))
    assert found.verdict is Verdict.ROUNDING
    assert found.max_relative_parameter_difference == 0.0
    assert (found.max_relative_loss_difference != 0.0) == (phase == "forward")
    assert found.reason.endswith("parameters by 0.0e+00; the bounds are 1.0e-12 and 1.0e-11")


def test_the_largest_difference_of_a_step_is_kept(tmp_path):
    # embed comes first, and its difference is the only one.
    found = compare(*pair(tmp_path, tamper=only("update", "embed", lambda value: value * (1 + 2.0**-40), step=1)))
    assert found.verdict is Verdict.ROUNDING
    assert [step for step, _ in found.parameter_differences] == [0, 1, 2]
    differences = dict(found.parameter_differences)
    assert differences[0] == differences[2] == 0.0
    assert 1e-13 < differences[1] <= 2.0**-40
    assert differences[1] == found.max_relative_parameter_difference
    assert f"losses differ by at most 0.0e+00, parameters by {differences[1]:.1e};" in found.reason


def test_equal_in_words_and_json(tmp_path):
    found = compare(*pair(tmp_path, tamper=only("reduce", "block.k_bias", lambda grad: grad)))
    assert found.reason == "all compared values are bitwise equal"
    made = found.to_json()
    assert made == json.loads(json.dumps(made))
    assert made["first_divergence"] is None
    assert made["zero_gradient_parameters"] == ["block.k_bias"]
    assert (made["world_size"], made["max_relative_loss_difference"]) == (2, 0.0)
    other = compare(*pair(tmp_path / "other", None, synthetic.manifest(3, framework="jax"))).to_json()
    assert other["world_size"] == [2, 3]


def losses_of(values):
    """The losses of every rank, a step."""

    def tamper(phase, step, rank, name, array):
        return np.array([values[step]]) if phase == "forward" else array

    return tamper


@pytest.mark.parametrize(("times", "expected"), [(5000, Verdict.INCONCLUSIVE), (5001, Verdict.BUG)])
def test_a_jump_is_more_than_a_thousand_times(tmp_path, times, expected):
    # 5 units at first, which 5000 exceed by just a thousand times. What comes after counts for nothing.
    u, bound = 2.0**-52, bounds_for("float64").loss
    assert 5000 * u / bound == 1000 * (5 * u / bound)
    values = [1 + 5 * u, 1 + times * u, 2.0]
    found = compare(*pair(tmp_path, tamper_a=losses_of([1.0] * 3), tamper=losses_of(values)))
    assert place(found) == (1, "forward", None, 0)
    assert found.verdict is expected


def test_a_jump_is_over_the_largest_that_came_before(tmp_path):
    # 5 units, then 1, then 4600: less than a thousand times the largest, more than a thousand times the last.
    u = 2.0**-52
    tamper = losses_of([1 + 5 * u, 1 + u, 1 + 4600 * u])
    found = compare(*pair(tmp_path, tamper_a=losses_of([1.0] * 3), tamper=tamper))
    assert place(found)[0] == 2
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.reason.endswith(
        "but differences grew by less than 1000 times from one step to the next, as amplified rounding does: compare fewer "
        "steps, or lower the learning rate"
    )


def test_before_the_first_update_nothing_can_have_grown(tmp_path):
    def tamper(phase, step, rank, name, array):
        array = losses_of([1 + 1e-13, 1.0, 1.0])(phase, step, rank, name, array)
        return only("reduce", "embed", lambda grad: grad * (1 + 1e-10))(phase, step, rank, name, array)

    found = compare(*pair(tmp_path, tamper_a=losses_of([1.0] * 3), tamper=tamper))
    assert (found.verdict, place(found)[:3]) == (Verdict.BUG, (0, "reduce", "embed"))


def test_the_first_that_is_not_finite_on_both_sides_is_named(tmp_path):
    def spoil(phase, step, rank, name, array):
        return array * np.nan if rank == 1 and (phase, step) in (("forward", 1), ("forward", 2)) else array

    found = compare(*pair(tmp_path, tamper_a=spoil, tamper=spoil))
    assert found.reason == (
        "all compared values are bitwise equal; from step 1 on (forward '') both sides contain NaN or infinity"
    )


def test_a_zero_gradient_parameter_that_is_not_finite_on_one_side_counts(tmp_path):
    found = compare(*pair(tmp_path, tamper=only("update", "block.k_bias", lambda x: x * np.nan, step=1)))
    assert found.max_relative_parameter_difference == np.inf
    assert found.to_json()["max_relative_parameter_difference"] is None
    assert dict(found.parameter_differences)[2] == 0.0


# Whether they are of the same run.


def test_a_parameter_that_only_the_second_has(tmp_path, monkeypatch):
    b = synthetic.record(tmp_path / "b")
    fewer = synthetic.manifest(units=synthetic.manifest().units[:1])
    monkeypatch.setattr(synthetic, "SHAPES", {name: spec.shape for name, spec in fewer.params.items()})
    a = synthetic.record(tmp_path / "a", fewer)
    for first, second in ((a, b), (b, a)):
        found = compare(first, second)
        reason = "parameter 'block.w' is only in b; parameter 'block.k_bias' is only in b; train the same"
        assert found.verdict is Verdict.INCOMPARABLE and found.reason.startswith(reason)


def test_a_parameter_that_one_side_freezes_explains_a_difference(tmp_path):
    """If nothing differs, it had no gradient while it was not frozen."""
    frozen = other_specs("block", requires_grad=False)
    found = compare(*pair(tmp_path / "equal", synthetic.manifest(kind="per_param"), frozen))
    stated = "requires_grad of 2 of 4 parameters (first 'block.w') differs: True in a, False in b"
    assert found.verdict is Verdict.EQUAL and found.settings == (stated,)
    a = synthetic.record(tmp_path / "a", synthetic.manifest(kind="per_param"))
    b = synthetic.record(tmp_path / "b", frozen, tamper=only("update", "block.w", lambda array: array + 0.5))
    found = compare(a, b)
    assert found.verdict is Verdict.INCOMPARABLE and found.reason.startswith(
        f"{stated}; from the numbers alone: at step 0"
    )


def test_a_parameter_without_elements_is_not_compared(tmp_path, monkeypatch):
    made = synthetic.manifest(units=other_specs("block").units)
    units = tuple(
        (name, PerParamLayout(tuple(replace(p, shape=(0,)) if p.name == "bias" else p for p in layout.params), 2))
        for name, layout in made.units
    )
    monkeypatch.setitem(synthetic.SHAPES, "bias", (0,))
    runs = pair(tmp_path, *(replace(made, units=units, framework=framework) for framework in ("torch", "jax")))
    assert compare(*runs).verdict is Verdict.EQUAL
    assert not any(q.parameter == "bias" for group in walk(Pair(*runs)) for q in group)


@pytest.mark.parametrize("swapped", [False, True])
def test_of_what_was_killed_the_side_without_a_step_is_named(tmp_path, swapped):
    whole = synthetic.record(tmp_path / "whole")
    for stop, reason in ((0, "killed has no complete step"), (1, "all compared values are bitwise equal")):
        directory = tmp_path / str(stop) / "killed"
        synthetic.write_run(directory, synthetic.manifest(), stop_before=stop)
        killed = Recording.open(directory, partial=True)
        found = compare(killed, whole) if swapped else compare(whole, killed)
        assert (found.steps, found.reason) == (stop, reason)


def test_ranks_of_the_first_that_were_fed_unevenly(tmp_path):
    # Six samples over four ranks: 2, 2, 1, 1.
    runs = pair(tmp_path, synthetic.manifest(4), synthetic.manifest(3, framework="jax"))
    reason = compare(*runs).reason
    assert reason.startswith(
        "at step 0 and 2 later steps the ranks of torch have [2, 2, 1, 1] samples: a mean over ranks is"
    )
    assert compare(*runs[::-1]).reason == reason
    # At one world size it matters only that both were fed the same.
    assert compare(*pair(tmp_path / "same", *(synthetic.manifest(4) for _ in "ab"))).verdict is Verdict.EQUAL


def test_recordings_without_updates_differ_by_nothing_there(tmp_path, monkeypatch):
    monkeypatch.setattr(RecordingWriter, "updated", lambda *args: None)
    found = compare(*pair(tmp_path, tamper=only("forward", "", lambda loss: loss * (1 + 8 * U))))
    assert (found.verdict, found.max_relative_parameter_difference) == (Verdict.ROUNDING, 0.0)
    assert "parameters by 0.0e+00;" in found.reason


def _edits(factor):
    """A loop that changes parameters between steps 0 and 1."""
    return lambda phase, step, rank, name, array: array * factor if (phase, step) == ("unsharded", 1) else array


def test_an_edit_between_steps_in_both_runs_agrees(tmp_path):
    dense = synthetic.manifest(schedule=Schedule(dense=3, every=1))
    edited = synthetic.record(tmp_path / "a", dense, tamper=_edits(1.25))
    assert compare(edited, edited).verdict is Verdict.EQUAL
    other_ranks = synthetic.record(
        tmp_path / "b", synthetic.manifest(3, schedule=Schedule(dense=3, every=1)), tamper=_edits(1.25)
    )
    assert compare(edited, other_ranks).verdict in (Verdict.EQUAL, Verdict.ROUNDING)


def test_edits_that_differ_between_runs_are_found(tmp_path):
    dense = synthetic.manifest(schedule=Schedule(dense=3, every=1))
    runs = {
        factor: synthetic.record(tmp_path / str(factor), dense, tamper=_edits(factor)) for factor in (1.0, 1.25, 1.5)
    }
    for first, second in ((1.25, 1.5), (1.5, 1.25), (1.0, 1.25), (1.25, 1.0)):
        found = compare(runs[first], runs[second])
        where = found.first_divergence
        assert where is not None
        assert found.verdict is Verdict.BUG and (where.step, where.phase) == (1, "unsharded"), (first, second)
    assert "or its loop changed parameters between steps" in found.reason


def test_an_edit_that_rounding_leaves_out_of_one_run_is_rounding(tmp_path):
    """As where a loop scales down only what exceeds a largest norm."""
    dense = synthetic.manifest(schedule=Schedule(dense=3, every=1))

    def loop(*edited):
        return lambda phase, step, rank, name, array: (
            array * (1 + 16 * U) if phase == "unsharded" and (step, name) in edited else array
        )

    both = synthetic.record(tmp_path / "a", dense, tamper=loop((1, "block.w"), (2, "block.w")))
    once = synthetic.record(tmp_path / "b", dense, tamper=loop((2, "block.w")))
    never = synthetic.record(tmp_path / "c", dense)
    assert [compare(*runs).verdict for runs in ((both, once), (once, both))] == [Verdict.ROUNDING] * 2
    assert compare(once, never).verdict is Verdict.BUG


def _turned(size, ranks=(0, 1)):
    """The unsharded values of step 1, whose largest element is changed by this on some ranks."""

    def change(phase, step, rank, name, array):
        if (phase, step) != ("unsharded", 1) or rank not in ranks:
            return array
        largest = array == array.flat[np.abs(array.astype(float)).argmax()]
        return np.where(largest, array.astype(float) * (1 + size), array).astype(array.dtype)

    return change


def test_a_few_roundings_on_one_rank_are_a_bug(tmp_path):
    made = synthetic.manifest(schedule=Schedule(dense=3, every=1))
    found = compare(*pair(tmp_path, made, made, tamper=_turned(3 * U, ranks=(1,))))
    assert found.verdict is Verdict.BUG, found.reason


@pytest.mark.parametrize("size", [3 * U, 1e-3], ids=["rounding", "more"])
def test_an_edit_where_the_other_run_is_not_dense_is_rounding(tmp_path, size):
    first, second = (synthetic.manifest(schedule=Schedule(dense=dense, every=1)) for dense in (1, 3))
    found = compare(*pair(tmp_path, first, second, tamper=_turned(size)))
    assert (found.verdict is Verdict.BUG) is (size > U * 10), found.reason
    if found.verdict is Verdict.BUG:
        assert "is not bitwise equal to the shards of b before the step" in found.reason


def test_shards_of_an_earlier_step_are_a_bug_at_any_rate(tmp_path):
    """At a tiny rate they differ by a rounding."""

    def run(name, behind):
        first = {}

        def change(phase, step, rank, what, array):
            if phase == "parameters" or (phase, step) == ("unsharded", 0):
                first[phase, rank, what] = array
            if phase == "update":
                return moved(first["parameters", rank, what], step + 1)
            if phase == "unsharded" and step:
                return moved(first["unsharded", rank, what], step - behind)
            return array

        return synthetic.record(tmp_path / name, made, tamper=change)

    def moved(array, steps):
        return (array * (1 + 2.0**-23 * steps)).astype(array.dtype)

    made = synthetic.manifest(dtype="float32", schedule=Schedule(dense=3, every=1))
    a, b = run("a", 0), run("b", 1)
    assert compare(a, a).verdict is Verdict.EQUAL
    found = compare(a, b)
    assert found.verdict is Verdict.BUG and found.first_divergence is not None, found.reason
    assert (found.first_divergence.step, found.first_divergence.phase) == (1, "unsharded")


@pytest.mark.parametrize(
    ("dtype", "size", "verdict"),
    [
        pytest.param("float64", 3 * U, Verdict.ROUNDING, id="float64"),
        pytest.param("float32", 3 * 2.0**-24, Verdict.ROUNDING, id="float32"),
        pytest.param("float32", 6 * 2.0**-24, Verdict.BUG, id="more"),
        pytest.param("bfloat16", 2.0**-8, Verdict.BUG, id="bfloat16"),
    ],
)
def test_an_edit_of_a_few_roundings_is_rounding(tmp_path, dtype, size, verdict):
    """As by an evaluation that turns parameters into averaged ones and back."""
    made = synthetic.manifest(dtype=dtype, schedule=Schedule(dense=3, every=1))
    a, b = synthetic.record(tmp_path / "a", made), synthetic.record(tmp_path / "b", made, tamper=_turned(size))
    for pair in ((a, b), (b, a)):
        found = compare(*pair)
        assert found.verdict is verdict, found.reason


def test_only_the_first_steps_are_compared(tmp_path):
    a, b = pair(tmp_path, tamper=only("reduce", "block.w", lambda array: 3 * array, step=2))
    assert compare(a, b).verdict is Verdict.BUG
    found = compare(a.first(2), b.first(2))
    assert (found.verdict, found.steps, len(found.loss_differences)) == (Verdict.EQUAL, 2, 2)
    assert a.first(3) is a and a.first(50) is a
    for steps in (0, -1, True, 1.0):
        with pytest.raises(RecordingError, match="steps: expected an int of at least 1"):
            a.first(steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slot", "change", "is_square"),
    [
        pytest.param("exp_avg_sq", np.abs, True, id="Adam"),
        pytest.param("square_avg", np.abs, True, id="RMSprop"),
        pytest.param("variance", np.abs, True, id="Adafactor"),
        pytest.param("0.nu", np.abs, True, id="an unknown name"),
        pytest.param("0.sum_of_squares", lambda square: 1e-3 + square, True, id="from an initial value on"),
        pytest.param("exp_inf", np.sqrt, False, id="magnitudes"),
        pytest.param("trace", np.negative, False, id="no squares"),
    ],
)
def test_squares_have_twice_the_bound_of_gradients(tmp_path, monkeypatch, slot, change, is_square):
    write = RecordingWriter.state

    def state(writer, step, unit, name, pieces):
        if name == "exp_avg_sq":
            name, pieces = slot, {n: (start, stop, change(values)) for n, (start, stop, values) in pieces.items()}
        write(writer, step, unit, name, pieces)

    monkeypatch.setattr(RecordingWriter, "state", state)
    runs = faulty.record(tmp_path / "a"), faulty.record(tmp_path / "b", noise=1)
    found = [q for group in walk(Pair(*runs), (STATE,)) for q in group]
    found = [q for q in found if (q.use, q.parameter) == (slot, "block.query.weight")]
    assert [q.scale == pytest.approx(2 * q.norms[0]) for q in found] == [is_square] * 3


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_number_of_any_shape_is_compared(tmp_path, shape):
    def number(of, factor=1.0):
        return only("output", "", lambda array: (factor * array.mean()).reshape(of).astype(array.dtype))

    a, b = pair(tmp_path, tamper_a=number(()), tamper=number(shape))
    assert compare(a, b).verdict is Verdict.EQUAL
    other = synthetic.record(
        tmp_path / "c", synthetic.manifest(framework="jax"), tamper=both(number(shape, 1.5), OTHER_LOSS)
    )
    found = compare(a, other)
    assert found.verdict is Verdict.BUG and found.first_divergence.event == "output"


def relu(array):
    return np.maximum(array, 0)


@pytest.mark.parametrize(
    ("framework", "change", "is_bug"),
    [
        pytest.param("jax", relu, False, id="an activation"),
        pytest.param("torch", relu, True, id="an activation in the same implementation"),
        pytest.param("jax", lambda array: 1.01 * relu(array), True, id="another scale"),
        pytest.param("jax", lambda array: 1.01 * array, True, id="a scale alone"),
    ],
)
def test_outputs_before_and_after_an_activation_are_two_things(tmp_path, framework, change, is_bug):
    a = synthetic.record(tmp_path / "a")
    b = synthetic.record(
        tmp_path / "b",
        synthetic.manifest(framework=framework),
        tamper=both(only("output", "block", change), *[OTHER_LOSS] * is_bug),
    )
    for runs in ((a, b), (b, a)):
        found = compare(*runs)
        if is_bug:
            assert found.verdict is Verdict.BUG and found.first_divergence.module == "block"
        else:
            assert (
                found.verdict is Verdict.EQUAL
                and "those of torch are before ReLU, and those of jax after it" in str(found.notes)
            )


def test_an_activation_is_missing_if_what_follows_differs(tmp_path):
    a = synthetic.record(tmp_path / "a", tamper=only("output", "block", relu))
    without = synthetic.record(
        tmp_path / "b",
        synthetic.manifest(framework="jax"),
        tamper=both(only("output", "", lambda array: 1.01 * array), OTHER_LOSS),
    )
    found = compare(a, without)
    assert found.verdict is Verdict.BUG and found.first_divergence.module == "block", found.reason


def test_an_activation_is_missing_in_each_microbatch_whose_loss_differs(tmp_path, monkeypatch):
    """What follows in the next microbatch does not depend on it."""
    write, kept = RecordingWriter.activation, []

    def twice(writer, step, microbatch, module, use, value):
        write(writer, step, 0, module, use, value)
        kept.append((module, use, value))
        if not module:  # the last one
            for each in kept:
                write(writer, step, 1, *each)
            kept.clear()

    monkeypatch.setattr(RecordingWriter, "activation", twice)
    a = synthetic.record(tmp_path / "a")
    changes = synthetic.both(only("output", "", relu), only("forward", "", lambda loss: 1.01 * loss))
    b = synthetic.record(tmp_path / "b", synthetic.manifest(framework="jax"), tamper=changes)
    groups = walk(Pair(a, b), (FORWARD,), range(1))
    assert [group[0].microbatch for group in groups if (group[0].module, group[0].use) == ("", "output")] == [0, 1]


TURNS = {"block.w": 1, "block.k_bias": 1, "embed": 2}
"""The forwards before the optimizer of a parameter steps; "bias" is in none."""
BACKWARDS = [(1, -3.0), (2, 5.0)]


def in_turns(monkeypatch, folder, turns=None, backwards=BACKWARDS, **fields):
    """A run of two forwards in each step, after each of which another optimizer steps."""
    write, loss, kept = RecordingWriter.activation, RecordingWriter.loss, []

    def twice(writer, step, microbatch, module, use, value):
        kept.append((module, use, value))
        if not module:  # the last one
            for microbatch in (0, 1):
                for each in kept:
                    write(writer, step, microbatch, *each)
            kept.clear()

    def with_backwards(writer, step, value):
        loss(writer, step, value, [(forwards, each * (writer.rank + 1)) for forwards, each in backwards])
        writer.turns(TURNS if turns is None else turns)

    with monkeypatch.context() as patched:
        patched.setattr(RecordingWriter, "activation", twice)
        patched.setattr(RecordingWriter, "loss", with_backwards)
        return synthetic.record(folder, synthetic.manifest(**fields))


def order(a, b, step):
    """The groups of a step, as (name, microbatch)."""
    groups = (group[0] for group in walk(Pair(a, b), steps=[step]) if group[0].phase != "parameters")
    return [(f"{q.phase} {q.name}".rstrip(), q.microbatch) for q in groups]


def test_turns_of_optimizers_are_walked_one_by_one(tmp_path, monkeypatch):
    a, b = (in_turns(monkeypatch, tmp_path / name, schedule=Schedule(dense=1, every=2)) for name in "ab")

    def of(*names):
        expected = [(f"{phase} {name}", 0) for phase in ("backward", "reduce") for name in names[::-1]]
        expected += [(f"state {use} of {name}", 0) for name in names for use in ("step", "exp_avg")]
        return expected + [(f"update {name}", 0) for name in names]

    modules = ("input of block", "output of block", "output of the model")
    expected = [(f"unsharded {name}", 0) for name in synthetic.SHAPES for _ in "ab"]
    for i, names in enumerate((("block.w", "block.k_bias"), ("embed",))):
        expected += [*((f"forward {name}", i) for name in modules), ("forward", i + 1), *of(*names)]
    last = of("bias")
    assert order(a, b, 0) == [*expected, ("forward", 0), *last[:2], ("norm", 0), *last[2:]]
    assert order(a, b, 1) == [("forward", 1), ("forward", 2), ("forward", 0), ("norm", 0)]


def test_losses_of_turns_have_the_scale_of_all(tmp_path, monkeypatch):
    a, b = (in_turns(monkeypatch, tmp_path / f"{by}", backwards=[(1, by * -3.0), (2, 5.0)]) for by in (1, 2))
    groups = [group for group in walk(Pair(a, b), (FORWARD,), [1]) if group[0].microbatch]
    found = [[(q.rank, q.microbatch, q.a.item(), q.b.item(), q.scale) for q in group] for group in groups]
    assert found == [
        [(0, 1, -3.0, -6.0, 8.0), (1, 1, -6.0, -12.0, 16.0)],
        [(0, 2, 5.0, 5.0, 8.0), (1, 2, 10.0, 10.0, 16.0)],
    ]


@pytest.mark.parametrize(
    ("other", "losses"),
    [
        pytest.param({"turns": TURNS | {"embed": 1}}, [1, 2], id="other turns"),
        pytest.param({"backwards": [(1, 1.0), (1, 1.0)]}, [], id="other forwards"),
        pytest.param({"backwards": []}, [], id="one backward"),
        pytest.param({"world_size": 3}, [], id="another world size"),
    ],
)
def test_runs_whose_turns_differ_are_walked_as_one(tmp_path, monkeypatch, other, losses):
    a, b = in_turns(monkeypatch, tmp_path / "a"), in_turns(monkeypatch, tmp_path / "b", **other)
    for runs in ((a, b), (b, a)):
        found = order(*runs, 0)
        assert [number for name, number in found if name == "forward"] == [*losses, 0]
        updates = [i for i, (name, _) in enumerate(found) if name.startswith("update")]
        assert updates == list(range(len(found) - 4, len(found)))
