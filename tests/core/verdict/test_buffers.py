"""Comparisons of tensors of a model that are no parameters."""

import math

import numpy as np
import pytest

from crossframe.baseline.condense import condense
from crossframe.recording import Recording, RecordingWriter
from crossframe.recording.event_format import UPDATE, perturbed_run_folder
from crossframe.verdict import Verdict, compare
from crossframe.verdict.measure.buffers import averaged_parameter, buffers_of, differing_at_first, has_before
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.one_naming import in_one_naming
from crossframe.verdict.perturbed_runs.spread import MEASURES
from tests.core.helpers import synthetic
from tests.core.helpers.translated import translate

NAMES = ("block.mean", "block.var")


def moving(*, momentum=0.1, by_rank=True, change=lambda step, rank, name, value: value):
    """The running mean and variance of a batch norm."""

    def buffers(step, rank):
        own = {"block.mean": np.zeros(4), "block.var": np.ones(4)}
        for at in range(step + 1):
            for name, value in own.items():
                drawn = np.random.default_rng([at, rank * by_rank, len(name)]).normal(size=4)
                own[name] = value + momentum * (drawn - value)
        return {name: change(step, rank, name, value) for name, value in own.items()}

    return buffers


def of_one(name, step, change, *, rank=None):
    """A change of one buffer from a step on."""
    return lambda at, who, what, value: change(value) if what == name and at >= step and rank in (None, who) else value


def recorded(tmp_path, name, buffers, *made, **options):
    return synthetic.record(tmp_path / name, synthetic.manifest(*made), buffers=buffers, **options)


@pytest.mark.parametrize("sketched", [False, True])
def test_the_first_buffer_that_differs_is_located(tmp_path, sketched):
    wrong = moving(change=of_one("block.var", 1, lambda value: value + np.array([0, 0, 0.5, 0]), rank=1))
    right, wrong = recorded(tmp_path, "right", moving()), recorded(tmp_path, "wrong", wrong)
    for a, b in ((right, wrong), (wrong, right)):
        found = compare(a, b, sketched=sketched)
        at = found.first_divergence
        assert found.verdict is Verdict.BUG and at is not None
        assert (at.step, at.phase, at.event, at.buffer, at.unit) == (1, "buffers", "buffer", "block.var", "block")
        assert (at.parameter, at.module, at.rank, at.start, at.stop) == (None, None, 1, 2, 3)
        assert "at step 1 the buffer 'block.var' (unit 'block', elements 2:3, rank 1) differs by" in found.reason
        assert at.to_json()["buffer"] == "block.var"
        assert (
            "the inside of the step was not recorded; to locate it, record both again with windows=[(1, 2)]"
            in found.reason
        )


def test_what_computes_a_buffer_is_located_before_it(tmp_path):
    wrong = moving(change=of_one("block.mean", 1, lambda value: 2 * value))
    right = recorded(tmp_path, "right", moving())
    for phase in ("reduce", "update"):
        tamper = synthetic.only(phase, "embed", lambda value: 1.5 * value, step=1)
        found = compare(right, recorded(tmp_path, phase, wrong, tamper=tamper))
        assert found.first_divergence is not None and found.first_divergence.phase == phase
    tamper = synthetic.only(UPDATE, "embed", lambda value: 1.5 * value, step=2)
    found = compare(right, recorded(tmp_path, "later", wrong, tamper=tamper))
    assert found.first_divergence is not None and found.first_divergence.buffer == "block.mean"


@pytest.mark.parametrize(
    ("wrong", "signature", "said"),
    [
        (moving(momentum=0.2), "constant_factor", "the step changes the buffer 2 times as much in wrong as in right"),
        (lambda step, rank: moving()(-1, rank), "stale_copy", "wrong has the value from before the step"),
        (
            moving(change=of_one("block.mean", 0, lambda value: 3 * value)),
            "constant_factor",
            "the step changes the buffer 3 times as much",
        ),
    ],
    ids=["momentum", "not updated", "factor"],
)
def test_a_wrong_update_is_diagnosed(tmp_path, wrong, signature, said):
    found = compare(recorded(tmp_path, "right", moving()), recorded(tmp_path, "wrong", wrong))
    assert found.verdict is Verdict.BUG
    assert found.first_divergence is not None and found.first_divergence.step == 0
    assert found.diagnosis is not None and found.diagnosis.signature == signature
    assert said in found.diagnosis.evidence


