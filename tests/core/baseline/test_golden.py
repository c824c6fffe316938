"""A golden is a recording in small sketches, and the verdict on it is the verdict on recordings."""

from dataclasses import replace

import numpy as np
import pytest

from crossframe.baseline import condense
from crossframe.cli.exit_status import FOUND
from crossframe.errors import RecordingError, UsageError
from crossframe.recording import Recording, RecordingWriter, create_recording
from crossframe.recording.dims import Order, channels_first
from crossframe.recording.event_format import perturbed_run_folder
from crossframe.recording.golden_file import Golden, GoldenStep
from crossframe.recording.known_settings import COMMAND
from crossframe.recording.sketch import sketches_of
from crossframe.verdict import Verdict, compare
from crossframe.verdict.perturbed_runs.spread import known_spread, spread_of
from tests.commands import invoke, status_of
from tests.core.helpers import synthetic

NOISE = 1e-6
RUNS = 8


def made(world_size=2, **other):
    return synthetic.manifest(world_size, dtype="float32", **other)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    synthetic.record(folder, made())
    for i in range(1, RUNS + 1):
        synthetic.record(folder / perturbed_run_folder(i), made(), tamper=synthetic.jitter(i, NOISE))
    return Recording.open(folder)


@pytest.fixture(scope="module")
def golden(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("goldens") / "first.golden"
    condense(run, run.perturbed_runs(), most_bytes=20_000).write(path)
    return Recording.open(path)


def test_a_golden_equals_the_run_that_it_was_made_of(run, golden):
    assert golden.recorded_steps() == run.recorded_steps() == (0, 1, 2)
    assert compare(golden, run).verdict is Verdict.EQUAL
    assert compare(run, golden).verdict is Verdict.EQUAL
    assert golden.losses().tolist() == run.losses().tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_golden_agrees_with_rounding_at_any_world_size(golden, tmp_path, world_size):
    other = synthetic.record(tmp_path / "other", made(world_size), tamper=synthetic.jitter(99, NOISE))
    found = compare(golden, other)
    assert found.verdict is Verdict.ROUNDING and found.limit_used


@pytest.mark.parametrize("name", [name for name in synthetic.SHAPES if name != "block.k_bias"])
def test_a_golden_finds_a_wrong_gradient(golden, tmp_path, name):
    def tamper(phase, step, rank, what, array):
        return array * np.float32(1.01) if (phase, step, what) == ("reduce", 1, name) else array

    noisy = synthetic.both(synthetic.jitter(99, NOISE), tamper)
    found = compare(golden, synthetic.record(tmp_path / "other", made(), tamper=noisy))
    assert found.verdict is Verdict.BUG
    where = found.first_divergence
    assert (where.step, where.phase, where.parameter) == (1, "reduce", name)


def test_a_golden_finds_a_wrong_optimizer_state(golden, tmp_path):
    def tamper(phase, step, rank, what, array):
        return array * np.float32(1.01) if (phase, step, what) == ("state", 2, "block.w") else array

    noisy = synthetic.both(synthetic.jitter(99, NOISE), tamper)
    found = compare(golden, synthetic.record(tmp_path / "other", made(), tamper=noisy))
    where = found.first_divergence
    assert found.verdict is Verdict.BUG and (where.step, where.phase, where.parameter) == (2, "state", "block.w")


def test_replicas_and_shards_take_no_more_sketches(tmp_path):
    def rows(world_size, **other):
        recording = synthetic.record(tmp_path / f"{world_size}{other}", made(world_size, **other))
        perturbed = [
            synthetic.record(
                tmp_path / f"{world_size}{other}{i}", made(world_size, **other), tamper=synthetic.jitter(i, NOISE)
            )
            for i in (1, 2)
        ]
        found = condense(recording, perturbed, most_bytes=100_000)
        # Activations and local gradients are those of a rank.
        return len(found.rows) - world_size * (3 + len(synthetic.SHAPES))

    assert rows(2) == rows(4) == rows(4, replicate=2)


def test_the_spread_is_that_of_the_perturbed_runs_from_the_file(run, golden):
    stored, measured = known_spread(golden), spread_of(golden, run.perturbed_runs())
    assert stored.of.keys() == measured.of.keys() and stored.numel == measured.numel
    assert stored.factors == measured.factors
    for place, value in measured.of.items():
        assert abs(stored.of[place] - value) <= 2.0**-24 * value  # stored as float32


def test_the_number_of_sums_follows_from_the_size(run):
    sizes = {limit: condense(run, run.perturbed_runs(), most_bytes=limit) for limit in (5_000, 40_000)}
    assert sizes[5_000].num_sums < sizes[40_000].num_sums
    assert all(len(found.to_bytes()) <= limit for limit, found in sizes.items())
    with pytest.raises(UsageError, match=r"takes [\d,]+ bytes with 8 sums .* --max-kb"):
        condense(run, run.perturbed_runs(), most_bytes=1000)


def test_a_folded_sketch_is_of_the_same_elements():
    a, b = (np.random.default_rng(i).normal(size=5000) for i in (1, 2))
    both = [sketches_of([each])[0] for each in (a, b)]
    folded = [each.folded(16) for each in both]
    # The standard deviation of the square is at most sqrt(2 / 16) of it; 4 of them.
    assert folded[0].distance(folded[1]) ** 2 == pytest.approx(np.square(a - b).sum(), rel=4 * np.sqrt(2 / 16))
    assert both[0].distance(folded[1]) == folded[0].distance(folded[1])
    changed = a.copy()
    changed[7] += 3.0
    assert folded[0].distance(sketches_of([changed])[0]) == pytest.approx(3.0)


def test_equal_runs_have_goldens_of_equal_bytes(run, golden):
    again = condense(run, run.perturbed_runs(), most_bytes=20_000)
    assert again.to_bytes() == golden.directory.read_bytes()
    assert Golden.read(golden.directory).to_bytes() == golden.directory.read_bytes()


@pytest.mark.parametrize("at", [0, 25, 500, -40])
def test_a_damaged_golden_raises(golden, tmp_path, at):
    content = bytearray(golden.directory.read_bytes())
    content[at] ^= 1
    (tmp_path / "bad.golden").write_bytes(content)
    with pytest.raises(RecordingError, match=r"damaged|expected the directory of a recording, or a golden"):
        Recording.open(tmp_path / "bad.golden")


@pytest.mark.parametrize("size", [0, 10, 300])
def test_a_cut_golden_raises(golden, tmp_path, size):
    (tmp_path / "bad.golden").write_bytes(golden.directory.read_bytes()[:size])
    with pytest.raises(RecordingError):
        Recording.open(tmp_path / "bad.golden")


def test_a_golden_of_few_perturbed_runs_says_how_to_measure_more(run, tmp_path):
    few = run.perturbed_runs()[:4]
    condense(run, few, most_bytes=20_000).write(tmp_path / "a few.golden")
    spread = spread_of(run, few)
    limit = spread.of[0, "norm", "", 0] * spread.factors["norm"]

    def off(phase, step, rank, name, array):
        return array + 1.5 * limit if (phase, step) == ("norm", 0) else array

    other = synthetic.record(tmp_path / "other", made(), tamper=off)
    found = compare(Recording.open(tmp_path / "a few.golden"), other)
    assert found.verdict is Verdict.INCONCLUSIVE
    command = f"crossframe baseline update --golden '{tmp_path}/a few.golden' --perturbed-runs 8"
    assert found.reason.endswith(f"would be decisive: measure rounding with `{command}`")


def test_a_golden_that_is_not_there_names_the_command(tmp_path):
    path = tmp_path / "none.golden"
    with pytest.raises(
        RecordingError, match=r"none.golden: there is no such file; check the path, or record it with crossframe b"
    ):
        Golden.read(path)


def test_a_golden_has_sketches_and_no_elements(golden):
    step = GoldenStep(golden.directory, np.zeros((2, 3)))
    assert step.rows(2).shape == (2, 3)
    with pytest.raises(RecordingError, match=r"first.golden: expected 3 sketches, got 2; damaged$"):
        step.rows(3)
    with pytest.raises(
        RecordingError, match=r"first.golden: a golden has sketches only, not the elements of 'reduce/block.w'$"
    ):
        golden.elements(0, replace(golden.ranges("reduce", 0, "block.w")[0], sketch=None, key="reduce/block.w"))


def test_a_golden_without_the_steps_of_a_rank_is_damaged(golden):
    whole = golden.golden
    for cut in (
        replace(whole, lines=whole.lines[:1], places=whole.places[:1]),
        replace(whole, places=(whole.places[0], whole.places[1][:2])),
        replace(whole, lines=(whole.lines[0], b"".join(whole.lines[1].splitlines(keepends=True)[:-1]))),
    ):
        with pytest.raises(
            RecordingError, match=r"first.golden: damaged: not all steps of all ranks; restore the file$"
        ):
            Recording.of_golden(golden.directory, cut)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"made": made(steps=2)}, "expected 3 steps, got 2"),
        (
            {"tamper": synthetic.only("parameters", "block.w", lambda x: x * np.float32(1 + 2.0**-18))},
            "begins with other values of 'block.w'",
        ),
    ],
)
def test_a_perturbed_run_that_is_another_run_is_refused(run, tmp_path, options, message):
    other = synthetic.record(tmp_path / "other", **({"made": made()} | options))
    with pytest.raises(
        UsageError, match=rf"^perturbed run 2 of \S+first: {message}; seed everything that the run draws$"
    ):
        condense(run, [run.perturbed_runs()[0], other], most_bytes=20_000)


