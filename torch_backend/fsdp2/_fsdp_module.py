"""FSDPModule: the methods that `fully_shard` adds to a module's class, and the functions that go with them."""

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from typing_extensions import deprecated

from crossframe.api import Api
from crossframe.errors import (
    AssertedError,
    RunOrderError,
    StateError,
    UnitError,
    UnsupportedError,
    UsageError,
    WrongTypeError,
)
from crossframe.lifecycle import Residency
from crossframe.reduction import custom_factors
from torch_backend.compat._fully_shard_api import AllGather, ReduceScatter
from torch_backend.engine._deferred_init import check_real, make_real
from torch_backend.engine._step_hooks import StepExecutor, executor_of
from torch_backend.engine._unit import Unit, unit_of
from torch_backend.engine._unit_tree import NamedUnit, named_units, units_in
from torch_backend.engine._unsupported import refuse_ddp, refuse_to_pickle
from torch_backend.memory._streams import on_stream
from torch_backend.ranks._collectives import Communicator
from torch_backend.state._load_check import load_plainly, strictly


class UnshardHandle:
    """A pending all-gather. The parameters are unsharded after `wait`."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Wait for the all-gather and register the unsharded parameters."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.is_full:
            unit.unshard("summon")
            unit.expose()


class FSDPModule(nn.Module):
    """The methods that `fully_shard` adds to a module's class.

    Methods with `recurse` also apply to all inner FSDPModules. All ranks must call the same methods with the same arguments.
    """

    # The index of the module's own class in the method resolution order.
    _own_class_index = 2

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create a module of the original class, as containers do when they are sliced."""
        own: Any = cls.__mro__[cls._own_class_index]
        module = own.__new__(own, *args, **kwargs)
        module.__init__(*args, **kwargs)
        return module

    def __deepcopy__(self, memo: dict) -> "FSDPModule":
        """Raise: a copy would not share hooks and memory with its unit."""
        raise AssertedError("a sharded module cannot be copied; copy it before fully_shard, or use a state dict")

    __reduce_ex__ = refuse_to_pickle  # type: ignore[assignment]
    _ddp_params_and_buffers_to_ignore = refuse_ddp

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict on all ranks. If entries do not fit, StateDictError lists them and nothing is loaded."""
        with strictly(strict):
            overridden = super().load_state_dict.__func__ is not nn.Module.load_state_dict
            if isinstance(state_dict, Mapping) and not (assign or overridden) and load_plainly(self, state_dict):
                return _IncompatibleKeys([], [])
            return super().load_state_dict(state_dict, strict=strict, assign=assign)

    # Parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this unit's parameters and register the unsharded ones, until `reshard` or the unit's next forward or
        backward frees them. Does not unshard inner units.

        Args:
            async_op: return a handle without waiting; call its `wait` before using the parameters. The unit's forward also waits.
        """
        unit = unit_of(self)
        unit.free_outdated("summon", training=False)
        unit.gather("summon")
        unit.step.keep()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Register the sharded parameters and free the unsharded ones, discarding edits of the latter."""
        unit_of(self).reshard("summon")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FSDPModule":
        """Implement `to`, `half`, `to_empty` etc.: convert the shards together and keep them sharded."""
        unit = unit_of(self)
        if unit.is_converting:  # the other modules of the unit
            return super()._apply(fn, recurse)
        with unit.converting(fn):
            return super()._apply(fn, recurse)

    # Steps

    def reset_iter_state(self) -> None:
        """Reshard all units and discard unreduced gradients after an exception in forward or backward. The next forward also does
        this.

        Raises:
            StateError: on an inner unit.
        """
        executor = executor_of(unit_of(self))
        if executor is None:
            return
        if executor.root is not unit_of(self):
            raise StateError("reset_iter_state: call it on the outermost FSDPModule; it resets the inner ones too")
        executor.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last one before the optimizer step. After other backwards, computation does not
        wait for reductions, and gradients must not be read."""
        _executor(self).is_last_backward = is_last_backward

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Set an event, recorded after the optimizer step, for which the all-gathers of the next forward wait instead of all work
        on the current stream. Applies once."""
        _executor(self).post_optim_event = event

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients. If not, unsharded gradients accumulate on each rank (R15)."""
        for unit in _units(self, recurse):
            unit.step.choose(reduce_grads=requires_gradient_sync, all_reduce_grads=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether gradients are all-reduced over replicas. If not, sums over the shard group accumulate until a backward that
        does (R28). Has no effect without replicas."""
        for unit in _units(self, recurse):
            unit.step.choose(all_reduce_grads=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether unsharded parameters are freed between forward and backward, also for the root. It replaces a reshard
        group (R08)."""
        _check_bool("set_reshard_after_forward", reshard_after_forward)
        for unit in _units(self, recurse):
            if unit.state.residency == Residency.RESHARD_GROUP:
                unit.reshard("summon")
            unit.step.choose(keep_root=False, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether unsharded parameters are freed after backward. If not, the next forward does not all-gather them unless an
        optimizer stepped."""
        for unit in _units(self, recurse):
            unit.step.choose(reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether this unit's backward needs its parameters. An embedding's backward does not, for example."""
        unit_of(self).step.choose(unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: "Sequence[FSDPModule]") -> None:
        """Set the modules whose parameters are all-gathered during this module's forward."""
        units = _units_of(modules, "set_modules_to_forward_prefetch")
        unit_of(self).step.forward_prefetch_units = tuple(unit.step for unit in units)

    def set_modules_to_backward_prefetch(self, modules: "Sequence[FSDPModule]") -> None:
        """Set the modules whose parameters are all-gathered during this module's backward, instead of the previous module
        (R16)."""
        units = _units_of(modules, "set_modules_to_backward_prefetch")
        unit_of(self).step.backward_prefetch_units = tuple(unit.step for unit in units)

    # Gradients

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this unit's gradients by `factor` instead of the number of ranks (R27)."""
        custom_factors(factor)
        for bucket in unit_of(self).buckets:
            bucket.reduction_choices.divide_factor = float(factor)

    @deprecated("Use `set_gradient_divide_factor`", category=FutureWarning)
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated alias of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether the reductions of this unit only sum, so that gradients are divided afterwards, except in dtypes that could
        overflow."""
        _check_bool("set_force_sum_reduction_for_comms", enable)
        for bucket in unit_of(self).buckets:
            bucket.reduction_choices.sum_only = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether parameters that a backward did not use contribute zeros and get a gradient, also in unused units. Ranks may
        then use different units (R29)."""
        for unit in _units(self, recurse):
            unit.step.choose(reduce_unused=reduce_scatter_unused_params)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call `hook` with this unit's 1-D reduced gradient after the last collective and before a remaining division.

        Args:
            stream: the stream of the hook on an accelerator; not supported with replicas.
        """
        if not callable(hook):
            raise UsageError(f"set_all_reduce_hook: expected a function of a tensor, got {hook!r}")
        if stream is not None and unit_of(self).mesh.spec.replicate > 1:
            raise UsageError("set_all_reduce_hook: a stream of your own is for meshes without replicas")
        for bucket in unit_of(self).buckets:
            bucket.reduction_choices.all_reduce_hook = hook if stream is None else on_stream(hook, stream)

    # Collectives

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """All-gather this unit's parameters with `comm`."""
        _check_comm("set_custom_all_gather", comm)
        unit_of(self).mesh.shards.custom_all_gather = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce-scatter this unit's gradients over the shard group with `comm`."""
        _check_comm("set_custom_reduce_scatter", comm)
        unit_of(self).mesh.reducing.custom_reduce_scatter = comm

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many reduce-scatter inputs may be pending on an accelerator. A larger number overlaps slow reductions with
        computation at the cost of memory."""
        if type(max_input_buffers) is not int:
            raise WrongTypeError(
                f"set_reduce_scatter_max_input_buffers: expected a number above 0, got {max_input_buffers!r}"
            )
        if max_input_buffers < 1:
            raise UsageError(
                f"set_reduce_scatter_max_input_buffers: expected a number above 0, got {max_input_buffers}"
            )
        for unit in _units(self, recurse):
            for bucket in unit.buckets:
                bucket.allow_held(max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Set whether gradients are reduced in a separate process group, so that NCCL can overlap all-gathers and reductions. All
        ranks of the mesh must call it."""
        made: dict[tuple[int, ...], Communicator] = {}
        for unit in _units(self, recurse):
            shards = unit.mesh.shards
            if shards.size == 1:
                continue
            if not enable:
                unit.mesh.reducing = shards
                continue
            if shards.ranks not in made:
                made[shards.ranks] = Communicator(_group_of(shards.ranks))
            own = Communicator(made[shards.ranks].group)
            own.custom_reduce_scatter = unit.mesh.reducing.custom_reduce_scatter
            unit.mesh.reducing = own

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether buffers of collectives are allocated by the process group, if it has an allocator. Does not apply to
        buffers that are the parameters' memory (flat and ragged layouts)."""
        mesh = unit_of(self).mesh
        for communicator in {mesh.shards, mesh.reducing}:
            communicator.allocates = enable

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Not supported.

        Raises:
            UnsupportedError: always, with the reason.
        """
        unit = unit_of(self)
        device = unit.device or torch.device("cpu")
        if device.type != "cuda":
            raise UnsupportedError(
                f"set_symm_mem_for_comm: symmetric memory is between GPUs over NCCL, and this unit computes on {device.type}"
            )
        raise UnsupportedError(
            "set_symm_mem_for_comm: gathers here go straight from the shard's buffer, which is not in symmetric memory; use "
            "set_allocate_memory_from_process_group_for_comm"
        )


# torch.distributed.checkpoint.state_dict looks it up in each module on the path of each parameter. In a module that lacks it this
# raises inside, which takes longer than the rest of the look-up.
_MODIFIERS = "_fqn_modifiers"
_NO_MODIFIERS: dict[str, str] = {}


def _no_modifiers(module: nn.Module) -> dict[str, str]:
    """The names in a state dict that differ from those of modules: none."""
    return _NO_MODIFIERS


@functools.cache
def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The sharded class of `cls`, cached so that instances of one class keep one type."""
    members: dict[str, Any] = {"__module__": cls.__module__}
    if not hasattr(cls, _MODIFIERS):
        members[_MODIFIERS] = _no_modifiers
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), members)


