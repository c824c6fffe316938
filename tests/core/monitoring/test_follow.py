"""A recording that grows, judged as it grows, and `crossframe watch`."""

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from crossframe.cli import watch as watch_module
from crossframe.cli.commands import app
from crossframe.errors import RecordingError, UsageError
from crossframe.monitoring import Alarm, Follower, Kind, Monitor, baseline
from crossframe.monitoring.updates import UnexpectedMove, UpdateRule
from crossframe.recording import Recording, RecordingWriter, Schedule, create_recording
from crossframe.recording.known_settings import FORWARD_ONLY, LOSSES, MEAN
from crossframe.recording.live import LiveRecording
from tests.core.helpers import faulty, synthetic
from tests.core.helpers.synthetic import LEARNING_RATE, manifest, write_run

SGD = {"optimizer": "SGD", "lr": LEARNING_RATE}


def nan_at(phase, step, name=""):
    def tamper(phase_, step_, rank, name_, array):
        return array * np.nan if (phase_, step_, name_) == (phase, step, name) else array

    return tamper


def other_replica(phase, step, rank, name, array):
    return array + 1 if (phase, step, rank, name) == ("update", 1, 2, "block.w") else array


def run(*arguments):
    result = CliRunner().invoke(app, ["watch", *map(str, arguments)])
    return result.exit_code, result.output


def test_a_recording_is_judged_step_by_step_as_it_is_judged_at_once(tmp_path):
    made = manifest(settings=SGD)
    create_recording(tmp_path / "run", made)
    follower = Follower(tmp_path / "run")
    assert follower.advance() == ([], []) and follower.num_steps == 0
    writers = [RecordingWriter(tmp_path / "run", made, rank) for rank in range(2)]
    plans = [synthetic._steps(made, rank, nan_at("forward", 1)) for rank in range(2)]
    found = []
    for step in range(3):
        for rank, (writer, plan) in enumerate(zip(writers, plans, strict=True)):
            _, record = next(plan)
            record(writer)
            writer.end_step(step)
            alarms, scalars = follower.advance()
            assert len(scalars) == rank  # a step counts once both ranks have ended it
            found += alarms
    assert not follower.ended
    for writer in writers:
        writer.finish()
    follower.advance()
    assert follower.ended and follower.steps_by_rank == [3, 3]
    at_once = Follower(tmp_path / "run")
    at_once.advance()
    assert found == follower.alarms == at_once.alarms
    assert [(alarm.kind, alarm.step) for alarm in found] == [(Kind.NOT_FINITE, 1)] and "ranks 0, 1" in found[0].text
    assert follower.last == at_once.last and set(at_once.last.gradients) == {"", "block"}


def test_a_line_that_is_being_written_is_read_when_it_is_complete(tmp_path):
    write_run(tmp_path / "run", manifest())
    events = tmp_path / "run" / "rank00000" / "events.jsonl"
    content = events.read_bytes()
    half = content.index(b'"event": "step"') + 5
    events.write_bytes(content[:half])
    follower = Follower(tmp_path / "run")
    assert follower.advance()[1] == []
    with events.open("ab") as file:
        file.write(content[half:])
    assert [each.step for each in follower.advance()[1]] == [0, 1, 2]
    assert Recording.open(tmp_path / "run").num_steps == 3


def test_recorded_steps_grow_with_the_recording(tmp_path):
    write_run(tmp_path / "run", manifest(1))
    events = tmp_path / "run" / "rank00000" / "events.jsonl"
    content = events.read_bytes()
    parts = [part + b"\n" for part in content.split(b"\n")[:-1]]
    events.write_bytes(b"")
    live, found = LiveRecording(tmp_path / "run"), []
    for part in parts:
        with events.open("ab") as file:
            file.write(part)
        recording = live.read()
        assert len(recording.recorded_steps()) == recording.num_steps
        found.append(recording.num_steps)
    assert sorted(set(found)) == [0, 1, 2, 3] and live.ended


