"""The second stage: faults that the quick tests do not see are judged with the tests that start commands and ranks.

One run of the suite without any fault, with a probe in the place of each of them, shows which tests execute it, in whichever
process. A test that fails has seen a fault if it passes without it.
"""

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.mutate.notes import NOTES, PROBES
from tests.mutate.operators import MODULE, STATEMENTS, Mutant
from tests.mutate.suite import KILLED, PYTEST, SURVIVED, Suite

FOLDERS = ("tests/across", "tests/core", "tests/on_jax", "tests/on_torch")
LIMIT_SECONDS = 120.0
"""Of the tests that judge one fault, as they take without it. The quickest are taken."""
_HIT = '__import__("crossframe._probe")._probe.hit({})'
_PROBE = f"""import os

def hit(number):
    folder = os.environ.get({PROBES!r})
    if folder and not os.path.exists(f"{{folder}}/{{number}}"):
        open(f"{{folder}}/{{number}}", "w").close()
"""


class Slower:
    """The tests that execute each of some faults, by how long they take.

    Attributes:
        tests: ids of tests that pass without a fault, quickest first.
        num_tests, num_failed: tests that ran without a fault, and those of them that failed.
        seconds: how long that took.
    """

    def __init__(self, suite: Suite, faults: Sequence[Mutant], jobs: int) -> None:
        self.suite = suite
        by_path: dict[str, dict[int, Mutant]] = {}
        for number, fault in enumerate(faults):
            by_path.setdefault(fault.path, {})[number] = fault
        probed = suite.copied_with("probed", {path: partial(with_probes, faults=own) for path, own in by_path.items()})
        (probed / "crossframe/_probe.py").write_text(_PROBE)
        began = time.monotonic()
        _, notes = _pytest(probed, ["--maxfail=0", "-n", str(jobs), "--dist", "loadfile", *FOLDERS])
        self.seconds = time.monotonic() - began
        self.num_tests, self.num_failed = len(notes), sum(not note["passed"] for note in notes)
        setup = {(_file(note["test"]), number) for note in notes for number in note["setup"]}
        self._seconds = {note["test"]: note["seconds"] for note in notes if note["passed"]}
        order = sorted(self._seconds, key=self._seconds.__getitem__)
        called = {(note["test"], number) for note in notes for number in note["call"]}
        # What ran in the setup of one test, such as a recording, may be judged by any other test of its file.
        self.tests = {
            fault: [test for test in order if (test, number) in called or (_file(test), number) in setup]
            for number, fault in enumerate(faults)
        }

    def chosen(self, fault: Mutant) -> list[str]:
        """The tests that judge it: those that the first stage did not run, within the limit of time."""
        before = {test for stage in self.suite.stages(fault) for test in stage}
        found, seconds = [], 0.0
        for test in self.tests[fault]:
            seconds += self._seconds[test]
            if test not in before and (not found or seconds <= LIMIT_SECONDS):
                found.append(test)
        return found

    def judge(self, fault: Mutant) -> Callable[[], int]:
        """Work for a fork: SURVIVED or KILLED; it prints what it ran and which test failed."""

        def work() -> int:
            tests = self.chosen(fault)
            print(f"{len(tests)} of {len(self.tests[fault])} tests that execute it were run")
            if not tests:
                return SURVIVED
            with self.suite.with_fault(fault):
                failed = self._failed(Path.cwd(), tests)
            if not failed or self._failed(self.suite.folder, failed):
                return SURVIVED
            print(f"seen by {failed[0]}")
            return KILLED

        return work

    def _failed(self, folder: Path, tests: Sequence[str]) -> list[str]:
        limit = 60 + 5 * sum(self._seconds[test] for test in tests)
        try:
            status, notes = _pytest(folder, tests, limit)
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


def with_probes(source: bytes, faults: Mapping[int, Mutant]) -> bytes:
    """A source that behaves the same, and notes when the place of a fault is executed.

    That of a fault outside of functions is each function of the module, and that of one where no call may stand, such as the
    pattern of a case, is its function.
    """
    insertions: list[tuple[int, int, int, str]] = []
    for number, fault in faults.items():
        own = _around(number, fault)
        if fault.function == MODULE or not _compiles(_inserted(source, own)):
            own = list(_in_functions(source, number, fault.function))
        insertions += own
    return _inserted(source, insertions)


def _around(number: int, fault: Mutant) -> list[tuple[int, int, int, str]]:
    """Insertions as (place, rank among those of this place, rank within these, text)."""
    hit = _HIT.format(number)
    if fault.what in STATEMENTS:
        return [(fault.start, 1, 0, f"{hit}; ")]
    return [(fault.start, 2, -fault.stop, f"({hit} or "), (fault.stop, 0, 0, ")")]


def _in_functions(source: bytes, number: int, function: int) -> Iterator[tuple[int, int, int, str]]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if function in (MODULE, min(node.lineno, *(each.lineno for each in node.decorator_list), node.lineno)):
            documented = ast.get_docstring(node) is not None and len(node.body) > 1
            first = node.body[documented]
            begin = min([first, *getattr(first, "decorator_list", [])], key=lambda each: each.lineno)
            column = begin.col_offset - (begin is not first)  # the @ of a decorator
            separator = "; " if begin.lineno == node.lineno else "\n" + " " * column
            yield starts[begin.lineno - 1] + column, 1, 0, _HIT.format(number) + separator


def _inserted(source: bytes, insertions: Sequence[tuple[int, int, int, str]]) -> bytes:
    for place, _, _, text in sorted(insertions, reverse=True):
        source = source[:place] + text.encode() + source[place:]
    return source


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "", "exec")
    except SyntaxError:
        return False
    return True
