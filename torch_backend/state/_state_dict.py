"""Model state dicts of FSDP1 (R36): full, sharded and local, under the module's names without wrappers.

While a state dict is made, the module registers what the state dict should hold. So the module itself decides the order and the
names of the keys, together with the hooks of activation checkpointing and of users. For a full state dict it registers full
parameters, views of the memory that each unit was gathered into. For a sharded one it registers PieceTensors, which become rows
of each parameter afterwards, by one all-to-all for each unit and without full parameters. To load, the module copies into
PieceTensors, which alias the shards.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh

from crossframe.errors import StateDictError, UnsupportedError, UsageError
from crossframe.layout import FlatLayout
from crossframe.state import FSDP_WRAPPED, StateKind, local_key, state_key, target_of
from torch_backend.engine._bucket import Bucket
from torch_backend.engine._unit import Unit, unit_of
from torch_backend.memory._gather import views_of, with_own_storage
from torch_backend.param_registration import FlatParameter, FlatRegistrar
from torch_backend.pieces._piece_location import PieceLocation
from torch_backend.pieces._piece_moves import PHASE
from torch_backend.pieces._piece_tensor import PieceTensor, piece_param
from torch_backend.pieces._sharded_tensors import sharded_tensor
from torch_backend.state._load_check import check_load, strictly
from torch_backend.state._piece_conversion import paths_of, piece_keys, show_sharded, take
from torch_backend.state._state_dict_types import (
    FullStateDictConfig,
    HasStateDictType,
    StateDictConfig,
    StateDictType,
    settings_of,
)


class HasStateDicts(HasStateDictType):
    """A wrapper over one unit, whose state dicts are those of the module inside (R36).

    Attributes:
        _device_mesh: the ranks, if the user gave them as a mesh.
    """

    _device_mesh: DeviceMesh | None
    # Whether a state dict of this wrapper, or of one around it, is being made.
    _shows_state = False

    def _provide_state_dicts(self, device_mesh: DeviceMesh | None) -> None:
        """Called at the end of a constructor."""
        self._device_mesh = device_mesh
        self._state_dict_settings = settings_of(StateDictType.FULL_STATE_DICT)
        # Buffers have a lower precision while the unit is used (R33).
        self._buffer_dtypes = {name: buffer.dtype for name, buffer in self.named_buffers()}
        self.register_state_dict_post_hook(_finish)
        self.register_load_state_dict_pre_hook(_prepare_load)
        self.register_load_state_dict_post_hook(_end_load)

    @property
    def _has_params(self) -> bool:
        """Whether the unit has parameters. Libraries read it under torch's name."""
        return bool(unit_of(self).buckets)

    @property
    def _flat_param(self) -> nn.Parameter | None:
        """The flat parameter; with original parameters, the shard that holds them; None if the unit has no parameters. Libraries
        read it under torch's name."""
        if not self._has_params:
            return None
        bucket = unit_of(self).buckets[0]
        if isinstance(bucket.registrar, FlatRegistrar):
            return bucket.registrar.flat_param
        return FlatParameter(
            bucket.store.buffer, requires_grad=any(param.requires_grad for param in bucket.registrar.managed())
        )

    def _fqn_modifiers(self) -> dict[str, str]:
        """No name is changed. Only torch.distributed.checkpoint.state_dict calls it.

        Raises:
            UsageError: `replace_torch_fsdp` was not called: torch would save shards as if they were full parameters.
        """
        if not isinstance(self, import_module("torch.distributed.checkpoint.state_dict").FSDP):
            raise UsageError(
                "torch.distributed.checkpoint.state_dict supports only torch's own FullyShardedDataParallel: call "
                "torch_backend.replace_torch_fsdp() first, or use FullyShardedDataParallel.state_dict_type and .optim_state_dict"
            )
        return {}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of the module without wrappers, of the type that `set_state_dict_type` set; by default full tensors on
        every rank. All ranks call it. While parameters are summoned, it holds the summoned parameters.

        Raises:
            StateError: called in a forward or backward.
            UnsupportedError: a local state dict with a `device_mesh`, as in torch.
        """
        with ExitStack() as stack:
            if not self._shows_state:
                for wrapper in _largest_first(self):
                    stack.enter_context(_showing(wrapper, unit_of(wrapper)))
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the module without wrappers, of the type that was set, or with full tensors. All ranks call it. If
        something does not fit, nothing is loaded.

        Raises:
            StateDictError: on all ranks; the message lists what does not fit.
            StateError: called in a forward or backward.
        """
        with strictly(strict):
            return super().load_state_dict(state_dict, strict=strict, assign=assign)


