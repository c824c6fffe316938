"""Runs checks, the full form in two processes, and gathers what they counted."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from multiprocessing import get_context

from crossframe.processes import end_with_parent, starting
from experiments.spec.checks import TORCH, Check, Scope
from experiments.spec.tally import Tallies, Tally

NUM_WORKERS = 2
Counted = tuple[Check, Tallies]


def torch_installed() -> bool:
    """Whether the checks against torch can run."""
    return find_spec("torch") is not None


def runnable(checks: Sequence[Check]) -> list[Check]:
    """The checks whose other side is here."""
    return [check for check in checks if check.against != TORCH or torch_installed()]


def run_checks(checks: Sequence[Check], *, quick: bool, progress: Callable[[int, int], None]) -> dict[str, Tally]:
    """What the checks count, by rule.

    Args:
        quick: a sample of every check in this process; otherwise every case, in two others.
        progress: called with the parts done and all parts.
    """
    jobs = [(check, Scope(part=part, num_parts=check.num_parts)) for check in checks for part in range(check.num_parts)]
    counted = _here(checks) if quick else _in_processes(jobs)
    total = len(checks) if quick else len(jobs)
    found: dict[str, Tally] = {}
    progress(0, total)
    for done, tallies in enumerate(counted, 1):
        for rule, tally in tallies.items():
            found.setdefault(rule, Tally()).add(tally)
        progress(done, total)
    return found


def _here(checks: Sequence[Check]) -> Iterator[Tallies]:
    for check in checks:
        yield check.run(Scope(quick=True))


def _in_processes(jobs: Sequence[tuple[Check, Scope]]) -> Iterator[Tallies]:
    workers = min(NUM_WORKERS, os.cpu_count() or 1)
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=end_with_parent)
    try:
        with starting():
            futures: dict[Future[Tallies], tuple[Check, Scope]] = {pool.submit(_run, *job): job for job in jobs}
        for future in as_completed(futures):
            check, scope = futures[future]
            try:
                yield future.result()
            except BrokenProcessPool:
                tallies = Tallies(check.rules)
                for tally in tallies.values():
                    tally.fail(f"{check.target} {scope}: its process ended, or that of another part")
                yield tallies
    finally:
        pool.shutdown(cancel_futures=True)


def _run(check: Check, scope: Scope) -> Tallies:
    if check.against == TORCH:  # the other checks need no torch, whose import takes seconds
        import torch

        torch.set_num_threads(1)
    return check.run(scope)
