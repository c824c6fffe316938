"""Reads units and parameters from each library that can shard a model: this package, torch's FSDP1 and FSDP2, DDP."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from crossframe.api import Api
from crossframe.dtypes import FLOATING
from crossframe.layout import FlatLayout, Layout, PerParamLayout, layouts_by_rows
from crossframe.params import ParamSpec
from crossframe.state import canonical_name
from crossframe.strategy import Strategy
from crossframe.unit_assignment import enclosing_unit
from torch_backend.compat._dtypes import dtype_name, name_or_none
from torch_backend.engine._unit_tree import named_units
from torch_backend.pieces._piece_tensor import PieceTensor
from torch_backend.ranks._collectives import Communicator, axis_name, default_process_group
from torch_backend.recorder import _module_tree as module_tree
from torch_backend.recorder._context import Context
from torch_backend.recorder._model_ranks import Axes, ModelRanks, axes_of, component, hash_of
from torch_backend.recorder._partition import Partition, Pieces, local_of, partitions_of, parts_of_dtensors
from torch_backend.recorder._pipeline import Pipeline
from torch_backend.recorder._unit_meshes import MeshGroups, Place, largest, place_in

# Weights of experts have a dim of experts.
_EXPERT_DIMS = 3

_TENSOR_AXIS = "tp"
"""The name of the axis of a process group without one."""
_NO_GROUP = (
    "divided over ranks without DTensors, and it is not known which ranks; pass tensor_parallel=, their process group"
)
_OTHER_LAYOUT = "the elements on each rank are not those that the recorder expects of this way to shard a model"

Registered = tuple[nn.Module, str]
Range = tuple[int, int]


@dataclass(frozen=True)
class Bucket:
    """Parameters that lie together.

    Attributes:
        modules: the names of the unit's modules, on whose entry its parameters can be read in full.
        params: what the optimizer has: one parameter each in the layout's order, or one flat parameter.
        places: of each parameter the modules and attributes that forward reads.
        is_flat: whether `params` is one flat parameter, this rank's shard.
        shards: the ranks that have pieces of parameters that are no DTensors; None: this rank alone.
        ranges: which elements the engine itself says are here, where it does; None where it says nothing.
        specs: of each parameter that of the DTensor of which it is the local part, None of the others; empty: there are none.
    """

    unit: str
    modules: Sequence[str]
    layout: Layout
    params: Sequence[Tensor]
    places: Sequence[Sequence[Registered]]
    is_flat: bool = False
    shards: dist.ProcessGroup | None = None
    ranges: Sequence[Range] | None = None
    specs: Sequence[Any] = ()

    def stated_range(self, i: int) -> Range | None:
        """Which elements of a parameter the engine says are here."""
        return None if self.ranges is None else self.ranges[i]


@dataclass(frozen=True)
class Engine:
    """What shards a model.

    Attributes:
        name: in words.
        replicas, shards: this rank's place, and how many there are.
        groups: the process groups of the shards and of the replicas, those of one rank left out.
        reads_all_at_once: whether all parameters can be read when the model begins, and not unit by unit.
        compute_dtype: None: that of the parameters.
        names: of our engine: its own names of parameters, and ours. It knows them once the root has run.
        axes: this rank's groups along the axes over which parameters are divided and the batch is not; None: the batch is the
            same where the place is. Then the place follows from them.
        is_gathered: whether full parameters are gathered to be recorded, since ranks with one batch have parts of them, or since
            units have different meshes or are sharded on other dims than the first.
        expert_axes: those of `axes` over which experts alone are divided, so that ranks may have other batches.
        partitions: of parameters that are divided without DTensors, or into pieces.
        left_out: by name why a parameter cannot be recorded.
        model_ranks: the ranks that compute this replica together; None: this rank alone.
        tensor_ranks: those of them that have the same positions of sequences; None: this rank alone.
    """

    name: str
    strategy: Strategy
    replicas: tuple[int, int]
    shards: tuple[int, int]
    groups: tuple[dist.ProcessGroup, ...]
    buckets: Sequence[Bucket]
    reads_all_at_once: bool = False
    compute_dtype: str | None = None
    names: Callable[[], dict[str, str]] | None = None
    axes: Axes | None = None
    is_gathered: bool = False
    expert_axes: frozenset[str] = frozenset()
    partitions: Mapping[str, Partition | Pieces] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    model_ranks: ModelRanks | None = None
    tensor_ranks: ModelRanks | None = None

    @property
    def params(self) -> dict[str, Tensor]:
        """What the optimizer has of each parameter, by name; only the first of a flat parameter."""
        return {
            spec.name: param
            for each in self.buckets
            for spec, param in zip(each.layout.params, each.params, strict=False)
        }

    @property
    def is_flat(self) -> bool:
        """Whether any parameters lie together in one."""
        return any(each.is_flat for each in self.buckets) or any(
            isinstance(param, PieceTensor) for param in self.params.values()
        )

    def entries_of(self, bucket: Bucket) -> Sequence[str]:
        """The modules on whose entry a bucket's parameters can be read in full."""
        return [""] if self.reads_all_at_once else bucket.modules


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
                Bucket(unit.name, unit.paths, each.layout, managed, places, is_flat, mesh.shards, specs=specs)
            )
            is_divided |= any(spec is not None for spec in specs)
            is_on_rows &= not any(getattr(each.layout, "dims", None) or ())
    if is_divided:  # such as routers that no unit manages, next to experts that are DTensors
        managed = {id(param) for each in buckets for param in each.params}
        others = {name: each for name, each in _registrations(model).items() if id(each[0]) not in managed}
        buckets += _buckets(others, [tuple(unit.paths) for unit in named])
    first = named[meshes.index(mesh := largest(meshes))].unit
    are_alike = all(each == mesh for each in meshes)
    place = Place.of(meshes, is_divided=is_divided)

    def names() -> dict[str, str]:
        return {
            own.name: spec.name
            for unit in named
            for each in unit.buckets
            for own, spec in zip(each.bucket.layout.params, each.params, strict=True)
        }

    return Engine(
        "crossframe FSDP1" if first.options.api is Api.FSDP1 else "crossframe FSDP2",
        _strategy(
            *(first.mesh.spec.shard, first.mesh.spec.replicate),
            keeps=not named[-1].unit.step.settings.reshard_after_forward,
        ),
        place.replicas,
        place.shards,
        place.groups,
        buckets,
        compute_dtype=name_or_none(first.buckets[0].buffer.leaves[0].dtype) if first.buckets else None,
        names=names,
        axes=place.axes,
        is_gathered=is_divided or not are_alike or not is_on_rows,
    )


