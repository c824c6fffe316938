"""Record a run in torch: one process a rank, gloo on CPU and NCCL on GPUs, `FullyShardedDataParallel`."""

import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.nn import functional

from crossframe.errors import UsageError
from crossframe.recording import Manifest, RecordingWriter, create_recording
from crossframe.strategy import Strategy
from crossframe.trace import Event
from experiments.parity.faults import fault_in_effect
from experiments.parity.settings import RunSettings, choose_device
from torch_backend import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy
from torch_backend.observe import Observer, observe
from torch_backend.shards import layouts_of, local_pieces


def record_torch(settings: RunSettings, output: Path, *, overwrite: bool = False) -> None:
    """Train and record; returns when all ranks have finished.

    Raises:
        UsageError: fewer devices than ranks.
        RecordingError: an output that cannot be written to.
        multiprocessing.ProcessRaisedException: a rank failed; the others were ended.
    """
    device = choose_device(settings.device, torch.cuda.device_count(), settings.world_size)
    manifest = settings.manifest("torch", ("torch", "numpy"))
    create_recording(output, manifest, overwrite=overwrite)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (settings, manifest, output, device, str(Path(folder, "store")))
        multiprocessing.spawn(_rank, args=arguments, nprocs=settings.world_size)  # type: ignore[attr-defined]


def _rank(rank: int, settings: RunSettings, manifest: Manifest, output: Path, device: str, store_path: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
        if "lo" in (name for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store_path}",
        rank=rank,
        world_size=settings.world_size,
    )
    try:
        record_rank(settings, manifest, output, rank, torch.device(device))
    finally:
        dist.destroy_process_group()


def record_rank(settings: RunSettings, manifest: Manifest, output: Path, rank: int, device: torch.device) -> None:
    """Train and record one rank of the default process group, into a recording that was created."""
    with fault_in_effect(settings.fault), RecordingWriter(output, manifest, rank) as writer:
        _train(settings, manifest, writer, rank, device)


class _Watcher(Observer):
    """Keeps what the engine tells of one step."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.grads: dict[str, dict[str, np.ndarray]] = {}

    def event(self, event: Event) -> None:
        self.events.append(event)

    def local_grads(self, unit: str, grads: Mapping[str, Tensor]) -> None:
        self.grads[unit] = {name: _numpy(grad) for name, grad in grads.items()}


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().copy()


def build_model(settings: RunSettings, device: torch.device) -> FullyShardedDataParallel:
    """The model with its initial values, sharded."""
    definition = settings.definition
    module, unit_classes = definition.make_torch()
    module = module.to(getattr(torch, settings.dtype))
    load_initial(module, definition.initial_params(settings.seed, settings.dtype))
    return FullyShardedDataParallel(
        module,
        sharding_strategy=ShardingStrategy[Strategy(settings.strategy).name],
        auto_wrap_policy=ModuleWrapPolicy(unit_classes),
        device_id=device,
        use_orig_params=True,
    )


def load_initial(module: nn.Module, params: Mapping[str, np.ndarray]) -> None:
    """Give a module its parameters.

    Raises:
        UsageError: other names or another order than the module's.
    """
    names = [name for name, _ in module.named_parameters()]
    if names != list(params):
        raise UsageError(f"the model's definition and its torch module disagree: {set(names) ^ set(params) or 'order'}")
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(torch.from_numpy(params[name]))


def _train(settings: RunSettings, manifest: Manifest, writer: RecordingWriter, rank: int, device: torch.device) -> None:
    model = build_model(settings, device)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, weight_decay=settings.weight_decay)
    for step in range(settings.steps):
        batch = settings.batch(step, rank)
        tokens, targets = (torch.from_numpy(part).long().to(device) for part in (batch.tokens, batch.targets))
        writer.batch(step, batch.digest, batch.sample_ids)
        if step == 0:
            _record_pieces(writer.parameters, step, model, rank, manifest, grads=False)
        with observe(watcher := _Watcher()):
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        writer.loss(step, loss.item())
        writer.collectives(step, watcher.events)
        if manifest.schedule.is_dense(step):
            for unit, grads in watcher.grads.items():
                writer.local_grads(step, unit, grads)
        if writer.records(step):
            _record_pieces(writer.reduced_grads, step, model, rank, manifest, grads=True)
        optimizer.step()
        optimizer.zero_grad()
        if writer.records(step):
            _record_pieces(writer.updated, step, model, rank, manifest, grads=False)
        writer.end_step(step)
    if layouts_of(model) != list(manifest.units):
        raise UsageError("the layouts of the model's definition are not those that torch_backend computed")


def _record_pieces(write, step: int, model: nn.Module, rank: int, manifest: Manifest, *, grads: bool) -> None:
    """Write this rank's pieces of parameters or of reduced gradients, unit by unit."""
    by_unit: dict[str, dict[str, tuple[int, int, np.ndarray]]] = {}
    prefixed = manifest.params
    for piece in local_pieces(model, rank):
        # Before the root has run, names are relative to their unit.
        name = piece.name if piece.name in prefixed else f"{piece.unit}.{piece.name}"
        values = piece.grad if grads else piece.values
        if values is not None:
            by_unit.setdefault(piece.unit, {})[name] = (piece.start, piece.stop, _numpy(values))
    for unit, pieces in by_unit.items():
        write(step, unit, pieces)
