"""The tests on a copy of the repository, and which functions of the core each of them executes.

That is learned once for each file of tests, in a copy whose functions have probes, and kept. Quick tests, those of tests/core and
doctests, run in forks of one process that has imported what they need; the others start commands and ranks, and run in processes
of their own. The fork of a mutant has a copy with the fault in it, so that processes that tests start have it too.
"""

import compileall
import hashlib
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import ml_dtypes  # noqa: F401  (imported for the forks)
import numpy  # noqa: F401
import pytest
import safetensors.numpy  # noqa: F401
from hypothesis import strategies  # noqa: F401

from tests.mutate.notes import NOTES
from tests.mutate.operators import MODULE, Mutant
from tests.mutate.probes import MODULE_PATH, MODULE_SOURCE, functions_of, with_probes

COPIED = ("crossframe", "docs", "experiments", "tests", "torch_backend", "jax_backend", "pyproject.toml", "README.md")
# Tests that look at sources, or start a browser.
LEFT_OUT = ("tests/core/test_imports.py", "tests/core/explorer/test_page.py")
QUICK = ("tests/core",)
SLOW = ("tests/across", "tests/on_jax", "tests/on_torch")
MOST_SECONDS = 120.0
"""Of the tests of each kind that judge one fault, as they take without it: the quickest are taken."""
MEMORY_BYTES = 6 * 2**30
# The limit of a test's CPU time: a number of seconds, and a multiple of its time without a fault.
LEAST_SECONDS, TIMES = 5.0, 5.0
PYTEST = ["--assert=plain", "-q", "-x", "--no-header", "--no-summary", "--tb=no", "-p", "no:cacheprovider"]
NOTED = ["-p", "tests.mutate.notes"]
SURVIVED, KILLED = 0, 1


@dataclass
class Item:
    """A test: how long it takes with probes, and the functions of the core that it executes, as "path:name"."""

    seconds: float
    executed: set[str]


