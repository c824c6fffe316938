"""What processes are told by their environment and by arguments: perturbed runs, requests of traces, windows."""

import json

import pytest

from crossframe.errors import RecordingError, UsageError
from crossframe.operators.request import TRACE, Request
from crossframe.recording.known_settings import check_settings
from crossframe.recording.perturbed_runs import NUMBER_VARIABLE, perturbed_run_number
from crossframe.recording.recorded_steps import Schedule, window_arguments, window_of


@pytest.mark.parametrize(("told", "given", "number"), [(None, None, 0), ("3", None, 3), ("3", 0, 0), ("x", 2, 2)])
def test_the_number_of_a_perturbed_run(told, given, number, monkeypatch):
    monkeypatch.delenv(NUMBER_VARIABLE, raising=False)
    if told is not None:
        monkeypatch.setenv(NUMBER_VARIABLE, told)
    assert perturbed_run_number(given) == number


@pytest.mark.parametrize("told", ["", "-1", "1.5", "one"])
def test_another_number_in_the_environment_is_refused(told, monkeypatch):
    monkeypatch.setenv(NUMBER_VARIABLE, told)
    with pytest.raises(
        UsageError, match=f"{NUMBER_VARIABLE}: expected 0, or the number of a perturbed run, got {told!r}"
    ):
        perturbed_run_number(None)


@pytest.mark.parametrize("given", [-1, 1.0, True])
def test_another_argument_is_refused(given):
    with pytest.raises(UsageError, match=f"perturbed_run: expected 0, or the number of a perturbed run, got {given!r}"):
        perturbed_run_number(given)


def test_a_request_goes_through_the_environment(monkeypatch):
    request = Request("/there", 3, 1, "forward", "block", in_bits=False, judged=True, compiled=True)
    monkeypatch.delenv(TRACE, raising=False)
    assert Request.from_environment() is None
    monkeypatch.setenv(TRACE, "")
    assert Request.from_environment() is None
    monkeypatch.setenv(TRACE, request.to_environment()[TRACE])
    assert Request.from_environment() == request
    plain = {"directory": "/there", "step": 3, "rank": 1, "phase": "forward", "unit": ""}
    monkeypatch.setenv(TRACE, json.dumps(plain))
    assert Request.from_environment() == Request(**plain, in_bits=True, judged=False, compiled=False)
    for text in ("{", "{}", json.dumps(plain | {"more": 1})):
        monkeypatch.setenv(TRACE, text)
        with pytest.raises(UsageError, match="expected a request as crossframe explain makes it; unset the variable"):
            Request.from_environment()


@pytest.mark.parametrize("text", ["5", "5:5", "6:5", ":5", "5:", "-1:5", "a:b", "5:1000000000000"])
def test_a_window_needs_two_steps_in_order(text):
    with pytest.raises(UsageError, match="window: expected the first step and the one after the last"):
        window_of(text)


def test_windows_are_arguments_again():
    assert (window_of("5:6"), window_of("0:999999999999")) == ((5, 6), (0, 999999999999))
    assert window_arguments([(1, 2), (5, 9)]) == ["--window", "1:2", "--window", "5:9"] and window_arguments([]) == []


def test_a_schedule_records_dense_steps_every_so_many_and_the_last():
    schedule = Schedule(dense=2, every=4, windows=((5, 7), (9, 10)))
    assert [step for step in range(13) if schedule.is_dense(step)] == [0, 1, 5, 6, 9]
    assert [step for step in range(13) if schedule.records(step, 12)] == [0, 1, 4, 5, 6, 8, 9, 11, 12]
    assert [step for step in range(13) if schedule.records(step, None)] == [0, 1, 4, 5, 6, 8, 9, 12]


VALID = {
    "lr": [0, 1e-3, -1.0, 2**53],
    "betas": [[0.9, 0.99], (0, 1)],
    "accumulate": [1, 1 << 16],
    "batch_size": [1, 1 << 53],
    "optimizer": ["AdamW", ""],
    "param_dtype": ["bfloat16"],
    "losses": ["mean"],
    "forward_only": [True, False],
    "per_rank_statistics": [["norm"], []],
    "param_groups": [[], [{"params": ["w"], "lr": 1.0, "more": "x"}], [{"params": [], "betas": None}]],
    "program": [{}, {"device": "cpu", "threads": 4, "compiled": True}],
}
INVALID = {
    "lr": [True, "1", float("inf"), float("nan"), 2**53 + 1, -(2**53) - 1],
    "betas": [0.9, [0.9], [0.9, 0.99, 0.999], [0.9, "x"]],
    "accumulate": [0, (1 << 16) + 1, 1.0, True],
    "batch_size": [0, (1 << 53) + 1],
    "optimizer": [3],
    "reduce_dtype": ["int8", 3, "float99"],
    "forward_only": [1, "yes"],
    "per_rank_statistics": ["norm", [3]],
    "param_groups": [{}, [3], [{}], [{"params": "w"}], [{"params": ["w"], "lr": "1"}]],
    "program": [[], {"device": 1.5}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in VALID.items() for value in values])
def test_valid_settings_pass(name, value):
    check_settings({name: value, "another": object})
    check_settings({name: None})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in INVALID.items() for value in values])
def test_invalid_settings_are_refused(name, value):
    with pytest.raises(RecordingError, match=rf"manifest field 'settings\.{name}': expected "):
        check_settings({name: value})
    with pytest.raises(RecordingError, match="manifest field 'settings': expected an object"):
        check_settings([name])
