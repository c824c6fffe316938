"""Checks of what the constructor of FullyShardedDataParallel is given, and what units of one model must have in common."""

import warnings
from typing import Any

from torch import nn

from crossframe.errors import UsageError
from crossframe.mesh import MeshSpec
from torch_backend.api import ShardingStrategy


def check_arguments(module: Any, *arguments: tuple[str, Any, Any]) -> None:
    """Raise UsageError unless `module` is a module and every (name, value, kind) is of its kind."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"FullyShardedDataParallel: expected a module, got {type(module).__name__}")
    for name, value, kind in arguments:
        if not isinstance(value, kind):
            expected = getattr(kind, "__name__", str(kind))
            raise UsageError(f"FullyShardedDataParallel: expected {name} of type {expected}, got {value!r}")
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        warnings.warn(
            f"a {type(module).__name__} has no forward, so wrapped by itself its parameters are never gathered; wrap the "
            "modules in it",
            stacklevel=3,
        )


def effective_strategy(asked: ShardingStrategy | None, mesh: MeshSpec) -> ShardingStrategy:
    """The strategy that a unit really has: where a shard group is one rank, nothing is sharded (R14)."""
    if mesh.shard > 1:
        return asked or ShardingStrategy.FULL_SHARD
    if asked not in (None, ShardingStrategy.NO_SHARD):
        warnings.warn(f"{asked.name} over one rank shards nothing: the strategy becomes NO_SHARD", stacklevel=3)
    return ShardingStrategy.NO_SHARD


def check_uniform(root: Any, name: str, wrapper: Any) -> None:
    """Raise UsageError unless an inner unit was given what the root was, where that cannot differ."""
    for argument, a, b in (
        ("use_orig_params", root._use_orig_params, wrapper._use_orig_params),
        ("limit_all_gathers", root.limit_all_gathers, wrapper.limit_all_gathers),
    ):
        if a != b:
            raise UsageError(
                f"unit {name!r} was wrapped with {argument}={b}, the root with {argument}={a}; pass the same to all units of "
                "one model"
            )