def test_a_buffer_that_only_one_run_changes_differs_from_its_first_value(tmp_path):
    """Also at a step after that of the first change."""
    late = moving(change=lambda step, rank, name, value: value if step > 1 else moving()(-1, rank)[name])
    found = compare(recorded(tmp_path, "right", moving()), recorded(tmp_path, "late", late))
    assert found.first_divergence is not None and found.first_divergence.step == 0
    never = compare(recorded(tmp_path, "b", late), recorded(tmp_path, "never", lambda _, rank: moving()(-1, rank)))
    assert never.first_divergence is not None and never.first_divergence.step == 2


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_mean_of_zero_has_the_bound_of_the_variance_beside_it(tmp_path, share):
    def noise(seed):
        def buffers(step, rank):
            own = moving()(step, rank)
            drawn = np.random.default_rng([seed, step + 1]).normal(size=4)
            size = 1e-11 * float(np.linalg.norm(own["block.var"])) / math.sqrt(2) / 2
            return own | {"block.mean": (step >= 0) * share * size * drawn / np.linalg.norm(drawn) * 2}

        return buffers

    found = compare(recorded(tmp_path, "a", noise(0)), recorded(tmp_path, "b", noise(1)))
    assert found.verdict is (Verdict.ROUNDING if share < 1 else Verdict.BUG), found.reason


def test_other_worlds_share_buffers_that_all_ranks_agree_on(tmp_path):
    one = recorded(tmp_path, "one", moving(by_rank=False), 1)
    two = recorded(tmp_path, "two", moving(by_rank=False), 2)
    found = compare(one, two)
    assert found.verdict is Verdict.ROUNDING and not found.notes
    assert {each.name for each in found.judged if each.phase == "buffers"} == set(NAMES)
    wrong = recorded(tmp_path, "wrong", moving(by_rank=False, momentum=0.2), 2)
    for pair in ((one, wrong), (wrong, one)):
        found = compare(*pair)
        assert found.first_divergence is not None and found.first_divergence.buffer == "block.mean"
    own = compare(one, recorded(tmp_path, "own", moving(), 2))
    assert own.verdict is Verdict.ROUNDING
    assert own.notes == (
        "'block.mean' and 1 more buffer, which are no parameter, are not compared: each rank has its own, of its own samples",
    )
    first = '"event": "activation", "step": 0, "microbatch": {}'
    for rank in (0, 1):
        synthetic.edit_events(two.directory, first.format(0), first.format(1), rank=rank)
    assert "are not compared: the models are called for other microbatches" in str(
        compare(one, Recording.open(two.directory)).notes
    )


def queue(order=(0, 1, 2, 3, 4, 5), *, wrong=0.0):
    """A queue of the features of all samples, in the order in which ranks fill it."""

    def buffers(step, rank):
        rows = 10 + np.random.default_rng(step + 1).normal(size=(6, 3))
        rows[0] += wrong
        return {"queue": rows[[*order]]}

    return buffers


OF_RANKS = (0, 2, 4, 1, 3, 5)  # as two ranks have the samples


@pytest.mark.parametrize(
    ("order", "wrong", "ranks", "verdict"),
    [
        pytest.param(OF_RANKS, 0.0, 2, Verdict.ROUNDING, id="of the samples"),
        pytest.param(OF_RANKS, 1e-3, 2, Verdict.BUG, id="wrong values"),
        pytest.param((1, 0, 2, 3, 4, 5), 0.0, 2, Verdict.BUG, id="exchanged rows"),
        pytest.param(OF_RANKS, 0.0, 1, Verdict.BUG, id="the same samples on the same rank"),
    ],
)
def test_rows_come_in_the_order_of_the_samples(tmp_path, order, wrong, ranks, verdict):
    whole, other = (
        recorded(tmp_path, "whole", queue(), 1),
        recorded(tmp_path, "other", queue(order, wrong=wrong), ranks),
    )
    for a, b in ((whole, other), (other, whole)):
        found = compare(a, b)
        assert found.verdict is verdict, found.reason
        said = "the rows of 'queue' come in different orders; they are compared in one order"
        assert verdict is Verdict.BUG or said in found.notes


