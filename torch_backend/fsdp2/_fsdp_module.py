"""FSDPModule: the methods that `fully_shard` adds to a module's class, and the functions that go with them."""

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import deprecated

from crossframe.errors import (
    AssertedError,
    RunOrderError,
    StateError,
    UnitError,
    UnsupportedError,
    UsageError,
    WrongTypeError,
)
from crossframe.faces import Face
from crossframe.lifecycle import Residency
from crossframe.reduction import custom_factors
from torch_backend.compat._fully_shard_api import AllGather, ReduceScatter
from torch_backend.engine._deferred_init import check_real, make_real
from torch_backend.engine._executor import StepExecutor
from torch_backend.engine._unit import Unit, unit_of
from torch_backend.engine._unit_tree import NamedUnit, named_units, units_in
from torch_backend.engine._unsupported import refuse_ddp, refuse_to_pickle
from torch_backend.memory._streams import on_stream
from torch_backend.ranks._collectives import Communicator
from torch_backend.state._load_check import strictly


class UnshardHandle:
    """An all-gather under way. The parameters are full after `wait`."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Wait for the all-gather and register the full parameters."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.is_full:
            unit.unshard("summon")
            unit.expose()


class FSDPModule(nn.Module):
    """What `fully_shard` adds to a module's class.

    Methods that end in `recurse` hold for all FSDPModules below too. Ranks must call the same methods with the same arguments.
    """

    # Where in the class's method resolution order the module's own class stands.
    _own_class_index = 2

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A module of the original class: containers make new ones of their own type when they are sliced."""
        own: Any = cls.__mro__[cls._own_class_index]
        module = own.__new__(own, *args, **kwargs)
        module.__init__(*args, **kwargs)
        return module

    def __deepcopy__(self, memo: dict) -> "FSDPModule":
        """Refused: the copy would share neither hooks nor memory with its unit."""
        raise AssertedError("a sharded module cannot be copied; copy it before fully_shard, or use a state dict")

    __reduce_ex__ = refuse_to_pickle  # type: ignore[assignment]
    _ddp_params_and_buffers_to_ignore = refuse_ddp

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any module, on all ranks; where something does not fit, StateDictError lists it and nothing is loaded."""
        with strictly(strict):
            return super().load_state_dict(state_dict, strict=strict, assign=assign)

    # Parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters and register them in full, until `reshard` or the unit's next forward or backward
        frees them. Inner units are not touched.

        Args:
            async_op: return at once with a handle, on which to `wait` before the parameters are used; the unit's forward waits
                by itself.
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
        """Register the sharded parameters and free the full ones. Edits of the full ones are lost."""
        unit_of(self).reshard("summon")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FSDPModule":
        """`to`, `half`, `to_empty` and their kin: the shards are moved and converted as one, and stay what they are."""
        unit = unit_of(self)
        if unit.is_converting:  # the other modules of the unit
            return super()._apply(fn, recurse)
        with unit.converting(fn):
            return super()._apply(fn, recurse)

    # Steps

    def reset_iter_state(self) -> None:
        """Bring every unit back to its shard after an exception in forward or backward. The next forward does so by itself;
        this does it at once, and forgets gradients that were not reduced.

        Raises:
            StateError: on an inner unit.
        """
        executor = unit_of(self).executor
        if executor is None:
            return
        if executor.root is not unit_of(self):
            raise StateError("reset_iter_state: call it on the outermost FSDPModule; it resets the inner ones too")
        executor.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last one before the optimizer steps. Behind one that is not, computation need not
        wait for its reductions, and gradients are not to be read."""
        _executor(self).is_last_backward = is_last_backward

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the gathers of the next forward wait for this event, recorded behind the optimizer's step, and not for all that the
        device was given since. It holds once."""
        _executor(self).post_optim_event = event

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether a backward reduces gradients. Without, they accumulate in full on each rank (R15)."""
        for unit in _units(self, recurse):
            unit.step.choose(reduce_grads=requires_gradient_sync, all_reduce_grads=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether a reduction goes on from the shard group to the replicas. Without, sums over the shard group accumulate, until
        a backward that does (R28). It changes nothing where there are no replicas."""
        for unit in _units(self, recurse):
            unit.step.choose(all_reduce_grads=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full parameters are freed between forward and backward; for the root too, and in the place of a smaller group
        (R08)."""
        _check_bool("set_reshard_after_forward", reshard_after_forward)
        for unit in _units(self, recurse):
            if unit.state.residency == Residency.K_GROUP:
                unit.reshard("summon")
            unit.step.choose(keep_root=False, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether full parameters are freed after backward. Without, the next forward needs no gather, unless an optimizer has
        stepped."""
        for unit in _units(self, recurse):
            unit.step.choose(reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether this unit's backward needs its parameters. That of an embedding does not, for example."""
        unit_of(self).step.choose(unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: "Sequence[FSDPModule]") -> None:
        """Gather the parameters of these modules while this one's forward computes."""
        units = _units_of(modules, "set_modules_to_forward_prefetch")
        unit_of(self).step.forward_prefetch_units = tuple(unit.step for unit in units)

    def set_modules_to_backward_prefetch(self, modules: "Sequence[FSDPModule]") -> None:
        """Gather the parameters of these modules while this one's backward computes, in the place of the one before it (R16)."""
        units = _units_of(modules, "set_modules_to_backward_prefetch")
        unit_of(self).step.backward_prefetch_units = tuple(unit.step for unit in units)

    # Gradients

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this unit's gradients by `factor`, and not by the number of ranks (R27)."""
        custom_factors(factor)
        for bucket in unit_of(self).buckets:
            bucket.reduction_choices.divide_factor = float(factor)

    @deprecated("Use `set_gradient_divide_factor`", category=FutureWarning)
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether the collectives of this unit's gradients do nothing but sum, so that all division is behind them, but in
        dtypes that could overflow."""
        _check_bool("set_force_sum_reduction_for_comms", enable)
        for bucket in unit_of(self).buckets:
            bucket.reduction_choices.sum_only = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Let parameters that a backward did not reach count as zeros on this rank and get a gradient, also in units of which
        it reached none: ranks may then take other ways through the model, whole units apart (R29)."""
        for unit in _units(self, recurse):
            unit.step.choose(reduce_unused=reduce_scatter_unused_params)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call `hook` with this unit's reduced gradient, 1-D, behind the last collective and ahead of a division that is left.

        Args:
            stream: where to call it, on an accelerator; where there are replicas, only the engine's own.
        """
        if not callable(hook):
            raise UsageError(f"set_all_reduce_hook: expected a function of a tensor, got {hook!r}")
        if stream is not None and unit_of(self).mesh.spec.replicate > 1:
            raise UsageError("set_all_reduce_hook: a stream of your own is for meshes without replicas")
        for bucket in unit_of(self).buckets:
            bucket.reduction_choices.all_reduce_hook = hook if stream is None else on_stream(hook, stream)

    # Collectives

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this unit's parameters by `comm`."""
        _check_comm("set_custom_all_gather", comm)
        unit_of(self).mesh.shards.custom_all_gather = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this unit's gradients over the shard group by `comm`."""
        _check_comm("set_custom_reduce_scatter", comm)
        unit_of(self).mesh.reducing.custom_reduce_scatter = comm

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many buffers of collected gradients may wait for their reductions on an accelerator: more let computation go on
        where reductions are slow, and take memory."""
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
        """Whether gradients are reduced in a process group of their own, so that NCCL can gather at the same time. All ranks of
        the mesh call it."""
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
        """Whether buffers of collectives come from the process group's own allocator, where it has one. Buffers that are the
        parameters' own memory (flat and ragged layouts) do not."""
        mesh = unit_of(self).mesh
        for communicator in {mesh.shards, mesh.reducing}:
            communicator.allocates = enable

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refused where it cannot be had: symmetric memory is NCCL's, between GPUs.

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


@functools.cache
def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a sharded `cls`: one for all its instances, so that they stay of one type."""
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


def begin_as_root(module: nn.Module) -> StepExecutor:
    """Take `module` to be the root of the units in it, which is used for the first time.

    Raises:
        UsageError: it is one of several modules of its unit.
        UnitError: two units have one parameter.
    """
    unit = unit_of(module)
    if unit.num_modules > 1:
        raise RunOrderError(
            f"unit of {unit.num_modules} modules: one of them runs first, outside of a sharded root; call fully_shard on a "
            "module around them and run that first"
        )
    named = named_units(module, Face.FSDP2)
    _check_shared(named)
    for each in named:
        make_real(each.unit)
    check_real(named)
    return StepExecutor(named, face="fully_shard")


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
    """Let a method of a sharded module gather its parameters before and free them after, as `forward` does. Of a module that is
    not sharded nothing changes.

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
    """Let several roots (the stages of a pipeline) gather and reduce on the same streams. Here all units of a device do.

    Raises:
        UsageError: something that is not sharded.
    """
    _units_of(modules, "share_comm_ctx")


def _units(module: nn.Module, recurse: bool) -> Iterator[Unit]:
    """The unit of a module, and with `recurse` those below it, each once."""
    yield from units_in(module, Face.FSDP2) if recurse else [unit_of(module)]


def _units_of(modules: Any, method: str) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise UsageError(
                f"{method}: expected FSDPModules, got {type(module).__name__}; call fully_shard on it first"
            )
    return list(dict.fromkeys(unit_of(module) for module in modules))


def _executor(module: nn.Module) -> StepExecutor:
    """The step executor of a module; one that has not run is taken to be a root."""
    return unit_of(module).executor or begin_as_root(module)


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
