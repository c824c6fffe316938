"""A recording that grows, judged as it grows, and `crossframe watch`."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from crossframe.cli import watch as watch_module
from crossframe.cli.commands import app
from crossframe.errors import RecordingError, UsageError
from crossframe.monitoring import Alarm, Follower, Kind, Monitor, baseline
from crossframe.monitoring.updates import UpdateRule
from crossframe.recording import Recording, RecordingWriter, create_recording
from crossframe.recording.known_settings import LOSSES, MEAN
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