def kind_of(wrapper: HasStateDicts) -> StateKind:
    """The kind of a wrapper's state dicts; FULL if nothing is sharded."""
    kind = wrapper._state_dict_settings.state_dict_type.kind
    unit = unit_of(wrapper)
    if kind is not StateKind.FULL and unit.mesh.spec.shard == 1:
        return StateKind.FULL
    if kind is StateKind.LOCAL and wrapper._device_mesh is not None:
        raise UnsupportedError(
            f"unit {unit.name!r}: local state dicts are of flat parameters on process groups; with a device_mesh use "
            "SHARDED_STATE_DICT"
        )
    if kind is not StateKind.FULL and wrapper._device_mesh is None and unit.is_tensor_parallel:
        raise UnsupportedError(
            f"unit {unit.name!r}: its parameters are parts of DTensors (tensor parallelism), of which a {kind.value} state dict "
            "needs the mesh of both; construct the wrapper with device_mesh=mesh['dp'] instead of process_group, or use "
            "FULL_STATE_DICT"
        )
    return kind


def config_of(wrapper: HasStateDicts) -> StateDictConfig:
    """The settings of a wrapper's state dicts; the defaults if nothing is sharded, as in torch."""
    if unit_of(wrapper).mesh.spec.shard == 1:
        return FullStateDictConfig()
    return wrapper._state_dict_settings.state_dict_config


def has_entries(config: Any, unit: Unit) -> bool:
    """Whether this rank's state dict has the entries of a unit."""
    return not getattr(config, "rank0_only", False) or unit.mesh.group_rank == 0


def _largest_first(outer: nn.Module) -> list[HasStateDicts]:
    """The wrappers of a module tree of which a state dict is about to be made, except for summoned ones, which stay as they are.

    The largest is gathered first: the memory that a unit needs on the way adds to the results of those before it.
    """
    found = [module for module in outer.modules() if isinstance(module, HasStateDicts) and not unit_of(module).summoned]
    return sorted(found, key=lambda each: -sum(bucket.layout.gathered_numel for bucket in unit_of(each).buckets))


def _check_idle(unit: Unit) -> None:
    if unit.executor is not None:
        unit.executor.recover()
    unit.check_summon()


@contextmanager
def _showing(wrapper: HasStateDicts, unit: Unit) -> Iterator[None]:
    """Inside, the wrapped module registers what its state dict should hold."""
    kind, config = kind_of(wrapper), config_of(wrapper)
    buckets = unit.buckets if kind is not StateKind.LOCAL else []
    if kind is not wrapper._state_dict_settings.state_dict_type.kind:
        warnings.warn(f"unit {unit.name!r} is not sharded: its state dict is a full one", stacklevel=3)
    _check_idle(unit)
    unit.show_shards()
    for bucket in unit.buckets:
        bucket.registrar.adopt()
    wrapper._shows_state = True
    try:
        for bucket in buckets:
            if kind is StateKind.FULL:
                full = _full_params(bucket, config, unit)
            else:
                full = _piece_params(bucket, wrapper._device_mesh)
            bucket.registrar.show_state(full)
        yield
    finally:
        wrapper._shows_state = False
        for bucket in buckets:
            bucket.registrar.hide_state()


def _full_params(bucket: Bucket, config: StateDictConfig, unit: Unit) -> list[nn.Parameter]:
    """Full parameters; PieceTensors on a rank without entries."""
    kept, shard = has_entries(config, unit), bucket.store.buffer
    gathered, _ = gathered_memory(bucket, shard.dtype)
    indices = range(len(bucket.layout.params))
    values = full_values(bucket, shard, gathered, indices, kept=kept, offload=config.offload_to_cpu, unit=unit.name)
    return [nn.Parameter(value, requires_grad=False) for value in values] if kept else _piece_params(bucket, None)