def torch_fsdp1(found: Sequence[module_tree.NamedModule]) -> Engine:
    """torch's FullyShardedDataParallel: each wrapper has a flat parameter, which says what is in it and what of that is here."""
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
        place.replicas,
        place.shards,
        place.groups,
        buckets,
        compute_dtype=name_or_none(compute),
        axes=place.axes,
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
    params = {name: each for name, each in _registrations(model).items() if isinstance(each[0], DTensor)}
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
    is_divided = any(param.device_mesh not in meshes for param, _, _ in params.values())
    place = Place.of([*meshes.values()], is_divided=is_divided)
    mesh = largest([*meshes.values()])
    strategy = _strategy(place_in(mesh.shards)[1], place_in(mesh.replicas)[1], keeps=False)
    if is_divided or len(meshes) > 1 or any(_dim(param) for param, _, _ in params.values()):
        every = _registrations(model)
        return _gathered(
            *("torch FSDP2", every if is_divided else {name: each for name, each in every.items() if name in params}),
            *(units, place, strategy, compute_dtype),
        )
    buckets = []
    for (modules, dtype), members in _by_unit(params, units).items():
        layout = PerParamLayout(_specs(params, members, dtype), place.shards[1])
        held, places = [params[n][0] for n in members], [params[n][1] for n in members]
        buckets.append(Bucket(", ".join(modules), modules, layout, held, places))
    return Engine(
        "torch FSDP2",
        strategy,
        place.replicas,
        place.shards,
        place.groups,
        buckets,
        compute_dtype=compute_dtype,
    )