def test_buffers_of_other_shapes_are_not_compared(tmp_path):
    def other(step, rank):
        return {"block.mean": np.full(5, float(step)), "block.var": moving()(step, rank)["block.var"]}

    found = compare(recorded(tmp_path, "a", moving()), recorded(tmp_path, "b", other))
    assert found.verdict is Verdict.EQUAL
    assert found.notes == (
        "'block.mean', which is no parameter, is not compared: it has shape (4,) in a and (5,) in b",
    )


@pytest.mark.parametrize("step", [0, 1, 2])
def test_buffers_that_appear_or_change_their_shape_later_are_compared(tmp_path, step):
    def growing(factor):
        def buffers(after, rank):
            made = {"cache": np.arange(1.0, 3.0 + after) * (factor if after == step else 1.0)} if after >= 0 else {}
            return made | ({"late": np.array([factor * after])} if after >= step else {})

        return buffers

    right, wrong = recorded(tmp_path, "right", growing(2.0)), recorded(tmp_path, "wrong", growing(3.0))
    assert compare(right, recorded(tmp_path, "again", growing(2.0))).verdict is Verdict.EQUAL
    found = compare(right, wrong)
    assert found.verdict is Verdict.BUG and found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.buffer) == (step, "cache")
    assert found.diagnosis is not None and "1.5 times the values" in found.diagnosis.evidence


def test_buffers_of_one_recording_are_noted(tmp_path):
    found = compare(recorded(tmp_path, "a", None), recorded(tmp_path, "b", moving()))
    assert found.verdict is Verdict.EQUAL
    assert found.notes == ("buffers, which b alone recorded, are not compared",)
    same = compare(recorded(tmp_path, "c", moving()), recorded(tmp_path, "d", lambda _, rank: moving()(-1, rank)))
    assert not same.notes


def test_a_buffer_that_one_recording_lacks_is_noted(tmp_path):
    def more(step, rank):
        return moving()(step, rank) | {"teacher.w": np.full(2, float(step))}

    found = compare(recorded(tmp_path, "a", moving()), recorded(tmp_path, "b", more))
    assert found.verdict is Verdict.EQUAL
    assert found.notes == ("the buffer 'teacher.w', which b alone recorded, is not compared",)


@pytest.mark.parametrize(("num", "said"), [(2, "1 more buffer"), (3, "2 more buffers")])
def test_buffers_that_one_side_lacks_are_counted(tmp_path, num, said):
    def more(step, rank):
        return moving()(step, rank) | {f"ema.{i}": np.full(2, float(step)) for i in range(num)}

    found = compare(recorded(tmp_path, "a", moving()), recorded(tmp_path, "b", more))
    assert found.notes == (f"the buffer 'ema.0' and {said}, which b alone recorded, are not compared",)


def test_other_values_before_the_first_step_are_noted_and_no_factor(tmp_path):
    def counting(start):
        return lambda step, rank: {"count": np.array([start + step + 1.0])}

    found = compare(recorded(tmp_path, "a", counting(1.0)), recorded(tmp_path, "b", counting(2.0)))
    assert found.verdict is Verdict.BUG and found.first_divergence is not None
    assert found.first_divergence.step == 0
    assert "the buffer 'count' has different values before the first step" in found.notes
    assert found.diagnosis is None or "changes the buffer" not in found.diagnosis.evidence


def test_constants_that_differ_are_noted_alone(tmp_path):
    def constant(values):
        return lambda step, rank: {"block.mask": np.array(values), "block.same": np.array([1.0, -np.inf])}

    found = compare(
        recorded(tmp_path, "a", constant([1.0, -np.inf])), recorded(tmp_path, "b", constant([2.0, -np.inf]))
    )
    assert found.verdict is Verdict.EQUAL
    assert found.notes == ("the buffer 'block.mask' has different values before the first step",)
    rounding = compare(
        recorded(tmp_path, "c", constant([1.0, 3.0])), recorded(tmp_path, "d", constant([1.0 + 1e-15, 3.0]))
    )
    assert not rounding.notes