def gathered_memory(bucket: Bucket, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory to all-gather a bucket into, shape (gathered_numel,), and the part of it that this rank's line comes to. A line that
    is made there needs no other memory."""
    gathered = torch.empty(bucket.layout.gathered_numel, dtype=dtype, device=bucket.device)
    return gathered, gathered.view(bucket.layout.world_size, -1)[bucket.store.rank]


def full_values(
    bucket: Bucket, line: Tensor, gathered: Tensor, indices: Sequence[int], *, kept: bool, offload: bool, unit: str
) -> list[Tensor]:
    """The tensors of a full state dict, for a bucket's parameters or tensors with the same layout. All ranks call it.

    Args:
        line: shape (padded_shard_numel,), in any dtype.
        gathered: memory of `gathered_memory`.
        indices: the parameters that are wanted.
        kept: whether this rank needs them; else the result is empty.
        offload: to the CPU.
    """
    line = line.detach().to(bucket.device)
    bucket.mesh.shards.all_gather(gathered, line, unit=unit, phase=PHASE).wait()
    if not kept:
        gathered.untyped_storage().resize_(0)  # the process group may refer to it for longer
        return []
    views = views_of(bucket.layout, gathered)
    tp_params = bucket.registrar.tp_params or [None] * len(views)
    # All of them share the gathered memory, without a copy. Some would keep the memory of the others.
    copy = len(indices) < len(views)
    device = torch.device("cpu") if offload else bucket.device
    values = [(with_own_storage(views[i]).to(device, copy=copy), tp_params[i]) for i in indices]
    return [value if tp_param is None else tp_param.dtensor(value) for value, tp_param in values]


def locations_of(bucket: Bucket, mesh: DeviceMesh | None) -> list[PieceLocation]:
    """The locations of a bucket's parameters."""
    ranks: Any = mesh
    tp_params = bucket.registrar.tp_params or [None] * len(bucket.layout.params)
    return [PieceLocation(bucket.store, i, ranks, bucket.mesh.shards, tp_param) for i, tp_param in enumerate(tp_params)]


def _piece_params(bucket: Bucket, mesh: DeviceMesh | None) -> list[nn.Parameter]:
    """This rank's piece of each parameter, as views of the shard."""
    return [
        piece_param(piece, location, requires_grad=False)
        for piece, location in zip(bucket.store.pieces, locations_of(bucket, mesh), strict=True)
    ]


def _finish(wrapper: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """State dict hook: remove the wrapper from the names, and convert pieces to the configured kind."""
    inside = f"{prefix}{FSDP_WRAPPED}."
    for key in [key for key in state if key.startswith(inside)]:
        state[prefix + key.removeprefix(inside)] = state.pop(key)
    unit = unit_of(wrapper)
    if unit.summoned:  # copies, since summoned parameters are freed when the context ends
        for bucket in unit.buckets:
            for keys in paths_of(wrapper, bucket.registrar.registered, prefix).values():
                state.update({key: state[key].detach().clone() for key in keys if key in state})
        return
    config = config_of(wrapper)
    if not has_entries(config, unit):
        own = [key for bucket in unit.buckets for key in piece_keys(bucket, state)]
        for key in (*own, *(key for key, _ in _buffers(wrapper, prefix))):
            state.pop(key, None)
        return
    for bucket in unit.buckets:
        if kind_of(wrapper) is StateKind.LOCAL:
            state[local_key(prefix.removesuffix("."))] = _own_shard(bucket, config)
        else:
            _replace_pieces(bucket, state, wrapper, unit.name)
    if kind_of(wrapper) is not StateKind.LOCAL:
        _convert_buffers(wrapper, state, prefix, config)


def _buffers(wrapper: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """The keys and names of all buffers below, except for those of ignored modules."""
    ignored = {id(buffer) for module in wrapper._ignored.modules for buffer in module.buffers()}
    for name, buffer in wrapper.named_buffers():
        if id(buffer) not in ignored:
            yield prefix + state_key(name), name


def _own_shard(bucket: Bucket, config: StateDictConfig) -> ShardedTensor:
    """This rank's shard of the flat parameter, without the padding at its end. It aliases the shard."""
    numel, own_numel = _flat_numels(bucket)
    trained = any(param.requires_grad for param in bucket.registrar.managed())
    own = bucket.store.buffer[:own_numel].detach().requires_grad_(trained)
    rows = bucket.layout.padded_shard_numel
    local = sharded_tensor(own, (numel,), rows, bucket.mesh.shards, requires_grad=trained)
    return local.cpu() if config.offload_to_cpu else local


def _flat_numels(bucket: Bucket) -> tuple[int, int]:
    """Elements of the flat parameter, and of this rank's shard without the padding at its end."""
    layout = target_of(bucket.layout, StateKind.LOCAL)
    assert isinstance(layout, FlatLayout)
    start, stop = layout.shard_range(bucket.store.rank)
    return layout.flat_numel, stop - start


def _replace_pieces(bucket: Bucket, state: dict[str, Any], wrapper: HasStateDicts, unit: str) -> None:
    keys, config = piece_keys(bucket, state), wrapper._state_dict_settings.state_dict_config
    if not keys:
        return
    check_use_dtensor(wrapper, config, unit)
    show_sharded(bucket, locations_of(bucket, wrapper._device_mesh), state, keys, unit=unit)
    if config.offload_to_cpu:
        moved = {id(state[key]): state[key].cpu() for key in keys}  # one tensor under all names of a shared parameter
        state.update({key: moved[id(state[key])] for key in keys})


def check_use_dtensor(wrapper: HasStateDicts, config: Any, unit: str) -> None:
    """Raise UsageError if sharded state dicts shall hold DTensors and there is no mesh. With a mesh they always do."""
    if getattr(config, "_use_dtensor", False) and wrapper._device_mesh is None:
        raise UsageError(f"unit {unit!r}: a DTensor needs a mesh; construct the wrapper with device_mesh")


def _convert_buffers(wrapper: HasStateDicts, state: dict[str, Any], prefix: str, config: StateDictConfig) -> None:
    """Convert buffers to the dtypes that they had when they were wrapped, and move them to the CPU if the settings say so."""
    lowered = wrapper.mixed_precision.buffer_dtype is not None  # type: ignore[union-attr]
    for key, name in _buffers(wrapper, prefix):
        buffer, dtype = state.get(key), wrapper._buffer_dtypes.get(name)
        if not isinstance(buffer, Tensor):  # not persistent
            continue
        if config.offload_to_cpu:
            buffer = buffer.cpu()
        if lowered and dtype is not None and buffer.dtype != dtype:
            buffer = buffer.to(dtype)
        state[key] = buffer


# Loading


def _prepare_load(wrapper: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load hook: register the shard's pieces, convert the values that will be copied into them, and put the wrapper's name into
    the keys."""
    unit = unit_of(wrapper)
    if not unit.summoned:
        _check_idle(unit)
        kind = kind_of(wrapper)
        if kind is not StateKind.LOCAL:
            check_load(wrapper, state, prefix)
        unit.show_shards()
        unit.free_before_edit()
        for bucket in unit.buckets:
            bucket.registrar.adopt()
            if kind is StateKind.LOCAL:
                _take_own_shard(bucket, state, local_key(prefix.removesuffix(".")), unit.name)
                continue
            locations = locations_of(bucket, wrapper._device_mesh)
            take(bucket, locations, state, paths_of(wrapper, bucket.registrar.registered, prefix), unit.name)
            bucket.registrar.show_state(_piece_params(bucket, wrapper._device_mesh))
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}{FSDP_WRAPPED}.{key.removeprefix(prefix)}"] = state.pop(key)


def _take_own_shard(bucket: Bucket, state: dict[str, Any], key: str, unit: str) -> None:
    store, (numel, own_numel) = bucket.store, _flat_numels(bucket)
    value = state.get(key)
    shards = value.local_shards() if isinstance(value, ShardedTensor) else []
    own = shards[0].tensor.detach() if len(shards) == 1 else store.buffer[:0]
    if not isinstance(value, ShardedTensor) or tuple(value.size()) != (numel,) or own.numel() != own_numel:
        came = f"a {type(value).__name__} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise StateDictError(
            f"unit {unit!r}, rank {store.rank}: a local state dict holds under {key!r} a ShardedTensor of {numel} elements, "
            f"{own_numel} of them this rank's; got {came}. It loads on as many ranks as saved it; to load on another number, "
            "save a sharded or a full one"
        )
    if isinstance(bucket.registrar, FlatRegistrar):
        state[key] = torch.cat([own.to(store.buffer), store.buffer[own_numel:]])
    else:
        del state[key]
        with torch.no_grad():
            store.buffer[:own_numel].copy_(own)


def _end_load(wrapper: Any, incompatible: Any) -> None:
    """Load hook, afterwards: register the sharded parameters again, and remove wrappers from the reported names."""
    unit = unit_of(wrapper)
    for names in incompatible:
        names[:] = [state_key(name) for name in names]
    if unit.summoned:
        return
    for bucket in unit.buckets:
        if kind_of(wrapper) is not StateKind.LOCAL:
            _take_assigned(bucket)
            bucket.registrar.hide_state()
        bucket.registrar.adopt_loaded()


@torch.no_grad()
def _take_assigned(bucket: Bucket) -> None:
    """Copy the tensors that the module registered instead of the pieces, because of `assign=True`."""
    for i, owner, attribute in bucket.registrar.registered:
        left = owner._parameters.get(attribute)
        if isinstance(left, PieceTensor) and left.local.data_ptr() != bucket.store.pieces[i].data_ptr():
            bucket.store.pieces[i].copy_(left.local)