def test_another_run_in_the_same_place_is_an_error(tmp_path):
    write_run(tmp_path / "run", manifest(), stop_before=1)
    follower = Follower(tmp_path / "run")
    follower.advance()
    write_run(tmp_path / "run", manifest(), overwrite=True)
    with pytest.raises(RecordingError, match="another run has replaced the recording"):
        follower.advance()


@pytest.mark.parametrize(
    ("made", "tamper", "kind", "text"),
    [
        pytest.param(
            {"world_size": 4, "replicate": 2, "settings": SGD},
            other_replica,
            Kind.RANKS,
            "updated value of 'block.w'",
            id="replicas",
        ),
        pytest.param(
            {"settings": SGD | {LOSSES: MEAN}},
            lambda p, s, r, n, a: a + r if p == "forward" else a,
            Kind.RANKS,
            "mean loss",
            id="mean loss",
        ),
        pytest.param(
            {"settings": SGD},
            lambda p, s, r, n, a: 1.5 * a if (p, s, n) == ("update", 1, "block.w") else a,
            Kind.OPTIMIZER,
            "does not follow the optimizer's rule",
            id="optimizer",
        ),
    ],
)
def test_faults_raise_alarms_that_name_them(tmp_path, made, tamper, kind, text):
    write_run(tmp_path / "run", manifest(**made), tamper=tamper)
    follower = Follower(tmp_path / "run")
    follower.advance()
    assert (follower.alarms[0].kind, len({alarm.kind for alarm in follower.alarms})) == (kind, 1)
    assert text in follower.alarms[0].text


KEPT = {"skips": lambda step, name: step > 0 and name == "embed.weight"}
DID_NOT_CHANGE = "the parameter 'embed.weight' did not change in"
BETAS = {"betas": [0.9, 0.999]}


@pytest.mark.parametrize(
    ("faults", "stated", "text"),
    [
        pytest.param(KEPT, BETAS, DID_NOT_CHANGE, id="kept"),
        pytest.param(KEPT, {"betas": None}, DID_NOT_CHANGE, id="kept, betas unknown"),
        pytest.param({"rate": 50 * faulty.RATE}, BETAS, "and 7 more moved by", id="moved"),
        pytest.param(
            {"rate": 50 * faulty.RATE}, {"betas": [0.9, 0.85]}, "moved by", id="moved, betas close to each other"
        ),
    ],
)
def test_parameters_that_moved_too_far_or_not_at_all_are_found_in_sketches(tmp_path, faults, stated, text, monkeypatch):
    monkeypatch.setattr("crossframe.recording.manifest.WHOLE", 0)
    recording = faulty.record(
        tmp_path / "run",
        faulty.Faults(**faults),
        dtype="float32",
        clip=None,
        detail="sketch",
        other=stated,
    )
    monkeypatch.setattr("crossframe.recording.reader.Recording.learning_rates", lambda *_: (faulty.RATE,))
    follower = Follower(recording.directory)
    follower.advance()
    assert {alarm.kind for alarm in follower.alarms} == {Kind.OPTIMIZER}
    assert any(text in alarm.text for alarm in follower.alarms)


def test_rounding_is_judged_by_the_largest_rate(tmp_path, monkeypatch):
    recording = faulty.record(tmp_path / "run", faulty.Faults(**KEPT), other=BETAS)
    rates = {0: faulty.RATE, 1: 0.0, 2: faulty.RATE}
    monkeypatch.setattr("crossframe.recording.reader.Recording.learning_rates", lambda _, step: (rates[step],))
    rule = UpdateRule()
    assert not list(rule.add(recording, 0))
    assert [(move.parameter, move.lost) for move in rule.add(recording, 2)] == [("embed.weight", False)]


def test_parameters_that_the_loop_changes_after_the_update_are_a_note(tmp_path):
    changed = faulty.Faults(gathered=lambda step, rank, name, now, old: now * 0.999 if step else now)
    follower = Follower(faulty.record(tmp_path / "run", changed, other={"lr": faulty.RATE}).directory)
    follower.advance()
    assert any(note.startswith("step 1: parameters were changed after the update") for note in follower.notes)


