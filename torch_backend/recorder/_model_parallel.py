"""The engine of a model that is divided besides, by parameters, stages or sequences: its replicas, and what ranks gather."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from crossframe.layout import layouts_by_rows
from crossframe.params import ParamSpec
from torch_backend.compat._dtypes import real_shape
from torch_backend.ranks._collectives import Communicator, axis_name, default_process_group
from torch_backend.recorder._context import Context
from torch_backend.recorder._engine import Bucket, Engine, strategy_of
from torch_backend.recorder._model_ranks import Axes, ModelRanks, component, hash_of
from torch_backend.recorder._partition import Partition, Pieces, local_of, partitions_of
from torch_backend.recorder._pipeline import Pipeline
from torch_backend.recorder._unit_meshes import place_in

_TENSOR_AXIS = "tp"
"""The name of the axis of a process group without one."""
NO_GROUP = (
    "divided over ranks without DTensors, and it is not known which ranks; pass tensor_parallel=, their process group"
)
_OTHER_LAYOUT = "the elements on each rank are not those that the recorder expects of this way to shard a model"


def divided_by(engine: Engine, tensor_parallel: dist.ProcessGroup | None, stated: Mapping[str, int]) -> Engine:
    """The engine of an FSDP whose modules divide parameters without DTensors, if they do.

    Args:
        tensor_parallel, stated: see `partitions_of`.
    """
    every = [each for bucket in engine.buckets for each in zip(*_each(bucket), strict=True)]
    num_dims = {spec.name: len(spec.shape) for spec, _ in every}
    divided = partitions_of({spec.name: param for spec, param in every}, num_dims, tensor_parallel, stated)
    if divided.unknown:
        return replace(engine, is_gathered=True, left_out=dict.fromkeys(divided.unknown, NO_GROUP))
    if not divided.partitions:
        return engine
    axes = None if engine.place.axes is None else axes_by_name(divided.partitions)
    place = replace(engine.place, axes=axes)
    return replace(engine, is_gathered=True, partitions=divided.partitions, place=place)


def axes_by_name(partitions: Mapping[str, Partition]) -> Axes:
    """The ranks that divide parameters, by the name of their mesh axis."""
    ranks = next(iter(partitions.values())).ranks
    return {axis_name(ranks.group, _TENSOR_AXIS): ranks.ranks}


def in_known_layouts(engine: Engine) -> Engine:
    """The engine without the parameters of which ranks hold other elements than the layout states. DTensors are gathered then,
    since they say themselves where their elements lie. All ranks of the engine's groups call it."""
    found: set[str] = set()
    for bucket in engine.buckets if not engine.is_gathered else ():
        pieces = {piece.name: piece for piece in bucket.layout.pieces(engine.place.shards[0])}
        for i, (spec, param) in enumerate(zip(*_each(bucket), strict=True)):
            piece = pieces.get(spec.name)
            start, stop = (piece.param_start, piece.param_stop) if piece else (0, 0)
            is_here = bucket.is_flat or local_of(param).numel() == stop - start
            if not is_here or (bucket.ranges is not None and bucket.ranges[i] != (start, stop)):
                found.add(spec.name)
    for group in engine.place.groups if not engine.is_gathered else ():  # ranks must know alike
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
    place, axes = engine.place, engine.place.axes
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
        replicas = component(axes.values(), dist.get_process_group_ranks(among))
        place = replace(place, replicas=replicas, groups=(among,) if among.size() > 1 else ())
    divided = {**engine.partitions, **pieces}
    ranks = ModelRanks(place.replicas[0], place.shards[0], _params(engine), axes, divided, engine.left_out)
    if is_one_of_several := len(ranks.ranks) > 1:
        place = replace(place, groups=(*place.groups, ranks.group))
    together = ranks if is_one_of_several else None
    return replace(_of_full(engine, pieces), place=place, model_ranks=ranks, tensor_ranks=together)


def ranks_with_batch(inputs: Sequence[Tensor]) -> Axes:
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
            shape = real_shape(param) if isinstance(param, DTensor) else spec.shape
            if part is not None:
                shape = part.full_shape() if isinstance(part, Pieces) else part.full_shape(param.shape)
            members.append((replace(spec, shape=shape), param, places))
        for layout in layouts_by_rows([spec for spec, _, _ in members], engine.place.shards[1]):
            own = [member for member in members if member[0] in layout.params]
            params, places = [param for _, param, _ in own], [places for _, _, places in own]
            buckets.append(replace(each, layout=layout, params=params, places=places, is_flat=False, ranges=None))
    return replace(engine, buckets=buckets, names=None, partitions=partitions)


def _params(engine: Engine) -> dict[str, Tensor]:
    """The optimizer's tensor of each parameter, by name."""
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


def of_sequences(engine: Engine, context: Context, pipeline: Pipeline | None) -> Engine:
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
    groups = (*engine.place.groups, model_ranks.group)
    place = replace(engine.place, replicas=(0, 1), shards=(index, size), groups=groups)
    return replace(
        _of_full(replace(engine, place=place), pieces),
        strategy=strategy_of(size, 1, keeps=False),
        model_ranks=model_ranks,
    )
