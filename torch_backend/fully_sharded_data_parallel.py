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

from crossframe.errors import StateError, UsageError
from crossframe.faces import Face
from crossframe.layout import FlatLayout, Layout
from crossframe.lifecycle import Activity
from crossframe.precision import PrecisionPolicy
from crossframe.state import FSDP_WRAPPED
from crossframe.unshard import UnshardRequest
from torch_backend.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, TrainingState
from torch_backend.compat._torch_classes import as_ours
from torch_backend.engine._build import build_unit
from torch_backend.engine._clipping import clip_grad_norm
from torch_backend.engine._executor import StepExecutor
from torch_backend.engine._unit import UNIT, unit_of
from torch_backend.engine._unit_tree import named_units, units_in
from torch_backend.engine._unshard import summon_units
from torch_backend.engine._unsupported import refuse_ddp, refuse_to_pickle
from torch_backend.fsdp1._arguments import (
    check_arguments,
    check_uniform,
    choices_of,
    effective_strategy,
    training_state,
    wrap_inside,
)
from torch_backend.fsdp1._optim_state_methods import HasOptimStateDicts
from torch_backend.fsdp1._summon import Summonable
from torch_backend.memory._store import ShardStore
from torch_backend.mesh._process_groups import Groups, find_groups, unit_mesh
from torch_backend.modules._buffers import cast_buffers
from torch_backend.modules._ignored import find_ignored
from torch_backend.modules._materialise import prepare, sync_states
from torch_backend.modules._owned_params import OwnedParam
from torch_backend.ranks._collectives import UnitMesh
from torch_backend.ranks._comm_hook import set_comm_hook
from torch_backend.registration import FlatParameter, FlatRegistrar, OriginalRegistrar, Registrar
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

# All that torch's module of this name has, so that only the package changes in an import.
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


# What is wrapped may be compiled; what happens around it may not.
_begin_forward = _disable_dynamo(StepExecutor.begin_forward)
_end_forward = _disable_dynamo(StepExecutor.end_forward)
_abandon_forward = _disable_dynamo(StepExecutor.abandon_forward)


