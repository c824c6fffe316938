"""`python -m experiments faults`: every fault of the catalogue put into a run, and what a comparison with a clean run says of it.

The clean run is of the other framework, so that real rounding lies between the two. Below float64 it alone has perturbed runs:
those of a faulty run would show how far the fault throws rounding. All runs of one framework and size share processes; a
recording is deleted once it was judged.
"""

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from crossframe.errors import UsageError
from crossframe.recording import Recording
from crossframe.verdict import compare
from experiments.faults.catalogue import FAULTS, Fault, check_fault
from experiments.faults.catalogue.fault import ALL_DTYPES, JAX, TORCH
from experiments.faults.judging import Found, failed, found
from experiments.faults.table import table
from experiments.parity.settings import DTYPES, RunSettings, check_size

STEPS = 5
NUM_PERTURBED_RUNS = 4
MOST_RANKS = 4
MAX_JOBS = 64
USUAL = RunSettings("gpt-tiny", steps=STEPS, dense=STEPS, device="cpu")


class Recorders:
    """The processes that record, started when they are needed: one of JAX, and those of torch for one number of ranks."""

    def __init__(self, dtype: str) -> None:
        self._wide = dtype == "float64"
        self._jax: Any = None
        self._torch: Any = None
        self._world_size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(JAX)
        self._end(TORCH)

    def _end(self, framework: str) -> None:
        runs = getattr(self, f"_{framework}")
        if runs is not None:
            runs.__exit__(None, None, None)
            setattr(self, f"_{framework}", None)

    def record(self, framework: str, settings: RunSettings, path: Path, perturbed_runs: int = 0) -> None:
        """Record a run and so many perturbed runs of it.

        Raises:
            UsageError: it failed. The processes are others from then on.
        """
        from experiments.parity.grid_runs import JaxRuns, TorchRuns

        if framework == TORCH and self._world_size != settings.world_size:
            self._end(TORCH)
        if framework == JAX and self._jax is None:
            self._jax = JaxRuns(MOST_RANKS, wide=self._wide)
        if framework == TORCH and self._torch is None:
            self._torch, self._world_size = TorchRuns(settings.world_size), settings.world_size
        try:
            getattr(self, f"_{framework}").record(settings, path, perturbed_runs)
        except UsageError:
            self._end(framework)
            raise


def settings_of(fault: Fault, dtype: str) -> RunSettings:
    """The faulty run."""
    return replace(USUAL, dtype=dtype, **{"fault": fault.name, **fault.run})


def in_order(faults: Sequence[Fault]) -> list[Fault]:
    """The faults so that as few processes as possible are started, and few references are kept."""
    return sorted(faults, key=lambda fault: (settings_of(fault, "float64").world_size, fault.frameworks[0]))


class References:
    """Clean recordings, made when they are asked for and kept.

    Attributes:
        perturbed_runs: so many has each below float64.
    """

    def __init__(self, recorders: Recorders, folder: Path, dtype: str) -> None:
        self._recorders, self._folder = recorders, folder
        self.perturbed_runs = 0 if dtype == "float64" else NUM_PERTURBED_RUNS
        self._made: dict[tuple[str, RunSettings], Recording] = {}
        self._tried = 0

    def of(self, fault: Fault, dtype: str) -> Recording:
        """The run without the fault, in the other framework."""
        framework = JAX if fault.frameworks[0] == TORCH else TORCH
        clean = replace(settings_of(fault, dtype), fault="", resume_at=None)
        key = (framework, clean)
        if key not in self._made:
            path, self._tried = self._folder / f"clean-{self._tried}", self._tried + 1
            self._recorders.record(framework, clean, path, self.perturbed_runs)
            self._made[key] = Recording.open(path)
        return self._made[key]