def _mesh_of_info(mesh: Any, info: Any) -> "MeshGroups":
    axes = info.shard_mesh_dim, info.replicate_mesh_dim
    return MeshGroups(*(None if axis is None else mesh.get_group(axis) for axis in axes))


def _gathered(
    name: str,
    params: dict[str, Any],
    units: Sequence[tuple[str, ...]],
    place: Place,
    strategy: Strategy,
    compute_dtype: str | None,
    **options: Any,
) -> Engine:
    """An engine whose parameters are gathered to be recorded; see [Note: model ranks].

    Args:
        units: of each unit but the root the names of its modules.
        options: of `Engine`.
    """
    given: dict[str, Any] = {"axes": place.axes} | options
    return Engine(
        name,
        strategy,
        place.replicas,
        place.shards,
        place.groups,
        _buckets(params, units),
        compute_dtype=compute_dtype,
        is_gathered=True,
        **given,
    )


def divided_by(engine: Engine, tensor_parallel: dist.ProcessGroup | None, stated: Mapping[str, int]) -> Engine:
    """The engine of an FSDP whose modules divide parameters without DTensors, if they do.

    Args:
        tensor_parallel, stated: see `partitions_of`.
    """
    every = [each for bucket in engine.buckets for each in zip(*_each(bucket), strict=True)]
    num_dims = {spec.name: len(spec.shape) for spec, _ in every}
    divided = partitions_of({spec.name: param for spec, param in every}, num_dims, tensor_parallel, stated)
    if divided.unknown:
        return replace(engine, is_gathered=True, left_out=dict.fromkeys(divided.unknown, _NO_GROUP))
    if not divided.partitions:
        return engine
    axes = None if engine.axes is None else _axes_of(divided.partitions)
    return replace(engine, is_gathered=True, partitions=divided.partitions, axes=axes)


def _axes_of(partitions: Mapping[str, Partition]) -> Axes:
    """The ranks that divide parameters, by the name of their mesh axis."""
    ranks = next(iter(partitions.values())).ranks
    return {axis_name(ranks.group, _TENSOR_AXIS): ranks.ranks}


def in_known_layouts(engine: Engine) -> Engine:
    """The engine without the parameters of which ranks hold other elements than the layout states. DTensors are gathered then,
    since they say themselves where their elements lie. All ranks of the engine's groups call it."""
    found: set[str] = set()
    for bucket in engine.buckets if not engine.is_gathered else ():
        pieces = {piece.name: piece for piece in bucket.layout.pieces(engine.shards[0])}
        for i, (spec, param) in enumerate(zip(*_each(bucket), strict=True)):
            piece = pieces.get(spec.name)
            start, stop = (piece.param_start, piece.param_stop) if piece else (0, 0)
            is_here = bucket.is_flat or local_of(param).numel() == stop - start
            if not is_here or bucket.stated_range(i) not in (None, (start, stop)):
                found.add(spec.name)
    for group in engine.groups if not engine.is_gathered else ():  # ranks must know alike
        found = set().union(*Communicator(group).gather_objects(found))
    if not found:
        return engine
    lost = [name for name, param in _params(engine).items() if name in found and not isinstance(param, DTensor)]
    return replace(engine, is_gathered=True, left_out={**engine.left_out, **dict.fromkeys(lost, _OTHER_LAYOUT)})


def joined_by(engine: Engine, pipeline: Pipeline | None, inputs: Sequence[Tensor]) -> Engine:
    """The engine with the ranks that compute this replica together, if there are any. All ranks call it.

    Of a pipeline, some stages may have parameters to gather and others none.

    Args:
        inputs: what forward is given; empty if that is not known.
    """
    if not dist.is_initialized() or not (engine.is_gathered or pipeline):
        return engine
    axes = engine.axes
    if pipeline is not None:
        every = Communicator(default_process_group()).gather_objects((engine.is_gathered, axes))
        if not any(is_gathered for is_gathered, _ in every):
            return engine
        if not engine.is_gathered and any(of_rank for _, of_rank in every):
            axes = pipeline.axes_of_others([of_rank or {} for _, of_rank in every])
    pieces = _pieces(engine)
    if axes is not None:
        if engine.expert_axes and inputs:
            differ = _have_other_batches(axes, inputs)
            axes = {name: ranks for name, ranks in axes.items() if name not in engine.expert_axes or not differ}
        among = pipeline.replicas if pipeline is not None else default_process_group()
        place = component(axes.values(), dist.get_process_group_ranks(among))
        engine = replace(engine, replicas=place, groups=(among,) if among.size() > 1 else ())
    divided = {**engine.partitions, **pieces}
    ranks = ModelRanks(engine.replicas[0], engine.shards[0], _params(engine), axes, divided, engine.left_out)
    groups = (*engine.groups, ranks.group) if ranks.group.size() > 1 else engine.groups
    together = ranks if len(ranks.ranks) > 1 else None
    return replace(_of_full(engine, pieces), groups=groups, model_ranks=ranks, tensor_ranks=together)


