"""Several torch ranks for a lesson: processes forked from the one that runs it."""

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from crossframe.errors import UsageError
from crossframe.processes import Child, end, starting


def on_ranks(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returns on each rank of a gloo group, in rank order.

    The processes are forked, so that `work` may be a function that exists in a lesson and nowhere else. Call it before JAX is
    used, whose threads do not survive a fork.

    Raises:
        UsageError: a rank that ended without a result; its traceback stands on stderr.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(target=Child(_rank), args=(rank, world_size, os.path.join(folder, "store"), work, sender))
            for rank, (_, sender) in enumerate(pipes)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                with starting():
                    process.start()
                sender.close()
            results = [_received(receiver) for receiver, _ in pipes]
            for process in processes:
                process.join()
        finally:
            end(process.pid for process in processes if process.pid is not None)
    if failed := [rank for rank, found in enumerate(results) if not found]:
        raise UsageError(f"torch ranks {failed} ended without a result: see their tracebacks above")
    return [value for (value,) in results]


def _received(receiver: Connection) -> tuple[Any, ...]:
    """(the rank's result,), or () where it ended without one."""
    try:
        return (receiver.recv(),)
    except EOFError:
        return ()


def _rank(rank: int, world_size: int, store: str, work: Callable[[int], Any], sender: Connection) -> None:
    torch.set_num_threads(1)
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    sender.send(work(rank))
    dist.destroy_process_group()
