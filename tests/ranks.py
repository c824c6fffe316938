"""Ranks for tests: processes with a process group, started once for each world size and reused by every test.

A test sends a module-level function; it runs on every rank as `fn(rank, world_size, *args)`, and the results come back in rank
order. A rank that raises fails the test with its traceback; a rank that hangs is killed with its world after a time.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT_SECONDS = 60
DEVICE_OF_TESTS = "CROSSFRAME_TESTS_DEVICE"
"""Set: where tensors are made in ranks unless a device is stated."""
_context = multiprocessing.get_context("forkserver")


class RankError(AssertionError):
    """A rank raised; the message holds the tracebacks."""


def start_process(target: Callable[..., Any], *args: Any) -> Any:
    """A process that runs `target(*args)`, forked from a server that has torch loaded."""
    _context.set_forkserver_preload(["tests.preload"])
    os.environ["OMP_NUM_THREADS"] = "1"
    process = _context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


class World:
    """Processes of one world size; with the backend "nccl" rank i has GPU i."""

    def __init__(self, world_size: int, backend: str) -> None:
        self.connections: list[Connection] = []
        self.processes = []
        port = 0  # the first rank takes a free one, and says which
        for rank in range(world_size):
            ours, theirs = multiprocessing.Pipe()
            self.processes.append(start_process(_serve, theirs, rank, world_size, port, backend))
            theirs.close()
            self.connections.append(ours)
            port = port or ours.recv()

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> list[Any]:
        """The results of `fn` on all ranks."""
        for connection in self.connections:
            connection.send((fn, args))
        waiting, results = dict(zip(self.connections, range(len(self.connections)), strict=True)), {}
        while waiting:
            ready = wait(list(waiting), timeout=seconds)
            if not ready:
                failed = "".join(f"\n--- rank {rank} ---\n{value}" for rank, (ok, value) in results.items() if not ok)
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer within {seconds} s{failed}")
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                results[rank] = connection.recv()  # type: ignore[union-attr]
        failures = [f"--- rank {rank} ---\n{value}" for rank, (ok, value) in sorted(results.items()) if not ok]
        if failures:
            raise RankError("\n".join(failures))
        return [results[rank][1] for rank in sorted(results)]

    def stop(self) -> None:
        """Kill the processes."""
        for process in self.processes:
            process.kill()


class Ranks:
    """Worlds by size and backend, each started when first asked for."""

    def __init__(self) -> None:
        self._worlds: dict[tuple[int, str], World] = {}

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        seconds: float = TIMEOUT_SECONDS,
        backend: str = "gloo",
    ) -> list[Any]:
        """Run `fn(rank, world_size, *args)` on every rank; results in rank order."""
        key = (world_size, backend)
        if key not in self._worlds:
            self._worlds[key] = World(world_size, backend)
        world = self._worlds[key]
        try:
            return world.run(fn, args, seconds)
        except (TimeoutError, EOFError, RankError):
            # Whatever its ranks were in the middle of, the next test gets a world that is whole.
            world.stop()
            del self._worlds[key]
            raise

    def stop(self) -> None:
        """Kill all worlds."""
        for world in self._worlds.values():
            world.stop()
        self._worlds.clear()


@contextmanager
def started_ranks() -> Iterator[Ranks]:
    """Ranks that end with the context."""
    ranks = Ranks()
    try:
        yield ranks
    finally:
        ranks.stop()


def _serve(connection: Connection, rank: int, world_size: int, port: int, backend: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if DEVICE_OF_TESTS in os.environ:
        torch.set_default_device(os.environ[DEVICE_OF_TESTS])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _share_gloos_thread()
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
    if rank == 0:
        connection.send(store.port)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    while True:
        try:
            fn, args = connection.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            connection.send((True, fn(rank, world_size, *args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


def _share_gloos_thread() -> None:
    """One thread for all groups of this process.

    Each gloo group has a thread of its own that wakes up every 10 ms. Tests leave groups behind: some hundred in each of a few
    ranks take more of two cores than the tests themselves.
    """
    from torch.distributed import distributed_c10d

    gloo: Any = distributed_c10d.ProcessGroupGloo
    device = gloo.create_device(interface=os.environ["GLOO_SOCKET_IFNAME"])

    class Shared(type):
        def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta, **further: Any) -> Any:
            options = gloo._Options()
            options._devices, options._timeout = [device], timeout
            for name, value in further.items():  # of later versions of torch
                setattr(options, name, value)
            return gloo(store, rank, size, options)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, gloo)

    class SharedGloo(metaclass=Shared):
        pass

    distributed_c10d.ProcessGroupGloo = SharedGloo  # type: ignore[misc, assignment]
