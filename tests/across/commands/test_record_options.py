"""What `crossframe record SCRIPT` says at once of options and scripts that it cannot use."""

import pytest

from crossframe.cli.entry import run
from crossframe.cli.script_imports import is_of_jax


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


def test_scripts_of_jax_are_refused_before_they_run(capsys, tmp_path):
    script, ran = tmp_path / "train.py", tmp_path / "ran"
    script.write_text(f"import helper\nopen({str(ran)!r}, 'w')\n")
    (tmp_path / "helper.py").write_text("def step():\n    import jax.numpy as jnp\n")
    said = said_of(capsys, str(script), "--output", str(tmp_path / "recording"))
    assert "imports JAX" in said and "jax_backend.Recorder" in said and not ran.exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import jax", True),
        ("from flax import nnx", True),
        ("import jax, torch", False),
        ("from transformers import Trainer\nimport jax", False),
        ("import numpy", False),
        ("import (", False),
    ],
)
def test_frameworks_are_told_by_imports(tmp_path, text, expected):
    (tmp_path / "train.py").write_text(text)
    assert is_of_jax(tmp_path / "train.py") is expected
