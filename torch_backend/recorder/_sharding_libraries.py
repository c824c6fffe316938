"""Reads units and parameters from each library that can shard a model: this package, torch's FSDP1 and FSDP2, DDP."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from crossframe.api import Api
from crossframe.dtypes import FLOATING
from crossframe.errors import UnsupportedError
from crossframe.layout import FlatLayout, Layout, PerParamLayout
from crossframe.params import ParamSpec
from crossframe.state import canonical_name
from crossframe.strategy import Strategy
from crossframe.unit_assignment import enclosing_unit
from torch_backend.compat._dtypes import dtype_name, name_or_none
from torch_backend.engine._unit_tree import NamedUnit, named_units
from torch_backend.pieces._piece_tensor import PieceTensor
from torch_backend.ranks._collectives import Communicator, axis_name, default_process_group
from torch_backend.recorder import _module_tree as module_tree
from torch_backend.recorder._context import Context
from torch_backend.recorder._model_ranks import Axes, ModelRanks, axes_of, component, hash_of
from torch_backend.recorder._partition import Partition, Pieces, partitions_of, parts_of_dtensors
from torch_backend.recorder._pipeline import Pipeline

# Weights of experts have a dim of experts.
_EXPERT_DIMS = 3

Registered = tuple[nn.Module, str]
Range = tuple[int, int]


_DIVIDED_FSDP1 = "tensor parallelism is recorded under fully_shard and without FSDP, not under FullyShardedDataParallel"


@dataclass(frozen=True)
class Bucket:
    """Parameters that lie together.

    Attributes:
        modules: the names of the unit's modules, on whose entry its parameters can be read in full.
        params: what the optimizer has: one parameter each in the layout's order, or one flat parameter.
        places: of each parameter the modules and attributes that forward reads.
        is_flat: whether `params` is one flat parameter, this rank's shard.
        ranges: which elements the engine itself says are here, where it does; None where it says nothing.
        specs: of each parameter that of the DTensor of which it is the local part, None of the others; empty: there are none.
    """

    unit: str
    modules: Sequence[str]
    layout: Layout
    params: Sequence[Tensor]
    places: Sequence[Sequence[Registered]]
    is_flat: bool = False
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
        is_divided: whether ranks with one batch have parts of parameters.
        expert_axes: those of `axes` over which experts alone are divided, so that ranks may have other batches.
        partitions: of parameters that are divided without DTensors, or into pieces.
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
    is_divided: bool = False
    expert_axes: frozenset[str] = frozenset()
    partitions: Mapping[str, Partition | Pieces] = field(default_factory=dict)
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
    first = named[0].unit
    for unit in named:
        unit.check_whole()
    registrars = [each.bucket.registrar for unit in named for each in unit.buckets]
    is_divided = any(param is not None for registrar in registrars for param in registrar.tp_params)
    if is_divided and any(isinstance(param, DTensor) for registrar in registrars for param in registrar.managed()):
        return _ours_divided(model, named)
    if any(each.unit.mesh.spec != first.mesh.spec for each in named):
        raise UnsupportedError("units of one model on meshes of different sizes cannot be recorded")
    buckets = []
    for unit in named:
        for each in unit.buckets:
            registrar = each.bucket.registrar
            places: list[list[Registered]] = [[] for _ in each.params]
            for i, module, attribute in registrar.registered:
                places[i].append((module, attribute))
            managed = registrar.managed()
            is_flat = getattr(managed[0], "_fsdp_flattened", False)
            specs = [None if param is None else param.spec for param in registrar.tp_params]
            buckets.append(Bucket(unit.name, unit.paths, each.layout, managed, places, is_flat, specs=specs))
    compute = name_or_none(first.buckets[0].buffer.leaves[0].dtype) if first.buckets else None
    mesh = first.mesh

    def names() -> dict[str, str]:
        return {
            own.name: spec.name
            for unit in named
            for each in unit.buckets
            for own, spec in zip(each.bucket.layout.params, each.params, strict=True)
        }

    return Engine(
        "crossframe FSDP1" if first.options.api is Api.FSDP1 else "crossframe FSDP2",
        _strategy(mesh.spec.shard, mesh.spec.replicate, keeps=not named[-1].unit.step.settings.reshard_after_forward),
        (mesh.replicas.rank, mesh.replicas.size),
        (mesh.shards.rank, mesh.shards.size),
        tuple(group.group for group in (mesh.shards, mesh.replicas) if group.size > 1),
        buckets,
        compute_dtype=compute,
        names=names,
        is_divided=is_divided,
    )


def torch_fsdp1(found: Sequence[module_tree.NamedModule]) -> Engine:
    """torch's FullyShardedDataParallel: each wrapper has a flat parameter, which says what is in it and what of that is here."""
    wrappers: list[tuple[str, Any, Any]] = [(place.name, place.module, place.module._handle) for place in found]
    root, handles = wrappers[0][1], [(name, handle) for name, _, handle in wrappers if handle is not None]
    buckets = [_flat_bucket(name, handle) for name, handle in handles]
    is_sharded = not handles or handles[0][1].uses_sharded_strategy
    shards, replicas = root.process_group, getattr(root, "_inter_node_pg", None)
    if not is_sharded:
        # A hybrid mesh with shards of one rank is none that FSDP1 calls hybrid, but its replicas are those of the mesh.
        alone = replicas is not None and root.process_group.size() == 1
        shards, replicas = None, replicas if alone else root.process_group
    compute = root.mixed_precision.param_dtype
    return Engine(
        "torch FSDP1",
        Strategy(root.sharding_strategy.name.lower().lstrip("_")),
        _place_in(replicas),
        _place_in(shards),
        tuple(group for group in (shards, replicas) if group is not None and group.size() > 1),
        buckets,
        compute_dtype=name_or_none(compute),
        is_divided=any(bucket.specs for bucket in buckets),
    )


