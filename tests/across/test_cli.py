"""The command line, as a user meets it: what it prints, what it leaves behind, and its exit status."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from experiments.cli import app
from experiments.parity.settings import RunSettings
from tests.across.recorded import record_with_torch


def run(*arguments):
    """Exit status and all that was printed, on one line."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(scope="module")
def recording(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "a"
    record_with_torch(ranks, RunSettings("gpt-tiny", "float64", 2, 3), folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["parity", "gpt3"], "unknown model 'gpt3': expected one of gpt, gpt-tiny"),
        (["parity", "gpt-tiny", "--world-size", "1000"], "1000"),
        (["parity", "gpt-tiny", "--world-size", "0"], "world-size: expected an integer of at least 1, got 0"),
        (["parity", "gpt-tiny", "--steps", "0"], "steps: expected an integer of at least 1, got 0"),
        (["parity", "gpt-tiny", "--steps", "many"], "'--steps'"),
        (["parity", "gpt-tiny", "--strategy", "zero"], "strategy: expected one of full_shard, shard_grad_op"),
        (["parity", "gpt-tiny", "--fault", "oops"], "unknown fault 'oops': expected one of sum_gradients"),
        (["parity", "gpt-tiny", "--fault-in", "numpy"], "fault-in: expected torch or jax"),
        (["parity", "gpt-tiny", "--learning-rate", "-1"], "learning-rate: expected a number above 0"),
        (["record", "tf", "gpt-tiny"], "framework: expected torch or jax, got 'tf'"),
        (["record", "torch", "gpt-tiny", "--world-size", "1000"], "at most 64 ranks"),
        (["record", "torch", "gpt-tiny", "--device", "cuda", "--world-size", "99"], "99 ranks need 99 GPUs"),
        (["record", "torch", "gpt-tiny", "--dtype", "int8"], "dtype: expected one of float64, float32"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_clear_line_and_exit_status_2(tmp_path, arguments, expected):
    output = tmp_path / "out"
    status, said = run(*arguments, "--output", output)
    assert status == 2
    assert expected in said
    assert "Traceback" not in said
    assert not (output / "report.html").exists() and not list(tmp_path.rglob("*.safetensors"))


def test_compare_answers_equal_for_a_recording_and_itself(recording, tmp_path):
    status, said = run("compare", recording, recording, "--output", tmp_path)
    assert status == 0
    assert "every bit that was compared is equal" in said
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "equal"


def _damage(recording, tmp_path, how):
    import shutil

    other = tmp_path / "other"
    if how == "missing":
        return other, "check the path"
    if how == "empty":
        other.mkdir()
        return other, "manifest"
    shutil.copytree(recording, other)
    events = other / "rank00001" / "events.jsonl"
    if how == "cut":
        events.write_bytes(events.read_bytes()[:-40])
        return other, "cut off"
    if how == "tensors":
        file = other / "rank00000" / "step00000.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
        return other, "step00000.safetensors"
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["model"] = "another"
    (other / "manifest.json").write_text(json.dumps(manifest))
    return other, "model"


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "tensors", "model"])
def test_a_recording_that_is_missing_damaged_or_of_another_model_is_no_answer(recording, tmp_path, how):
    other, expected = _damage(recording, tmp_path, how)
    for pair in ((recording, other), (other, recording)):
        status, said = run("compare", *pair)
        assert status == 2
        assert expected in said and "Traceback" not in said, said


def test_a_recording_is_not_overwritten_unless_asked(recording):
    before = (recording / "manifest.json").read_bytes()
    status, said = run("record", "torch", "gpt-tiny", "--output", recording)
    assert status == 2
    assert "--overwrite" in said or "overwrite" in said
    assert (recording / "manifest.json").read_bytes() == before


def test_other_settings_are_incomparable(ranks, recording, tmp_path):
    settings = RunSettings("gpt-tiny", "float64", 2, 3)
    record_with_torch(ranks, replace(settings, seed=1), tmp_path / "b")
    status, said = run("compare", recording, tmp_path / "b")
    assert status == 2
    assert "not recordings of the same run" in said and "seed" in said


def test_parity_from_end_to_end_in_processes_of_its_own(tmp_path):
    """What `make parity` does, with a small model."""
    command = [
        sys.executable,
        "-m",
        "experiments.entry",
        "parity",
        "gpt-tiny",
        "--steps",
        "2",
        "--output",
        str(tmp_path),
    ]
    (tmp_path / "report.html").write_text("of an earlier run")
    clean = subprocess.run([*command, "--world-size", "3"], capture_output=True, text=True, check=False)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == "rounding"
    assert [pair["dtype"] for pair in report["pairs"]] == ["float64", "float32"]
    assert report["trace"]["equal"] is True
    assert re.search(r"float64 +3 +2 +rounding", clean.stdout)
    assert str(tmp_path / "report.html") in clean.stdout.replace("\n", "")
    page = (tmp_path / "report.html").read_text()
    assert (
        "<svg" in page and "http://" not in re.sub(r"http://www\.w3\.org/[^\"']*", "", page) and "https://" not in page
    )


def test_a_fault_is_exit_status_1_and_named(ranks, recording, tmp_path):
    settings = RunSettings("gpt-tiny", "float64", 2, 3, fault="sum_gradients")
    record_with_torch(ranks, settings, tmp_path / "b")
    status, said = run("compare", recording, tmp_path / "b")
    assert status == 1
    assert "There is a bug: at step 0 the reduced gradient of" in said


@pytest.mark.parametrize(("framework", "missing"), [("torch", "torch"), ("jax", "jax"), ("jax", "flax")])
def test_a_missing_framework_is_one_line_with_the_install_to_run(tmp_path, framework, missing):
    code = f"import sys; sys.modules[{missing!r}] = None; from experiments.cli import app; app()"
    command = [sys.executable, "-c", code, "record", framework, "gpt-tiny", "--output", str(tmp_path / "a")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == f"crossframe: needs {missing}: pip install 'crossframe[{framework}]'\n"
    assert not (tmp_path / "a").exists()
