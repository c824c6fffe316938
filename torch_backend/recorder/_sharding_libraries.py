"""Reads units and parameters from each library that can shard a model: this package, torch's FSDP1 and FSDP2, DDP."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from crossframe.api import Api
from crossframe.dtypes import COMPLEX, FLOATING
from crossframe.errors import UnsupportedError
from crossframe.layout import FlatLayout, Layout, PerParamLayout
from crossframe.params import ParamSpec
from crossframe.state import canonical_name
from crossframe.strategy import Strategy
from crossframe.unit_assignment import enclosing_unit
from torch_backend.compat._dtypes import dtype_name, name_or_none, real_shape
from torch_backend.engine._unit_tree import named_units
from torch_backend.recorder import _module_tree as module_tree
from torch_backend.recorder._engine import Bucket, Engine, Registered, strategy_of
from torch_backend.recorder._model_parallel import NO_GROUP, axes_by_name, ranks_with_batch
from torch_backend.recorder._model_ranks import axes_of
from torch_backend.recorder._partition import partitions_of, parts_of_dtensors
from torch_backend.recorder._unit_meshes import MeshGroups, Place, largest, place_in

# Weights of experts have a dim of experts.
_EXPERT_DIMS = 3
DDP, ONE_DEVICE, REPLICAS = "torch DDP", "one device", "replicas"
"""The engines of modules that nothing shards: in DDP, on one rank, and on several."""


def ours(model: nn.Module) -> Engine:
    """Ours, under either interface."""
    named = named_units(model, rename=canonical_name)
    for unit in named:
        unit.check_whole()
    meshes = [MeshGroups(each.unit.mesh.shards.group, each.unit.mesh.replicas.group) for each in named]
    buckets, is_divided, is_on_rows = [], False, True
    for unit, mesh in zip(named, meshes, strict=True):
        for each in unit.buckets:
            registrar = each.bucket.registrar
            places: list[list[Registered]] = [[] for _ in each.params]
            for i, module, attribute in registrar.registered:
                places[i].append((module, attribute))
            managed = registrar.managed()
            is_flat = getattr(managed[0], "_fsdp_flattened", False)
            specs = [None if param is None else param.spec for param in registrar.tp_params]
            buckets.append(
                Bucket(
                    unit.name, unit.paths, _of_pairs(each.layout), managed, places, is_flat, mesh.shards, specs=specs
                )
            )
            is_divided |= any(spec is not None for spec in specs)
            is_on_rows &= not any(getattr(each.layout, "dims", None) or ())
    if is_divided:  # such as routers that no unit manages, next to experts that are DTensors
        managed = {id(param) for each in buckets for param in each.params}
        others = {name: each for name, each in _registrations(model).items() if id(each.param) not in managed}
        buckets += _buckets(others, [tuple(unit.paths) for unit in named])
    first = named[meshes.index(mesh := largest(meshes))].unit
    are_alike = all(each == mesh for each in meshes)
    place = Place.of(meshes, is_divided=is_divided)
    leaves = [leaf for each in named for bucket in each.unit.buckets for leaf in bucket.buffer.leaves]

    def names() -> dict[str, str]:
        return {
            own.name: spec.name
            for unit in named
            for each in unit.buckets
            for own, spec in zip(each.bucket.layout.params, each.params, strict=True)
        }

    return Engine(
        "crossframe FSDP1" if first.options.api is Api.FSDP1 else "crossframe FSDP2",
        strategy_of(
            *(first.mesh.spec.shard, first.mesh.spec.replicate),
            keeps=not named[-1].unit.step.settings.reshard_after_forward,
        ),
        place,
        buckets,
        compute_dtype=name_or_none(leaves[0].dtype) if leaves else None,
        names=names,
        is_gathered=is_divided or not are_alike or not is_on_rows,
    )


def torch_fsdp1(found: Sequence[module_tree.NamedModule]) -> Engine:
    """torch's FullyShardedDataParallel: each wrapper has a flat parameter, which states its elements and this rank's part."""
    wrappers: list[tuple[str, Any]] = [(place.name, place.module) for place in found]
    root, owners = wrappers[0][1], [(name, wrapper) for name, wrapper in wrappers if wrapper._handle is not None]
    meshes = [_mesh_of_wrapper(wrapper) for _, wrapper in owners or wrappers[:1]]
    buckets = [
        _flat_bucket(name, wrapper._handle, mesh.shards) for (name, wrapper), mesh in zip(owners, meshes, strict=False)
    ]
    compute = root.mixed_precision.param_dtype
    is_divided = any(bucket.specs for bucket in buckets)
    place = Place.of(meshes, is_divided=is_divided)
    return Engine(
        "torch FSDP1",
        Strategy(root.sharding_strategy.name.lower().lstrip("_")),
        place,
        buckets,
        compute_dtype=name_or_none(compute),
        is_gathered=is_divided or any(each != meshes[0] for each in meshes),
    )


def _mesh_of_wrapper(wrapper: Any) -> "MeshGroups":
    shards, replicas = wrapper.process_group, getattr(wrapper, "_inter_node_pg", None)
    if wrapper._handle is not None and not wrapper._handle.uses_sharded_strategy:
        # A hybrid mesh with shards of one rank is none that FSDP1 calls hybrid, but its replicas are those of the mesh.
        alone = replicas is not None and shards.size() == 1
        shards, replicas = None, replicas if alone else shards
    return MeshGroups(shards, replicas)


def _flat_bucket(name: str, handle: Any, shards: dist.ProcessGroup | None) -> Bucket:
    flat = handle.flat_param
    prefix = f"{name}." if name else ""
    names = [prefix + canonical_name(each) for each in flat._fqns]
    places: list[list[Registered]] = [[(info.module, info.param_name)] for info in flat._param_infos]
    order = {(id(info.module), info.param_name): i for i, info in enumerate(flat._param_infos)}
    aliases: list[list[str]] = [[] for _ in names]
    for info in flat._shared_param_infos:
        i = order[id(info.prim_module), info.prim_param_name]
        places[i].append((info.module, info.param_name))
        alias = f"{info.module_name}.{info.param_name}" if info.module_name else info.param_name
        aliases[i].append(prefix + canonical_name(alias))
    keeps = handle._use_orig_params
    params = list(flat._params) if keeps else [flat]
    specs = tuple(
        ParamSpec(
            each,
            tuple(shape),
            dtype_name(flat.dtype),
            tuple(aliases[i]),
            (params[i] if keeps else flat).requires_grad,
        )
        for i, (each, shape) in enumerate(zip(names, flat._shapes, strict=True))
    )
    size = handle.world_size if handle.uses_sharded_strategy else 1
    compute = handle._fwd_bwd_param_dtype
    layout = FlatLayout(specs, size, keep_original=keeps, compute_dtype=name_or_none(compute))
    ranges = [
        (info.intra_param_start_idx, info.intra_param_end_idx + 1) if info.in_shard else (0, 0)
        for info in flat._shard_param_infos
    ]
    extensions = list(flat._param_extensions)
    specs = extensions if any(each is not None for each in extensions) else ()
    return Bucket(name, (name,), layout, params, places, not keeps, shards, ranges, specs)


def torch_fsdp2(model: nn.Module, found: Sequence[module_tree.NamedModule]) -> Engine:
    """torch's fully_shard: each parameter is a DTensor, and belongs to the unit of the nearest module that was sharded."""
    every = _registrations(model)
    params = {name: each for name, each in every.items() if isinstance(each.param, DTensor)}
    # Modules that were sharded together have one state.
    states: dict[int, tuple[Any, list[str]]] = {}
    for place in found:
        sharded: Any = place.module
        state = sharded._get_fsdp_state()
        states.setdefault(id(state), (state, []))[1].append(place.name)
    groups = [group for state, _ in states.values() if (group := getattr(state, "_fsdp_param_group", None)) is not None]
    infos = {group.mesh_info.mesh: group.mesh_info for group in groups}
    meshes = {mesh: _mesh_of_info(mesh, info) for mesh, info in infos.items()}
    units = [tuple(names) for _, names in states.values()]
    policies = [policy for state, _ in states.values() if (policy := getattr(state, "_mp_policy", None))]
    compute_dtype = name_or_none(policies[0].param_dtype) if policies else None
    # Under tensor parallelism a DTensor has further axes. Experts may be sharded over fewer ranks than other parameters, between
    # those that have other experts.
    is_divided = any(each.param.device_mesh not in meshes for each in params.values())
    place = Place.of([*meshes.values()], is_divided=is_divided)
    mesh = largest([*meshes.values()])
    strategy = strategy_of(place_in(mesh.shards)[1], place_in(mesh.replicas)[1], keeps=False)
    if is_divided or len(meshes) > 1 or any(_dim(each.param) for each in params.values()):
        buckets = _buckets(every if is_divided else params, units)
        return Engine("torch FSDP2", strategy, place, buckets, compute_dtype=compute_dtype, is_gathered=True)
    buckets = _buckets(params, units, place.shards[1])
    return Engine("torch FSDP2", strategy, place, buckets, compute_dtype=compute_dtype)


