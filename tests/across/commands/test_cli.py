"""The command line, as a user meets it: what it prints, what it leaves behind, and its exit status."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from crossframe.errors import UsageError
from experiments.parity.settings import RunSettings
from tests.across.helpers.recorded import record_with_torch
from tests.commands import invoke as run
from tests.commands import module_of

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def recording(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "a"
    record_with_torch(ranks, RunSettings("gpt-tiny", "float64", 2, 3), folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["parity", "gpt3"], "unknown model 'gpt3': expected one of gpt, gpt-tiny"),
        (["parity", "gpt-tiny", "--world-size", "0"], "world-size: expected an integer of at least 1, got 0"),
        (["parity", "gpt-tiny", "--steps", "0"], "steps: expected an integer of at least 1, got 0"),
        (["parity", "gpt-tiny", "--steps", "many"], "'--steps'"),
        (["parity", "gpt-tiny", "--strategy", "zero"], "strategy: expected one of full_shard, shard_grad_op"),
        (["parity", "gpt-tiny", "--fault", "oops"], "unknown fault 'oops': expected one of"),
        (["parity", "gpt-tiny", "--fault-in", "numpy"], "fault-in: expected torch or jax"),
        (["parity", "gpt-tiny", "--learning-rate", "-1"], "learning-rate: expected a number above 0"),
        (["train", "tf", "gpt-tiny"], "framework: expected torch or jax, got 'tf'"),
        (["train", "torch", "gpt-tiny", "--world-size", "1000"], "at most 64 ranks"),
        (["train", "torch", "gpt-tiny", "--device", "cuda", "--world-size", "99"], "99 ranks need 99 GPUs"),
        (["train", "torch", "gpt-tiny", "--dtype", "int8"], "dtype: expected one of float64, float32"),
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
    assert "all compared values are bitwise equal" in said
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
    return other, "written by another manifest"


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "tensors", "edited"])
def test_a_recording_that_is_missing_damaged_or_edited_is_no_answer(recording, tmp_path, how):
    other, expected = _damage(recording, tmp_path, how)
    for pair in ((recording, other), (other, recording)):
        status, said = run("compare", *pair)
        assert status == 2
        assert expected in said and "Traceback" not in said, said


def test_a_recording_is_not_overwritten_unless_asked(recording):
    before = (recording / "manifest.json").read_bytes()
    status, said = run("train", "torch", "gpt-tiny", "--output", recording)
    assert status == 2
    assert "--overwrite" in said or "overwrite" in said
    assert (recording / "manifest.json").read_bytes() == before


def test_other_settings_are_incomparable(ranks, recording, tmp_path):
    settings = RunSettings("gpt-tiny", "float64", 2, 3)
    record_with_torch(ranks, replace(settings, seed=1), tmp_path / "b")
    status, said = run("compare", recording, tmp_path / "b")
    assert status == 4
    assert "not recordings of the same run" in said and "seed" in said


# `make parity` does the same with its own model.
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtypes", [pytest.param(["float32"], id="float32"), pytest.param([], id="default dtypes")])
def test_parity_from_end_to_end_in_own_processes(tmp_path, dtypes):
    """Does what `make parity` does, with a small model, in a folder whose packages have the names of the project's."""
    for name in ("crossframe", "experiments", "torch_backend"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "random.py").write_text("raise ImportError('the random of the user')")
    arguments = ["parity", "mlp", "--steps", "2", "--world-size", "2", "--output", str(tmp_path)]
    arguments += [word for dtype in dtypes for word in ("--dtype", dtype)]
    clean = subprocess.run(
        [sys.executable, "-P", "-m", "experiments", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert clean.returncode == 0, clean.stdout + clean.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == "rounding"
    dtypes = dtypes or ["float64", "float32"]
    assert [pair["dtype"] for pair in report["pairs"]] == dtypes
    assert report["trace"]["equal"] is True
    for dtype in dtypes:
        assert re.search(rf"{dtype} +2 +2 +rounding", clean.stdout)
    assert str(tmp_path / "report.html") in clean.stdout.replace("\n", "")
    page = (tmp_path / "report.html").read_text()
    assert (
        "<svg" in page and "http://" not in re.sub(r"http://www\.w3\.org/[^\"']*", "", page) and "https://" not in page
    )


def test_parity_compares_float64_and_float32_by_default(tmp_path, monkeypatch):
    asked = []

    def run_parity(*_, dtypes, **__):
        asked.append(dtypes)
        raise UsageError("recorded nothing")

    monkeypatch.setattr("experiments.parity.run.run_parity", run_parity)
    assert run("parity", "mlp", "--output", tmp_path)[0] == 2
    assert run("parity", "mlp", "--output", tmp_path, "--dtype", "bfloat16")[0] == 2
    assert asked == [("float64", "float32"), ("bfloat16",)]


def test_a_fault_is_exit_status_1_and_named(ranks, recording, tmp_path):
    settings = RunSettings("gpt-tiny", "float64", 2, 3, fault="sum_gradients")
    record_with_torch(ranks, settings, tmp_path / "b")
    status, said = run("compare", recording, tmp_path / "b")
    assert status == 1
    assert "There is a bug: at step 0 the reduced gradient of" in said


MISSING = ("torch", "torch"), ("jax", "jax"), ("jax", "flax")
WITHOUT_A_FRAMEWORK = f"""
import os, sys
from experiments.cli.commands import app
statuses = []
for framework, missing in {MISSING}:
    if not (child := os.fork()):
        sys.modules[missing] = None
        app(["train", framework, "gpt-tiny", "--output", sys.argv[1]])
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print()
print(statuses)
"""


def test_a_missing_framework_is_one_line_with_the_install_to_run(tmp_path):
    command = [sys.executable, "-c", WITHOUT_A_FRAMEWORK, str(tmp_path / "a")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines()[-1] == "[2, 2, 2]", ended  # after bars of progress, if it is slow
    assert ended.stderr.splitlines() == [
        f"crossframe: needs {missing}: pip install 'crossframe[{framework}]'" for framework, missing in MISSING
    ]
    assert not (tmp_path / "a").exists()


def test_parity_deletes_no_report_that_it_did_not_write(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    status, said = run("parity", "gpt-tiny", "--output", tmp_path)
    assert status == 2 and "nothing was deleted" in said
    assert (tmp_path / "report.html").read_text() == "mine"
    status, said = run("parity", "gpt-tiny", "--output", tmp_path / "report.html")
    assert status == 2 and "is a file" in said


@pytest.mark.exhaustive
def test_a_parity_run_that_fails_leaves_no_report_of_an_earlier_one(tmp_path):
    (tmp_path / "torch-float64").mkdir()
    (tmp_path / "torch-float64" / "notes.txt").write_text("in the way of the recording")
    (tmp_path / "report.html").write_text("of an earlier run")
    status, said = run("parity", "gpt-tiny", "--output", tmp_path)
    assert status == 2 and "recording in torch (float64) failed" in said and "nothing in it is deleted" in said
    assert not (tmp_path / "report.html").exists()


@pytest.fixture
def spawned(tmp_path):
    """Start the command in a process; what the test leaves of it is killed."""
    processes = []

    def start(*arguments):
        command = [sys.executable, "-m", module_of(arguments[0]), *arguments, "--output", str(tmp_path / "out")]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def _children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _wait_for(condition, seconds=200):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_during_imports_is_no_traceback(tmp_path, number):
    # The first import of the command line that takes long: typer, here one that says so and does not return.
    (tmp_path / "typer.py").write_text("import time\nprint('importing', flush=True)\nwhile True:\n    time.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "crossframe", "--help"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 128 + number and "Traceback" not in said, said


@pytest.mark.exhaustive
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds processes by /proc")
def test_a_rank_that_is_killed_ends_the_run_with_its_name(tmp_path, spawned):
    process = spawned("train", "torch", "gpt-tiny", "--steps", "5000")
    _wait_for(lambda: list(tmp_path.rglob("step00000.safetensors")))
    ranks = [rank for server in _children(process.pid) for rank in _children(server)]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "failed, and the others were ended" in said and "crossframe: " in said
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks)
    status, said = run("compare", tmp_path / "out", tmp_path / "out")
    assert status == 2 and "cut off" in said


TRAINS_FOR_EVER = """
import os, torch, torch.distributed as dist
from experiments.net import net
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while True:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


# test_processes sends every signal to a smaller family of processes. One rank is enough: no other rank's end can then end it.
SIGNALS = [("script", signal.SIGKILL)]
MORE_SIGNALS = [
    ("parity", signal.SIGINT),
    ("parity", signal.SIGTERM),
    ("model", signal.SIGINT),
    ("script", signal.SIGINT),
]


@pytest.mark.exhaustive
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds processes by /proc")
@pytest.mark.parametrize(
    ("what", "number"),
    [
        *(pytest.param(what, number, id=f"{what}-{number.name}") for what, number in SIGNALS),
        *(
            pytest.param(what, number, id=f"{what}-{number.name}", marks=pytest.mark.exhaustive)
            for what, number in MORE_SIGNALS
        ),
    ],
)
def test_a_signal_to_the_command_alone_ends_its_ranks(tmp_path, spawned, what, number):
    recording = tmp_path / "out"
    if what == "script":
        (tmp_path / "train.py").write_text(TRAINS_FOR_EVER)
        (tmp_path / "experiments").mkdir()  # its own, not the project's
        (tmp_path / "experiments" / "__init__.py").touch()
        (tmp_path / "experiments" / "net.py").write_text("import torch\nnet = lambda: torch.nn.Linear(4, 4)\n")
        process = spawned("record", str(tmp_path / "train.py"), "--nproc-per-node", "1")
    elif what == "model":
        process = spawned("train", "torch", "gpt-tiny", "--steps", "5000", "--world-size", "1")
    else:
        process = spawned("parity", "gpt-tiny", "--steps", "5000", "--world-size", "1")
        recording /= "torch-float64"
    _wait_for(lambda: list(tmp_path.rglob("step00000.safetensors")))
    started = [pid for child in _children(process.pid) for pid in (child, *_children(child))]
    assert len(started) >= 2
    process.send_signal(number)
    said, _ = process.communicate(timeout=100)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in said
    _wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in started))
    status, said = run("compare", recording, recording)
    assert status == 2 and "cut off" in said
