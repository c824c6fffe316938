"""Saves and loads checkpoints in crossframe's format, which JAX reads too: parameters and optimizer state.

For buffers, and for checkpoints that tools of torch read, there are `state_dict` and torch.distributed.checkpoint.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from crossframe.checkpoint import MODEL, STATE, Contents, read, save
from crossframe.errors import UsageError
from crossframe.layout import Sharding
from crossframe.mesh import MeshSpec
from crossframe.state import canonical_name
from torch_backend.compat._dtypes import from_numpy, to_numpy
from torch_backend.engine._unit_tree import named_units
from torch_backend.ranks._consensus import agree, withdraw
from torch_backend.state._checkpoint_state import OptimizerState

T = TypeVar("T")


def save_checkpoint(
    path: Path | str,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a sharded model to a new folder that all ranks see. All ranks call it, between steps.

    `jax_backend.load_checkpoint` reads it, and `load_checkpoint` here, at any world size, under any interface and layout. No full
    parameter is made. A rank that is killed meanwhile leaves nothing under the name `path`, and neither does a save that fails.

    Args:
        model: the root, under FSDP1 or FSDP2. What lies outside of units, and buffers, are not in the checkpoint.
        optimizer: whose state is saved too; what was set when it was built, such as learning rates, is not. It has stepped.
        about: JSON that belongs to it, such as the step; `crossframe.checkpoint.read(path).about` gives it back.

    Raises:
        CheckpointError: something exists at `path`, another job has saved there meanwhile, or a rank's file is not seen by the
            first; AgreementError on other ranks.
        UsageError: no sharded root, or an optimizer that has no state of a parameter, or not of this model.
        StateDictError: state that is neither elementwise nor a scalar, or a scalar that differs between ranks.
        UnsupportedError: a scalar that differs between parameters, a flat unit that is trained in part, or tensor parallelism.
    """
    held = _Held(model)
    state = held.state(optimizer, fill=False)

    def contents() -> Contents:
        sections, values = {MODEL: held.sharding}, {}
        if state is not None:
            sections[STATE], values = Sharding(state.units, held.sharding.mesh), state.values()
        return Contents(sections, values, [] if held.replica else [held.place], lambda _: lines())

    def lines() -> dict[str, list[np.ndarray]]:
        model = [to_numpy(bucket.store.buffer) for _, bucket, _ in held.named]
        return {MODEL: model} if state is None else {MODEL: model, STATE: state.lines()}

    save(path, held, contents, about)


def load_checkpoint(path: Path | str, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Read a sharded model, whatever world size, layout and backend wrote it. All ranks call it.

    Args:
        model: the root; it is told that its parameters are new.
        optimizer: to be given the state that was saved, if it is; it may have stepped or not.

    Raises:
        CheckpointError: missing, damaged, or of other names, shapes or dtypes, which are listed, or without the state of such an
            optimizer; AgreementError on ranks that met nothing of that. No rank has changed its model or optimizer then.
        UsageError: no sharded root, or an optimizer of something else.
    """
    held = _Held(model)
    state = held.state(optimizer, fill=True)

    def found() -> list[np.ndarray]:
        saved = read(path)
        lines = saved.lines(MODEL, held.sharding, held.place)
        if state is not None:
            state.read(saved, held.sharding.mesh, held.place)
        return lines

    try:
        lines = held.together("reading of a checkpoint", found)
    except BaseException:
        if state is not None:
            state.forget()
        raise
    for unit in held.units:
        unit.free_before_edit()
    with torch.no_grad():
        for (_, bucket, _), line in zip(held.named, lines, strict=True):
            for own, value in zip(bucket.store.pieces, bucket.store.split(from_numpy(line)), strict=True):
                own.copy_(value)
    if state is not None:
        state.fill()


class _Held:
    """What this rank holds, and how it meets the others.

    Attributes:
        named: (unit, bucket, its layout under the names of the whole model) of each bucket.
    """

    def __init__(self, model: nn.Module) -> None:
        found = named_units(model, rename=canonical_name) if isinstance(model, nn.Module) else []
        if not found or found[0].name:
            raise UsageError(
                f"expected the root of a sharded model, got {type(model).__name__}; pass what FullyShardedDataParallel or "
                "fully_shard was called on last"
            )
        for each in found:
            each.check_whole()
            each.unit.refuse_tensor_parallelism(
                "tensor parallel parameters are not in crossframe's checkpoints; use state_dict and torch.distributed.checkpoint"
            )
        self.units = [each.unit for each in found]
        mesh = self.units[0].mesh
        for unit in self.units:
            unit.check_summon()
            unit.show_shards()
            for bucket in unit.buckets:
                bucket.registrar.adopt()
        self.named = [(unit.name, each.bucket, each.layout) for unit in found for each in unit.buckets]
        units = tuple((name, layout) for name, _, layout in self.named)
        self.sharding = Sharding(units, MeshSpec(mesh.spec.shard))
        self.shards = mesh.shards
        self.place, self.replica = mesh.shards.rank, mesh.replicas.rank
        self.is_first = self.place == self.replica == 0
        self.groups = [some.group for some in (mesh.shards, mesh.replicas) if some.size > 1]

    def state(self, optimizer: Optimizer | None, *, fill: bool) -> OptimizerState | None:
        """What an optimizer keeps, as all ranks know it."""
        if optimizer is None:
            return None
        title, made = "look at an optimizer's state", []
        try:
            self.together(title, lambda: made.append(OptimizerState(optimizer, self.named, fill=fill)))
            everyone = made[0].told()
            self.together(title, lambda: made[0].settle(everyone))
        except BaseException:
            for state in made:
                state.forget()
            raise
        return made[0]

    def from_first(self, value: str) -> str:
        """The first process's value; of a replica, that of its own first process, which is used nowhere."""
        return self.shards.broadcast_object(value)

    def together(self, title: str, act: Callable[[], T]) -> T:
        """Do something on every rank, and go on once all have; what one raises is raised on all."""
        try:
            done = act()
        except Exception as error:
            withdraw(self.groups, title, error)
            raise
        agree(self.groups, title, list, brief="")
        return done
