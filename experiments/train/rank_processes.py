"""Start one process per rank, each forked from a server that has imported torch: an import takes longer than a small run."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.multiprocessing.spawn import ProcessContext, start_processes

from crossframe import processes


@contextmanager
def rank_processes(
    target: Callable[..., Any], args: tuple[Any, ...], num_processes: int, preload: Sequence[str]
) -> Iterator[ProcessContext]:
    """Processes that run `target(rank, *args)`; all of them have ended when the context is left.

    Args:
        target: a function of a module.
        preload: modules that the server imports before it forks. No import may initialise CUDA or start threads.

    Yields:
        The processes. `join()` returns True once all have succeeded, and raises `ProcessException` for one that failed.
    """
    multiprocessing.set_forkserver_preload(list(preload))
    with processes.starting():
        started = start_processes(processes.Child(target), args, num_processes, join=False, start_method="forkserver")
    assert started is not None
    try:
        yield started
    finally:
        processes.end(started.pids())
