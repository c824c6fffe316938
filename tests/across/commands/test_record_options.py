"""What `crossframe record SCRIPT` says at once of options and scripts that it cannot use."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from crossframe.cli.baseline import golden_path
from crossframe.cli.entry import run
from crossframe.cli.explain import command_of
from crossframe.cli.script_imports import is_of_jax
from crossframe.cli.training_command import TrainingCommand
from crossframe.recording import Recording
from crossframe.recording.known_settings import COMMAND
from crossframe.scripts import NOT_RECORDED, run_again_file
from crossframe.verdict import Verdict, compare
from tests.on_jax.helpers.scripts import EAGER


def said_of(capsys, *arguments):
    assert run(["record", *arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        (["train.py", "--mode", "x"], "train.py -- --mode x"),
        (["train.py", "--every", "1", "--mode=x y"], "train.py --every 1 -- '--mode=x y'"),
        (["train.py", "fast", "-x"], "train.py fast -- -x"),
    ],
)
def test_forgotten_dashes_before_options_are_named(capsys, given, typed):
    assert f"put options of the script after --: crossframe record {typed}" in said_of(capsys, *given)


def test_unknown_options_without_a_script_are_unknown(capsys):
    said = said_of(capsys, "torch", "gpt", "--mode", "x")
    assert "No such option: --mode" in said and "script" not in said


def test_options_of_torch_are_refused_for_scripts_of_jax_before_they_run(capsys, tmp_path):
    script, ran = tmp_path / "train.py", tmp_path / "ran"
    script.write_text(f"import helper\nopen({str(ran)!r}, 'w')\n")
    (tmp_path / "helper.py").write_text("def step():\n    import jax.numpy as jnp\n")
    said = said_of(capsys, str(script), "--output", str(tmp_path / "recording"), "--nproc-per-node", "2")
    assert "--nproc-per-node starts processes of torch" in said and not ran.exists()
    said = said_of(capsys, str(script), "--output", str(tmp_path / "recording"), "--framework", "numpy")
    assert "expected torch or jax, got 'numpy'" in said and not ran.exists()
    said = said_of(capsys, str(script), "--output", str(tmp_path / "recording"), "--detail", "whole")
    assert "expected full, sketch or auto, got 'whole'" in said and not ran.exists()


def test_a_script_of_jax_is_recorded_by_the_command(capsys, tmp_path):
    """Which imports torch too, so that the framework is stated."""
    script = tmp_path / "train.py"
    script.write_text(f"if False:\n    import torch\n{EAGER}")
    output = tmp_path / "recording"
    arguments = ["record", str(script), "--output", str(output), "--framework", "jax", "--every", "2", "--dense", "1"]
    arguments += ["--detail", "sketch"]
    assert run(arguments) == 0, capsys.readouterr().err
    found = Recording.open(output)
    assert found.manifest.detail == "sketch"
    assert found.manifest.framework == "jax" and found.num_steps == 3
    assert found.manifest.settings["command"].endswith("train.py --framework jax --every 2 --dense 1 --detail sketch")


def test_a_script_is_recorded_again_without_idle_optimizers(tmp_path, monkeypatch, capsys):
    script, output, runs, ranks = tmp_path / "train.py", tmp_path / "out", [], [0, 1]
    script.write_text("import torch\n")
    output.mkdir()
    run_again_file(output, "7").write_text('{"idle_optimizers": [5]}')  # of a command that was killed

    def run_once(program, **_):
        runs.append(json.loads(program[-2]))
        if len(runs) > 1:
            return 0, ""
        for rank in range(2):
            run_again_file(output, str(rank)).write_text(json.dumps({"idle_optimizers": [2 if rank in ranks else 3]}))
        return NOT_RECORDED, ""

    monkeypatch.setattr("crossframe.cli.record.run", run_once)
    assert run(["record", str(script), "--output", str(output), "--perturbed-runs", "2"]) == 0
    assert [(each.get("idle_optimizers"), each["overwrite"], each["perturbed_run"]) for each in runs] == [
        (None, False, 0),
        ([2], True, 0),
        ([2], True, 1),
        ([2], True, 2),
    ]
    said = capsys.readouterr().out
    assert "ran again with --idle-optimizer 2: the script does not use all optimizers that it makes" in said
    assert not any(output.iterdir())
    stated = runs[1]["settings"]["command"]
    assert stated.endswith("--idle-optimizer 2") and "--idle-optimizer" not in runs[0]["settings"]["command"]
    again = command_of(stated.split(), Path("out"), 1, "torch")
    assert json.loads(again[-2])["idle_optimizers"] == [2]
    runs[:], ranks[:] = [], [0]  # ranks that list other optimizers
    assert run(["record", str(script), "--output", str(output)]) == 2 and len(runs) == 1
    arguments = ["record", str(script), "--output", str(tmp_path / "stated"), "--idle-optimizer", "0"]
    assert run([*arguments, "--idle-optimizer", "3"]) == 0 and runs[-1]["idle_optimizers"] == [0, 3]
    script.write_text("import jax\n")
    assert "--idle-optimizer is of scripts of torch" in said_of(capsys, str(script), "--idle-optimizer", "0")


def test_a_recording_of_forward_alone_is_repeated_as_one():
    stated = ["crossframe", "record", "eval.py", "--forward", "--every", "100", "--dense", "16", "--", "1"]
    command = command_of(stated, Path("out"), 1, "torch")
    assert command[-2:] == ["eval.py", "1"] and json.loads(command[-3])["forward_only"] is True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import jax", True),
        ("from flax import nnx", True),
        ("import jax, torch", False),
        ("from transformers import Trainer\nimport jax", False),
        ("import optax\nfrom torch.utils import data", True),
        ("import optax\nfrom transformers import FlaxGPT2LMHeadModel", True),
        ("import optax, torch\ntorch.optim.SGD([])", False),
        ("import optax\nfrom torch import optim", False),
        ("import optax, accelerate", False),
        ("import numpy", False),
        ("import (", False),
    ],
)
def test_frameworks_are_told_by_imports(tmp_path, text, expected):
    (tmp_path / "train.py").write_text(text)
    assert is_of_jax(tmp_path / "train.py") is expected


# Both frameworks record by crossframe.scripts, which prints the error.
@pytest.mark.parametrize("framework", [pytest.param("torch", marks=pytest.mark.exhaustive), "jax"])
def test_an_error_of_a_script_is_printed_as_without_the_command(capfd, tmp_path, monkeypatch, framework):
    monkeypatch.chdir(tmp_path)
    text = (
        "import os\nos.chdir('/')\ntry:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('b') from error\n"
    )
    Path("train.py").write_text(text)
    subprocess.run([sys.executable, "train.py"], check=False)
    alone = capfd.readouterr().err
    assert "raise ValueError('b') from error" in alone
    assert run(["record", "train.py", "--framework", framework]) == 2
    end = "crossframe: train.py was not recorded, or not to its end: exit status 1\n"
    assert capfd.readouterr().err == alone + end


PACKAGE = {
    "nets.py": "from torch import nn\n\n\ndef net():\n    return nn.Linear(3, 1)\n",
    "train.py": """