def _ranks_with_batch(inputs: Sequence[Tensor]) -> Axes:
    """The ranks that forward gives the inputs of this one."""
    every = Communicator(default_process_group()).gather_objects([hash_of(each) for each in inputs])
    same = [rank for rank, own in enumerate(every) if own and own == every[dist.get_rank()]]
    return {_TENSOR_AXIS: same} if len(same) > 1 else {}


def _have_other_batches(axes: Axes, inputs: Sequence[Tensor]) -> bool:
    """Whether ranks along any of the axes have other batches, on any rank."""
    every = Communicator(default_process_group()).gather_objects([hash_of(each) for each in inputs])
    own = any(every[rank] != every[dist.get_rank()] for ranks in axes.values() for rank in ranks)
    return any(Communicator(default_process_group()).gather_objects(own))


def _of_full(engine: Engine, pieces: Mapping[str, Pieces]) -> Engine:
    """The engine with the layout of full parameters over the data-parallel ranks.

    Args:
        pieces: of the parameters of flat and ragged layouts.
    """
    buckets, partitions = [], {**engine.partitions, **pieces}
    for each in engine.buckets:
        members = []
        for spec, param, places in zip(*_each(each), each.places, strict=True):
            if spec.name in engine.left_out:
                continue
            part = partitions.get(spec.name)
            shape = tuple(param.shape) if isinstance(param, DTensor) else spec.shape
            if part is not None:
                shape = part.full_shape() if isinstance(part, Pieces) else part.full_shape(param.shape)
            members.append((replace(spec, shape=shape), param, places))
        for layout in layouts_by_rows([spec for spec, _, _ in members], engine.shards[1]):
            own = [member for member in members if member[0] in layout.params]
            params, places = [param for _, param, _ in own], [places for _, _, places in own]
            buckets.append(replace(each, layout=layout, params=params, places=places, is_flat=False, ranges=None))
    return replace(engine, buckets=buckets, names=None, partitions=partitions)


def _params(engine: Engine) -> dict[str, Tensor]:
    """What the optimizer has of each parameter, by name."""
    return {spec.name: param for each in engine.buckets for spec, param in zip(*_each(each), strict=True)}


def _each(bucket: Bucket) -> tuple[Sequence[ParamSpec], Sequence[Tensor]]:
    """The parameters of a bucket, and what the optimizer has of each: of a flat parameter the same for all."""
    specs = bucket.layout.params
    return specs, [bucket.params[0]] * len(specs) if bucket.is_flat else bucket.params


def _pieces(engine: Engine) -> dict[str, Pieces]:
    """The pieces that ranks have of parameters that are no DTensors and not whole."""
    found = {}
    for bucket in engine.buckets:
        own_rank, size = place_in(bucket.shards)
        ranks = Communicator(bucket.shards) if bucket.shards is not None and size > 1 else None
        of_ranks = [{piece.name: piece for piece in bucket.layout.pieces(rank)} for rank in range(size)]
        here, is_divided = of_ranks[own_rank], any(spec is not None for spec in bucket.specs)
        for i, (spec, param) in enumerate(zip(*_each(bucket), strict=True)):
            if isinstance(param, DTensor) or not (size > 1 or bucket.is_flat or is_divided):
                continue
            own = [each.get(spec.name) for each in of_ranks]
            ranges = [(0, 0) if piece is None else (piece.param_start, piece.param_stop) for piece in own]
            piece = here.get(spec.name)
            part = (0, 0) if piece is None else (piece.shard_start, piece.shard_stop)
            dtensor, partition = bucket.specs[i] if bucket.specs else None, engine.partitions.get(spec.name)
            found[spec.name] = Pieces(
                *(ranks, ranges, part if bucket.is_flat else None, tuple(spec.shape), dtensor),
                partition if isinstance(partition, Partition) else None,
            )
    return found


