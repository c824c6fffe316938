"""Saves and loads checkpoints in crossframe's format, which JAX reads too: parameters and optimizer state.

Buffers, and checkpoints for torch's tools, are saved with `state_dict` and torch.distributed.checkpoint.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from crossframe.checkpoint import MODEL, STATE, AsyncSaver, Contents, read, save
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
    saver: AsyncSaver | None = None,
) -> None:
    """Write a sharded model to a new folder that all ranks see. All ranks call it, between steps.

    `load_checkpoint` reads it, here and in `jax_backend`, at any world size, under any API and layout. No full parameter is made.
    If a rank is killed or the save fails, nothing is left under the name `path`.

    Args:
        model: the root, under FSDP1 or FSDP2. Buffers and parameters outside of units are not in the checkpoint.
        optimizer: an optimizer that has stepped; its state is saved too, but not its settings, such as learning rates.
        about: further information as JSON, such as the step, which `crossframe.checkpoint.read(path).about` returns.
        saver: writes the files while training continues, after the values are copied to the host; errors are then raised by the
            next save with it, or by its `wait`. None: write them now.

    Raises:
        CheckpointError: something exists at `path`, another job has saved there in the meantime, or the first rank does not see a
            rank's file; AgreementError on the other ranks.
        UsageError: `model` is not a sharded root, or the optimizer has no state of a parameter, or is of another model.
        StateDictError: state that is neither elementwise nor a scalar, or a scalar that differs between ranks.
        UnsupportedError: a scalar that differs between parameters, a flat unit that is trained in part, or tensor parallelism.
    """
    sharded = _ShardedModel(model)
    state = sharded.state(optimizer, fill=False)

    def contents() -> Contents:
        sections, values = {MODEL: sharded.sharding}, {}
        if state is not None:
            sections[STATE], values = Sharding(state.units, sharded.sharding.mesh), state.values()
        return Contents(sections, values, [] if sharded.replica else [sharded.place], lambda _: lines())

    def lines() -> dict[str, list[np.ndarray]]:
        model = [to_numpy(bucket.store.buffer) for _, bucket, _ in sharded.named]
        return {MODEL: model} if state is None else {MODEL: model, STATE: state.lines()}

    start = save if saver is None else saver.save
    start(path, sharded, contents, about)


def load_checkpoint(path: Path | str, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Load a sharded model from a checkpoint of any world size, layout and backend. All ranks call it.

    Args:
        model: the root.
        optimizer: gets the state that was saved; it may have stepped or not.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, has other names, shapes or dtypes, which are listed, or lacks the
            state of such an optimizer; AgreementError on ranks without an error of their own. No rank has changed anything.
        UsageError: `model` is not a sharded root, or the optimizer is of another model.
    """
    sharded = _ShardedModel(model)
    state = sharded.state(optimizer, fill=True)

    def found() -> list[np.ndarray]:
        saved = read(path)
        lines = saved.lines(MODEL, sharded.sharding, sharded.place)
        if state is not None:
            state.read(saved, sharded.sharding.mesh, sharded.place)
        return lines

    try:
        lines = sharded.together("reading of a checkpoint", found)
    except BaseException:
        if state is not None:
            state.forget()
        raise
    for unit in sharded.units:
        unit.free_before_edit()
    with torch.no_grad():
        for (_, bucket, _), line in zip(sharded.named, lines, strict=True):
            for own, value in zip(bucket.store.pieces, bucket.store.split(from_numpy(line)), strict=True):
                own.copy_(value)
    if state is not None:
        state.fill()


class _ShardedModel:
    """A sharded model on this rank, and the ranks that save and load it together (`crossframe.checkpoint.Processes`).

    Attributes:
        named: (unit name, bucket, layout with the names of the whole model) of each bucket.
        sharding: of the model over the ranks of one replica.
        place, replica: this rank's index in its shard group, and the index of its replica.
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
        """The state of an optimizer, settled between all ranks."""
        if optimizer is None:
            return None
        title, made = "look at an optimizer's state", []
        try:
            self.together(title, lambda: made.append(OptimizerState(optimizer, self.named, fill=fill)))
            everyone = made[0].descriptions()
            self.together(title, lambda: made[0].settle(everyone))
        except BaseException:
            for state in made:
                state.forget()
            raise
        return made[0]

    def from_first(self, value: str) -> str:
        """The value of the first rank of the replica. Only the first replica uses it."""
        return self.shards.broadcast_object(value)

    def together(self, title: str, act: Callable[[], T]) -> T:
        """Do something on every rank, and return once all have done it; an error on one is raised on all."""
        try:
            done = act()
        except Exception as error:
            withdraw(self.groups, title, error)
            raise
        agree(self.groups, title, list, brief="")
        return done
