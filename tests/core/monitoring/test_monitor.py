"""What a monitor does with alarms, and the numbers that it writes."""

import pytest

from crossframe.errors import UsageError
from crossframe.monitoring import Alarm, Follower, Kind, Monitor
from crossframe.monitoring.follow import StepScalars
from crossframe.monitoring.scalars import scalar_writer
from tests.core.helpers.synthetic import manifest, write_run


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """A monitor that is given these alarms, of the next steps at each call."""
    write_run(tmp_path, manifest())

    def start(calls, **options):
        given = iter(calls)

        def advance(follower):
            alarms, steps = next(given)
            follower.alarms += alarms
            return alarms, [StepScalars(step, 0.5) for step in steps]

        monkeypatch.setattr(Follower, "advance", advance)
        monitor = Monitor(**options)
        monitor.begin(tmp_path)
        return monitor

    return start


def alarm(kind, step):
    return Alarm(kind, step, "", f"of step {step}")


def test_an_alarm_of_a_new_kind_is_news(judged, caplog):
    first, second, third = alarm(Kind.LOSS, 1), alarm(Kind.LOSS, 2), alarm(Kind.RANKS, 2)
    told = []
    monitor = judged(
        [([], [0]), ([first], [1]), ([second], [2]), ([third, second], [2]), ([], [3])], on_alarm=told.append
    )
    assert [monitor.judge() for _ in range(5)] == [False, True, False, True, False]
    assert told == monitor.alarms == [first, second, third, second]
    assert caplog.messages == [each.describe() for each in told]


def test_each_step_is_written_with_its_alarms(judged):
    rows = []

    class Writer:
        def add_scalar(self, name, value, step):
            rows.append((name, value, step))

    monitor = judged([([alarm(Kind.LOSS, 1), alarm(Kind.RANKS, 1), alarm(Kind.LOSS, 2)], [0, 1, 2])], writer=Writer())
    monitor.judge()
    losses = [("crossframe/loss", 0.5, step) for step in range(3)]
    alarms = [("crossframe/alarms", float(num), step) for step, num in enumerate((0, 2, 3))]
    assert rows == [row for both in zip(losses, alarms, strict=True) for row in both]


def test_a_monitor_that_failed_is_at_rest(judged, caplog):
    monitor = judged([])  # which raises StopIteration
    assert not monitor.judge() and caplog.text.count("the run is no longer monitored") == 1
    assert not monitor.judge() and caplog.text.count("the run is no longer monitored") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": True}, "Monitor: every: expected an int of at least 1, got True"),
        ({"every": 1.5}, "Monitor: every: expected an int of at least 1, got 1.5"),
        ({"window": -1}, "Monitor: window: expected an int of at least 0, got -1"),
        ({"on_alarm": [print, "a word"]}, "Monitor: on_alarm and checkpoint: expected functions"),
    ],
)
def test_arguments_of_another_type_raise(options, message):
    with pytest.raises(UsageError) as raised:
        Monitor(**options)
    assert str(raised.value) == message


def test_a_monitor_has_documented_defaults():
    monitor = Monitor()
    assert (monitor.every, monitor.window, monitor.alarms) == (16, 4, [])
    assert (Monitor(every=1, window=0).every, Monitor(window=0).window) == (1, 0)


def test_numbers_are_named_by_unit():
    rows = []

    class Writer:
        def add_scalar(self, name, value, step):
            rows.append((name, value, step))

    scalars = StepScalars(7, 0.5, 3.0, {"": 1.0, "block": 2.0}, {"": 4.0, "block": 5.0})
    scalar_writer(Writer())(scalars, 2)
    assert rows == [
        ("crossframe/loss", 0.5, 7),
        ("crossframe/alarms", 2.0, 7),
        ("crossframe/gradient_norm", 3.0, 7),
        ("crossframe/gradient_norm/root", 1.0, 7),
        ("crossframe/gradient_norm/block", 2.0, 7),
        ("crossframe/parameter_norm/root", 4.0, 7),
        ("crossframe/parameter_norm/block", 5.0, 7),
    ]


@pytest.mark.parametrize("known", ["log", "define_metric"])
def test_half_a_run_of_wandb_is_no_writer(known):
    writer = type("Half", (), {known: lambda *_: None})()
    with pytest.raises(UsageError, match=r"writer: expected .*, got Half"):
        scalar_writer(writer)
