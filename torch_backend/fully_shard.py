"""The FSDP2 API: `fully_shard`, which turns modules into FSDPModules with DTensor parameters."""

import functools
import sys
from collections.abc import Sequence
from typing import Any, Literal

from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from crossframe.step import StepSettings
from torch_backend.compat._composable import register, replicated_params
from torch_backend.compat._fully_shard_api import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch_backend.engine._build_unit import build_unit
from torch_backend.engine._deferred_init import make_real
from torch_backend.engine._step_hooks import executor_of
from torch_backend.engine._unit import UNIT, Unit, unit_of
from torch_backend.fsdp2._arguments import as_record, modules_to_shard, reshard_setting, unit_options
from torch_backend.fsdp2._fsdp_module import (
    FSDPModule,
    UnshardHandle,
    begin_as_root,
    register_fsdp_forward_method,
    sharded_class,
    share_comm_ctx,
)
from torch_backend.fsdp2._shard_parts import BlockFn, ShardParts
from torch_backend.memory._reshard_group import ReshardGroupShard
from torch_backend.mesh._device_mesh import DataMesh, find_mesh
from torch_backend.mesh._placement import PlacementFn
from torch_backend.modules._materialise import move_to_mesh
from torch_backend.ranks._collectives import Communicator
from torch_backend.state._load_check import check_load
from torch_backend.state._piece_conversion import show_dtensors, take_dtensors

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

_AS_STORED, _ON_DEVICE = MixedPrecisionPolicy(), OffloadPolicy()


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = _AS_STORED,
    offload_policy: OffloadPolicy = _ON_DEVICE,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    layout: Literal["per_param", "flat", "ragged"] = "per_param",
    block_fn: BlockFn | None = None,
) -> Any:
    """Shard the parameters of a module in place, except those that an inner FSDPModule owns. Call it on inner modules first.

    Args:
        module: a module, or several modules whose parameters are all-gathered and reduced together.
        mesh: a mesh with one axis (shard) or two axes (replicate, shard). None: all ranks.
        reshard_after_forward: whether to free the unsharded parameters between forward and backward. An int is the size of the
            reshard group that keeps them, a divisor of the shard axis (R08). None means True, except for the root (R13).
        shard_placement_fn: maps a parameter to its `Shard(dim)`, or None for dim 0. A dim above 0 must be divisible by the shard
            axis (R07).
        mp_policy: dtypes of computation and reduction.
        offload_policy: CPUOffloadPolicy keeps shards on the CPU.
        ignored_params: parameters that are not sharded.
        dp_mesh_dims: the data-parallel axes of `mesh`, if the parameters are already DTensors on all of its axes.
        layout: the layout of a unit's shards; `layout` and `block_fn` are not in PyTorch. "per_param": chunks each parameter;
            sharded parameters are DTensors, as in PyTorch. "flat": concatenates all parameters and cuts them into equal shards.
            "ragged": cuts between blocks only (R09). The last two all-gather directly into the parameters' memory, and sharded
            parameters are PieceTensors.
        block_fn: for "ragged", maps a parameter to the number of elements of a block. None: a row.

    Returns:
        `module`, whose modules are now also FSDPModules.

    Raises:
        UsageError: not a module, a mesh with other axes, a policy of another type, or a module that is already sharded.
        MeshError: a `reshard_after_forward` that does not divide the shard axis.
        LayoutError: a parameter without dims, or one that cannot be sharded on its dim.
    """
    modules = modules_to_shard(module)
    policy = as_record("mp_policy", mp_policy, MixedPrecisionPolicy)
    # None means no offload, as in torch.
    offload = as_record(
        "offload_policy", _ON_DEVICE if offload_policy is None else offload_policy, CPUOffloadPolicy, OffloadPolicy
    )
    dims = None if dp_mesh_dims is None else as_record("dp_mesh_dims", dp_mesh_dims, DataParallelMeshDims)
    data = find_mesh(mesh, dims)
    ranks = data.unit_mesh()
    step = StepSettings(
        reshard_after_forward=reshard_setting(reshard_after_forward, ranks.shards.size),
        keep_root=reshard_after_forward is None,
    )
    parts = ShardParts(data, ranks, mp_policy, shard_placement_fn, layout, block_fn, step)
    ignored = set(ignored_params or ())
    for root in modules:
        ignored |= replicated_params(root)
        move_to_mesh(root, is_sharded, ignored, data.device)

    unit = build_unit(
        modules,
        ranks,
        unit_options(step, policy, ranks.spec),
        is_unit=is_sharded,
        parts=parts,
        policy=policy.policy,
        device=data.device,
        offload=isinstance(offload, CPUOffloadPolicy),
        pinned=isinstance(offload, CPUOffloadPolicy) and offload.pin_memory,
        ignored=ignored,
    )
    if step.reshards_to_group:
        unit.when_agreed = functools.partial(_keep_parts, unit, data, int(step.reshard_after_forward))
    _attach(modules, unit)
    return module


