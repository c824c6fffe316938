"""The tests of the core on a copy of the repository, run in forks of one process that has imported what they need.

The fork of a mutant has a copy of its own with the fault in it, so that processes that tests start have it too.
"""

import compileall
import json
import os
import resource
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
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

from tests.mutate.operators import MODULE, Mutant

COPIED = ("crossframe", "docs", "experiments", "tests", "torch_backend", "jax_backend", "pyproject.toml", "README.md")
# Tests that look at sources, or start a browser.
LEFT_OUT = ("tests/core/test_imports.py", "tests/core/explorer/test_page.py")
MEMORY_BYTES = 6 * 2**30
# The limit of a test's CPU time: a number of seconds, and a multiple of its time without a fault.
LEAST_SECONDS, TIMES = 5.0, 5.0
PYTEST = ["--assert=plain", "-q", "-x", "--no-header", "--no-summary", "--tb=no", "-p", "no:cacheprovider"]
SURVIVED, KILLED = 0, 1


@dataclass
class Item:
    """A test: how long it takes under the tracer, and the functions of the core that it reaches, as (file, first line)."""

    seconds: float
    reached: set[tuple[str, int]]


@dataclass
class Suite:
    """All tests of the core, by node id, in a folder of its own.

    Attributes:
        folder: the copy.
        items: by node id.
        collecting: functions that importing a test file reaches, by file.
    """

    folder: Path
    items: dict[str, Item] = field(default_factory=dict)
    collecting: dict[str, set[tuple[str, int]]] = field(default_factory=dict)

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

    def files(self) -> list[str]:
        """Every file with tests in it, doctests of the core among them."""
        tests = self.folder.glob("tests/core/**/test_*.py")
        sources = (path for path in self.folder.glob("crossframe/**/*.py") if b">>>" in path.read_bytes())
        names = [path.relative_to(self.folder).as_posix() for path in (*sorted(tests), *sorted(sources))]
        return [name for name in names if name not in LEFT_OUT]

    def learn(self, file: str) -> Callable[[], int]:
        """Work for a fork: run one file without a fault, and write down what its tests reach and take."""

        def work() -> int:
            _limit_memory()
            recorder = _Recorder(self.folder)
            sys.settrace(recorder.trace)
            threading.settrace(recorder.trace)
            status = pytest.main([*PYTEST, file], plugins=[recorder])
            sys.settrace(None)
            self._notes(file).write_text(json.dumps([recorder.seconds, recorder.reached]))
            return int(status)

        return work

    def _notes(self, file: str) -> Path:
        return self.folder.with_name(f"{file.replace('/', '-')}.json")

    def learned(self, file: str) -> None:
        """Take in what the fork wrote down."""
        seconds, reached = json.loads(self._notes(file).read_text())
        places = {name: {(path, line) for path, line in found} for name, found in reached.items()}
        self.collecting[file] = places.pop("")
        for name, taken in seconds.items():
            self.items[name] = Item(taken, places[name])

    def stages(self, mutant: Mutant) -> list[list[str]]:
        """Which tests to run, as node ids: those that reach the function, in files named after the module's folders first.

        Tests of the module's own file may reach it in a process that they start, so they run in any case.
        """
        first, others = [], []
        for name, item in self.items.items():
            file = name.partition("::")[0]
            reaches = _reaches(mutant, item.reached) or _reaches(mutant, self.collecting[file])
            *folders, own = _words(mutant.path)
            if (
                own in _named(file)
                or file == mutant.path
                or (reaches and any(each in _named(file) for each in folders))
            ):
                first.append((not reaches, item.seconds, name))
            elif reaches:
                others.append((False, item.seconds, name))
        return [[name for _, _, name in sorted(stage)] for stage in (first, others) if stage]

    def judge(self, mutant: Mutant) -> Callable[[], int]:
        """Work for a fork: SURVIVED or KILLED."""

        def work() -> int:
            _limit_memory()
            with self.with_fault(mutant):
                for stage in self.stages(mutant):
                    files = list(dict.fromkeys(name.partition("::")[0] for name in stage))
                    limits = {name: LEAST_SECONDS + TIMES * self.items[name].seconds for name in stage}
                    _limit(60.0)  # while tests are collected
                    if pytest.main([*PYTEST, *files], plugins=[_Chosen(limits)]) != pytest.ExitCode.OK:
                        return KILLED
            return SURVIVED

        return work

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


def _reaches(mutant: Mutant, places: set[tuple[str, int]]) -> bool:
    """Whether functions that ran have a fault, or are of the module that has it outside of functions."""
    if mutant.function == MODULE:
        return any(path == mutant.path for path, _ in places)
    return (mutant.path, mutant.function) in places


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


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


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


class _Recorder:
    """What each test takes, and which functions of the core run in it; "" stands for collection."""

    def __init__(self, folder: Path) -> None:
        self.prefix, self.root = f"{folder}/crossframe/", f"{folder}/"
        self.seconds: dict[str, float] = {}
        self.places: dict[str, set[tuple[str, int]]] = {"": set()}
        self.now = self.places[""]

    @property
    def reached(self) -> dict[str, list[tuple[str, int]]]:
        return {
            name: [(path.removeprefix(self.root), line) for path, line in places if path.startswith(self.prefix)]
            for name, places in self.places.items()
        }

    def trace(self, frame: Any, event: str, argument: Any) -> None:
        self.now.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.now = self.places[item.nodeid] = set()
        before = sum(os.times()[:2])
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = sum(os.times()[:2]) - before
