"""Lets recorders in this process look for modules among the objects of one test, and runs scripts that are recorded."""

import gc
import sys

import pytest

from tests.on_torch.helpers.recorded_scripts import HEAD
from torch_backend.recorder import script


@pytest.fixture(autouse=True)
def only_own_objects() -> None:
    """A recorder looks at all objects that are collected, of which the tests before leave a million: 0.2 s each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script in this process, recorded into tmp_path / "out"; its exit status."""

    def run(text, *arguments, **options):
        monkeypatch.setattr(sys, "argv", sys.argv)
        monkeypatch.setattr(sys, "path", [*sys.path])
        path = tmp_path / "script.py"
        path.write_text(HEAD + text)
        given = {"directory": str(tmp_path / "out"), "every": 2, "dense": 1} | options
        return script.run([str(path), *arguments], **given)

    return run