def _state(module: nn.Module) -> Unit | None:
    """The unit of a module that `fully_shard` was called on, else None. It does not have the private attributes of PyTorch's
    FSDPState."""
    return unit_of(module) if is_sharded(module) else None


fully_shard.state = _state  # type: ignore[attr-defined]


def is_sharded(module: nn.Module) -> bool:
    """Whether it is an FSDPModule."""
    return isinstance(module, FSDPModule)


def _keep_parts(unit: Unit, data: DataMesh, group_size: int) -> None:
    """Let a unit reshard to a group between forward and backward (R08)."""
    mesh = data.group_mesh(group_size)
    group = Communicator(mesh.get_group(1))
    for bucket in unit.buckets:
        bucket.group_shard = ReshardGroupShard(bucket.layout, group, mesh)


def _attach(modules: Sequence[nn.Module], unit: Unit) -> None:
    """Register the unit's hooks on its modules and change their class."""
    hooks = _Hooks(modules, unit)
    for module in modules:
        module.__dict__[UNIT] = unit
        register(module)
        module.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(hooks.after, always_call=True)
        module.register_state_dict_pre_hook(hooks.show_sharded)
        module.register_load_state_dict_pre_hook(hooks.prepare_load)
        # Not deferred to the next all-gather: an optimizer created in between must get the final parameters.
        module.register_load_state_dict_post_hook(hooks.adopt)
        if any(bucket.layout.contiguous for bucket in unit.buckets):
            module._register_state_dict_hook(show_dtensors)
            module.register_load_state_dict_pre_hook(take_dtensors)
        module.__class__ = sharded_class(type(module))
    unit.call_around = (hooks.before, hooks.after)


class _Hooks:
    """The hooks of a unit's modules."""

    def __init__(self, modules: Sequence[nn.Module], unit: Unit) -> None:
        self._modules, self._unit = modules, unit
        # The modules that have not run in this forward.
        self._to_run: set[nn.Module] = set()

    @_disable_dynamo
    def before(self, inner: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        executor = executor_of(self._unit) or begin_as_root(inner)
        if not self._to_run or not executor.has_run_in_part(self._unit):
            self._to_run.update(self._modules)
        return executor.begin_forward(self._unit, args, kwargs)

    @_disable_dynamo
    def after(self, inner: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook. No output and an active exception mean that the module or its first use raised."""
        executor = executor_of(self._unit)
        if executor is None:
            return None
        self._to_run.discard(inner)
        if output is None and sys.exc_info()[0] is not None:
            self._to_run.clear()
            return executor.abandon_forward(self._unit)
        return executor.end_forward(self._unit, output, whole=not self._to_run)

    def show_sharded(self, inner: nn.Module, *_: Any) -> None:
        """A state dict is about to be made."""
        self._unit.show_shards()

    def prepare_load(self, inner: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """A state dict is about to be loaded."""
        check_load(inner, state, prefix)
        self._unit.show_shards()
        self._unit.free_before_edit()

    def adopt(self, inner: nn.Module, _: Any) -> None:
        """A state dict has been loaded, into one of the unit's modules."""
        make_real(self._unit)
        for bucket in self._unit.buckets:
            if not bucket.store.buffer.is_meta:  # else other parameters have still to be loaded
                bucket.registrar.adopt_loaded()