@pytest.mark.parametrize("rest", [7.0, np.nan])
def test_elements_that_no_step_has_changed_are_not_compared(tmp_path, rest):
    """As in a queue made by `torch.empty`, which each step fills further."""

    def queue(rest, *, last=0.0, steps=3):
        def buffers(step, rank):
            value = np.full(5, rest)
            value[: min(step + 1, steps)] = np.arange(min(step + 1, steps))
            value[2:3] += last if step == 2 else 0.0
            return {"queue": value}

        return buffers

    a, b = recorded(tmp_path, "a", queue(1.0)), recorded(tmp_path, "b", queue(rest))
    for pair in ((a, b), (b, a)):
        found = compare(*pair)
        assert found.verdict is Verdict.EQUAL, found.reason
        assert found.notes == ("the buffer 'queue' has different values before the first step",)
    for name, wrong, place in (("wrong", queue(rest, last=1.0), (2, 2, 3)), ("short", queue(rest, steps=2), (2, 2, 3))):
        found = compare(a, recorded(tmp_path, name, wrong))
        assert found.verdict is Verdict.BUG and found.first_divergence is not None
        at = found.first_divergence
        assert (at.step, at.start, at.stop) == place


def amplified(seed):
    """The bias whose gradient is zero up to rounding, which Adam has amplified to the size of its learning rate."""

    def tamper(phase, step, rank, name, array):
        noise = 0.1 * np.random.default_rng([seed, step]).normal(size=array.shape)
        return array + noise if (phase, name) == ("update", "block.k_bias") else array

    return tamper


def average(tmp_path, name, of, made=None, *, error=0.0, start=0.0, seed=0):
    """A run with a moving average of a parameter; `start` is added to its initial value, and `error` after each step."""
    right = synthetic.record(tmp_path / f"{name} before", tamper=amplified(seed))

    def buffers(step, rank):
        value = right.full("parameters", 0, of) + start
        for at in range(step + 1):
            value = value + 0.25 * (right.full("update", at, of) - value)
        return {"average": value + (error if step >= 0 else 0.0)}

    return synthetic.record(tmp_path / name, made, buffers=buffers, tamper=amplified(seed))


def test_an_average_of_a_parameter_is_known_by_its_values(tmp_path):
    run = average(tmp_path, "run", "embed")
    assert [averaged_parameter(run, step, 0, "average") for step in (0, 1)] == ["embed", "embed"]
    assert averaged_parameter(average(tmp_path, "other", "embed", error=1e-3), 0, 0, "average") is None
    assert averaged_parameter(average(tmp_path, "elsewhere", "embed", start=0.1), 0, 0, "average") is None
    assert averaged_parameter(recorded(tmp_path, "moving", moving()), 0, 0, "block.mean") is None


def test_a_parameter_that_has_not_moved_has_no_average(tmp_path):
    """As the bias of a batch norm beside its mean, in a first step with a learning rate of zero."""
    initial = synthetic.initial("bias", "float64")

    def still(phase, step, rank, name, array):
        return initial if (phase, name) == ("update", "bias") else array

    run = synthetic.record(tmp_path / "run", buffers=lambda step, _: {"mean": initial + (step + 1.0)}, tamper=still)
    assert averaged_parameter(run, 0, 0, "mean") is None


@pytest.mark.parametrize(
    ("rate", "along", "across", "of"),
    [
        pytest.param(0.25, 0.0, 0.8, "embed", id="off by rounding"),
        pytest.param(0.25, 0.0, 1.2, None, id="off by more than rounding"),
        pytest.param(0.0, 0.8, 0.0, None, id="moved by rounding"),
        pytest.param(0.0, 1.2, 0.0, "embed", id="moved by more than rounding"),
    ],
)
def test_an_average_is_known_up_to_four_roundings(tmp_path, rate, along, across, of):
    """Of its value before and of the parameter."""
    run = synthetic.record(tmp_path / "run")
    before, value = (run.full(phase, 0, "embed").reshape(-1) for phase in ("parameters", "update"))
    moved = value - before
    axes = np.linalg.qr(np.stack([moved, np.ones(12)], axis=1))[0]
    error = 4 * 2.0**-53 * (np.linalg.norm(before) + np.linalg.norm(value))
    after = before + rate * moved + error * axes @ [np.sign(axes[:, 0] @ moved) * along, across]
    values = {-1: before.reshape(4, 3)}
    found = synthetic.record(tmp_path / "average", buffers=lambda step, _: {"b": values.get(step, after.reshape(4, 3))})
    assert averaged_parameter(found, 0, 0, "b") == of