class FullyShardedDataParallel(Summonable, HasOptimStateDicts):
    """Shard a module's parameters over the ranks; gather them around its forward and backward.

    Args:
        module: the module to shard. Every rank builds the same one with the same values, or passes `sync_module_states`.
        process_group: the ranks to shard over; for a hybrid strategy a pair (to shard over, to replicate over). None: all ranks;
            for a hybrid strategy those of one machine, replicated over machines.
        sharding_strategy: FULL_SHARD if None.
        cpu_offload: whether shards, gradients and optimizer state live on the CPU.
        auto_wrap_policy: which submodules become units of their own, each gathered and freed by itself: a ModuleWrapPolicy, a
            CustomPolicy, or a function `policy(module, recurse, nonwrapped_numel)`. See torch_backend.wrap.
        backward_prefetch: when backward gathers the next unit, or None for when it is needed.
        mixed_precision: in which dtypes to compute, reduce and keep buffers.
        ignored_modules: modules that are left alone, with all below them.
        param_init_fn: for modules on the meta device: called with each, to give its own parameters and buffers memory and
            values. None: they are made empty and their `reset_parameters()` is called.
        device_id: move the module there first, and compute there. None: compute where the parameters are.
        sync_module_states: take the first rank's parameters and buffers on all ranks.
        forward_prefetch: gather in forward, beside each unit, the one that came next in the step before.
        limit_all_gathers: on an accelerator, let gathers run ahead of the computation by one unit and no further.
        use_orig_params: keep the original parameters (sharded views with their names), instead of one `FlatParameter` a
            unit.
        ignored_states: parameters, or modules, that are left alone.
        device_mesh: the ranks, instead of `process_group`: one axis; for a hybrid strategy two, (replicate, shard).

    Raises:
        UsageError: no process group, a module that is sharded already, arguments of other types or that exclude each other.
        LayoutError: parameters that one flat parameter cannot hold; the message names them.
        InitialisationError: what is still on the meta device.
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
        choices = choices_of(
            self.sharding_strategy,
            self.mixed_precision,
            backward_prefetch,
            forward_prefetch,
            use_orig_params,
            mesh.spec,
        )

        self._input_dtypes = choices.input_dtype, choices.root_input_dtype
        if self._full_in_eval:  # ranks that were given different environments would gather in different dtypes
            choices.settings = {**choices.settings, "FSDP_USE_FULL_PREC_IN_EVAL": "1"}
        self.add_module(FSDP_WRAPPED, module)
        self.__dict__[UNIT] = build_unit(
            [module],
            mesh,
            choices,
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
        """The wrapped module; below a wrapper for activation checkpointing, what that wraps."""
        module = self._modules[FSDP_WRAPPED]
        return module._checkpoint_wrapped_module if isinstance(module, ActivationWrapper) else module  # type: ignore

    @property
    def compute_device(self) -> torch.device:
        """Where the unit computes, also after it was moved."""
        return unit_of(self).device or self._device

    @property
    def training_state(self) -> TrainingState:
        """What the unit is in the middle of."""
        return training_state(unit_of(self).state)

    @property
    def params(self) -> list[nn.Parameter]:
        """What stands for the parameters of this unit alone: its flat parameter, or its original ones."""
        return [param for bucket in unit_of(self).buckets for param in bucket.registrar.managed()]

    def __getattr__(self, name: str) -> Any:
        """Attributes that the wrapper lacks are the wrapped module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(FSDP_WRAPPED), name)

    def __getitem__(self, key: int) -> Any:
        """Items are the wrapped module's."""
        return self._modules[FSDP_WRAPPED][key]  # type: ignore[index]

    @_disable_dynamo(recursive=False)  # the hooks are not to be compiled, what is wrapped may be
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with its parameters gathered."""
        unit = unit_of(self)
        executor = unit.executor or self._begin_as_root()
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
        executor = StepExecutor(named_units(self, Face.FSDP1), face=type(self).__name__)
        self._lower_buffers()
        return executor

    def _lower_buffers(self) -> None:
        named = list(_named_fsdp_modules(self))
        cast_buffers(
            ((wrapper, wrapper.mixed_precision.buffer_dtype, wrapper.compute_device) for _, wrapper in named),
            (module for _, wrapper in named for module in wrapper._ignored.modules),
        )

    @_disable_dynamo
    def _follow_mode(self) -> None:
        """Under FSDP_USE_FULL_PREC_IN_EVAL: compute in full precision while the wrapped module is in eval mode, else as the user
        chose. The root's mode counts for all buffers."""
        full, unit = not self.module.training, unit_of(self)
        if full is self._computes_in_full:
            return
        self._computes_in_full = full
        policy = self.mixed_precision.policy
        if policy.param_dtype is not None or policy.reduce_dtype is not None:
            unit.compute_in(PrecisionPolicy() if full else policy)
        unit.choices.input_dtype, unit.choices.root_input_dtype = (None, None) if full else self._input_dtypes
        if unit.executor is not None and unit.executor.root is unit:
            if not full:
                self._lower_buffers()
            else:
                for name, buffer in self.named_buffers():
                    buffer.data = buffer.to(dtype=self._buffer_dtypes[name])

    def check_is_root(self) -> bool:
        """Whether this is the outermost unit; asked before the first forward, this instance is taken to be it."""
        executor = unit_of(self).executor or self._begin_as_root()
        return executor.root is unit_of(self)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list["FullyShardedDataParallel"]:
        """All wrappers in a module tree; with `root_only` those that lie in no other."""
        found = [wrapper for _, wrapper in _named_fsdp_modules(module)]
        if not root_only:
            return found
        inner = {id(w) for outer in found for w in outer.modules() if w is not outer}
        return [wrapper for wrapper in found if id(wrapper) not in inner]

    def apply(self, fn: Callable[[nn.Module], None]) -> "FullyShardedDataParallel":
        """Apply `fn` to every module below and to this one, each while the parameters of its unit are full; what it writes
        stays (R20).

        Raises:
            StateError: in a forward or backward, or while parameters are summoned.
        """
        with summon_units([unit_of(self)], UnshardRequest()):
            return super().apply(fn)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FullyShardedDataParallel":
        """`to`, `half`, `cuda` and their kin: the shards are moved and converted as one, and stay what they are."""
        with unit_of(self).converting(fn):
            return super()._apply(fn, recurse)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; full gradients that accumulated under `no_sync` are forgotten too."""
        executor = unit_of(self).executor
        if executor is not None:
            executor.recover()
        super().zero_grad(set_to_none)
        units = executor.units if executor is not None else units_in(self, Face.FSDP1)
        for unit in units:
            unit.drop_grads()

    __reduce_ex__ = refuse_to_pickle  # type: ignore[assignment]
    _ddp_params_and_buffers_to_ignore = refuse_ddp

    def __deepcopy__(self, memo: dict) -> "FullyShardedDataParallel":
        """Refused: the copy would share neither hooks nor memory with its units."""
        raise UsageError("a FullyShardedDataParallel cannot be copied; copy the module before wrapping it")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward reduces nothing: full gradients accumulate on each rank (R15)."""
        units = units_in(self, Face.FSDP1)
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
        """Scale all gradients so that the norm over them all, each element once, is at most `max_norm` (R30).

        All ranks call it, on the outermost unit.

        Returns:
            The norm before, of shape (), the same on all ranks, in the largest dtype of the gradients.

        Raises:
            StateError: on an inner unit, or during a step.
            UsageError: a negative `max_norm`, or a `norm_type` that is not above 0.
        """
        if not self.check_is_root():
            raise StateError(
                "clip_grad_norm_ on an inner unit would see a part of the gradients; call it on the outermost"
            )
        executor = unit_of(self).executor
        assert executor is not None
        executor.check_summon()
        managed = {
            id(param) for unit in executor.units for bucket in unit.buckets for param in bucket.registrar.managed()
        }
        others = [param for param in self.parameters() if id(param) not in managed]
        return clip_grad_norm(executor.units, others, max_norm, norm_type)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook` reduce gradients in the place of this class, division included.

        Args:
            state: given to the hook as its first argument.
            hook: `hook(state, full, shard)`: fill `shard` with this rank's part of the reduced `full`, both 1-D. Where nothing is
                sharded (NO_SHARD) `hook(state, full)`: reduce in place. torch's default_hooks and fp16_compress_hook fit.

        Raises:
            StateError: on an inner unit, where there is a hook already, or under hybrid sharding, as in torch.
            UsageError: a hook that cannot be called.
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
    """What the units are made of: one flat layout each, and by `use_orig_params` one flat parameter or the original ones."""

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
        """All are one, which refuses a mix."""

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
