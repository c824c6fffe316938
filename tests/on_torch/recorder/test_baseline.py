"""Goldens of runs in torch: the commands, and the fixture of the pytest plugin."""

from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from torch import nn

from crossframe.cli.fixture import Training
from crossframe.errors import UsageError
from crossframe.processes import module_command
from crossframe.recording import Recording
from tests import forked
from tests.commands import status_of

SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(int(sys.argv[2]))
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16, eps=float(sys.argv[1])), nn.GELU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=len(sys.argv) > 3)
for _ in range(3):
    model(torch.randn(8, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("{not JSON")
"""
TESTS = """
import os
import torch
from torch import nn


def train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16, eps=float(os.environ["EPS"])), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(8, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_one(training):
    training.matches("one", train, perturbed_runs=2)


def test_two(training):
    training.matches("two", train, perturbed_runs=2)
"""


def test_a_script_is_checked_against_its_golden(forks, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    command = ("--", "python", "train.py")
    assert status_of("baseline", "record", "--perturbed-runs", 2, *command, "1e-5", 1) == 0
    golden = Path("baselines/train.golden")
    assert Recording.open(golden).golden.command == ("python", "train.py", "1e-5", "1")
    before = golden.read_bytes()
    assert status_of("baseline", "check", "--junit", "junit.xml", *command, "1e-5", 2, "foreach") == 0
    capfd.readouterr()
    assert status_of("baseline", "check", "--json", *command, "1e-1", 1) == 1
    assert '"verdict": "bug"' in capfd.readouterr().out and Path("runs/baseline/train/report.html").exists()
    assert status_of("baseline", "update", *command, "1e-1", 1) == 2  # nobody can confirm it
    assert golden.read_bytes() == before
    capfd.readouterr()
    assert status_of("baseline", "update", "--yes", *command, "1e-1", 1) == 0
    assert "There is a bug: at step 0" in capfd.readouterr().out and golden.read_bytes() != before
    assert status_of("baseline", "check", "--golden", golden) == 0  # its own command


def fixture(folder, *, updates=False):
    told = []
    return Training(folder, folder / "scratch", updates, of="test_of.py::test", tell=told.append), told


def trains(eps=1e-5, seed=0):
    def train():
        if seed is not None:
            torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16, eps=eps), nn.Linear(16, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(2):
            model(torch.randn(8, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def test_a_function_matches_its_golden(tmp_path):
    training, _ = fixture(tmp_path)
    with pytest.raises(pytest.fail.Exception, match=r"there is no golden yet.*--update-baselines"):
        training.matches("one", trains())
    updating, told = fixture(tmp_path, updates=True)
    updating.matches("one", trains(), perturbed_runs=2)
    assert len(told) == 1 and str(tmp_path / "baselines" / "one.golden") in told[0]
    training.matches("one", trains())
    with pytest.raises(
        pytest.fail.Exception, match=r"(?s)There is a bug: at step 0 the output of module '1'.*report: .*html"
    ):
        training.matches("one", trains(eps=1e-1))


def test_an_unseeded_function_gets_no_golden(tmp_path):
    updating, _ = fixture(tmp_path, updates=True)
    with pytest.raises(UsageError, match=r"perturbed run 1 .* seed everything"):
        updating.matches("one", trains(seed=None), perturbed_runs=2)
    with pytest.raises(UsageError, match="a file name without a folder"):
        updating.matches("../one", trains())


@pytest.mark.exhaustive
def test_the_plugin_updates_goldens_under_xdist_and_compares_with_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    Path("test_training.py").write_text(TESTS)
    known = any(entry.name == "crossframe" for entry in entry_points(group="pytest11"))
    plugin = [] if known else ["-p", "crossframe.pytest_plugin"]

    def run(*options, eps="1e-5"):
        command = [*module_command("pytest:console_main", ["-q", "-p", "no:cacheprovider", *plugin, *options])]
        return forked.run(command, captured=True, environment={"EPS": eps})

    status, printed = run("-n", "1", "--update-baselines")  # a process of its own, whose goldens the first one lists
    assert status == 0 and printed.count(" kB") == 2, printed
    status, printed = run("-p", "no:xdist", eps="1e-1")
    assert status == 1 and printed.count("There is a bug: at step 0") >= 2, printed
