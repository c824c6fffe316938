"""`replace_torch_fsdp()`: makes libraries that import torch.distributed.fsdp get the classes of this package.

accelerate, lightning, transformers and torch.distributed.checkpoint.state_dict check the class of a sharded model: they import
torch's FullyShardedDataParallel or FSDPModule and call its static methods. They would treat a model of this package as an
unsharded one, saving it as such or sharding it again. `replace_torch_fsdp()` replaces these names wherever they were imported.
It does not use torch's FSDP. `python -m torch_backend train.py` runs a script after it.
"""

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
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
_PIPELINING = "torch.distributed.pipelining"
# Modules of internals from which libraries import the classes.
_REEXPORTS = (f"{_FSDP}._fully_shard",)
# Modules that access the internals of torch's FSDP, which models of this package lack.
_UNCHANGED = (
    f"{_FSDP}._",
    "torch._dynamo.",
    "torch.distributed._composable.replicate",
    "torch.distributed._tools.",
    f"{_PIPELINING}.",
    "torch_backend",
)
_CHECKPOINT = "torch.distributed.checkpoint.state_dict"
_STATE_OF = "_get_module_fsdp_state_if_fully_sharded_module"
# The second one has what the first one calls.
_STARTS = ("torch.multiprocessing", "torch.multiprocessing.spawn")
_STARTED = "__mp_main__"
"""The module of the script in a process that multiprocessing has started."""


@dataclass(frozen=True)
class ReplacingProcess:
    """What a process that is started runs: a function with the names replaced."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Replace the names, and call the function."""
        replace_torch_fsdp()
        return self.function(*args)


class Replacement:
    """The replaced names, which `remove` or the end of a `with` block restores."""

    def __init__(self, replaced: list[tuple[dict[str, Any], str, Any]]) -> None:
        self._replaced = replaced

    def remove(self) -> None:
        """Restore torch's names."""
        while self._replaced:
            names, name, value = self._replaced.pop()
            names[name] = value

    def __enter__(self) -> "Replacement":
        """Return the handle; the names are already replaced."""
        return self

    def __exit__(self, *_: object) -> None:
        """Call `remove`."""
        self.remove()


def replace_torch_fsdp() -> Replacement:
    """Replace torch's FSDP by this package in all modules of this process that imported it or will import it.

    Call it once, before models are sharded. Replaces FullyShardedDataParallel, fully_shard, FSDPModule, UnshardHandle,
    register_fsdp_forward_method, share_comm_ctx, ShardedGradScaler and torch.distributed.pipelining's PipelineStage. Enums,
    policies and dataclasses (StateDictType, MixedPrecision ...) stay torch's, which this package accepts. Do not use models that
    torch's FSDP sharded at the same time. Processes that torch.multiprocessing.spawn starts from now on replace the names too.

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
    stage = import_module(_PIPELINING).PipelineStage  # imported here, since it takes half a second
    ours[id(stage)] = import_module("torch_backend.pipelining").PipelineStage
    checkpoint = import_module(_CHECKPOINT)
    replaced = [
        (names, name, value)
        for names in _namespaces()
        for name, value in list(names.items())
        if id(value) in ours and ours[id(value)] is not value
    ]
    for names, name, value in replaced:
        names[name] = ours[id(value)]
    # This function also checks the attributes of the wrappers that it finds.
    replaced.append((vars(checkpoint), _STATE_OF, getattr(checkpoint, _STATE_OF)))
    setattr(checkpoint, _STATE_OF, _as_wrapper)
    for names in map(vars, map(import_module, _STARTS)):
        replaced.append((names, "start_processes", names["start_processes"]))
        names["start_processes"] = _replacing_too(names["start_processes"])
    return Replacement(replaced)


def _namespaces() -> list[dict[str, Any]]:
    """The names of all modules, but for internals of torch. In a started process functions of the script have names of their own,
    which are no module's (`runpy.run_path`)."""
    found = [
        vars(module)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType)
        and (module.__name__ in _REEXPORTS or not module.__name__.startswith(_UNCHANGED))
    ]
    if _STARTED in sys.modules:
        found += [each for each in gc.get_objects() if type(each) is dict and each.get("__name__") == _STARTED]
    return found


def _replacing_too(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def start_processes(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return own(ReplacingProcess(fn), *args, **kwargs)

    return start_processes


def _as_wrapper(module: nn.Module) -> nn.Module | None:
    return module if isinstance(module, FullyShardedDataParallel) else None