def test_a_healthy_run_in_sketches_is_quiet(tmp_path, monkeypatch):
    monkeypatch.setattr("crossframe.recording.manifest.WHOLE", 0)
    recording = faulty.record(tmp_path / "run", dtype="float32", clip=None, detail="sketch")
    monkeypatch.setattr("crossframe.recording.reader.Recording.learning_rates", lambda *_: (faulty.RATE,))
    follower = Follower(recording.directory)
    follower.advance()
    assert (follower.alarms, follower.notes) == ([], [])


def test_a_run_that_leaves_the_spread_of_its_baseline_is_an_alarm(tmp_path):
    faulty.record(tmp_path / "base", dtype="float32")
    for number in (1, 2, 3, 4):
        faulty.record(tmp_path / "base" / f"twin{number:05d}", noise=number, dtype="float32")
    faulty.record(tmp_path / "right", noise=9, dtype="float32")
    faulty.record(tmp_path / "wrong", faulty.Faults(epsilon=1e-2), noise=9, dtype="float32")
    status, said = run(tmp_path / "right", "--baseline", tmp_path / "base")
    assert status == 0, said
    status, said = run(tmp_path / "wrong", "--baseline", tmp_path / "base", "--json")
    (alarm,) = json.loads(said)["alarms"]
    assert status == 1 and alarm["kind"] == "baseline" and "output of module 'norm'" in alarm["text"]
    status, said = run(tmp_path / "right", "--baseline", tmp_path / "wrong")
    assert status == 2 and "--perturbed-runs" in said


def test_a_run_outside_of_its_baseline_is_not_compared_again(tmp_path, monkeypatch):
    faulty.record(tmp_path / "base", dtype="float32")
    for number in (1, 2):
        faulty.record(tmp_path / "base" / f"twin{number:05d}", noise=number, dtype="float32")
    wrong = faulty.record(tmp_path / "wrong", faulty.Faults(epsilon=1e-2), noise=9, dtype="float32")
    rule, compared = baseline.BaselineRule(tmp_path / "base"), []
    own = baseline.compare
    monkeypatch.setattr(baseline, "compare", lambda *args, **options: compared.append(args) or own(*args, **options))
    answers = [rule.add(wrong.first(num_steps))[1] for num_steps in range(1, wrong.num_steps + 1)]
    assert len(answers) > 2 and answers[0] and not any(answers[1:]) and len(compared) == 1


def test_the_command_shows_a_run_and_exits_by_what_it_found(tmp_path, monkeypatch):
    monkeypatch.setattr(watch_module, "POLL_SECONDS", 0.01)
    write_run(tmp_path / "right", manifest(settings=SGD))
    status, said = run(tmp_path / "right")
    assert status == 0 and "3 of 3 steps, ended" in said and said.rstrip().endswith("no alarm")
    write_run(tmp_path / "nan", manifest(settings=SGD), tamper=nan_at("forward", 1))
    status, said = run(tmp_path / "nan", "--once")
    assert (
        status == 1 and "not finite: step 1, ranks 0, 1: the loss is the first value" in said and "loss nan" not in said
    )
    write_run(tmp_path / "killed", manifest(settings=SGD), stop_before=2)
    assert run(tmp_path / "killed", "--timeout", "0.05")[0] == 3
    assert run(tmp_path / "killed", "--once")[0] == 0
    assert run(tmp_path / "none")[0] == 2 and run(tmp_path / "right", "--timeout", "0")[0] == 2


def test_each_alarm_runs_a_command_of_the_user(tmp_path):
    write_run(tmp_path / "nan", manifest(settings=SGD), tamper=nan_at("forward", 1))
    line = f'echo "$CROSSFRAME_ALARM_KIND, $CROSSFRAME_ALARM_STEP, $CROSSFRAME_ALARM" >> {tmp_path / "log"}; exit 3'
    status, said = run(tmp_path / "nan", "--on-alarm", line)
    assert status == 1 and "--on-alarm failed at the alarm of step 1: exit status 3" in said
    (logged,) = (tmp_path / "log").read_text().splitlines()
    assert logged.startswith("not finite, 1, not finite: step 1, ranks 0, 1: the loss is the first value")


