"""When a run is compared with its baseline, and what is said of it."""

from types import SimpleNamespace

import pytest

from crossframe.baseline import condense
from crossframe.errors import UsageError
from crossframe.monitoring import Alarm, Follower, Kind, baseline
from crossframe.monitoring.baseline import BaselineRule
from crossframe.verdict import Verdict
from tests.core.helpers.synthetic import jitter, manifest, record, write_run

STEPS = 7


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """A rule with a baseline of STEPS steps, a run of two more, and the numbers of steps that were compared."""
    write_run(tmp_path / "base", manifest(steps=STEPS))
    write_run(tmp_path / "base" / "twin00001", manifest(steps=STEPS))
    run, numbers = record(tmp_path / "run", manifest(steps=STEPS + 2)), []

    def start(verdict=Verdict.ROUNDING, first_divergence=None):
        def compare(base, part, bitwise):
            assert (base.directory, part.directory, bitwise) == (tmp_path / "base", tmp_path / "run", False)
            numbers.append(part.num_steps)
            return SimpleNamespace(verdict=verdict, first_divergence=first_divergence, reason="a reason")

        monkeypatch.setattr(baseline, "compare", compare)
        return BaselineRule(tmp_path / "base"), run, numbers

    return start


def test_steps_are_compared_whenever_their_number_has_doubled(compared):
    rule, run, numbers = compared()
    assert [rule.add(run.first(steps)) for steps in (*range(1, STEPS + 3), STEPS + 2)] == [(0, "", "")] * (STEPS + 3)
    assert rule.num_steps == STEPS and numbers == [1, 2, 4, 7]


def test_a_recording_without_steps_is_not_compared(compared):
    rule, run, numbers = compared()
    assert rule.add(run.with_num_steps(0)) == (0, "", "") and numbers == []


@pytest.mark.parametrize(("divergence", "step"), [(SimpleNamespace(step=1), 1), (None, 2)])
def test_an_alarm_has_the_step_that_diverges(compared, divergence, step):
    rule, run, numbers = compared(Verdict.BUG, divergence)
    assert rule.add(run.first(3)) == (step, "the run leaves the spread of its baseline base: a reason", "")
    assert rule.add(run) == (0, "", "") and numbers == [3]


def test_an_incomparable_run_is_not_compared_again(compared):
    rule, run, numbers = compared(Verdict.INCOMPARABLE)
    assert rule.add(run.first(3)) == (0, "", "the run is not compared with its baseline base: a reason")
    assert rule.add(run) == (0, "", "") and numbers == [3]


@pytest.mark.parametrize("verdict", [Verdict.BUG, Verdict.INCOMPARABLE])
def test_a_follower_raises_an_alarm_or_notes_once(compared, verdict):
    rule, run, _ = compared(verdict, SimpleNamespace(step=4))
    follower = Follower(run.directory, rule)
    follower.advance()
    alarm = Alarm(Kind.BASELINE, 4, "", "the run leaves the spread of its baseline base: a reason")
    assert follower.alarms == [alarm] * (verdict is Verdict.BUG)
    assert follower.notes == ["the run is not compared with its baseline base: a reason"] * (verdict is not Verdict.BUG)
    assert follower.advance() == ([], [])


def test_batches_are_kept_while_a_baseline_needs_them(compared, monkeypatch):
    rule, run, _ = compared()
    forgotten = []
    monkeypatch.setattr("crossframe.recording.live.LiveRecording.forget", lambda _, step: forgotten.append(step))
    follower = Follower(run.directory, rule)
    follower.advance()
    assert (follower.alarms, follower.notes) == ([], [])
    assert forgotten == [STEPS, STEPS + 1]
    Follower(run.directory).advance()
    assert forgotten[2:] == list(range(STEPS + 2))


def test_a_golden_is_a_baseline(tmp_path):
    made = manifest(dtype="float32")
    run = record(tmp_path / "base", made)
    perturbed = [record(tmp_path / f"noise{i}", made, tamper=jitter(i, 1e-6)) for i in (1, 2)]
    condense(run, perturbed, most_bytes=20_000).write(tmp_path / "base.golden")
    rule = BaselineRule(tmp_path / "base.golden")
    assert rule.num_steps == 3 and rule.add(run) == (0, "", "")


def test_a_baseline_without_perturbed_runs_is_refused(tmp_path):
    write_run(tmp_path / "base", manifest())
    with pytest.raises(
        UsageError, match="expected a golden, or a recording with perturbed runs, which measure rounding"
    ):
        BaselineRule(tmp_path / "base")