def _mesh_of_info(mesh: Any, info: Any) -> "MeshGroups":
    axes = info.shard_mesh_dim, info.replicate_mesh_dim
    return MeshGroups(*(None if axis is None else mesh.get_group(axis) for axis in axes))


def unsharded(
    model: nn.Module,
    unit_names: set[str],
    replicas: dist.ProcessGroup | None,
    tensor_parallel: dist.ProcessGroup | None,
    partition: Mapping[str, int],
    inputs: Sequence[Tensor],
) -> Engine:
    """No FSDP: DistributedDataParallel, or the user averages gradients, or tensor parallelism alone, or there is one rank.

    Args:
        replicas: the ranks that have this model, unless DistributedDataParallel states them; None: all.
        tensor_parallel, partition: of parameters that are divided without DTensors.
        inputs: what forward is given; empty if that is not known. Where it is not known which ranks divide parameters, those with
            the same inputs compute one replica.
    """
    params = _registrations(model)
    buckets = _buckets(params, [(name,) for name in unit_names])
    if any(isinstance(each.param, DTensor) for each in params.values()):
        return _tensor_parallel(params, buckets)
    is_ddp = module_tree.is_ddp(model)
    group = getattr(model, "process_group", None) if is_ddp else None
    own = {name: each.param for name, each in params.items()}
    if parts := parts_of_dtensors(own):
        place = Place.of([MeshGroups(None, group)], is_divided=True)
        return _gathered(DDP, place, buckets, partitions=parts)
    divided = partitions_of(own, {name: each.ndim for name, each in own.items()}, tensor_parallel, partition)
    if divided.partitions or divided.unknown:
        place = Place.of([MeshGroups(None, group)], is_divided=True)
        if group is None:
            axes = axes_by_name(divided.partitions) if divided.partitions else ranks_with_batch(inputs)
            place = replace(place, axes=axes)
        left_out = dict.fromkeys(divided.unknown, NO_GROUP)
        return _gathered("tensor parallelism", place, buckets, partitions=divided.partitions, left_out=left_out)
    if group is None and dist.is_initialized():
        group = replicas or dist.group.WORLD
    alone = group is None or group.size() == 1
    return Engine(
        DDP if is_ddp else ONE_DEVICE if alone else REPLICAS,
        Strategy.NO_SHARD,
        Place(place_in(group), (0, 1), () if alone else (group,)),  # type: ignore[arg-type]
        buckets,
        reads_all_at_once=True,
    )