def _flat_bucket(name: str, handle: Any) -> Bucket:
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
    return Bucket(name, (name,), layout, params, places, not keeps, ranges, specs)


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
    # Experts may be sharded over fewer ranks, between those that have other experts.
    mesh, info = max(infos.items(), key=lambda each: each[0].size())
    shards = None if info.shard_mesh_dim is None else mesh.get_group(info.shard_mesh_dim)
    replicas = None if info.replicate_mesh_dim is None else mesh.get_group(info.replicate_mesh_dim)
    units = [tuple(names) for _, names in states.values()]
    policies = [policy for state, _ in states.values() if (policy := getattr(state, "_mp_policy", None))]
    compute_dtype = name_or_none(policies[0].param_dtype) if policies else None
    strategy = _strategy(_place_in(shards)[1], _place_in(replicas)[1], keeps=False)
    if any(param.device_mesh != mesh for param, _, _ in params.values()):
        return _divided("torch FSDP2", _registrations(model), units, shards, replicas, strategy, compute_dtype)
    buckets = []
    for (modules, dtype), members in _by_unit(params, units).items():
        specs, dims = _specs(params, members, dtype), tuple(_dim(params[name][0]) for name in members)
        layout = PerParamLayout(specs, _place_in(shards)[1], dims)
        held, places = [params[n][0] for n in members], [params[n][1] for n in members]
        buckets.append(Bucket(", ".join(modules), modules, layout, held, places))
    return Engine(
        "torch FSDP2",
        strategy,
        _place_in(replicas),
        _place_in(shards),
        tuple(group for group in (shards, replicas) if group is not None and group.size() > 1),
        buckets,
        compute_dtype=compute_dtype,
    )


def _ours_divided(model: nn.Module, named: Sequence[NamedUnit]) -> Engine:
    """Ours over tensor parallelism."""
    first = max((each.unit for each in named), key=lambda unit: unit.mesh.spec.world_size)
    if first.options.api is Api.FSDP1:
        raise UnsupportedError(_DIVIDED_FSDP1)
    mesh, params = first.mesh, _registrations(model)
    for name, (param, _, _) in params.items():
        if isinstance(param, PieceTensor):
            raise UnsupportedError(
                f"parameter {name!r} is a {type(param).__name__}; over tensor parallelism, the layout per_param is recorded"
            )
    shards = mesh.shards.group if mesh.shards.size > 1 else None
    replicas = mesh.replicas.group if mesh.replicas.size > 1 else None
    return _divided(
        "crossframe FSDP2",
        params,
        [tuple(unit.paths) for unit in named],
        shards,
        replicas,
        _strategy(mesh.spec.shard, mesh.spec.replicate, keeps=not named[-1].unit.step.settings.reshard_after_forward),
        name_or_none(first.buckets[0].buffer.leaves[0].dtype) if first.buckets else None,
    )