def judge_fault(fault: Fault, dtype: str, recorders: Recorders, references: References, path: Path) -> Found:
    """Record a fault and say what a comparison says of it."""
    began = time.monotonic()
    try:
        reference = references.of(fault, dtype)
        recorders.record(fault.frameworks[0], settings_of(fault, dtype), path)
        faulty = Recording.open(path)
        said, sketched = compare(reference, faulty), compare(reference, faulty, sketched=True)
    except Exception as error:  # one that fails is no reason not to go on with the others
        return failed(fault, dtype, f"{type(error).__name__}: {error}", time.monotonic() - began)
    return found(fault, dtype, (reference, faulty), said, sketched, time.monotonic() - began)


def run_faults(
    names: Sequence[str],
    dtypes: Sequence[str],
    *,
    output: Path | None,
    keep: Path | None,
    jobs: int = 1,
    console: Console,
) -> int:
    """Run faults and print what became of them; 0 if all were detected in the dtypes in which they can be told.

    Args:
        names: none: all.
        dtypes: none: all.
        output: a Markdown file for the table, rewritten as faults are judged; beside it the same as JSON.
        keep: a folder in which recordings stay; None: nothing stays.
        jobs: so many are recorded and judged at the same time, each by processes of its own.

    Raises:
        UsageError: an unknown fault or dtype, or no job.
    """
    for name in names:
        check_fault(name)
    if strange := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise UsageError(f"dtype: expected among {', '.join(DTYPES)}, got {', '.join(strange)}")
    check_size("jobs", jobs, 1, MAX_JOBS)
    chosen, began = in_order([FAULTS[name] for name in dict.fromkeys(names)] or list(FAULTS.values())), time.monotonic()
    done: list[Found] = []
    said, stopped = threading.Lock(), threading.Event()

    def tell(each: Found) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        with said:
            done.append(each)
            _show(each, console)
            if output is not None:
                _write(output, done, time.monotonic() - began)

    for dtype in dict.fromkeys(dtypes or ALL_DTYPES):
        told = [fault for fault in chosen if dtype in fault.dtypes]
        size = -(-len(told) // jobs) or 1
        shares = [told[start : start + size] for start in range(0, len(told), size)]
        with ThreadPoolExecutor(jobs) as pool:
            try:
                for _ in pool.map(lambda share, dtype=dtype: _run_share(share, dtype, keep, tell), shares):
                    pass
            except BaseException:
                stopped.set()
                raise
    missed = sum(not each.detected for each in done)
    if done:
        console.print(table(done, time.monotonic() - began).totals, markup=False, highlight=False, soft_wrap=True)
    return int(missed > 0)


def _run_share(faults: Sequence[Fault], dtype: str, keep: Path | None, tell: Callable[[Found], None]) -> None:
    """Record and judge faults one behind the other."""
    with tempfile.TemporaryDirectory() as temporary, Recorders(dtype) as recorders:
        folder = Path(temporary) if keep is None else keep / dtype / faults[0].name
        references = References(recorders, folder, dtype)
        for fault in faults:
            path = folder / fault.name
            tell(judge_fault(fault, dtype, recorders, references, path))
            if keep is None:
                shutil.rmtree(path, ignore_errors=True)


def _show(each: Found, console: Console) -> None:
    marks = {True: "yes", False: "NO", None: "-"}
    console.print(
        f"{each.dtype:8} {each.fault:24} {each.verdict:12} localised {marks[each.localised]:3} diagnosed "
        f"{marks[each.diagnosed]:3} {each.signature or '':24} {each.seconds:4.1f} s  {each.place}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if not each.detected:
        console.print(f"    {each.why}", markup=False, highlight=False, soft_wrap=True)


def _write(output: Path, done: list[Found], seconds: float) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(table(done, seconds).markdown)
    output.with_suffix(".json").write_text(json.dumps([each.to_json() for each in done], indent=1) + "\n")


def list_faults(console: Console) -> None:
    """Print the catalogue."""
    for fault in FAULTS.values():
        source = f" ({fault.source})" if fault.source else ""
        console.print(
            f"{fault.name}: {fault.description}{source} [{fault.family}; {' or '.join(fault.frameworks)}]",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
