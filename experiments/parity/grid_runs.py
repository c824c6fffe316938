"""Processes that record one run after another: starting torch, and JAX, costs more than a small run does."""

import tempfile
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import torch.multiprocessing as multiprocessing

from crossframe.errors import UsageError
from crossframe.processes import Child, end, starting
from crossframe.recording import Manifest, create_recording
from experiments.parity.record_torch import manifest_of
from experiments.parity.settings import RunSettings

Job = tuple[RunSettings, Path, int]
"""A run, where it is recorded, and how many perturbed runs of it."""
# How long the other ranks may still take once one has failed: they may be waiting for it in a collective.
PATIENCE_SECONDS = 5.0


class _Workers:
    """Processes that take jobs from a pipe each, and answer each with None or with what went wrong."""

    def __init__(self, num_processes: int, target: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=Child(_serve), args=(theirs, target, rank, *arguments), daemon=True)
            with starting():
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, job: Job) -> None:
        """Run a job on all; UsageError with what they said, if it failed on one."""
        waiting, failed = {}, ""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(job)
                waiting[pipe] = rank
            except OSError as error:
                failed = f"process {rank} has ended: {error}"
        while waiting:
            ready = wait(list(waiting), PATIENCE_SECONDS if failed else None)
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    said = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    said = "it ended"
                if said is not None and not failed:
                    failed = f"{job[0].model} on {job[0].world_size} ranks, process {rank}: {said}"
        if failed:
            raise UsageError(failed)

    def close(self) -> None:
        """End them."""
        end(process.pid for process in self._processes)
        for process in self._processes:
            process.join()


def _serve(pipe: Connection, target: Any, rank: int, *arguments: Any) -> None:
    record = target(rank, *arguments)
    while True:
        job = pipe.recv()
        try:
            record(*job)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
        else:
            pipe.send(None)


class TorchRuns:
    """Ranks of torch over gloo."""

    def __init__(self, world_size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._workers = _Workers(world_size, _torch_rank, world_size, str(Path(self._folder.name, "store")))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._workers.close()
        self._folder.cleanup()

    def record(self, settings: RunSettings, path: Path, perturbed_runs: int = 0) -> None:
        """Record a run and so many perturbed runs of it; UsageError if it fails."""
        for run, where in settings.runs(path, perturbed_runs):
            create_recording(where, manifest_of(run, "cpu"))
        self._workers.run((settings, path, perturbed_runs))


def _torch_rank(rank: int, world_size: int, store_path: str) -> Any:
    import torch

    from experiments.parity.record_torch import join, record_rank

    join(rank, world_size, "cpu", store_path)

    def record(settings: RunSettings, path: Path, perturbed_runs: int) -> None:
        for run, where in settings.runs(path, perturbed_runs):
            # Not made anew: each manifest that is made has a token of its own.
            record_rank(run, Manifest.read(where), where, rank, torch.device("cpu"))

    return record


class JaxRuns:
    """One process of JAX, with so many devices.

    Args:
        wide: whether it knows 64-bit numbers: with them, what runs in lower precision may round otherwise.
    """

    def __init__(self, num_devices: int, *, wide: bool = True) -> None:
        self._workers = _Workers(1, _jax_process, num_devices, wide)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._workers.close()

    def record(self, settings: RunSettings, path: Path, perturbed_runs: int = 0) -> None:
        """Record a run and so many perturbed runs of it; UsageError if it fails."""
        self._workers.run((settings, path, perturbed_runs))


def _jax_process(_: int, num_devices: int, wide: bool) -> Any:
    import jax

    from experiments.parity.record_jax import record_on_devices

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_enable_x64", wide)

    def record(settings: RunSettings, path: Path, perturbed_runs: int) -> None:
        for run, where in settings.runs(path, perturbed_runs):
            record_on_devices(run, where, jax.devices("cpu"))
        jax.clear_caches()

    return record
