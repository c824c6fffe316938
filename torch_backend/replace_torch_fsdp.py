"""`replace_torch_fsdp()`: makes libraries that import torch.distributed.fsdp get the classes of this package.

accelerate, lightning, transformers and torch.distributed.checkpoint.state_dict check the class of a sharded model: they import
torch's FullyShardedDataParallel or FSDPModule and call its static methods. They would treat a model of this package as an
unsharded one, saving it as such or sharding it again. `replace_torch_fsdp()` replaces these names wherever they were imported.
It does not use torch's FSDP.
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
_REPLACEMENTS = {
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
# Modules that access the internals of torch's FSDP, which models of this package lack.
_UNCHANGED = (
    f"{_FSDP}._",
    "torch._dynamo.",
    "torch.distributed._composable.replicate",
    "torch.distributed._tools.",
    "torch.distributed.pipelining.",
    "torch_backend",
)
_CHECKPOINT = "torch.distributed.checkpoint.state_dict"
_STATE_OF = "_get_module_fsdp_state_if_fully_sharded_module"


class Replacement:
    """The replaced names, which `remove` or the end of a `with` block restores."""

    def __init__(self, replaced: list[tuple[ModuleType, str, Any]]) -> None:
        self._replaced = replaced

    def remove(self) -> None:
        """Restore torch's names."""
        while self._replaced:
            setattr(*self._replaced.pop())

    def __enter__(self) -> "Replacement":
        """Return the handle; the names are already replaced."""
        return self

    def __exit__(self, *_: object) -> None:
        """Call `remove`."""
        self.remove()


def replace_torch_fsdp() -> Replacement:
    """Replace torch's FSDP by this package in all modules of this process that imported it or will import it.

    Call it once, before models are sharded. Replaces FullyShardedDataParallel, fully_shard, FSDPModule, UnshardHandle,
    register_fsdp_forward_method, share_comm_ctx and ShardedGradScaler. Enums, policies and dataclasses (StateDictType,
    MixedPrecision ...) stay torch's, which this package accepts. Do not use models that torch's FSDP sharded at the same time.
    torch.distributed.pipelining is not changed because it uses internals of torch's FSDP2.

    Returns:
        A handle whose `remove()` restores torch's names; also a context manager.

    >>> with replace_torch_fsdp():
    ...     import_module("torch.distributed.fsdp").fully_shard is fully_shard
    True
    >>> import_module("torch.distributed.fsdp").fully_shard is fully_shard
    False
    """
    ours = {
        id(getattr(import_module(module), entry.__name__)): entry
        for module, entries in _REPLACEMENTS.items()
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
    # This function also checks the attributes of the wrappers that it finds.
    replaced.append((checkpoint, _STATE_OF, getattr(checkpoint, _STATE_OF)))
    setattr(checkpoint, _STATE_OF, _as_wrapper)
    return Replacement(replaced)


def _globals(module: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(module, ModuleType) and not module.__name__.startswith(_UNCHANGED):
        yield from list(vars(module).items())


def _as_wrapper(module: nn.Module) -> nn.Module | None:
    return module if isinstance(module, FullyShardedDataParallel) else None