def test_a_perturbed_run_with_other_batches_is_refused(run, tmp_path):
    synthetic.write_run(tmp_path, made())
    was = run.batch(1, 1).digest
    synthetic.edit_events(tmp_path, was, was[::-1], rank=1)
    with pytest.raises(
        UsageError, match=r"perturbed run 1 of .*: the batch of rank 1 at step 1 is another one; seed everything"
    ):
        condense(run, [Recording.open(tmp_path)], most_bytes=20_000)


def test_a_perturbed_run_may_begin_a_unit_in_the_last_place_away(run, tmp_path):
    def nudged(phase, step, rank, name, array):
        return np.nextafter(array, np.float32(np.inf)) if phase == "parameters" else array

    runs = [synthetic.record(tmp_path / str(i), made(), tamper=nudged) for i in range(2)]
    assert condense(run, runs, most_bytes=20_000).spread.num_runs == 2


def test_a_golden_keeps_the_order_of_dims_and_what_model_ranks_disagree_about(tmp_path):
    images = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)

    def record(folder):
        described = made(1, steps=1)
        create_recording(folder, described)
        with RecordingWriter(folder, described, 0) as writer:
            writer.batch(0, synthetic.digest(""), [0, 1])
            writer.loss(0, 1.0)
            writer.grad_norm(0, 0.5)
            writer.parameters(0, "block", {"block.w": (0, 15, np.ones(15, np.float32))})
            writer.reduced_grads(0, "block", {"block.w": (0, 15, np.ones(15, np.float32))})
            writer.activation(0, 0, "block", "output", images, order=Order.UNSTATED, operator="conv")
            writer.activation(0, 0, "", "output", images)
            writer.disagreement(0, "reduce", "block", "block.w", "", 0.25, "tp", (1, 3))
            writer.end_step(0, (0.5, 0.25))
        return Recording.open(folder)

    run, *others = (record(tmp_path / name) for name in "abc")
    condense(run, others, most_bytes=100_000).write(tmp_path / "x.golden")
    golden = Recording.open(tmp_path / "x.golden")
    assert golden.disagreements(1) == run.disagreements(1) and len(golden.disagreements(1)) == 1
    assert (golden.grad_norm(0, 0), golden.learning_rates(0)) == (0.5, (0.5, 0.25))
    of = [(0, 0, 0, module, "output") for module in ("block", "")]
    assert [golden.activation_order(*each) for each in of] == [Order.UNSTATED, Order.TORCH]
    assert [golden.activation_operator(*each) for each in of] == ["conv", ""]
    assert golden.activation_shape(*of[0]) == (2, 5, 3)
    view = golden.with_channels_first([("block", "output")])
    num_sums = golden.golden.num_sums
    for each, array in ((golden, images), (view, channels_first(images))):
        expected = sketches_of([array])[0].folded(num_sums)
        np.testing.assert_allclose(each.activation_sketch(*of[0]).sums, expected.sums, rtol=2e-7)
    with pytest.raises(
        RecordingError, match=r"the output of '' at step 0 has no sketch with channels first; record again"
    ):
        golden.with_channels_first([("", "output")]).activation_sketch(*of[1])