@dataclass
class Suite:
    """The tests in a folder of its own.

    Attributes:
        folder: the copy.
        items: tests that pass without a fault, by node id.
        functions: the functions of the copy that has probes, by their numbers.
    """

    folder: Path
    items: dict[str, Item] = field(default_factory=dict)
    functions: list[str] = field(default_factory=list)

    @classmethod
    def copied(cls, root: Path, folder: Path) -> "Suite":
        """A copy of a repository's sources, without any tests known yet."""
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        folder.mkdir()
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, folder / name, ignore=ignored)
            else:
                shutil.copy(root / name, folder / name)
        compileall.compile_dir(folder, quiet=2)  # once, since every fork and process imports most of it
        return cls(folder)

    def copied_with(self, name: str, edits: Mapping[str, Callable[[bytes], bytes]]) -> Path:
        """Another copy, with some of its sources edited; its other files are links."""
        own = self.folder.with_name(name)
        shutil.copytree(self.folder, own, copy_function=os.link)
        for path, edit in edits.items():
            source = (own / path).read_bytes()
            for old in (own / path, *(own / path).parent.glob(f"__pycache__/{(own / path).stem}.*")):
                old.unlink()
            (own / path).write_bytes(edit(source))
        return own

    def probed(self) -> Path:
        """A copy whose functions have probes."""

        def edit(path: str) -> Callable[[bytes], bytes]:
            return lambda source: with_probes(path, source, self.functions)

        paths = [path.relative_to(self.folder).as_posix() for path in sorted(self.folder.glob("crossframe/**/*.py"))]
        copy = self.copied_with("probed", {path: edit(path) for path in paths})
        (copy / MODULE_PATH).write_text(MODULE_SOURCE)
        compileall.compile_dir(copy / "crossframe", quiet=2)
        return copy

    def files(self, *, quick: bool) -> list[str]:
        """Every file with tests in it, of those that are quick or of the others."""
        tests = [
            path for name in (QUICK if quick else SLOW) for path in sorted((self.folder / name).rglob("test_*.py"))
        ]
        if quick:  # doctests
            tests += sorted(path for path in self.folder.glob("crossframe/**/*.py") if b">>>" in path.read_bytes())
        names = [path.relative_to(self.folder).as_posix() for path in tests]
        return [name for name in names if name not in LEFT_OUT]

    def known(self, file: str, kept: Path) -> bool:
        """Take in what is kept about a file of tests; False if there is nothing, or the file has changed since."""
        path = kept / f"{file.replace('/', '-')}.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        if found.get("sha256") != hashlib.sha256((self.folder / file).read_bytes()).hexdigest():
            return False
        for test, (seconds, executed) in found["tests"].items():
            self.items[test] = Item(seconds, {found["functions"][place] for place in executed})
        return True

    def learn(self, kept: Path) -> Callable[[str], Callable[[], int]]:
        """Work for forks in the copy with probes: run one file without a fault, and keep what its tests execute."""

        def work(file: str) -> int:
            notes = self.folder.with_name(f"{os.getpid()}.jsonl")
            if is_quick(file):
                status = _pytest_here(["--maxfail=0", file], notes)
            else:
                status = _pytest_apart(Path.cwd(), ["--maxfail=0", file], notes)
            if status not in (0, 1, 5):  # all passed, some failed, there are none
                return status
            lines = _read(notes)
            shared = {number for line in lines for number in line["shared"]}
            executed = sorted(shared.union(*(line["own"] for line in lines)))
            places = {number: place for place, number in enumerate(executed)}
            fields = {
                "sha256": hashlib.sha256((self.folder / file).read_bytes()).hexdigest(),
                "functions": [self.functions[number] for number in executed],
                "tests": {
                    line["test"]: [line["seconds"], [places[number] for number in sorted(shared.union(line["own"]))]]
                    for line in lines
                    if line["passed"]
                },
            }
            kept.mkdir(parents=True, exist_ok=True)
            (kept / f"{file.replace('/', '-')}.json").write_text(json.dumps(fields))
            return status

        return lambda file: lambda: work(file)

    def executing(self, mutant: Mutant, *, quick: bool) -> list[str]:
        """The tests that execute a fault's function, or any of its module if it is in none, quickest first."""
        functions = list(functions_of((self.folder / mutant.path).read_bytes()))
        wanted = {f"{mutant.path}:{name}" for name, _, line in functions if mutant.function in (MODULE, line)}
        if not functions:
            wanted = {f"{mutant.path}:"}
        found = [name for name, item in self.items.items() if is_quick(name) == quick and wanted & item.executed]
        return sorted(found, key=lambda name: self.items[name].seconds)

    def judge(self, mutant: Mutant) -> Callable[[], int]:
        """Work for a fork: SURVIVED or KILLED, by quick tests. Those named after the module's folders come first, and all run."""

        def work() -> int:
            words = _words(mutant.path)
            tests = self.executing(mutant, quick=True)
            named = [name for name in tests if any(word in _named(name.partition("::")[0]) for word in words)]
            others = self._quickest([name for name in tests if name not in named])
            with self.with_fault(mutant):
                for stage in (named, others):
                    files = list(dict.fromkeys(name.partition("::")[0] for name in stage))
                    limits = {name: LEAST_SECONDS + TIMES * self.items[name].seconds for name in stage}
                    _limit(60.0)  # while tests are collected
                    if stage and _pytest_here(files, plugins=[_Chosen(limits)]) != pytest.ExitCode.OK:
                        return KILLED
            return SURVIVED

        return work

    def judge_slowly(self, mutant: Mutant) -> Callable[[], int]:
        """Work for a fork: SURVIVED or KILLED, by the other tests; it prints how many ran, and which one failed."""

        def work() -> int:
            tests = self.executing(mutant, quick=False)
            chosen = self._quickest(tests)
            print(f"{len(chosen)} of {len(tests)} other tests that execute its function were run")
            if not chosen:
                return SURVIVED
            with self.with_fault(mutant):
                failed = self._failed(Path.cwd(), chosen)
            if not failed or self._failed(self.folder, failed):
                return SURVIVED
            print(f"seen by {failed[0]}")
            return KILLED

        return work

    def _quickest(self, tests: Sequence[str]) -> list[str]:
        """As many of these tests, the quickest first, as take MOST_SECONDS; at least one, if there is any."""
        taken = itertools.accumulate(self.items[test].seconds for test in tests)
        return [
            test for i, (test, seconds) in enumerate(zip(tests, taken, strict=True)) if not i or seconds <= MOST_SECONDS
        ]

    def _failed(self, folder: Path, tests: Sequence[str]) -> list[str]:
        """The first of these tests that fails, if any does."""
        notes = self.folder.with_name(f"{os.getpid()}-in-{folder.name}.jsonl")
        try:
            limit = 60 + TIMES * sum(self.items[test].seconds for test in tests)
            status = _pytest_apart(folder, tests, notes, timeout=limit, stdout=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            os.killpg(0, signal.SIGPROF)
            raise
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            print(f"pytest ended with status {status}")
        return [line["test"] for line in _read(notes) if not line["passed"]]

    @contextmanager
    def with_fault(self, mutant: Mutant) -> Iterator[None]:
        """A context whose current folder is a copy of the repository with a fault."""
        own = self.copied_with(f"{os.getpid()}", {mutant.path: mutant.apply})
        os.chdir(own)
        sys.path[0] = str(own)
        try:
            yield
        finally:
            shutil.rmtree(own, ignore_errors=True)


def is_quick(test: str) -> bool:
    """Whether a test, or a file of them, is a quick one.

    >>> is_quick("tests/core/step/test_cost.py::test_a"), is_quick("tests/across/commands/test_cli.py")
    (True, False)
    """
    return test.startswith((*QUICK, "crossframe"))


def _pytest_here(arguments: Sequence[str], notes: Path | None = None, plugins: Sequence[object] = ()) -> int:
    """Run pytest in this process, a fork; its exit status."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    if notes is not None:
        os.environ[NOTES] = str(notes)
        arguments = [*NOTED, *arguments]
    return int(pytest.main([*PYTEST, *arguments], plugins=[*plugins]))


def _pytest_apart(folder: Path, arguments: Sequence[str], notes: Path, **options: Any) -> int:
    """Run pytest in a process of its own, in a copy of the repository; its exit status."""
    environment = {**os.environ, NOTES: str(notes), "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-m", "pytest", *PYTEST, *NOTED, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, **options).returncode


def _read(notes: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def _words(path: str) -> list[str]:
    """The folders and the name of a module.

    >>> _words("crossframe/layout/flat.py")
    ['layout', 'flat']
    """
    return path.removesuffix(".py").removesuffix("/__init__").split("/")[1:] or ["crossframe"]


def _named(file: str) -> str:
    """What a file of tests is named after, by its folder and name.

    >>> _named("tests/core/layout/test_flat.py")
    'layout/flat.py'
    """
    return file.removeprefix("tests/core/").replace("test_", "")


def fork(work: Callable[[], int], folder: Path) -> int:
    """Run work in a child process, in a copy of the repository; the child's process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(folder)
        sys.path[:] = [str(folder), *(entry for entry in sys.path if entry)]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "crossframe")]:
            del sys.modules[name]
        # Descriptors too, as pytest captures those.
        log = os.open(log_of(folder, os.getpid()), os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        hypothesis.settings.register_profile("mutate", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
        hypothesis.settings.load_profile("mutate")
        status = work()
    except BaseException:  # nothing of the parent may run on in the child
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def log_of(folder: Path, pid: int) -> Path:
    """Where a fork's output goes."""
    return folder.with_name(f"{pid}.log")


def _limit(seconds: float) -> None:
    """End this process when it has used so much more of the processor."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


class _Chosen:
    """Runs the chosen tests alone, in their order, each within its limit."""

    def __init__(self, limits: dict[str, float]) -> None:
        self.limits = limits
        self.order = {name: i for i, name in enumerate(limits)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.order), key=lambda item: self.order[item.nodeid]
        )

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        _limit(self.limits[item.nodeid])