import sys, torch
from pkg import nets
from .nets import net
assert nets.net is net and sys.path[0] != __file__.rpartition("/")[0], sys.path
torch.manual_seed(0)
model = net()
optimizer = torch.optim.SGD(model.parameters(), float(sys.argv[1]))
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
""",
    "__init__.py": "",
    "__main__.py": "from . import train\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "pkg"
    folder.mkdir()
    for name, text in PACKAGE.items():
        (folder / name).write_text(text)
    monkeypatch.chdir(tmp_path)


def test_modules_are_recorded_as_scripts_are(package, capsys):
    for name, module in (("train", "pkg.train"), ("again", "pkg")):
        assert run(["record", "-m", module, "--output", name, "--", "0.1"]) == 0, capsys.readouterr().err
    recordings = [Recording.open(Path(name)) for name in ("train", "again")]
    assert [each.manifest.settings[COMMAND] for each in recordings] == [
        f"crossframe record --module {module} --every 100 --dense 2 -- 0.1" for module in ("pkg.train", "pkg")
    ]
    assert compare(*recordings).verdict is Verdict.EQUAL
    again = command_of(shlex.split(recordings[0].manifest.settings[COMMAND]), Path("out"), 1, "torch")
    assert again[-3:] == ["-m", "pkg.train", "0.1"]


@pytest.mark.parametrize("name", ["pkg.missing", "missing", "pkg.train.missing"])
def test_what_is_no_module_is_refused(package, capsys, name):
    assert run(["record", "-m", name]) == 2
    assert f"expected a module that `python -m {name}` would run in {Path.cwd()}" in capsys.readouterr().err
    Path("pkg/__main__.py").unlink()
    assert run(["record", "-m", "pkg"]) == 2


def test_a_command_may_name_a_module():
    words = ["A=1", "torchrun", "--nproc-per-node", "2", "-m", "pkg.train", "--lr", "1"]
    found = TrainingCommand.parse(words, command="check")
    assert (found.script, found.arguments, found.is_module) == (Path("pkg.train"), ("--lr", "1"), True)
    assert found.words() == ("A=1", "torchrun", "--standalone", *words[2:])
    assert TrainingCommand.parse(found.words(), command="check") == found
    assert golden_path(None, ["python", "-m", "pkg.train"]) == golden_path(None, ["python", "train.py"])