def _divided(
    name: str,
    params: dict[str, Any],
    units: Sequence[tuple[str, ...]],
    shards: dist.ProcessGroup | None,
    replicas: dist.ProcessGroup | None,
    strategy: Strategy,
    compute_dtype: str | None,
    **options: Any,
) -> Engine:
    """Several ranks compute a replica together; see [Note: model ranks]. The layout is that of full parameters over the
    data-parallel ranks.

    Args:
        units: of each unit but the root the names of its modules.
        shards, replicas: the data-parallel groups of this rank; None: one rank.
        options: of `Engine`.
    """
    replica, shard = _place_in(replicas), _place_in(shards)
    buckets = []
    for (modules, dtype), members in _by_unit(params, units).items():
        specs = _specs(params, members, dtype, options.get("partitions", {}))
        layout = PerParamLayout(specs, shard[1], (0,) * len(members))
        held, places = [params[n][0] for n in members], [params[n][1] for n in members]
        buckets.append(Bucket(", ".join(modules), modules, layout, held, places))
    return Engine(
        name,
        strategy,
        replica,
        shard,
        tuple(group for group in (shards, replicas) if group is not None and group.size() > 1),
        buckets,
        compute_dtype=compute_dtype,
        is_divided=True,
        **options,
    )


def joined_by(engine: Engine, pipeline: Pipeline | None, inputs: Sequence[Tensor]) -> Engine:
    """The engine with the ranks that compute this replica together, if there are any. All ranks call it.

    Of a pipeline, some stages may have divided parameters and others none.

    Args:
        inputs: what forward is given; empty if that is not known.
    """
    if not dist.is_initialized() or not (engine.is_divided or pipeline):
        return engine
    axes = engine.axes
    if pipeline is not None:
        every = Communicator(default_process_group()).gather_objects((engine.is_divided, axes))
        if not any(is_divided for is_divided, _ in every):
            return engine
        if not engine.is_divided and any(of_rank for _, of_rank in every):
            axes = pipeline.axes_of_others([of_rank or {} for _, of_rank in every])
    pieces = _pieces(engine)
    if axes is not None:
        if engine.expert_axes and inputs:
            differ = _have_other_batches(axes, inputs)
            axes = {name: ranks for name, ranks in axes.items() if name not in engine.expert_axes or not differ}
        among = pipeline.replicas if pipeline is not None else default_process_group()
        place = component(axes.values(), dist.get_process_group_ranks(among))
        engine = replace(engine, replicas=place, groups=(among,) if among.size() > 1 else ())
    params = {spec.name: param for each in engine.buckets for spec, param in zip(*_each(each), strict=True)}
    ranks = ModelRanks(engine.replicas[0], engine.shards[0], params, axes, {**engine.partitions, **pieces})
    groups = (*engine.groups, ranks.group) if ranks.group.size() > 1 else engine.groups
    return replace(_of_full(engine, pieces), groups=groups, model_ranks=ranks, tensor_ranks=ranks)


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
    buckets = []
    for each in engine.buckets:
        specs, params = _each(each)
        full = tuple(
            replace(spec, shape=pieces[spec.name].full_shape(param)) if spec.name in pieces else spec
            for spec, param in zip(specs, params, strict=True)
        )
        layout = PerParamLayout(full, engine.shards[1], (0,) * len(full))
        buckets.append(replace(each, layout=layout, params=params, is_flat=False, ranges=None))
    return replace(engine, buckets=buckets, names=None, partitions={**engine.partitions, **pieces})


def _each(bucket: Bucket) -> tuple[Sequence[ParamSpec], Sequence[Tensor]]:
    """The parameters of a bucket, and what the optimizer has of each: of a flat parameter the same for all."""
    specs = bucket.layout.params
    return specs, [bucket.params[0]] * len(specs) if bucket.is_flat else bucket.params


def _pieces(engine: Engine) -> dict[str, Pieces]:
    """The pieces that ranks have of parameters that are no DTensors and not whole."""
    size = engine.shards[1]
    ranks = Communicator(engine.groups[0]) if size > 1 else None
    found = {}
    for bucket in engine.buckets:
        of_ranks = [{piece.name: piece for piece in bucket.layout.pieces(rank)} for rank in range(size)]
        here, is_divided = of_ranks[engine.shards[0]], any(spec is not None for spec in bucket.specs)
        for i, (spec, param) in enumerate(zip(*_each(bucket), strict=True)):
            if isinstance(param, DTensor) or not (size > 1 or bucket.is_flat or is_divided):
                continue
            own = [each.get(spec.name) for each in of_ranks]
            ranges = [(0, 0) if piece is None else (piece.param_start, piece.param_stop) for piece in own]
            piece = here.get(spec.name)
            part = (0, 0) if piece is None else (piece.shard_start, piece.shard_stop)
            dtensor = bucket.specs[i] if bucket.specs else None
            found[spec.name] = Pieces(ranks, ranges, part if bucket.is_flat else None, tuple(spec.shape), dtensor)
    return found