def of_sequences(engine: Engine, context: Context, pipeline: Pipeline | None = None) -> Engine:
    """The engine of ranks that have parts of the same sequences, as that of data-parallel ranks with whole ones; see
    [Note: context ranks].

    Args:
        pipeline: the stages of which the model is one. Each stage has its own ranks.
    """
    tensor_ranks = engine.tensor_ranks
    axes = {context.axis: context.ranks} | (dict(tensor_ranks.axes) if tensor_ranks else {})
    among = range(dist.get_world_size()) if pipeline is None else dist.get_process_group_ranks(pipeline.replicas)
    index, size = component([context.ranks, *([tensor_ranks.ranks] if tensor_ranks else [])], among)
    pieces = _pieces(engine) if engine.model_ranks is None else {}
    divided = {**engine.partitions, **pieces}
    model_ranks = ModelRanks(0, index, _params(engine), axes, divided, engine.left_out)
    return replace(
        _of_full(replace(engine, shards=(index, size)), pieces),
        strategy=_strategy(size, 1, keeps=False),
        replicas=(0, 1),
        groups=(*engine.groups, model_ranks.group),
        model_ranks=model_ranks,
    )


def unsharded(
    model: nn.Module,
    unit_names: set[str],
    replicas: dist.ProcessGroup | None = None,
    tensor_parallel: dist.ProcessGroup | None = None,
    partition: Mapping[str, int] | None = None,
    inputs: Sequence[Tensor] = (),
) -> Engine:
    """No FSDP: DistributedDataParallel, or the user averages gradients, or tensor parallelism alone, or there is one rank.

    Args:
        replicas: the ranks that have this model, unless DistributedDataParallel states them; None: all.
        tensor_parallel, partition: of parameters that are divided without DTensors.
        inputs: what forward is given; empty if that is not known. Where it is not known which ranks divide parameters, those with
            the same inputs compute one replica.
    """
    params = _registrations(model)
    units = [(name,) for name in unit_names]
    if any(isinstance(param, DTensor) for param, _, _ in params.values()):
        return _tensor_parallel(model, params, units)
    group = getattr(model, "process_group", None) if module_tree.is_ddp(model) else None
    own = {name: each for name, (each, _, _) in params.items()}
    if parts := parts_of_dtensors(own):
        return _gathered(
            *(
                "torch DDP",
                params,
                units,
                Place.of([MeshGroups(None, group)], is_divided=True),
                Strategy.NO_SHARD,
                None,
            ),
            reads_all_at_once=True,
            partitions=parts,
        )
    num_dims = {name: each.ndim for name, each in own.items()}
    divided = partitions_of(own, num_dims, tensor_parallel, partition or {})
    if divided.partitions or divided.unknown:
        axes = _axes_of(divided.partitions) if divided.partitions else _ranks_with_batch(inputs)
        place = Place.of([MeshGroups(None, group)], is_divided=True)
        return _gathered(
            *("tensor parallelism", params, units, place, Strategy.NO_SHARD, None),
            reads_all_at_once=True,
            axes=None if group is not None else axes,
            partitions=divided.partitions,
            left_out=dict.fromkeys(divided.unknown, _NO_GROUP),
        )
    if group is None and dist.is_initialized():
        group = replicas or dist.group.WORLD
    alone = group is None or group.size() == 1
    return Engine(
        "torch DDP" if module_tree.is_ddp(model) else "one device" if alone else "replicas",
        Strategy.NO_SHARD,
        place_in(group),
        (0, 1),
        () if alone else (group,),  # type: ignore[arg-type]
        _buckets(params, units),
        reads_all_at_once=True,
    )