@pytest.mark.parametrize("write", ["parameters", "updated"])
def test_an_average_needs_a_recorded_parameter(tmp_path, monkeypatch, write):
    monkeypatch.setattr(RecordingWriter, write, lambda *args: None)
    run = synthetic.record(
        tmp_path / "run", buffers=lambda step, _: {"b": synthetic.initial("embed", "float64") * (step + 2)}
    )
    assert averaged_parameter(run, 0, 0, "b") is None


def test_a_buffer_of_another_shape_is_no_average(tmp_path):
    run = average(tmp_path, "run", "embed")
    buffers = {step: run.buffer(step, 0, "average").reshape(-1) for step in (-1, 0, 1, 2)}
    flat = synthetic.record(tmp_path / "flat", buffers=lambda step, _: {"b": buffers[step]}, tamper=amplified(0))
    assert averaged_parameter(run, 0, 0, "average") == "embed" and averaged_parameter(flat, 0, 0, "b") is None


def test_an_average_has_the_scale_of_its_parameter(tmp_path):
    """The largest of its norm, the norm of the parameter's total update, and what Adam may move it by."""
    for rate, moves in ((10.0, 10.0 * 3 * math.sqrt(12)), (None, 0.0)):
        run = average(tmp_path, str(rate), "embed", synthetic.manifest(learning_rate=rate))
        ((made, _),) = buffers_of(Pair(run, run), 2)
        size = np.linalg.norm(run.buffer(2, 0, "average"))
        update = np.linalg.norm(run.full("update", 2, "embed") - run.full("parameters", 0, "embed"))
        assert size > update and made.scale == pytest.approx(max(size, moves), rel=1e-15)


def test_a_buffer_has_the_scale_of_its_module(tmp_path):
    values = {"block.a": [3.0, 4.0], "block.b": [0.0, 7.0], "block.c": [9.0], "other.d": [6.0, 8.0], "top": [8.0, 0.0]}
    run = recorded(
        tmp_path, "run", lambda step, _: {name: np.array(value) * (step + 1) for name, value in values.items()}
    )
    scales = {group[0].name: group[0].scale for group in buffers_of(Pair(run, run), 0)}
    assert scales == {"block.a": 7.0, "block.b": 7.0, "block.c": 9.0, "other.d": 10.0, "top": 8.0}


def test_a_buffer_is_known_before_in_its_shape(tmp_path):
    grows = recorded(tmp_path, "run", lambda step, _: {"b": np.zeros(max(2, step + 1)) + step})
    assert [has_before(grows, before, 1, "b") for before in (-2, -1, 0, 1, 2, 3)] == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]
    assert not has_before(grows, -1, 2, "b") and not has_before(grows, 0, 0, "c")


@pytest.mark.parametrize(("share", "differs"), [(0.99, False), (1.01, True)])
def test_first_values_differ_by_more_than_the_bound(tmp_path, share, differs):
    first = {"b": np.array([3.0, 4.0]), "c": np.ones(2), "alone": np.ones(1)}
    other = {"c": np.ones(3), "b": np.array([3.0, 4.0 + share * 1e-11 * 5.0])}
    a, b = (recorded(tmp_path, name, lambda step, _, own=own: own) for name, own in (("a", first), ("b", other)))
    assert differing_at_first(Pair(a, b)) == differing_at_first(Pair(b, a)) == (["b"] if differs else [])


def test_an_average_is_judged_as_its_parameter(tmp_path):
    """One whose gradient is zero up to rounding may have any value."""
    right, other = (average(tmp_path, f"bias {seed}", "block.k_bias", seed=seed) for seed in (0, 1))
    found = compare(right, other)
    assert found.verdict is Verdict.ROUNDING and "block.k_bias" in found.zero_gradient_parameters, found.reason
    right = average(tmp_path, "right", "embed")
    for error, verdict in ((1e-6, Verdict.BUG), (1e-13, Verdict.ROUNDING)):
        assert compare(right, average(tmp_path, f"wrong {error}", "embed", error=error)).verdict is verdict