def _gathered(name: str, place: Place, buckets: Sequence[Bucket], **options: Any) -> Engine:
    """The engine of a model without FSDP whose parameters are gathered to be recorded; see [Note: model ranks].

    Args:
        options: of `Engine`.
    """
    return Engine(name, Strategy.NO_SHARD, place, buckets, reads_all_at_once=True, is_gathered=True, **options)


def _tensor_parallel(params: "Registrations", buckets: Sequence[Bucket]) -> Engine:
    """Tensor parallelism alone. Ranks along axes over which no parameter is sharded are replicas."""
    dtensors = [each.param for each in params.values() if isinstance(each.param, DTensor)]
    sharded = [
        (param, param.device_mesh, axis)
        for param in dtensors
        for axis, placement in enumerate(param.placements)
        if not isinstance(placement, Replicate)
    ]
    divided = {(mesh, axis) for _, mesh, axis in sharded}
    others = {(mesh, axis) for param, mesh, axis in sharded if param.ndim < _EXPERT_DIMS}
    meshes = {mesh for _, mesh, _ in sharded}
    axes = axes_of(meshes, lambda mesh, axis: (mesh, axis) in divided)
    of_others = axes_of(meshes, lambda mesh, axis: (mesh, axis) in others)
    place = Place((0, 1), (0, 1), (), axes)
    return _gathered("tensor parallelism", place, buckets, expert_axes=frozenset(axes.keys() - of_others.keys()))