class Writer:
    """What a SummaryWriter, or a run of W&B, is given."""

    def __init__(self):
        self.given = []

    def add_scalar(self, name, value, step):
        self.given.append((name, value, step))


class WandbRun:
    def __init__(self):
        self.given, self.metrics = [], []

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, row):
        self.given.append(row)


def test_a_monitor_tells_callbacks_the_log_and_writers_and_outlives_their_errors(tmp_path, caplog):
    write_run(tmp_path / "run", manifest(settings=SGD), tamper=nan_at("forward", 1))
    told, writer, wandb = [], Writer(), WandbRun()

    def fails(alarm):
        raise ValueError("no network")

    monitor = Monitor(on_alarm=[fails, told.append], writer=writer)
    monitor.begin(tmp_path / "run")
    assert monitor.judge() and not monitor.judge()
    assert told == monitor.alarms and isinstance(told[0], Alarm)
    assert "not finite: step 1" in caplog.text and "no network" in caplog.text
    assert ("crossframe/loss", pytest.approx(synthetic_loss(tmp_path / "run")), 0) in writer.given
    assert {name: step for name, value, step in writer.given if value == 1.0 and name == "crossframe/alarms"}
    assert any(name == "crossframe/gradient_norm/block" for name, _, _ in writer.given)
    monitor = Monitor(writer=wandb)
    monitor.begin(tmp_path / "run")
    monitor.judge()
    assert wandb.metrics == [("crossframe/step", None), ("crossframe/*", "crossframe/step")]
    assert [row["crossframe/step"] for row in wandb.given] == [0, 1, 2]
    assert [row["crossframe/alarms"] for row in wandb.given] == [0.0, 1.0, 1.0]


def synthetic_loss(directory):
    return Recording.open(directory).losses()[0].mean()


def test_a_monitor_is_due_at_recorded_steps_and_every_so_many():
    monitor, kept = Monitor(every=4, checkpoint=lambda num_steps: kept.append(num_steps)), []
    assert [step for step in range(9) if monitor.is_due(step, recorded=step == 5)] == [3, 5, 7]
    assert not monitor.judge()  # no recording has begun
    monitor.save_checkpoint(3)
    Monitor().save_checkpoint(4)
    assert kept == [3]


def test_a_run_that_cannot_be_compared_with_its_baseline_is_a_note(tmp_path):
    faulty.record(tmp_path / "base", dtype="float32")
    for number in (1, 2):
        faulty.record(tmp_path / "base" / f"twin{number:05d}", noise=number, dtype="float32")
    write_run(tmp_path / "other", manifest(dtype="float32"))
    other, rule = Recording.open(tmp_path / "other"), baseline.BaselineRule(tmp_path / "base")
    step, text, note = rule.add(other.first(1))
    assert (step, text) == (0, "")
    assert note.startswith(
        "the run is not compared with its baseline base: learning rate differs: 0.01 in base, 0.1 in other"
    )
    assert rule.add(other) == (0, "", "")


def test_a_monitor_that_fails_does_not_end_the_training(tmp_path, caplog):
    write_run(tmp_path / "run", manifest())
    monitor = Monitor()
    monitor.begin(tmp_path / "run")
    (tmp_path / "run" / "manifest.json").unlink()
    assert not monitor.judge() and "no longer monitored" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every: expected an int of at least 1, got 0"),
        ({"window": -1}, "window: expected an int of at least 0"),
        ({"checkpoint": "here"}, "expected functions"),
        ({"writer": 3}, "writer: expected an object with add_scalar"),
    ],
)
def test_invalid_options_of_a_monitor_raise(options, message):
    with pytest.raises(UsageError, match=message):
        Monitor(**options)


def alarms_of(directory, made, tamper=None):
    write_run(directory, made, tamper=tamper)
    follower = Follower(directory)
    follower.advance()
    return follower


