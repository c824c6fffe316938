"""`crossframe inspect`, as a user meets it."""

import json

import numpy as np
from typer.testing import CliRunner

from experiments.cli import app
from tests.core.synthetic import manifest, record


def run(*arguments):
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    return result.exit_code, result.output


def test_a_right_recording_exits_with_0(tmp_path):
    record(tmp_path / "run")
    status, said = run(tmp_path / "run")
    assert status == 0 and said.startswith("nothing wrong")


def test_a_fault_exits_with_1_and_is_printed_as_json(tmp_path):
    def nan(phase, step, rank, name, array):
        return array * np.nan if (phase, step) == ("norm", 1) else array

    record(tmp_path / "run", manifest(), tamper=nan)
    status, said = run(tmp_path / "run", "--json")
    found = json.loads(said)
    assert status == 1 and found["faulty"]
    assert [(each["step"], each["name"], each["ranks"]) for each in found["not_finite"]] == [
        (1, "gradient norm", [0, 1])
    ]


def test_no_recording_exits_with_2(tmp_path):
    status, said = run(tmp_path / "none")
    assert status == 2 and "check the path" in said and "Traceback" not in said
