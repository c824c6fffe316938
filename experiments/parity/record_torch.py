"""Record a run in torch: one process a rank, gloo on CPU and NCCL on GPUs, `FullyShardedDataParallel`."""

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException
from torch.nn import functional

from crossframe.errors import CrossframeError, RecordingError
from crossframe.recording import Manifest, create_recording
from crossframe.strategy import Strategy
from experiments.data import Batch
from experiments.faults.catalogue import fault_in_effect
from experiments.models import load_torch
from experiments.parity.settings import MOMENTUM, RunSettings, choose_device
from experiments.train.rank_processes import rank_processes
from experiments.train.resume import resume_torch
from torch_backend import FullyShardedDataParallel, MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from torch_backend.other_rounding import OtherRounding
from torch_backend.recorder import Recorder
from torch_backend.recorder._manifest import program

_PACKAGES = ("torch", "numpy")
_REASON = "reason-of-rank-"


def record_torch(settings: RunSettings, output: Path, *, perturbed_runs: int = 0, overwrite: bool = False) -> None:
    """Train and record; returns when all ranks have finished.

    Args:
        perturbed_runs: number of perturbed runs that are recorded after it, inside its folder.

    Raises:
        UsageError: fewer devices than ranks.
        RecordingError: an output that cannot be written to; a rank whose disk or memory is full.
        ProcessRaisedException: a rank failed; the others were ended.
    """
    record_many(settings.runs(output, perturbed_runs), overwrite=overwrite)


def record_many(runs: Sequence[tuple[RunSettings, Path]], *, overwrite: bool = False) -> None:
    """Record runs of one number of ranks and one kind of device in the same processes, one run behind the other.

    Raises:
        UsageError, RecordingError, ProcessRaisedException: as `record_torch`.
    """
    first = runs[0][0]
    device = choose_device(first.device, torch.cuda.device_count(), first.world_size)
    assert {(run.world_size, run.device) for run, _ in runs} == {(first.world_size, first.device)}, runs
    begun = [(run, manifest_of(run, device), path) for run, path in runs]
    for _, manifest, path in begun:
        create_recording(path, manifest, overwrite=overwrite)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (begun, device, str(Path(folder, "store")))
        # An optimizer imports torch._dynamo.
        with rank_processes(_rank, arguments, first.world_size, (__name__, "torch._dynamo")) as ranks:
            try:
                while not ranks.join():
                    pass
            except ProcessException as error:
                exits = enumerate(process and process.exitcode for process in ranks.processes)
                killed = [rank for rank, exit_code in exits if exit_code == -signal.SIGKILL]
                if (
                    killed and error.error_index not in killed
                ):  # the others fail for want of it, and may be noticed first
                    message = f"process {killed[0]} terminated with signal SIGKILL"
                    raise ProcessExitedException(message, killed[0], ranks.pids()[killed[0]], -signal.SIGKILL) from None
                for reason in sorted(Path(folder).glob(f"{_REASON}*")) if not killed else ():
                    rank, text = f"rank {reason.name.removeprefix(_REASON)}", reason.read_text()
                    raise RecordingError(text if text.startswith(rank) else f"{rank}: {text}") from None
                raise


def manifest_of(settings: RunSettings, device: str) -> Manifest:
    """The manifest of a run in torch, on ranks that `join` has prepared: on a CPU each has one thread."""
    threads = 1 if device == "cpu" else None
    return settings.manifest("torch", _PACKAGES, program(device, threads=threads))


def _rank(rank: int, runs: list[tuple[RunSettings, Manifest, Path]], device: str, store_path: str) -> None:
    join(rank, runs[0][0].world_size, device, store_path)
    try:
        for settings, manifest, path in runs:
            record_rank(settings, manifest, path, rank, torch.device(device))
    except (CrossframeError, OSError, MemoryError) as error:
        # No defect, so no traceback: the process that started this one says it.
        Path(store_path).with_name(f"{_REASON}{rank}").write_text(str(error) or type(error).__name__)
        sys.exit(2)
    finally:
        dist.destroy_process_group()


