"""torch's registry of composable APIs, which tells `replicate` and `fully_shard` which modules the other one handles.

torch.distributed._composable keeps in each module's `__dict__` the names of the APIs that were applied to it, under a key that is
made when it is imported. The key is looked up here without importing it: before anyone has, nothing can have been applied.
"""

import sys
from typing import Any

from torch import nn

_CONTRACT = "torch.distributed._composable.contract"


def _key() -> str | None:
    return getattr(sys.modules.get(_CONTRACT), "REGISTRY_KEY", None)


def register(module: nn.Module) -> None:
    """Let other composable APIs know that `module` is sharded, so that `replicate` around it leaves its parameters alone."""
    key = _key()
    if key is not None:
        registry: dict[str, Any] = module.__dict__.setdefault(key, {})
        registry["fully_shard"] = object()


def replicated_params(root: nn.Module) -> set[nn.Parameter]:
    """The parameters of modules below `root` that `replicate` was applied to: DistributedDataParallel reduces their gradients."""
    key = _key()
    if key is None:
        return set()
    replicated = [module for module in root.modules() if "replicate" in module.__dict__.get(key, ())]
    return {param for module in replicated for param in module.parameters()}


def replaced_by_replicate(module: nn.Module) -> str:
    """What to say about parameters of a sharded module that another object replaced, if `replicate` may have done that."""
    key = _key()
    if key is None or key in module.__dict__:
        return ""
    return "; if replicate() of torch.distributed._composable is around it, import that before calling fully_shard"