def begin_as_root(module: nn.Module) -> StepExecutor:
    """Make `module` the root of all units in it, on first use.

    Raises:
        RunOrderError: its unit has several modules.
        UnitError: two units share a parameter.
    """
    unit = unit_of(module)
    if unit.num_modules > 1:
        raise RunOrderError(
            f"unit of {unit.num_modules} modules: the first of them runs outside a sharded root; call fully_shard on a "
            "module that contains them all, and run that"
        )
    named = named_units(module, Api.FSDP2)
    _check_shared(named)
    for each in named:
        make_real(each.unit)
    check_real(named)
    return StepExecutor(named, api="fully_shard")


def _check_shared(named: Sequence[NamedUnit]) -> None:
    seen: dict[object, tuple[str, str]] = {}
    for unit in named:
        for each in unit.buckets:
            for spec, origin in zip(each.params, each.bucket.origins, strict=True):
                if origin in seen:
                    name, other = seen[origin]
                    raise UnitError(
                        f"{name!r} of unit {other!r} and {spec.name!r} of unit {unit.name!r} are one parameter; shard the "
                        "modules that share it together, fully_shard([a, b]), or leave both to a unit around them"
                    )
                seen[origin] = spec.name, unit.name


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a sharded module all-gather and free the parameters as `forward` does. Does nothing if the module is not
    sharded.

    Raises:
        UsageError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise UsageError(f"register_fsdp_forward_method: a {type(module).__name__} has no method {method_name!r}")
    before, after = unit_of(module).call_around

    @functools.wraps(method)
    def around(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = before(self, args, kwargs)
        try:
            output = method(*args, **kwargs)
        except BaseException:
            after(self, args, None)
            raise
        changed = after(self, args, output)
        return output if changed is None else changed

    setattr(module, method_name, types.MethodType(around, module))


def share_comm_ctx(modules: "Sequence[FSDPModule]") -> None:
    """Share communication streams between several roots, such as pipeline stages. All units of a device already share them.

    Raises:
        UsageError: a module that is not sharded.
    """
    _units_of(modules, "share_comm_ctx")


def _units(module: nn.Module, recurse: bool) -> Iterator[Unit]:
    """The unit of a module, and with `recurse` all inner units, each once."""
    yield from units_in(module, Api.FSDP2) if recurse else [unit_of(module)]


def _units_of(modules: Any, method: str) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise UsageError(
                f"{method}: expected FSDPModules, got {type(module).__name__}; call fully_shard on it first"
            )
    return list(dict.fromkeys(unit_of(module) for module in modules))


def _executor(module: nn.Module) -> StepExecutor:
    """The step executor of a module; a module that has not run becomes a root."""
    return executor_of(unit_of(module)) or begin_as_root(module)


def _check_bool(method: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{method}: expected True or False, got {value!r}")


def _check_comm(method: str, comm: Any) -> None:
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise UsageError(f"{method}: expected an object to call, with a method `allocate`; got {comm!r}")


def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="crossframe_reduce_scatter")
    assert isinstance(group, dist.ProcessGroup)
    return group
