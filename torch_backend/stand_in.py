"""`stand_in()`: makes libraries that import torch.distributed.fsdp get the classes of this package.

accelerate, lightning, transformers and torch.distributed.checkpoint.state_dict ask of which class a sharded model is: they
import torch's FullyShardedDataParallel or FSDPModule, and call its static methods. To them a model of ours is a plain one, which
they would save as if each rank had it whole, or shard a second time. After `stand_in()` these names are ours wherever they were
imported to. Nothing of torch's FSDP is used here: it is looked up to be replaced.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import nn

from torch_backend.fsdp2._fsdp_module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from torch_backend.fully_shard import fully_shard
from torch_backend.fully_sharded_data_parallel import FullyShardedDataParallel
from torch_backend.sharded_grad_scaler import ShardedGradScaler

_FSDP = "torch.distributed.fsdp"
_STANDING_IN = {
    _FSDP: (
        FullyShardedDataParallel,
        FSDPModule,
        UnshardHandle,
        fully_shard,
        register_fsdp_forward_method,
        share_comm_ctx,
    ),
    f"{_FSDP}.sharded_grad_scaler": (ShardedGradScaler,),
}
# Their own insides, and what reaches into those: of a model of ours that would find nothing.
_LEFT_ALONE = (
    f"{_FSDP}._",
    "torch._dynamo.",
    "torch.distributed._composable.replicate",
    "torch.distributed._tools.",
    "torch.distributed.pipelining.",
    "torch_backend",
)
_CHECKPOINT = "torch.distributed.checkpoint.state_dict"
_STATE_OF = "_get_module_fsdp_state_if_fully_sharded_module"


class Standing:
    """What was replaced. `remove` puts it back, and so does the end of a `with`."""

    def __init__(self, replaced: list[tuple[ModuleType, str, Any]]) -> None:
        self._replaced = replaced

    def remove(self) -> None:
        """Give the names back to torch."""
        while self._replaced:
            setattr(*self._replaced.pop())

    def __enter__(self) -> "Standing":
        """It has begun already."""
        return self

    def __exit__(self, *_: object) -> None:
        """As `remove`."""
        self.remove()


def stand_in() -> Standing:
    """Let every module of this process that has imported torch's FSDP, or will, have this package's in its place.

    Call it once, before models are sharded. The names that change are FullyShardedDataParallel, fully_shard, FSDPModule,
    UnshardHandle, register_fsdp_forward_method, share_comm_ctx and ShardedGradScaler. Enums, policies and records (StateDictType,
    MixedPrecision ...) stay torch's, which are taken everywhere here. Models that torch's own FSDP has sharded are not to be used
    meanwhile. torch.distributed.pipelining is left alone, since it reaches into torch's FSDP2.

    Returns:
        A handle whose `remove()` gives the names back to torch; also a context manager.

    >>> with stand_in():
    ...     import_module("torch.distributed.fsdp").fully_shard is fully_shard
    True
    >>> import_module("torch.distributed.fsdp").fully_shard is fully_shard
    False
    """
    ours = {
        id(getattr(import_module(module), entry.__name__)): entry
        for module, entries in _STANDING_IN.items()
        for entry in entries
    }
    checkpoint = import_module(_CHECKPOINT)
    replaced = [
        (module, name, value)
        for module in list(sys.modules.values())
        for name, value in _globals(module)
        if id(value) in ours and ours[id(value)] is not value
    ]
    for module, name, value in replaced:
        setattr(module, name, ours[id(value)])
    # It also asks whether the wrappers that it found are whole.
    replaced.append((checkpoint, _STATE_OF, getattr(checkpoint, _STATE_OF)))
    setattr(checkpoint, _STATE_OF, _as_wrapper)
    return Standing(replaced)


def _globals(module: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(module, ModuleType) and not module.__name__.startswith(_LEFT_ALONE):
        yield from list(vars(module).items())


def _as_wrapper(module: nn.Module) -> nn.Module | None:
    return module if isinstance(module, FullyShardedDataParallel) else None