def test_a_stated_setting_explains_the_buffers_of_its_step(tmp_path):
    """A learning rate changes averages of parameters in the step in which it differs."""
    made = synthetic.manifest(learning_rate=0.2)
    right = recorded(tmp_path, "right", moving())
    wrong = synthetic.record(tmp_path / "wrong", made, buffers=moving(momentum=0.2))
    found = compare(right, wrong)
    assert found.verdict is Verdict.INCOMPARABLE and "learning rate differs" in found.reason


def test_steps_whose_buffers_were_not_recorded_are_not_compared(tmp_path):
    """Such as those that a scan over steps returns at its end alone: the first value is not that of a later step."""
    run = recorded(tmp_path, "run", moving())
    lines = tmp_path / "run" / "rank00000" / "events.jsonl"
    assert lines.read_text().count('"buffers": true') == 3
    for rank in range(2):
        synthetic.edit_events(tmp_path / "run", ', "buffers": true', "", rank=rank)
    reopened = Recording.open(tmp_path / "run")
    assert run.has_buffer(0, "block.mean") and reopened.has_buffer(0, "block.mean")  # it has a line of its own
    constant = recorded(tmp_path, "constant", lambda _, rank: moving()(-1, rank))
    assert constant.has_buffer(0, "block.mean")
    for rank in range(2):
        synthetic.edit_events(tmp_path / "constant", ', "buffers": true', "", rank=rank)
    reopened = Recording.open(tmp_path / "constant")
    assert not reopened.has_buffer(0, "block.mean") and reopened.has_buffer(1, "block.mean")


def test_perturbed_runs_measure_the_spread_of_buffers(tmp_path):
    assert "buffers" in MEASURES
    made = synthetic.manifest(dtype="float32")

    def noisy(seed, size):
        def change(step, rank, name, value):
            moved = size * np.random.default_rng([seed, step + 1, rank, len(name)]).normal(size=4) * (step >= 0)
            return (value + moved).astype(np.float32)

        return moving(change=change)

    def run(name, seed, size):
        return synthetic.record(tmp_path / name, made, buffers=noisy(seed, size), tamper=synthetic.jitter(seed, 1e-7))

    run("right", 0, 0.0)
    for number in range(1, 5):
        folder = f"right/{perturbed_run_folder(number)}"
        run(folder, number, 1e-4)
    right = Recording.open(tmp_path / "right")
    assert compare(right, run("near", 9, 1e-4)).verdict is Verdict.ROUNDING
    found = compare(right, run("far", 9, 1e-1))
    assert found.verdict is Verdict.BUG and found.first_divergence is not None
    assert found.first_divergence.buffer == "block.mean"
    golden = condense(right, right.perturbed_runs(), most_bytes=200_000)
    golden.write(tmp_path / "kept.golden")
    kept = Recording.open(tmp_path / "kept.golden")
    assert kept.buffers(1) == right.buffers(1) and kept.initial_buffers() == right.initial_buffers()
    assert compare(kept, Recording.open(tmp_path / "near")).verdict is Verdict.ROUNDING
    found = compare(kept, Recording.open(tmp_path / "far"))
    assert found.first_divergence is not None and found.first_divergence.buffer == "block.mean"


@pytest.mark.parametrize("world_size", [1, 2])
def test_buffers_of_renamed_modules_are_compared(tmp_path, world_size):
    """A module's parameters say which one it is; the rest of a name stays."""
    paths = {"embed": "embed", "bias": "bias", "block.w": "layers.0.w", "block.k_bias": "layers.0.k_bias"}
    right = recorded(tmp_path, "right", moving(), world_size)
    for wrong, verdict in ((moving(), Verdict.EQUAL), (moving(momentum=0.2), Verdict.BUG)):
        own = recorded(tmp_path, verdict.value, wrong, world_size)
        renamed = translate(own, tmp_path / f"renamed {verdict.value}", paths, modules={"block": "layers.0"})
        assert renamed.buffers(0) == ["layers.0.mean", "layers.0.var"]
        found = compare(right, renamed)
        assert found.verdict is verdict, found.reason
        assert {each.name for each in found.judged if each.phase == "buffers"} == set(NAMES)
        mapped = in_one_naming(right, renamed, None).b
        assert mapped.initial_buffers() == list(NAMES) and mapped.buffer_shape(0, 0, "block.mean") == (4,)