def test_numbers_of_a_step_are_norms_by_unit(tmp_path):
    """Of the first of two replicas, and as the loop computed the norm of all."""
    made = manifest(4, replicate=2)
    other = lambda p, s, r, n, a: a + 1 if r >= 2 and p in ("reduce", "update") else a  # noqa: E731
    follower = alarms_of(tmp_path, made, other)
    recording, last = Recording.open(tmp_path), follower.last
    units = {"": ("embed", "bias"), "block": ("block.w", "block.k_bias")}

    def norms(phase):
        return {
            unit: pytest.approx(np.sqrt(sum(np.square(recording.full(phase, 2, name)).sum() for name in names)))
            for unit, names in units.items()
        }

    assert (last.step, last.gradients, last.parameters) == (2, norms("reduce"), norms("update"))
    assert list(last.gradients) == list(last.parameters) == ["", "block"]
    assert last.grad_norm == pytest.approx(math.hypot(*last.gradients.values()))
    assert last.loss == pytest.approx(recording.losses()[2].mean())
    assert list(follower.losses) == pytest.approx(recording.losses().mean(axis=1)) and follower.losses.maxlen == 512


@pytest.mark.parametrize(("step", "last"), [(1, 0), (2, 2)])
def test_the_last_recorded_step_may_not_be_finite(tmp_path, step, last):
    made = manifest(settings=SGD, steps=4, schedule=Schedule(dense=1, every=2))
    write_run(tmp_path, made, tamper=nan_at("forward", step), stop_before=step + 1)
    follower = Follower(tmp_path)
    assert follower.last is None
    follower.advance()
    assert follower.last.step == last and [alarm.step for alarm in follower.alarms] == [step]


def test_a_new_step_is_a_sign_of_life(tmp_path, monkeypatch):
    write_run(tmp_path, manifest())
    times = iter((5.0, 6.0, 7.0))
    monkeypatch.setattr("crossframe.monitoring.follow.time.monotonic", lambda: next(times))
    follower = Follower(tmp_path)
    assert follower.changed_at == 5.0
    for _ in range(2):
        follower.advance()
        assert (follower.changed_at, follower.num_steps) == (6.0, 3)


@pytest.mark.parametrize("settings", [{}, {FORWARD_ONLY: True}])
def test_losses_jump_in_training_alone(tmp_path, settings):
    made = manifest(1, steps=31, schedule=Schedule(dense=1, every=100), settings=settings)
    follower = alarms_of(tmp_path, made, lambda p, s, r, n, a: a * 0 + (1 if s < 17 else 3) if p == "forward" else a)
    text = "step 29: the loss jumped: the last 13 values, 3 or more, all exceed the 17 before them, which are at most 1"
    assert follower.alarms == [Alarm(Kind.LOSS, 29, "", text)] * (not settings)


def test_units_whose_gradients_explode_are_named(tmp_path):
    follower = alarms_of(
        tmp_path, manifest(1, steps=7), lambda p, s, r, n, a: a * 1e4 if (p, s) == ("reduce", 5) else a
    )
    assert [(alarm.kind, alarm.step, alarm.subject) for alarm in follower.alarms] == [
        (Kind.GRADIENT, 5, ""),
        (Kind.GRADIENT, 5, "block"),
    ]
    for alarm, unit in zip(follower.alarms, ("(root)", "block"), strict=True):
        assert alarm.text.startswith(f"step 5: the gradient of unit '{unit}' explodes: its norm is ")


