"""`git bisect run crossframe baseline check --git-bisect` in a repository of a dozen commits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from crossframe.baseline import condense
from crossframe.cli.exit_status import ABORT, WRONG_USE
from crossframe.recording import Recording
from crossframe.recording.event_format import perturbed_run_folder
from tests.commands import status_of
from tests.core.helpers import synthetic

ROOT = Path(__file__).parents[3]
PROGRAM = """
# crossframe, but a training script states how it trains, and is not run.
import sys
import numpy as np
from crossframe.cli import baseline, entry
from crossframe.errors import FailedRunError
from tests.core.helpers import synthetic


def record(self, command, folder, perturbed_runs, console, *, detail):
    how = command.script.read_text()
    if "does not run" in how:
        raise FailedRunError("train.py was not recorded")
    bug = synthetic.only("reduce", "embed", lambda array: array * np.float32(1.01 if "wrong" in how else 1), step=1)
    tamper = synthetic.both(synthetic.jitter(len(how), 1e-6), bug)
    return synthetic.record(folder, synthetic.manifest(dtype="float32"), tamper=tamper, overwrite=True)


baseline.Options.record = record
baseline.find_spec = lambda name: None  # no page
sys.exit(entry.run(sys.argv[1:]))
"""
COMMITS = [f"right {i}" for i in range(8)] + [f"wrong {i}" for i in range(8, 12)]
COMMITS[5] = COMMITS[6] = "does not run"


@pytest.fixture
def bisect(tmp_path):
    """Bisects a history whose scripts are given; returns the commit that git names, the commits, and what was printed."""
    folder, repository = tmp_path / "golden", tmp_path / "repository"
    made = synthetic.manifest(dtype="float32")
    synthetic.record(folder, made)
    for i in range(1, 9):
        synthetic.record(folder / perturbed_run_folder(i), made, tamper=synthetic.jitter(i, 1e-6))
    run = Recording.open(folder)
    condense(run, run.perturbed_runs(), most_bytes=20_000).write(tmp_path / "good.golden")
    repository.mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)

    def git(*arguments):
        who = ["-c", "user.name=author", "-c", "user.email=author@example.org", "-c", "commit.gpgsign=false"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(
            ["git", *who, *arguments], cwd=repository, env=environment, capture_output=True, text=True, check=False
        )

    def bisected(scripts):
        git("init", "-q", "-b", "main")
        commits = []
        for script in scripts:
            (repository / "train.py").write_text(script)
            git("add", "train.py")
            git("commit", "-q", "--allow-empty", "-m", script)
            commits.append(git("rev-parse", "HEAD").stdout.strip())
        git("bisect", "start", commits[-1], commits[0])
        check = ["baseline", "check", "--git-bisect", "--golden", "../good.golden", "--", "python", "train.py"]
        ended = git("bisect", "run", sys.executable, "../program.py", *check)
        return git("rev-parse", "refs/bisect/bad").stdout.strip(), commits, ended

    return bisected


def test_git_finds_the_first_wrong_commit_and_skips_those_that_do_not_run(bisect):
    found, commits, ended = bisect(COMMITS)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert found == commits[8] and "skipped: train.py was not recorded" in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--golden", "none.golden", "--", "train.py"], id="no_golden"),
        pytest.param(["--no-such-option", "--golden", "none.golden", "--", "train.py"], id="unknown_option"),
        pytest.param(["--golden"], id="option_without_value"),
        pytest.param([], id="no_command"),
    ],
)
def test_wrong_use_stops_the_search(words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert status_of("baseline", "check", "--git-bisect", *words) == ABORT
    assert status_of("baseline", "check", *words) == WRONG_USE


def test_misspelled_git_bisect_stops_the_search():
    assert status_of("baseline", "check", "--git-bisekt", "--", "train.py") == ABORT
    assert status_of("baseline", "check", "--github-actions", "--", "train.py") == WRONG_USE