def join(rank: int, world_size: int, device: str, store_path: str) -> None:
    """Make this process a rank of the default process group, whose ranks meet at a file."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
        if "lo" in (name for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store_path}", rank=rank, world_size=world_size)


def record_rank(settings: RunSettings, manifest: Manifest, output: Path, rank: int, device: torch.device) -> None:
    """Train and record one rank of the default process group, into a recording that was created."""
    if settings.perturbed_run:
        rounding = OtherRounding(settings.perturbed_run)
    else:
        rounding = OtherRounding(settings.rounding, moves=False) if settings.rounding else nullcontext()
    with fault_in_effect(settings.fault), rounding:
        _train(settings, manifest, output, rank, device)


def optimizer_of(settings: RunSettings, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a run."""
    decay = settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD(params, settings.learning_rate, momentum=MOMENTUM, weight_decay=decay)
    return torch.optim.AdamW(params, settings.learning_rate, weight_decay=decay)


def build_model(settings: RunSettings, device: torch.device) -> FullyShardedDataParallel:
    """The model with its initial values, sharded."""
    definition = settings.definition
    module, unit_classes = definition.make_torch()
    module = module.to(getattr(torch, settings.stored_dtype))
    load_torch.load_initial(module, settings.initial_params)
    names, sizes = ("replicate", "shard"), (settings.spec.replicate, settings.spec.shard)
    strategies = {each.strategy: each for each in ShardingStrategy}
    return FullyShardedDataParallel(
        module,
        device_mesh=init_device_mesh(device.type, sizes, mesh_dim_names=names) if settings.mesh else None,
        sharding_strategy=strategies[Strategy(settings.strategy)],
        auto_wrap_policy=ModuleWrapPolicy(unit_classes),
        device_id=device,
        mixed_precision=_mixed_precision(settings),
        use_orig_params=True,
    )


def _mixed_precision(settings: RunSettings) -> MixedPrecision | None:
    if settings.dtype == settings.stored_dtype:
        return None
    low, full = getattr(torch, settings.dtype), getattr(torch, settings.stored_dtype)
    # Batch norm too, so that the units are those of the other framework.
    return MixedPrecision(low, reduce_dtype=full, buffer_dtype=low, _module_classes_to_ignore=())


def _train(settings: RunSettings, manifest: Manifest, output: Path, rank: int, device: torch.device) -> None:
    model = build_model(settings, device)
    optimizer = optimizer_of(settings, model.parameters())
    # The settings have moved a perturbed run's initial values already.
    with Recorder(output, model=model, optimizer=optimizer, manifest=manifest, perturbed_run=0) as recorder:
        for step in range(settings.steps):
            resume_torch(settings.resume_at, step, output, model, optimizer)
            batch = settings.batch(step, rank)
            loss = _backward(settings, model, batch, device)
            if settings.clip is not None:
                model.clip_grad_norm_(settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss, batch=batch.digest, sample_ids=batch.sample_ids)


def _backward(settings: RunSettings, model: FullyShardedDataParallel, batch: Batch, device: torch.device) -> float:
    """Leave the reduced gradient of all microbatches; returns this rank's mean loss."""
    inputs, targets = torch.from_numpy(batch.inputs).to(device), torch.from_numpy(batch.targets).long().to(device)
    if not inputs.is_floating_point():
        inputs = inputs.long()
    total = 0.0
    for i in range(settings.accumulate):
        part = slice(i * settings.batch_size, (i + 1) * settings.batch_size)
        with nullcontext() if i == settings.accumulate - 1 else model.no_sync():
            logits = model(inputs[part])
            loss = functional.cross_entropy(logits.flatten(0, -2), targets[part].flatten()) / settings.accumulate
            loss.backward()
        total += loss.item()
    return total