@pytest.mark.parametrize(
    ("settings", "value", "found"),
    [
        pytest.param({"optimizer": "Adam"}, 0.95e-8, True, id="less than the default"),
        pytest.param({"optimizer": "AdamW", "eps": None}, 0.95e-8, True, id="not stated"),
        pytest.param({"optimizer": "AdamW"}, 1.05e-8, False, id="more than the default"),
        pytest.param({"optimizer": "AdamW", "eps": 1e-6}, 0.95e-6, True, id="less than stated"),
        pytest.param({"optimizer": "AdamW", "eps": 1e-6}, 1.05e-6, False, id="more than stated"),
        pytest.param({"optimizer": "SGD", "eps": 1e-6}, 0.95e-6, False, id="SGD"),
    ],
)
def test_elements_of_a_unit_are_compared_with_epsilon(tmp_path, settings, value, found):
    """All 18 elements of the gradient of "block" have this value: it is their root mean square."""
    small = lambda p, s, r, n, a: a * 0 + value if p == "reduce" and n.startswith("block") else a  # noqa: E731
    alarms = [
        alarm for alarm in alarms_of(tmp_path, manifest(settings=settings), small).alarms if alarm.kind == "gradient"
    ]
    assert [(alarm.step, alarm.subject) for alarm in alarms] == [(1, "block")] * found
    assert all(f"the root mean square of its elements is {value:.2g}" in alarm.text for alarm in alarms)


def test_units_whose_parameters_jump_are_named(tmp_path):
    follower = alarms_of(
        tmp_path, manifest(1, steps=7), lambda p, s, r, n, a: a * 1e4 if (p, s) == ("update", 5) else a
    )
    assert [(alarm.kind, alarm.step, alarm.subject) for alarm in follower.alarms if alarm.kind != Kind.RANKS] == [
        (Kind.OPTIMIZER, 5, "parameters of "),
        (Kind.OPTIMIZER, 5, "parameters of block"),
    ]
    for alarm, unit in zip(follower.alarms, ("(root)", "block"), strict=False):
        assert alarm.text.startswith(f"step 5: the parameters of unit '{unit}' jump: their norm is ")


@pytest.mark.parametrize(
    ("ranks", "names", "more"),
    [
        pytest.param((2,), ("embed",), "", id="one piece"),
        pytest.param((2,), ("embed", "block.w"), "; and 1 more values of this step", id="one piece of each"),
        pytest.param((2, 3), ("embed", "block.w"), "; and 3 more values of this step", id="two pieces of each"),
    ],
)
def test_pieces_on_which_replicas_differ_are_counted(tmp_path, ranks, names, more):
    apart = lambda p, s, r, n, a: a + 1 if (p, s) == ("update", 2) and r in ranks and n in names else a  # noqa: E731
    (alarm,) = alarms_of(tmp_path, manifest(4, replicate=2), apart).alarms
    assert alarm.step == 2 and alarm.text.startswith(
        "step 2: the updated value of 'embed' differs between ranks 0, 2 by"
    )
    assert alarm.text.endswith(f"(relative){more}")


def test_replicas_that_differ_by_rounding_are_a_note(tmp_path):
    """One note, of the first step that shows it."""
    apart = lambda p, s, r, n, a: np.nextafter(a, np.inf) if p == "update" and s and r == 2 else a  # noqa: E731
    follower = alarms_of(tmp_path, manifest(4, replicate=2), apart)
    assert follower.alarms == []
    (note,) = [note for note in follower.notes if "rounding" in note]
    assert note.startswith("step 1: the updated value of 'embed' ")


def test_lost_updates_are_noted_and_others_raise_alarms(tmp_path, monkeypatch):
    write_run(tmp_path, manifest())
    moves = [
        [UnexpectedMove("a", "is lost", True), UnexpectedMove("b", "moved"), UnexpectedMove("c", "is lost", True)],
        [UnexpectedMove("d", "is lost", True)],
        [UnexpectedMove("e", "moved"), UnexpectedMove("f", "moved"), UnexpectedMove("g", "moved")],
    ]
    monkeypatch.setattr(UpdateRule, "add", lambda _, recording, step: moves[step])
    monkeypatch.setattr("crossframe.monitoring.alarm.QUIET_STEPS", 1)
    follower = Follower(tmp_path)
    follower.advance()
    assert follower.notes == ["step 0: the parameter 'a' and 1 more is lost"]
    assert follower.alarms == [
        Alarm(Kind.OPTIMIZER, 0, "moved", "step 0: the parameter 'b' moved"),
        Alarm(Kind.OPTIMIZER, 2, "moved", "step 2: the parameter 'e' and 2 more moved"),
    ]
