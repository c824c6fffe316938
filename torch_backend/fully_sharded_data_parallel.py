"""The FSDP1 interface: `FullyShardedDataParallel`, a wrapper module over one unit of the engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from crossframe.errors import UsageError
from crossframe.layout import FlatLayout
from crossframe.strategy import Strategy
from crossframe.units import Order
from crossframe.unshard import UnshardRequest
from torch_backend.build import build_unit, default_process_group, move_to_device
from torch_backend.collectives import Communicator
from torch_backend.exposure import FlatExposure, FlatParameter, OriginalExposure
from torch_backend.schedule import Schedule
from torch_backend.slots import WRAPPED, canonical_name
from torch_backend.unit import UNIT, unit_of
from torch_backend.unshard import summon_units
from torch_backend.wrap import ModuleWrapPolicy, wrap_children

__all__ = ["BackwardPrefetch", "FlatParameter", "FullyShardedDataParallel", "ShardingStrategy"]


class ShardingStrategy(Enum):
    """When full parameters are freed (R14)."""

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()

    @property
    def strategy(self) -> Strategy:
        """The core's name of it."""
        return Strategy[self.name]


class BackwardPrefetch(Enum):
    """When the next unit's parameters are gathered in backward (R16): before this unit's gradients are computed."""

    BACKWARD_PRE = auto()


class FullyShardedDataParallel(nn.Module):
    """Shard a module's parameters over the ranks; gather them around its forward and backward.

    Args:
        module: the module to shard. Every rank builds the same one with the same values.
        process_group: the ranks to shard over; the default group if None.
        sharding_strategy: FULL_SHARD (default) or SHARD_GRAD_OP.
        auto_wrap_policy: which submodules become units of their own, each gathered and freed by itself.
        backward_prefetch: gather the next unit while this one computes its backward (default), or None for not.
        device_id: move the module there first.
        use_orig_params: keep the original parameters (sharded views with their names), instead of one `FlatParameter` a
            unit.

    Raises:
        UsageError: no process group, a module that is sharded already, or an argument of another type.
        LayoutError: parameters that one flat parameter cannot hold; the message names them.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        *,
        auto_wrap_policy: ModuleWrapPolicy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        device_id: int | torch.device | None = None,
        use_orig_params: bool = False,
    ) -> None:
        super().__init__()
        strategy = ShardingStrategy.FULL_SHARD if sharding_strategy is None else sharding_strategy
        _check_arguments(module, strategy, backward_prefetch, auto_wrap_policy)
        group = process_group or default_process_group()
        move_to_device(module, device_id)
        self._backward_prefetch = backward_prefetch
        self._use_orig_params = use_orig_params
        if auto_wrap_policy is not None:
            wrap = partial(
                FullyShardedDataParallel,
                process_group=group,
                sharding_strategy=strategy,
                backward_prefetch=backward_prefetch,
                use_orig_params=use_orig_params,
            )
            wrap_children(module, auto_wrap_policy, wrap)
        communicator = Communicator(group)

        def make_exposure(owned, store, leaves):
            if use_orig_params:
                return OriginalExposure(owned, store, leaves)
            return FlatExposure(module, owned, store, leaves)

        def make_layout(owned):
            return FlatLayout(tuple(entry.spec for entry in owned), communicator.size, keep_original=use_orig_params)

        self.__dict__[UNIT] = build_unit(
            module,
            communicator,
            is_unit=lambda inner: isinstance(inner, FullyShardedDataParallel),
            order=Order.PRE_ORDER,
            make_layout=make_layout,
            make_exposure=make_exposure,
            mixes_dtypes=False,
            divides_once=False,
            reshard_after_forward=strategy.strategy.reshards_after_forward,
            keeps_full_unreduced=not strategy.strategy.reshards_after_forward,
        )
        self.add_module(WRAPPED, module)
        self.register_state_dict_pre_hook(_refuse_sharded_state_dict)
        self.register_state_dict_post_hook(_strip_wrapper)
        self.register_load_state_dict_pre_hook(_add_wrapper)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._modules[WRAPPED]  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        """Attributes that the wrapper lacks are the wrapped module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(WRAPPED), name)

    def __getitem__(self, key: int) -> Any:
        """Items are the wrapped module's."""
        return self.module[key]  # type: ignore[index]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with its parameters gathered."""
        unit = unit_of(self)
        schedule = unit.schedule or self._begin_as_root()
        args, kwargs = schedule.begin_forward(unit, args, kwargs)
        try:
            output = self.module(*args, **kwargs)
        except BaseException:
            schedule.abandon_forward(unit)
            raise
        schedule.end_forward(unit, output)
        return output

    def _begin_as_root(self) -> Schedule:
        unit_of(self).reshard_after_forward = False  # R13
        named = [(canonical_name(name), unit_of(module)) for name, module in _named_fsdp_modules(self)]
        prefetch = self._backward_prefetch is not None
        return Schedule(named, backward_prefetch=prefetch, face="FullyShardedDataParallel")

    def check_is_root(self) -> bool:
        """Whether this is the outermost unit; asked before the first forward, this instance is taken to be it."""
        schedule = unit_of(self).schedule or self._begin_as_root()
        return schedule.root is unit_of(self)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list["FullyShardedDataParallel"]:
        """All wrappers in a module tree; with `root_only` those that lie in no other."""
        found = [(name, wrapper) for name, wrapper in _named_fsdp_modules(module)]
        if not root_only:
            return [wrapper for _, wrapper in found]
        inner = {id(w) for _, outer in found for w in outer.modules() if w is not outer}
        return [wrapper for _, wrapper in found if id(wrapper) not in inner]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; full gradients that accumulated under `no_sync` are forgotten too."""
        super().zero_grad(set_to_none)
        for wrapper in self.fsdp_modules(self):
            unit_of(wrapper).drop_grads()

    def __deepcopy__(self, memo: dict) -> "FullyShardedDataParallel":
        """Refused: the copy would share neither hooks nor memory with its units."""
        raise UsageError("a FullyShardedDataParallel cannot be copied; copy the module before wrapping it")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward reduces nothing: full gradients accumulate on each rank (R15)."""
        units = [unit_of(wrapper) for wrapper in self.fsdp_modules(self)]
        before = [unit.reduces for unit in units]
        for unit in units:
            unit.reduces = False
        try:
            yield
        finally:
            for unit, reduces in zip(units, before, strict=True):
                unit.reduces = reduces

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module, recurse: bool = True, writeback: bool = True, rank0_only: bool = False
    ) -> Iterator[None]:
        """Inside, parameters are full, under their original names and shapes (R18-R21).

        Args:
            module: a module with units in it; all of them are unsharded, or with `recurse=False` its own alone.
            writeback: on exit each rank copies back what it owns of the edits; otherwise they are lost.
            rank0_only: ranks other than the group's first see their shards; needs `writeback=False`.

        Raises:
            StateError: during forward or backward, or inside another summon of the same units.
            UnsupportedError: `writeback` with `rank0_only`.
        """
        request = UnshardRequest(writeback=writeback, rank0_only=rank0_only)
        if recurse:
            wrappers = FullyShardedDataParallel.fsdp_modules(module)
        else:
            wrappers = [module] if isinstance(module, FullyShardedDataParallel) else []
        for wrapper in wrappers:
            request.check(keeps_original=wrapper._use_orig_params)
        with summon_units([unit_of(wrapper) for wrapper in wrappers], request):
            yield

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; while parameters are summoned, without the names that wrapping added."""
        summoned = self._summoned
        for name, param in super().named_parameters(*args, **kwargs):
            yield (canonical_name(name) if summoned else name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As of any module; while parameters are summoned, without the names that wrapping added."""
        summoned = self._summoned
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield (canonical_name(name) if summoned else name), buffer

    @property
    def _summoned(self) -> bool:
        return unit_of(self).summoned


