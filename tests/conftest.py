"""Fixtures that several folders use."""

import compileall
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import forked
from tests.cpu_time import LIST
from tests.ranks import Ranks, started_ranks

# A shell starts what is in its background with SIGINT ignored, and so would be the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several processes share the processors. With two threads each, an operation on a few numbers waits until both threads have had
# their turn: tests take twice the time, on a busy machine ten times. Read when torch and numpy are imported, here and in what
# tests start.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

EXHAUSTIVE = "CROSSFRAME_EXHAUSTIVE_TESTS"
JAX_DEFAULTS = "CROSSFRAME_TESTS_OF_JAX_DEFAULTS"
"""Set: neither jax_enable_x64 nor flags of XLA. No option, since tests/on_jax/conftest.py is read before options are."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--exhaustive`: tests marked `exhaustive` too, and every combination where a test otherwise takes those that differ.

    `--slow`: with or without the tests of slow.txt, or only these (`tests.cpu_time`).
    """
    parser.addoption(
        "--exhaustive", action="store_true", help="also tests that take hours, and every combination of each"
    )
    parser.addoption("--slow", choices=("with", "without", "only"), default="with", help="the tests of tests/slow.txt")


def pytest_configure(config: pytest.Config) -> None:
    """Tests look at it when they are collected."""
    if config.getoption("--exhaustive"):
        os.environ[EXHAUSTIVE] = "1"
    if JAX_DEFAULTS in os.environ:
        os.environ.pop("XLA_FLAGS", None)
    elif not config.getoption("--exhaustive"):
        # Small models run for milliseconds, and JAX compiles them for seconds.
        os.environ.setdefault("XLA_FLAGS", _quick_to_compile())
    if not config.getoption("--exhaustive"):
        # Many tests make the same program anew, from functions of their own. To note the line of Python in which each operation
        # stands takes JAX a tenth of its time.
        cache = tempfile.TemporaryDirectory(prefix="crossframe-tests-xla-")
        config.add_cleanup(cache.cleanup)
        kept = {
            "jax_compilation_cache_dir": cache.name,
            "jax_persistent_cache_min_compile_time_secs": 0,
            "jax_traceback_in_locations_limit": 0,
        }
        os.environ.update({name.upper(): str(value) for name, value in kept.items()})
        if jax := sys.modules.get("jax"):  # by the tests that were named on the command line
            for name, value in kept.items():
                jax.config.update(name, value)
    # In several processes files go by their names. xdist would begin with those of many tests, and end with the few long ones,
    # one after the other in one process while the others have nothing to do.
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Write bytecode once: several processes that start at the same time would each compile and rewrite all modules."""
    if getattr(session.config.option, "numprocesses", None) and not sys.dont_write_bytecode:
        _compile_all(session.config)


def _compile_all(config: pytest.Config) -> None:
    folders = [
        config.rootpath / name for name in ("crossframe", "torch_backend", "jax_backend", "experiments", "tests")
    ]
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    num = os.cpu_count() or 1
    hook, context = config.pluginmanager.rewrite_hook, multiprocessing.get_context("fork")
    processes = [context.Process(target=_compile, args=(files[i::num], hook), daemon=True) for i in range(num)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _compile(files: Sequence[Path], hook: Any) -> None:
    for path in files:
        compileall.compile_file(path, quiet=2)
        if path.name.startswith("test_") and not list(
            (path.parent / "__pycache__").glob(f"{path.stem}.*-pytest-*.pyc")
        ):
            spec = hook.find_spec(path.stem, [str(path.parent)])
            # Without builtins the module ends at its first import, after pytest has rewritten its assertions and kept it.
            with suppress(ImportError):
                hook.exec_module(SimpleNamespace(__name__=path.stem, __spec__=spec, __builtins__={}))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked `exhaustive` to `--exhaustive`, unless the command line names single tests, and choose by `--slow`."""
    if (choice := config.getoption("--slow")) != "with":
        listed = frozenset(LIST.read_text().splitlines())
        _deselect(config, items, [item for item in items if (item.nodeid in listed) is (choice == "without")])
    if config.getoption("--exhaustive") or any("::" in argument for argument in config.args):
        return
    _deselect(config, items, [item for item in items if item.get_closest_marker("exhaustive")])


def _deselect(config: pytest.Config, items: list[pytest.Item], others: list[pytest.Item]) -> None:
    left_out = {*map(id, others)}
    items[:] = [item for item in items if id(item) not in left_out]
    config.hook.pytest_deselected(items=others)


def pytest_collection_finish() -> None:
    """Exempt all that is imported from garbage collection, which otherwise takes a tenth of the time of tests on JAX, and collect
    after more new objects than usual: tests leave few cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _quick_to_compile() -> str:
    """Flags under which XLA compiles some six times as fast: it does not optimise machine code, emits fused loops plainly (which
    XLA of JAX 0.11 has no more), and does not cut a small program into many parts, which takes a third of the time."""
    flags = "--xla_backend_optimization_level=0"
    if find_spec("jaxlib") and version("jaxlib").startswith("0.10."):
        flags += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    return flags


@pytest.fixture(autouse=True)
def own_main() -> Iterator[None]:
    """Restore `__main__`, which a script that is run in this process remains: processes that later tests start import it."""
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes with a gloo group, by world size."""
    with started_ranks() as started:
        yield started


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts that are recorded or traced, and what reads checkpoints of torch, run in forks of the server of ranks."""
    for command in ("record", "explain", "checkpoints"):
        monkeypatch.setattr(f"crossframe.cli.{command}.run", forked.run)
