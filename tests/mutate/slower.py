"""The second stage: faults that the quick tests do not see are judged with the tests that start commands and ranks.

Which functions of the core these tests execute, in whichever process, is learned once for each file of tests, in a copy whose
functions note that they run, and is kept in `runs/mutate`. A test that fails has seen a fault if it passes without it.
"""

import ast
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.mutate.notes import NOTES, PROBES
from tests.mutate.operators import MODULE, Mutant
from tests.mutate.suite import KILLED, PYTEST, SURVIVED, Suite

FOLDERS = ("tests/across", "tests/on_jax", "tests/on_torch")
LIMIT_SECONDS = 120.0
"""Of the tests that judge one fault, as they take without it. The quickest are taken."""
_PROBE = f"""import os

def hit(number):
    folder = os.environ.get({PROBES!r})
    if folder and not os.path.exists(f"{{folder}}/{{number}}"):
        open(f"{{folder}}/{{number}}", "w").close()
"""


@dataclass
class Slower:
    """The tests that start commands and ranks, and the functions of the core that they execute.

    Attributes:
        suite: the sources.
        kept: a JSON file: by file of tests its sha256, the names of functions, and for each test that passes its seconds and
            which of these functions it executes.
    """

    suite: Suite
    kept: Path

    def __post_init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = json.loads(self.kept.read_text()) if self.kept.exists() else {}

    def learn(self, jobs: int, folders: Sequence[str] = FOLDERS) -> None:
        """Run the files of tests that are new or have changed, without a fault."""
        folder = self.suite.folder
        files = {path.relative_to(folder).as_posix() for name in folders for path in (folder / name).rglob("test_*.py")}
        digests = {file: hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in sorted(files)}
        changed = [file for file in digests if self._known.get(file, {}).get("sha256") != digests[file]]
        if not changed:
            return
        names: list[str] = []

        def probed(path: str) -> Callable[[bytes], bytes]:
            return lambda source: with_probes(path, source, names)

        paths = [path.relative_to(folder).as_posix() for path in sorted(folder.glob("crossframe/**/*.py"))]
        copy = self.suite.copied_with("probed", {path: probed(path) for path in paths})
        (copy / "crossframe/_probe.py").write_text(_PROBE)
        _, notes = _pytest(copy, ["--maxfail=0", "-n", str(jobs), "--dist", "loadfile", *changed])
        for file in changed:
            own = [note for note in notes if _file(note["test"]) == file]
            # What ran in the setup of one test, such as a recording, may be judged by any other test of its file.
            setup = {number for note in own for number in note["setup"]}
            executed = sorted(setup.union(*(note["call"] for note in own)))
            places = {number: place for place, number in enumerate(executed)}
            self._known[file] = {
                "sha256": digests[file],
                "functions": [names[number] for number in executed],
                "tests": {
                    note["test"]: [note["seconds"], [places[number] for number in sorted(setup.union(note["call"]))]]
                    for note in own
                    if note["passed"]
                },
            }
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        self.kept.write_text(json.dumps(self._known))

    def tests(self, fault: Mutant) -> dict[str, float]:
        """The tests that execute a fault's function, or any of its module if it is in none, quickest first, and their seconds."""
        source = (self.suite.folder / fault.path).read_bytes()
        wanted = {f"{fault.path}:{name}" for name, _, line in _functions(source) if fault.function in (MODULE, line)}
        found = {}
        for file, known in self._known.items():
            places = {place for place, name in enumerate(known["functions"]) if name in wanted}
            if places and (self.suite.folder / file).exists():
                found |= {test: seconds for test, (seconds, own) in known["tests"].items() if places & set(own)}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def judge(self, fault: Mutant) -> Callable[[], int]:
        """Work for a fork: SURVIVED or KILLED; it prints what it ran and which test failed."""

        def work() -> int:
            tests, chosen, seconds = self.tests(fault), [], 0.0
            for test, own in tests.items():
                if chosen and seconds + own > LIMIT_SECONDS:
                    break
                chosen.append(test)
                seconds += own
            print(f"{len(chosen)} of {len(tests)} other tests that execute its function were run")
            if not chosen:
                return SURVIVED
            with self.suite.with_fault(fault):
                failed = _failed(Path.cwd(), chosen, seconds)
            if not failed or _failed(self.suite.folder, failed, tests[failed[0]]):
                return SURVIVED
            print(f"seen by {failed[0]}")
            return KILLED

        return work


def _failed(folder: Path, tests: Sequence[str], seconds: float) -> list[str]:
    """The first of these tests that fails, if any does."""
    try:
        status, notes = _pytest(folder, tests, 60 + 5 * seconds)
    except subprocess.TimeoutExpired:
        os.killpg(0, signal.SIGPROF)
        raise
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print(f"pytest ended with status {status}")
    return [note["test"] for note in notes if not note["passed"]]


def _pytest(folder: Path, arguments: Sequence[str], limit: float | None = None) -> tuple[int, list[dict[str, Any]]]:
    """Run pytest in a copy of the repository; its exit status, and what it wrote down about each test."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as notes:
        environment = {**os.environ, NOTES: notes, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
        command = [sys.executable, "-m", "pytest", *PYTEST, "-p", "tests.mutate.notes", *arguments]
        with open(folder.with_name(f"{folder.name}.pytest"), "w") as log:
            ended = subprocess.run(
                command, cwd=folder, env=environment, timeout=limit, stdout=log, stderr=subprocess.STDOUT
            )
        lines = [line for path in Path(notes).glob("*.jsonl") for line in path.read_text().splitlines()]
    return ended.returncode, [json.loads(line) for line in lines]


def _file(test: str) -> str:
    return test.partition("::")[0]


def with_probes(path: str, source: bytes, names: list[str]) -> bytes:
    """A source whose functions note that they run, by their place in `names`, to which they are added as "path:name"."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    insertions = []
    for name, node, _ in _functions(source):
        documented = ast.get_docstring(node) is not None and len(node.body) > 1
        first = node.body[documented]
        begin = min([first, *getattr(first, "decorator_list", [])], key=lambda each: each.lineno)
        column = begin.col_offset - (begin is not first)  # the @ of a decorator
        separator = "; " if begin.lineno == node.lineno else "\n" + " " * column
        hit = f'__import__("crossframe._probe")._probe.hit({len(names)}){separator}'
        insertions.append((starts[begin.lineno - 1] + column, hit))
        names.append(f"{path}:{name}")
    for place, hit in sorted(insertions, reverse=True):
        source = source[:place] + hit.encode() + source[place:]
    return source


def _functions(source: bytes) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Each function with its name, which includes those around it, and its first line, decorators included."""
    waiting: list[tuple[str, ast.AST]] = [("", ast.parse(source))]
    while waiting:
        outer, node = waiting.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (
                    f"{outer}{child.name}",
                    child,
                    min(child.lineno, *(d.lineno for d in child.decorator_list), child.lineno),
                )
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            waiting.append((f"{outer}{child.name}." if named else outer, child))  # type: ignore[attr-defined]