def _tensor_parallel(model: nn.Module, params: dict[str, Any], units: Sequence[tuple[str, ...]]) -> Engine:
    """Tensor parallelism alone. Ranks along axes over which no parameter is sharded are replicas."""
    sharded = [
        (param, param.device_mesh, axis)
        for param, _, _ in params.values()
        if isinstance(param, DTensor)
        for axis, placement in enumerate(param.placements)
        if not isinstance(placement, Replicate)
    ]
    divided = {(mesh, axis) for _, mesh, axis in sharded}
    others = {(mesh, axis) for param, mesh, axis in sharded if param.ndim < _EXPERT_DIMS}
    meshes = {mesh for _, mesh, _ in sharded}
    axes = axes_of(meshes, lambda mesh, axis: (mesh, axis) in divided)
    of_others = axes_of(meshes, lambda mesh, axis: (mesh, axis) in others)
    return _gathered(
        *("tensor parallelism", params, units, Place((0, 1), (0, 1), ()), Strategy.NO_SHARD, None),
        reads_all_at_once=True,
        axes=axes,
        expert_axes=frozenset(axes.keys() - of_others.keys()),
    )


def _registrations(model: nn.Module) -> dict[str, tuple[Any, list[Registered], list[str]]]:
    """Every parameter of a floating dtype by its first name: itself, where it is registered, its other names."""
    by_param: dict[int, str] = {}
    found: dict[str, tuple[Any, list[Registered], list[str]]] = {}
    for place in module_tree.named_modules(model, every_name=True):
        for attribute, param in place.module._parameters.items():
            if param is None or dtype_name(param.dtype) not in FLOATING:
                continue
            name = f"{place.name}.{attribute}" if place.name else attribute
            first = by_param.setdefault(id(param), name)
            _, places, aliases = found.setdefault(first, (param, [], []))
            if (place.module, attribute) not in places:
                places.append((place.module, attribute))
            if name != first and name not in aliases:
                aliases.append(name)
    return found


def _by_unit(params: dict[str, Any], units: Sequence[tuple[str, ...]]) -> dict[tuple[tuple[str, ...], str], list[str]]:
    """Names of parameters by unit and dtype, the root first and the others in the order of the tree.

    Args:
        units: of each unit but the root the names of its modules.
    """
    of_module = {"": ("",)} | {name: modules for modules in units for name in modules}
    known = frozenset(of_module)
    found: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for name, (param, _, _) in params.items():
        unit = of_module[enclosing_unit(name.rpartition(".")[0], known)]
        found.setdefault((unit, dtype_name(param.dtype)), []).append(name)
    return dict(sorted(found.items(), key=lambda entry: entry[0][0] != ("",)))


def _buckets(params: dict[str, Any], units: Sequence[tuple[str, ...]]) -> list[Bucket]:
    """Buckets of parameters that lie one by one.

    Args:
        units: of each unit but the root the names of its modules.
    """
    buckets = []
    for (modules, dtype), members in _by_unit(params, units).items():
        layout = FlatLayout(_specs(params, members, dtype), 1, keep_original=True)
        held, places = [params[n][0] for n in members], [params[n][1] for n in members]
        buckets.append(Bucket(", ".join(modules), modules, layout, held, places))
    return buckets


def _specs(params: dict[str, Any], names: Sequence[str], dtype: str) -> tuple[ParamSpec, ...]:
    return tuple(
        ParamSpec(name, tuple(param.shape), dtype, tuple(aliases), param.requires_grad)
        for name, (param, _, aliases) in ((name, params[name]) for name in names)
    )


def _dim(param: DTensor) -> int:
    """The dim on which a parameter is sharded."""
    return next((placement.dim for placement in param.placements if isinstance(placement, Shard)), 0)


def _strategy(shard: int, replicate: int, *, keeps: bool) -> Strategy:
    if shard == 1:
        return Strategy.NO_SHARD
    if replicate > 1:
        return Strategy.HYBRID_SHARD_ZERO2 if keeps else Strategy.HYBRID_SHARD
    return Strategy.SHARD_GRAD_OP if keeps else Strategy.FULL_SHARD