def of_sequences(engine: Engine, context: Context, pipeline: Pipeline | None = None) -> Engine:
    """The engine of ranks that have parts of the same sequences, as that of data-parallel ranks with whole ones; see
    [Note: context ranks].

    Args:
        pipeline: the stages of which the model is one. Each stage has its own ranks.
    """
    tensor_ranks = engine.model_ranks
    axes = {context.axis: context.ranks} | (dict(tensor_ranks.axes) if tensor_ranks else {})
    among = range(dist.get_world_size()) if pipeline is None else dist.get_process_group_ranks(pipeline.replicas)
    index, size = component([context.ranks, *([tensor_ranks.ranks] if tensor_ranks else [])], among)
    pieces = _pieces(engine) if tensor_ranks is None else {}
    params = {spec.name: param for each in engine.buckets for spec, param in zip(*_each(each), strict=True)}
    model_ranks = ModelRanks(0, index, params, axes, {**engine.partitions, **pieces})
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
) -> Engine:
    """No FSDP: DistributedDataParallel, or the user averages gradients, or tensor parallelism alone, or there is one rank.

    Args:
        replicas: the ranks that have this model, unless DistributedDataParallel states them; None: all.
        tensor_parallel, partition: of parameters that are divided without DTensors.
    """
    params = _registrations(model)
    units = [(name,) for name in unit_names]
    if any(isinstance(param, DTensor) for param, _, _ in params.values()):
        return _tensor_parallel(model, params, units)
    group = getattr(model, "process_group", None) if module_tree.is_ddp(model) else None
    own = {name: each for name, (each, _, _) in params.items()}
    if parts := parts_of_dtensors(own):
        return _divided(
            *("torch DDP", params, units, None, group, Strategy.NO_SHARD, None),
            reads_all_at_once=True,
            partitions=parts,
        )
    partitions = partitions_of(own, tensor_parallel, partition or {})
    if partitions:
        ranks = next(iter(partitions.values())).ranks
        axes = {axis_name(ranks.group, "tp"): ranks.ranks}
        return _divided(
            *("tensor parallelism", params, units, None, group, Strategy.NO_SHARD, None),
            reads_all_at_once=True,
            axes=None if group is not None else axes,
            partitions=partitions,
        )
    if group is None and dist.is_initialized():
        group = replicas or dist.group.WORLD
    buckets = []
    for (modules, dtype), members in _by_unit(params, units).items():
        layout = FlatLayout(_specs(params, members, dtype), 1, keep_original=True)
        held, places = [params[n][0] for n in members], [params[n][1] for n in members]
        buckets.append(Bucket(modules[0], modules, layout, held, places))
    alone = group is None or group.size() == 1
    return Engine(
        "torch DDP" if module_tree.is_ddp(model) else "one device" if alone else "replicas",
        Strategy.NO_SHARD,
        _place_in(group),
        (0, 1),
        () if alone else (group,),  # type: ignore[arg-type]
        buckets,
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
    return _divided(
        *("tensor parallelism", params, units, None, None, Strategy.NO_SHARD, None),
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


def _specs(
    params: dict[str, Any], names: Sequence[str], dtype: str, partitions: Mapping[str, Partition | Pieces] | None = None
) -> tuple[ParamSpec, ...]:
    shapes = {name: tuple(params[name][0].shape) for name in names}
    shapes |= {name: each.full_shape(params[name][0]) for name, each in (partitions or {}).items() if name in shapes}
    return tuple(
        ParamSpec(name, shapes[name], dtype, tuple(params[name][2]), params[name][0].requires_grad) for name in names
    )


def _dim(param: DTensor) -> int:
    last = param.placements[-1]
    return last.dim if isinstance(last, Shard) else 0


def _place_in(group: Any) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank(), group.size())


def _strategy(shard: int, replicate: int, *, keeps: bool) -> Strategy:
    if shard == 1:
        return Strategy.NO_SHARD
    if replicate > 1:
        return Strategy.HYBRID_SHARD_ZERO2 if keeps else Strategy.HYBRID_SHARD
    return Strategy.SHARD_GRAD_OP if keeps else Strategy.FULL_SHARD
