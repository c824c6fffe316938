"""`crossframe inspect`, and `crossframe explain` where it cannot run, as a user meets them."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from crossframe.cli.commands import app
from tests.core.helpers.synthetic import manifest, record

OF_FOUR_PROCESSES = {"device": "cpu", "deterministic": True, "compiled": True, "processes": 4}


def run(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    return result.exit_code, result.output


def test_a_right_recording_exits_with_0(tmp_path):
    record(tmp_path / "run")
    status, said = run("inspect", tmp_path / "run")
    assert status == 0 and said.startswith("nothing wrong")


def test_a_fault_exits_with_1_and_is_printed_as_json(tmp_path):
    def nan(phase, step, rank, name, array):
        return array * np.nan if (phase, step) == ("norm", 1) else array

    record(tmp_path / "run", manifest(), tamper=nan)
    status, said = run("inspect", tmp_path / "run", "--json")
    found = json.loads(said)
    assert status == 1 and found["faulty"]
    assert [(each["step"], each["name"], each["ranks"]) for each in found["not_finite"]] == [
        (1, "gradient norm", [0, 1])
    ]


def test_no_recording_exits_with_2(tmp_path):
    status, said = run("inspect", tmp_path / "none")
    assert status == 2 and "check the path" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("fields", "options", "expected"),
    [
        pytest.param({}, [], "does not state the command that made it", id="no command"),
        pytest.param(
            {"settings": {"command": "make train"}}, [], "expected crossframe record or a script", id="unknown"
        ),
        pytest.param(
            {"settings": {"command": "python absent.py"}},
            [],
            "exit status 2, without a trace; run explain in",
            id="fails",
        ),
        pytest.param(
            {"settings": {"command": "python -c 'import signal; signal.pause()'"}},
            ["--timeout", "0.5"],
            "allow more with --timeout",
            id="late",
        ),
        pytest.param(
            {"framework": "jax", "settings": {"command": "python -c 'raise SystemExit(3)'"}},
            [],
            "exit status 3, without a trace; run explain in",
            id="jax",
        ),
        pytest.param(
            {"framework": "jax", "settings": {"command": "python train.py", "program": OF_FOUR_PROCESSES}},
            [],
            "recorded by 4 processes of JAX, and explain repeats a run of JAX in one process; record the script in one",
            id="jax of several processes",
        ),
    ],
)
def test_runs_that_cannot_be_made_again_exit_with_2(tmp_path, fields, options, expected):
    for name, factor in (("a", 1.0), ("b", 2.0)):
        made = manifest(1, **fields)
        change = lambda phase, step, rank, name, x, factor=factor: x * factor if phase == "output" else x  # noqa: E731
        record(tmp_path / name, made, tamper=change)
    status, said = run("explain", tmp_path / "a", tmp_path / "b", *options)
    assert status == 2 and "Traceback" not in said
    assert expected in " ".join(said.split())


def test_equal_recordings_have_nothing_to_explain(tmp_path):
    record(tmp_path / "a")
    status, said = run("explain", tmp_path / "a", tmp_path / "a")
    assert status == 0 and "nothing to explain" in said