def test_the_commands_record_and_compare_a_recording(run, tmp_path):
    path = tmp_path / "new.golden"
    status, text = invoke("baseline", "record", "--golden", path, "--recording", run.directory, "--max-kb", 20)
    assert status == 0 and "8 perturbed runs" in text and path.stat().st_size <= 20_000
    assert status_of("baseline", "record", "--golden", path, "--recording", run.directory) == 2  # it exists
    assert status_of("baseline", "check", "--golden", path) == 2  # its command is not known

    def tamper(phase, step, rank, what, array):
        return array * 2 if phase == "reduce" else array

    synthetic.record(tmp_path / "bug", made(), tamper=tamper)
    assert status_of("compare", path, tmp_path / "bug") == FOUND


def test_a_difference_within_rounding_counts_only_bitwise(run, golden, tmp_path):
    program = {"device": "cpu", "deterministic": True, "compiled": False, "source": "1"}
    settings = {"program": program, COMMAND: "python train.py"}

    def record(name, tamper=None, **changed):
        manifest = made(settings=settings | {"program": program | changed})
        return synthetic.record(tmp_path / name, manifest, tamper=tamper)

    first = record("a")
    perturbed = [record(f"p{i}", synthetic.jitter(i, NOISE)) for i in range(1, RUNS + 1)]
    content = condense(first, perturbed, most_bytes=20_000)
    opened = Recording.of_golden(tmp_path / "a.golden", content)
    other = record("b", synthetic.jitter(99, NOISE), source="2")
    # A golden keeps sketches, and the setting is part of the program.
    other.manifest = replace(other.manifest, detail="sketch")
    assert compare(opened, other).verdict is Verdict.DIFFERENT
    assert compare(opened, other, bitwise=False).verdict is Verdict.ROUNDING
