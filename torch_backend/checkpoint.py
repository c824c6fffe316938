"""Checkpoints in crossframe's format, which JAX reads too: the parameters of a sharded model, without its optimizer.

For the optimizer's state, and for checkpoints of torch alone, there are `state_dict` and torch.distributed.checkpoint.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from crossframe.checkpoint import MODEL, begin, finish, read, write_rank
from crossframe.dtypes import numpy_dtype
from crossframe.errors import UsageError
from crossframe.layout import Sharding
from crossframe.mesh import MeshSpec
from torch_backend.bucket import Bucket
from torch_backend.rounds import agree, withdraw
from torch_backend.shards import sharded_units
from torch_backend.unit import UNIT, unit_of


def save_checkpoint(path: Path | str, model: nn.Module) -> None:
    """Write the sharded parameters of a model to a new folder that all ranks see. All ranks call it, between steps.

    Args:
        model: the root, under FSDP1 or FSDP2, once it has run. What lies outside of units, and buffers, are not in the
            checkpoint.

    Raises:
        CheckpointError: there is something at `path`, or a rank's file is not seen by the first; AgreementError on other ranks.
        UsageError: no sharded root.
    """
    path, held = Path(path), _Held(model)
    held.together("beginning of a checkpoint", lambda: begin(path) if held.rank == 0 else None)
    held.together("writing of a checkpoint", lambda: held.write(path))
    held.together("end of a checkpoint", lambda: finish(path, held.sections) if held.rank == 0 else None)


def load_checkpoint(path: Path | str, model: nn.Module) -> None:
    """Read the sharded parameters of a model, whatever world size, layout and backend wrote them. All ranks call it.

    Raises:
        CheckpointError: missing, damaged, or of other names, shapes or dtypes, which are listed; AgreementError on ranks that met
            nothing of that. No rank has changed its model then.
        UsageError: no sharded root.
    """
    held = _Held(model)
    target = held.sections[MODEL]
    lines = held.together("reading of a checkpoint", lambda: read(Path(path)).lines(MODEL, target, held.place))
    for unit in held.units:
        unit.free_before_edit()
    with torch.no_grad():
        for bucket, line in zip(held.buckets, lines, strict=True):
            tensor = torch.from_numpy(line.view(np.uint8)).view(bucket.store.buffer.dtype)
            for own, value in zip(bucket.store.pieces, bucket.store.split(tensor), strict=True):
                own.copy_(value)


class _Held:
    """What this rank holds, and how it meets the others."""

    def __init__(self, model: nn.Module) -> None:
        units = sharded_units(model)
        if not units or units[0][0]:
            raise UsageError(
                f"expected the root of a sharded model, got {type(model).__name__}; pass what FullyShardedDataParallel or "
                "fully_shard was called on last"
            )
        mesh = unit_of(model).mesh
        named = [(name, bucket) for name, buckets in units for bucket in buckets]
        self.buckets: list[Bucket] = [bucket for _, bucket in named]
        self.units = [unit_of(module) for module in model.modules() if UNIT in module.__dict__]
        for unit in self.units:
            unit.check_summon()
            unit.show_shards()
            for bucket in unit.buckets:
                bucket.exposure.adopt()
        sharding = Sharding(tuple((name, bucket.layout) for name, bucket in named), MeshSpec(mesh.spec.shard))
        self.sections = {MODEL: sharding}
        self.place = mesh.shards.rank
        self.replica = mesh.replicas.rank
        self.rank = self.place + self.replica * mesh.spec.shard
        self.groups = [some.group for some in (mesh.shards, mesh.replicas) if some.size > 1]

    def write(self, path: Path) -> None:
        if self.replica == 0:
            # numpy has no bfloat16 of torch's: the bits are taken as they are.
            lines = [
                bucket.store.buffer.detach().cpu().view(torch.uint8).numpy().view(numpy_dtype(bucket.layout.dtype))
                for bucket in self.buckets
            ]
            write_rank(path, self.place, self.sections, {MODEL: lines})

    def together(self, title: str, act: Any) -> Any:
        """Do something on every rank, and go on once all have; what one raises is raised on all."""
        try:
            done = act()
        except Exception as error:
            withdraw(self.groups, title, error)
            raise
        agree(self.groups, title, list, brief="")
        return done
