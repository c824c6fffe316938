"""Makes the repository under git, lets the changes arrive one by one, and notes what its gate answers to each."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from crossframe.errors import UsageError
from crossframe.processes import run
from experiments.goldens.history.changes import HERE, REPOSITORY, Change, read_changes

RESULTS = HERE / "results"
WORKFLOW = Path(".github", "workflows", "training.yml")
_GATE = "crossframe baseline check"
_GOLDENS = (Path("baselines", "train.golden"), Path("tests", "baselines", "gpt.golden"))
_TEST = "python -m pytest -q -p no:cacheprovider tests"


@dataclass(frozen=True)
class Answer:
    """What the gate answered to a change.

    Attributes:
        name: of the change.
        passes: whether the gate should let it pass.
        status: exit status of the workflow's check.
        right: whether the status is one of those that are right.
        names_place: whether the report's first line matches the stated pattern; None: nothing is to be named.
        test_status: exit status of pytest: 0 passed, 1 failed.
        seconds, test_seconds: wall clock of both.
        line: the report's first line, or the last line of the errors if there is no report.
    """

    name: str
    passes: bool
    status: int
    right: bool
    names_place: bool | None
    test_status: int
    seconds: float
    test_seconds: float
    line: str

    @property
    def test_is_right(self) -> bool:
        """Whether pytest passed and failed as it should."""
        return (self.test_status == 0) == self.passes and self.test_status in (0, 1)


def measure(of: str, names: Sequence[str], folder: Path, console: Console) -> list[Answer]:
    """The gate's answers to the changes, in their order.

    Args:
        of: the set of changes.
        names: only these changes are checked; harmless ones are merged in any case. Empty: all.
        folder: the repository is made in it, and answers.json is written to it after each change.

    Raises:
        UsageError: no such change.
    """
    changes = read_changes(of)
    if strange := set(names) - {change.name for change in changes}:
        raise UsageError(f"history: --change: expected among {', '.join(c.name for c in changes)}, got {strange}")
    root = _repository(folder)
    began = time.monotonic()
    _must(root, _gate(root).replace("check --github --junit runs/junit.xml", "record"))
    _must(root, f"{_TEST} --update-baselines")
    sizes = [(root / path).stat().st_size / 1000 for path in _GOLDENS]
    console.print(f"goldens of {sizes[0]:.0f} and {sizes[1]:.0f} kB in {time.monotonic() - began:.0f} s")
    _commit(root, "Goldens")
    answers = []
    for change in changes:
        _git(root, "switch", "-q", "-c", change.name)
        change.apply(root)
        _commit(root, f"{change.message}")
        if not names or change.name in names:
            answers.append(_answer(root, change))
            _tell(answers[-1], console)
            content = {"golden_kb": sizes, "answers": [asdict(each) for each in answers]}
            (folder / "answers.json").write_text(json.dumps(content, indent=1) + "\n")
        _git(root, "switch", "-q", "main")
        if change.passes:
            _git(root, "merge", "-q", "--ff-only", change.name)
            if answers and answers[-1].name == change.name:
                _update(root, answers[-1])
    return answers


def _repository(folder: Path) -> Path:
    root = (folder / "repository").resolve()
    if root.exists():
        raise UsageError(f"history: {root} exists; remove it, or choose another folder with --output")
    shutil.copytree(REPOSITORY, root, ignore=shutil.ignore_patterns("__pycache__"))
    _git(root, "init", "-q", "-b", "main")
    _commit(root, "A small GPT")
    return root


def _answer(root: Path, change: Change) -> Answer:
    shutil.rmtree(root / "runs", ignore_errors=True)
    status, seconds, printed, errors = _run(root, _gate(root))
    test_status, test_seconds, _, _ = _run(root, _TEST)
    lines = [line for line in printed.splitlines() if line and not line.startswith("::")] or errors.splitlines()[-1:]
    line = lines[0] if lines else ""
    names_place = None if change.passes else re.search(change.names, line, re.IGNORECASE) is not None
    right = status in change.statuses
    return Answer(change.name, change.passes, status, right, names_place, test_status, seconds, test_seconds, line)


def _update(root: Path, answer: Answer) -> None:
    """Record goldens again that a harmless change did not pass."""
    if answer.status != 0:
        _must(root, _gate(root).replace("check --github --junit runs/junit.xml", "update --yes"))
    if answer.test_status != 0:
        _must(root, f"{_TEST} --update-baselines")
    if answer.status or answer.test_status:
        _commit(root, "Goldens recorded again")


def _gate(root: Path) -> str:
    """The line of the workflow that checks."""
    lines = (root / WORKFLOW).read_text().splitlines()
    return next(line.partition("run: ")[2] for line in lines if f"run: {_GATE}" in line)


def _run(root: Path, line: str) -> tuple[int, float, str, str]:
    """Run a line of the workflow in the repository: its exit status, its seconds, and what it printed and complained of."""
    paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    errors, began = root.parent / "errors.txt", time.monotonic()
    script = f"cd {root} && {{ {line}; }} 2> {errors.resolve()}"
    status, printed = run(["bash", "-c", script], captured=True, environment={"PATH": paths, "COLUMNS": "1000"})
    return status, time.monotonic() - began, printed, errors.read_text(errors="replace")


def _must(root: Path, line: str) -> None:
    status, _, printed, errors = _run(root, line)
    if status not in (0, 1) or (status == 1 and "pytest" in line):
        raise UsageError(f"history: `{line}` failed with exit status {status}:\n{printed[-2000:]}\n{errors[-2000:]}")


def _git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=author", "-c", "user.email=author@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def _commit(root: Path, message: str) -> None:
    _git(root, "add", "-A")
    _git(root, "commit", "-q", "-m", message)


def _tell(answer: Answer, console: Console) -> None:
    said = "right" if answer.right else "WRONG"
    tested = "right" if answer.test_is_right else "WRONG"
    console.print(
        f"{answer.name:22} status {answer.status} {said} in {answer.seconds:.0f} s; pytest {answer.test_status} {tested} "
        f"in {answer.test_seconds:.0f} s; {answer.line}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
