"""Checks and converts the constructor arguments of FullyShardedDataParallel, and checks that units of one model agree."""

import warnings
from typing import Any

from torch import nn

from crossframe.api import Api
from crossframe.errors import StateError, UsageError
from crossframe.lifecycle import Activity, Exposure, UnitState
from crossframe.mesh import MeshSpec
from crossframe.step import StepSettings
from torch_backend.api import BackwardPrefetch, MixedPrecision, ShardingStrategy, TrainingState
from torch_backend.engine._unit_options import UnitOptions


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
    """The effective strategy of a unit: a shard group of one rank means NO_SHARD (R14)."""
    if mesh.shard > 1:
        return asked or ShardingStrategy.FULL_SHARD
    if asked not in (None, ShardingStrategy.NO_SHARD):
        warnings.warn(f"{asked.name} over one rank shards nothing: the strategy becomes NO_SHARD", stacklevel=3)
    return ShardingStrategy.NO_SHARD


def unit_options(
    strategy: ShardingStrategy,
    precision: MixedPrecision,
    backward_prefetch: BackwardPrefetch | None,
    forward_prefetch: bool,
    use_orig_params: bool,
    mesh: MeshSpec,
) -> UnitOptions:
    """Convert constructor arguments to the options of a unit."""
    policy = precision.policy
    return UnitOptions(
        Api.FSDP1,
        StepSettings.of_strategy(
            strategy.strategy,
            casts=precision.param_dtype is not None,
            backward_prefetch=None if backward_prefetch is None else backward_prefetch.prefetch,
            forward_prefetch=forward_prefetch,
        ),
        refuses_double_backward=True,
        input_dtype=precision.param_dtype if policy.casts_inputs(Api.FSDP1, is_root=False) else None,
        # Apart from the other, because that one needs parameters of the unit's own.
        root_input_dtype=precision.param_dtype if precision.cast_root_forward_inputs else None,
        settings={
            "strategy": strategy.name,
            "mesh": f"{mesh.replicate} x {mesh.shard} (replicate x shard)",
            "use_orig_params": str(use_orig_params),
            "mixed_precision": str(policy),
            "backward_prefetch": str(backward_prefetch),
            "forward_prefetch": str(forward_prefetch),
        },
    )


def check_uniform(root: Any, name: str, wrapper: Any) -> None:
    """Raise UsageError if an inner unit has different arguments than the root where they must be equal.

    Raises StateError for a flat parameter with an optimizer in backward, as in PyTorch.
    """
    for argument, a, b in (
        ("use_orig_params", root._use_orig_params, wrapper._use_orig_params),
        ("limit_all_gathers", root.limit_all_gathers, wrapper.limit_all_gathers),
    ):
        if a != b:
            raise UsageError(
                f"unit {name!r} was wrapped with {argument}={b}, the root with {argument}={a}; pass the same to all units of "
                "one model"
            )
    if not wrapper._use_orig_params and any(hasattr(param, "_in_backward_optimizers") for param in wrapper.params):
        raise StateError(
            f"unit {name!r} has a flat parameter, on which an optimizer cannot step in backward; pass use_orig_params=True"
        )


def training_state(state: UnitState) -> TrainingState:
    """The TrainingState of a unit's state."""
    if state.exposure == Exposure.SUMMONED:
        return TrainingState.SUMMON_FULL_PARAMS
    return TrainingState.FORWARD_BACKWARD if state.activity != Activity.IDLE else TrainingState.IDLE
