"""The FSDP1 API: `FullyShardedDataParallel`, a wrapper module around one unit of the engine."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.device_mesh import DeviceMesh

from crossframe.api import Api
from crossframe.errors import StateError, UsageError
from crossframe.layout import FlatLayout, Layout
from crossframe.lifecycle import Activity
from crossframe.precision import PrecisionPolicy
from crossframe.state import FSDP_WRAPPED
from crossframe.unshard import UnshardRequest
from torch_backend.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, TrainingState
from torch_backend.compat._torch_classes import as_ours
from torch_backend.engine._build_unit import build_unit
from torch_backend.engine._clipping import clip_grad_norm
from torch_backend.engine._step_hooks import StepExecutor, executor_of
from torch_backend.engine._summon import summon_units
from torch_backend.engine._unit import UNIT, unit_of
from torch_backend.engine._unit_tree import named_units, units_in
from torch_backend.engine._unsupported import refuse_ddp, refuse_to_pickle
from torch_backend.fsdp1._arguments import (
    check_arguments,
    check_uniform,
    effective_strategy,
    training_state,
    unit_options,
)
from torch_backend.fsdp1._optim_state_methods import HasOptimStateDicts
from torch_backend.fsdp1._register_comm_hook import set_comm_hook
from torch_backend.fsdp1._summon_full_params import Summonable
from torch_backend.fsdp1._wrap_units import wrap_inside
from torch_backend.memory._store import ShardStore
from torch_backend.mesh._process_groups import Groups, find_groups, unit_mesh
from torch_backend.modules._buffers import cast_buffers
from torch_backend.modules._ignored import find_ignored
from torch_backend.modules._materialise import prepare, sync_states
from torch_backend.modules._owned_params import OwnedParam
from torch_backend.param_registration import FlatParameter, FlatRegistrar, OriginalRegistrar, Registrar
from torch_backend.ranks._collectives import UnitMesh
from torch_backend.state._state_dict_types import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch_backend.wrap import CustomPolicy, ModuleWrapPolicy

# All names of PyTorch's module, so that users only change the package of an import.
__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CustomPolicy",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "TrainingState",
]

_INTERNAL_TO_TORCH = ("FlatParamHandle", "HandleTrainingState")


def __getattr__(name: str) -> Any:
    if name in _INTERNAL_TO_TORCH:
        raise ImportError(
            f"torch_backend has no {name}, which is internal to PyTorch's FSDP: a FullyShardedDataParallel has `params` and "
            "`training_state`, and `summon_full_params` shows full parameters"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# The wrapped module may be compiled, the hooks may not.
_begin_forward = _disable_dynamo(StepExecutor.begin_forward)
_end_forward = _disable_dynamo(StepExecutor.end_forward)
_abandon_forward = _disable_dynamo(StepExecutor.abandon_forward)


class FullyShardedDataParallel(Summonable, HasOptimStateDicts):
    """A wrapper that shards a module's parameters over ranks and all-gathers them for its forward and backward.

    Args:
        module: the module to shard. All ranks must have the same values, or pass `sync_module_states`.
        process_group: the group to shard over; for a hybrid strategy a pair (shard group, replicate group). None: all ranks; for
            a hybrid strategy, shard within a machine and replicate over machines.
        sharding_strategy: None means FULL_SHARD.
        cpu_offload: whether sharded parameters, gradients and optimizer states are on the CPU.
        auto_wrap_policy: selects the submodules that become separate units: a ModuleWrapPolicy, a CustomPolicy, or a function
            `policy(module, recurse, nonwrapped_numel)`. See torch_backend.wrap.
        backward_prefetch: when backward all-gathers the next unit; None disables prefetching.
        mixed_precision: dtypes of computation, reduction and buffers.
        ignored_modules: modules that are not sharded, including their submodules.
        param_init_fn: called with each module on the meta device to materialize its own parameters and buffers. None: allocates
            them and calls `reset_parameters()`.
        device_id: move the module to this device and compute there. None: the device of the parameters.
        sync_module_states: broadcast parameters and buffers from the first rank.
        forward_prefetch: all-gather the next unit of the previous step during each unit's forward.
        limit_all_gathers: on an accelerator, let all-gathers run at most one unit ahead of the computation.
        use_orig_params: keep the original parameters (sharded views with their names) instead of one `FlatParameter` per unit.
        ignored_states: parameters or modules that are not sharded.
        device_mesh: a mesh instead of `process_group`, with one axis, or two (replicate, shard) for a hybrid strategy.

    Raises:
        UsageError: no process group, a module that is already sharded, or arguments that are invalid or exclude each other.
        LayoutError: parameters that cannot share a flat parameter; the message names them.
        InitialisationError: parameters that are still on the meta device.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Groups | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Callable[..., bool] | ModuleWrapPolicy | CustomPolicy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        if isinstance(module, FullyShardedDataParallel):
            raise UsageError("FullyShardedDataParallel: the module is one already; wrap it once")
        sharding_strategy = as_ours(sharding_strategy, ShardingStrategy)
        cpu_offload, mixed_precision = as_ours(cpu_offload, CPUOffload), as_ours(mixed_precision, MixedPrecision)
        backward_prefetch = as_ours(backward_prefetch, BackwardPrefetch)
        check_arguments(
            module,
            ("sharding_strategy", sharding_strategy, ShardingStrategy | None),
            ("cpu_offload", cpu_offload, CPUOffload | None),
            ("backward_prefetch", backward_prefetch, BackwardPrefetch | None),
            ("mixed_precision", mixed_precision, MixedPrecision | None),
            ("sync_module_states", sync_module_states, bool),
            ("forward_prefetch", forward_prefetch, bool),
            ("limit_all_gathers", limit_all_gathers, bool),
            ("use_orig_params", use_orig_params, bool),
        )
        ignored = find_ignored(module, ignored_modules, ignored_states, _is_wrapped)
        asked = sharding_strategy or ShardingStrategy.FULL_SHARD
        groups = find_groups(asked.strategy, process_group, device_mesh, wraps_inside=auto_wrap_policy is not None)
        if auto_wrap_policy is not None:
            wrap_inside(
                module,
                auto_wrap_policy,
                ignored,
                _is_wrapped,
                FullyShardedDataParallel,
                process_group=None if device_mesh is not None else groups,
                device_mesh=device_mesh,
                sharding_strategy=sharding_strategy,
                cpu_offload=cpu_offload,
                backward_prefetch=backward_prefetch,
                mixed_precision=mixed_precision,
                param_init_fn=param_init_fn,
                device_id=device_id,
                sync_module_states=sync_module_states,
                forward_prefetch=forward_prefetch,
                limit_all_gathers=limit_all_gathers,
                use_orig_params=use_orig_params,
            )
        mesh = unit_mesh(asked.strategy, groups)
        self.sharding_strategy = effective_strategy(sharding_strategy, mesh.spec)
        self.cpu_offload = cpu_offload or CPUOffload()
        self.mixed_precision = mixed_precision or MixedPrecision()
        self.backward_prefetch, self.forward_prefetch = backward_prefetch, forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self.process_group = groups[0] if isinstance(groups, tuple) else groups
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self._use_orig_params = use_orig_params
        self._ignored, self._synced = ignored, sync_module_states
        self._full_in_eval, self._computes_in_full = os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1", False

        self._device = prepare(
            module,
            _is_wrapped,
            ignored,
            process_group=self.process_group,
            device_id=device_id,
            param_init_fn=param_init_fn,
        )
        if sync_module_states:
            inner = [wrapper for _, wrapper in _named_fsdp_modules(module) if wrapper._synced]
            sync_states(module, _is_wrapped, ignored, mesh, {id(b) for wrapper in inner for b in wrapper.buffers()})
        policy = self.mixed_precision.policy
        options = unit_options(
            self.sharding_strategy,
            self.mixed_precision,
            backward_prefetch,
            forward_prefetch,
            use_orig_params,
            mesh.spec,
        )

        self._input_dtypes = options.input_dtype, options.root_input_dtype
        if self._full_in_eval:  # checked, since ranks with different environments would all-gather different dtypes
            options.settings = {**options.settings, "FSDP_USE_FULL_PREC_IN_EVAL": "1"}
        self.add_module(FSDP_WRAPPED, module)
        self.__dict__[UNIT] = build_unit(
            [module],
            mesh,
            options,
            is_unit=_is_wrapped,
            parts=_Parts(self, policy.param_dtype, mesh, device_mesh),
            policy=policy,
            device=self._device if self.cpu_offload.offload_params else None,
            offload=self.cpu_offload.offload_params,
            limited=limit_all_gathers,
            ignored=ignored.params,
        )
        self._provide_state_dicts(device_mesh)

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without a wrapper for activation checkpointing."""
        module = self._modules[FSDP_WRAPPED]
        return module._checkpoint_wrapped_module if isinstance(module, ActivationWrapper) else module  # type: ignore

    @property
    def compute_device(self) -> torch.device:
        """The device of the unit's computation."""
        return unit_of(self).device or self._device

    @property
    def training_state(self) -> TrainingState:
        """The unit's training state."""
        return training_state(unit_of(self).state)

    @property
    def params(self) -> list[nn.Parameter]:
        """This unit's flat parameter, or its original parameters."""
        return [param for bucket in unit_of(self).buckets for param in bucket.registrar.managed()]

    def __getattr__(self, name: str) -> Any:
        """Forward missing attributes to the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(FSDP_WRAPPED), name)

    def __getitem__(self, key: int) -> Any:
        """Forward indexing to the wrapped module."""
        return self._modules[FSDP_WRAPPED][key]  # type: ignore[index]

    @_disable_dynamo(recursive=False)  # the wrapped module may be compiled, the hooks may not
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with unsharded parameters."""
        unit = unit_of(self)
        executor = executor_of(unit) or self._begin_as_root()
        if self._full_in_eval and unit.state.activity == Activity.IDLE:
            self._follow_mode()
        args, kwargs = _begin_forward(executor, unit, args, kwargs)
        try:
            output = self._modules[FSDP_WRAPPED](*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            _abandon_forward(executor, unit)
            raise
        _end_forward(executor, unit, output)
        return output

    @_disable_dynamo
    def _begin_as_root(self) -> StepExecutor:
        named = list(_named_fsdp_modules(self))
        for name, wrapper in named:
            check_uniform(self, name, wrapper)
        executor = StepExecutor(named_units(self, Api.FSDP1), api=type(self).__name__)
        self._lower_buffers()
        return executor

    def _lower_buffers(self) -> None:
        named = list(_named_fsdp_modules(self))
        cast_buffers(
            ((wrapper, wrapper.mixed_precision.policy, wrapper.compute_device) for _, wrapper in named),
            (module for _, wrapper in named for module in wrapper._ignored.modules),
        )

    @_disable_dynamo
    def _follow_mode(self) -> None:
        """Under FSDP_USE_FULL_PREC_IN_EVAL, compute in full precision in eval mode. The root's mode applies to all buffers."""
        full, unit = not self.module.training, unit_of(self)
        if full is self._computes_in_full:
            return
        self._computes_in_full = full
        policy = self.mixed_precision.policy
        if policy.param_dtype is not None or policy.reduce_dtype is not None:
            unit.compute_in(PrecisionPolicy() if full else policy)
        unit.options.input_dtype, unit.options.root_input_dtype = (None, None) if full else self._input_dtypes
        executor = executor_of(unit)
        if executor is not None and executor.root is unit:
            if not full:
                self._lower_buffers()
            else:
                for name, buffer in self.named_buffers():
                    buffer.data = buffer.to(dtype=self._buffer_dtypes[name])

    def check_is_root(self) -> bool:
        """Whether this is the outermost unit. Before the first forward, makes this instance the root."""
        executor = executor_of(unit_of(self)) or self._begin_as_root()
        return executor.root is unit_of(self)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list["FullyShardedDataParallel"]:
        """All wrappers in a module tree; with `root_only` only the outermost ones."""
        found = [wrapper for _, wrapper in _named_fsdp_modules(module)]
        if not root_only:
            return found
        inner = {id(w) for outer in found for w in outer.modules() if w is not outer}
        return [wrapper for wrapper in found if id(wrapper) not in inner]

    def apply(self, fn: Callable[[nn.Module], None]) -> "FullyShardedDataParallel":
        """Apply `fn` to all submodules and this module with unsharded parameters, and write edits back (R20).

        Raises:
            StateError: in a forward or backward, or while parameters are summoned.
        """
        with summon_units([unit_of(self)], UnshardRequest()):
            return super().apply(fn)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FullyShardedDataParallel":
        """Implement `to`, `half`, `cuda` etc.: convert the shards together and keep them sharded."""
        with unit_of(self).converting(fn):
            return super()._apply(fn, recurse)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, including unsharded gradients that accumulated under `no_sync`."""
        executor = executor_of(unit_of(self))
        if executor is not None:
            executor.recover()
        super().zero_grad(set_to_none)
        units = executor.units if executor is not None else units_in(self, Api.FSDP1)
        for unit in units:
            unit.drop_grads()

    __reduce_ex__ = refuse_to_pickle  # type: ignore[assignment]
    _ddp_params_and_buffers_to_ignore = refuse_ddp

    def __deepcopy__(self, memo: dict) -> "FullyShardedDataParallel":
        """Raise: a copy would not share hooks and memory with its units."""
        raise UsageError("a FullyShardedDataParallel cannot be copied; copy the module before wrapping it")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward does not reduce gradients; unsharded gradients accumulate on each rank (R15)."""
        units = units_in(self, Api.FSDP1)
        before = [unit.step.settings.reduce_grads for unit in units]
        for unit in units:
            unit.step.choose(reduce_grads=False)
        try:
            yield
        finally:
            for unit, reduces in zip(units, before, strict=True):
                unit.step.choose(reduce_grads=reduces)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> Tensor:
        """Clip the global gradient norm to `max_norm` (R30). All ranks must call it on the outermost unit.

        Returns:
            The total norm before clipping, of shape (), equal on all ranks, in the largest dtype of the gradients.

        Raises:
            StateError: on an inner unit, or during a step.
            UsageError: a negative `max_norm`, or a `norm_type` that is not positive.
        """
        if not self.check_is_root():
            raise StateError(
                "clip_grad_norm_ on an inner unit would see a part of the gradients; call it on the outermost"
            )
        executor = executor_of(unit_of(self))
        assert executor is not None
        executor.check_summon()
        return clip_grad_norm(executor.units, list(self.parameters()), max_norm, norm_type)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a hook that reduces gradients, including their division, instead of this class.

        Args:
            state: the first argument of the hook.
            hook: `hook(state, full, shard)` fills `shard` with this rank's part of the reduced `full`, both 1-D. Under NO_SHARD,
                `hook(state, full)` reduces in place. PyTorch's default_hooks and fp16_compress_hook can be used.

        Raises:
            StateError: on an inner unit, with a second hook, or under hybrid sharding, as in PyTorch.
            UsageError: a hook that is not callable.
        """
        if not self.check_is_root():
            raise StateError("register_comm_hook: register it on the outermost unit; it holds for all units inside")
        wrappers = self.fsdp_modules(self)
        hybrid = any(wrapper.sharding_strategy.strategy.is_hybrid for wrapper in wrappers)
        set_comm_hook([unit_of(wrapper) for wrapper in wrappers], state, hook, hybrid=hybrid)


def _is_wrapped(module: nn.Module) -> bool:
    return isinstance(module, FullyShardedDataParallel)


def _named_fsdp_modules(module: nn.Module) -> Iterator[tuple[str, FullyShardedDataParallel]]:
    for name, inner in module.named_modules():
        if isinstance(inner, FullyShardedDataParallel):
            yield name, inner


class _Parts:
    """The parts of a unit: one flat layout, and one flat parameter or, with `use_orig_params`, the original parameters."""

    def __init__(
        self,
        wrapper: FullyShardedDataParallel,
        param_dtype: str | None,
        mesh: UnitMesh,
        device_mesh: DeviceMesh | None,
    ) -> None:
        self._wrapper, self._param_dtype, self._ranks = wrapper, param_dtype, mesh.shards
        self._device_mesh = device_mesh

    def bucket_of(self, entry: OwnedParam) -> None:
        """All parameters share one bucket."""

    def layout(self, owned: Sequence[OwnedParam]) -> Layout:
        """See Parts."""
        specs, original = tuple(entry.spec for entry in owned), self._wrapper._use_orig_params
        return FlatLayout(specs, self._ranks.size, keep_original=original, compute_dtype=self._param_dtype)

    def store(
        self, owned: Sequence[OwnedParam], layout: Layout, full: Sequence[Tensor], device: torch.device, pinned: bool
    ) -> ShardStore:
        """See Parts."""
        return ShardStore(layout, self._ranks.rank, full, device, pinned=pinned)

    def registrar(self, owned: Sequence[OwnedParam], store: ShardStore, leaves: list[nn.Parameter]) -> Registrar:
        """See Parts."""
        if self._wrapper._use_orig_params:
            return OriginalRegistrar(owned, store, leaves, self._device_mesh)
        return FlatRegistrar(self._wrapper.module, owned, store, leaves, self._device_mesh)