def _named_fsdp_modules(module: nn.Module) -> Iterator[tuple[str, FullyShardedDataParallel]]:
    for name, inner in module.named_modules():
        if isinstance(inner, FullyShardedDataParallel):
            yield name, inner


def _check_arguments(module: Any, strategy: Any, prefetch: Any, policy: Any) -> None:
    if not isinstance(module, nn.Module):
        raise UsageError(f"FullyShardedDataParallel: expected a module, got {type(module).__name__}")
    if isinstance(module, FullyShardedDataParallel):
        raise UsageError("FullyShardedDataParallel: the module is one already; wrap it once")
    if policy is not None and any(True for _ in _named_fsdp_modules(module)):
        raise UsageError(
            "FullyShardedDataParallel: with auto_wrap_policy the submodules must not be wrapped yet; wrap by policy or by "
            "hand, not both"
        )
    for name, value, kind in (
        ("sharding_strategy", strategy, ShardingStrategy),
        ("backward_prefetch", prefetch, BackwardPrefetch | None),
        ("auto_wrap_policy", policy, ModuleWrapPolicy | None),
    ):
        if not isinstance(value, kind):
            raise UsageError(f"FullyShardedDataParallel: expected {name} of type {kind}, got {value!r}")


def _refuse_sharded_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    assert isinstance(module, FullyShardedDataParallel)
    if not module._summoned:
        raise UsageError(
            f"state_dict of the sharded unit {unit_of(module).name!r} would hold this rank's shards under the names of full "
            "parameters; call it inside FullyShardedDataParallel.summon_full_params(module, writeback=False)"
        )


def _strip_wrapper(module: nn.Module, state: dict, prefix: str, local_metadata: dict) -> None:
    """Names in a state dict are those of the module without wrappers."""
    for key in [key for key in state if key.startswith(f"{prefix}{WRAPPED}.")]:
        state[prefix + key.removeprefix(f"{prefix}{WRAPPED}.")] = state.pop(key)


def _add_wrapper(module: nn.Module, state: dict, prefix: str, *rest: Any) -> None:
    """The inverse, for loading."""
    assert isinstance(module, FullyShardedDataParallel)
    if not module._summoned:
        raise UsageError(
            f"load_state_dict into the sharded unit {unit_of(module).name!r}: call it inside "
            "FullyShardedDataParallel.summon_full_params(module), where parameters have their full shapes"
        )
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}{WRAPPED}.{key.removeprefix(prefix)}"] = state.pop(key)