class Registration(NamedTuple):
    """A parameter.

    Attributes:
        places: where it is registered.
        aliases: its other names.
    """

    param: Any
    places: list[Registered]
    aliases: list[str]


Registrations = Mapping[str, Registration]
"""Parameters by their first names."""


def _registrations(model: nn.Module) -> dict[str, Registration]:
    """Every parameter of a floating or complex dtype by its first name."""
    by_param: dict[int, str] = {}
    found: dict[str, Registration] = {}
    for place in module_tree.named_modules(model, every_name=True):
        for attribute, param in module_tree.params_of(place.module).items():
            if param is None or dtype_name(param.dtype.to_real()) not in FLOATING:
                continue
            name = f"{place.name}.{attribute}" if place.name else attribute
            first = by_param.setdefault(id(param), name)
            own = found.setdefault(first, Registration(param, [], []))
            if (place.module, attribute) not in own.places:
                own.places.append((place.module, attribute))
            if name != first and name not in own.aliases:
                own.aliases.append(name)
    return found


def _by_unit(params: Registrations, units: Sequence[tuple[str, ...]]) -> dict[tuple[tuple[str, ...], str], list[str]]:
    """Names of parameters by unit and dtype, the root first and the others in the order of the tree.

    Args:
        units: of each unit but the root the names of its modules.
    """
    of_module = {"": ("",)} | {name: modules for modules in units for name in modules}
    known = frozenset(of_module)
    found: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for name, each in params.items():
        unit = of_module[enclosing_unit(name.rpartition(".")[0], known)]
        found.setdefault((unit, dtype_name(each.param.dtype.to_real())), []).append(name)
    return dict(sorted(found.items(), key=lambda entry: entry[0][0] != ("",)))


def _of_pairs(layout: Layout) -> Layout:
    """The layout of complex parameters as pairs of real numbers (`as_real`); others as they are."""
    if layout.dtype not in COMPLEX:
        return layout
    if not isinstance(layout, PerParamLayout):
        names = ", ".join(spec.name for spec in layout.params)
        raise UnsupportedError(
            f"complex parameters in a flat buffer are not recorded: {names}: {layout.dtype}; shard them with layout='per_param'"
        )
    dtype = "float32" if layout.dtype == "complex64" else "float64"
    return replace(layout, params=tuple(replace(spec, shape=(*spec.shape, 2), dtype=dtype) for spec in layout.params))


def _buckets(params: Registrations, units: Sequence[tuple[str, ...]], shards: int | None = None) -> list[Bucket]:
    """Buckets of parameters that lie one by one.

    Args:
        units: of each unit but the root the names of its modules.
        shards: the number of ranks over which each parameter is sharded by rows; None: it is whole.
    """
    buckets = []
    for (modules, dtype), names in _by_unit(params, units).items():
        members = [params[name] for name in names]
        specs = tuple(
            # Complex numbers are pairs of real ones (`as_real`).
            ParamSpec(name, real_shape(each.param), dtype, tuple(each.aliases), each.param.requires_grad)
            for name, each in zip(names, members, strict=True)
        )
        layout = FlatLayout(specs, 1, keep_original=True) if shards is None else PerParamLayout(specs, shards)
        held, places = [each.param for each in members], [each.places for each in members]
        buckets.append(Bucket(", ".join(modules), modules, layout, held, places))
    return buckets


def _dim(param: DTensor) -> int:
    """The dim on which a parameter is sharded."""
    return next((placement.dim for placement in param.placements if isinstance(placement, Shard)), 0)
