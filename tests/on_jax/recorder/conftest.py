"""Records scripts in this process."""

import sys

import pytest

import crossframe.scripts
from jax_backend.recorder import script


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Record a script in this process into tmp_path / name; (exit status, the script's variables)."""

    def run(text, name="out", fault=1.0, **options):
        monkeypatch.setattr(sys, "argv", sys.argv)
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setenv("FAULT", str(fault))
        path, variables, own = tmp_path / "script.py", {}, crossframe.scripts.run_as_main
        path.write_text(text)
        monkeypatch.setattr(crossframe.scripts, "run_as_main", lambda *of: variables.update(own(*of)))
        status = script.run([str(path)], **({"directory": str(tmp_path / name), "every": 2, "dense": 1} | options))
        monkeypatch.setattr(crossframe.scripts, "run_as_main", own)
        return status, variables

    return run
