"""Describes a model in the core's terms, whatever shards it: units, layouts, and the elements on this rank.

Our two APIs, torch's FSDP1 and FSDP2, DistributedDataParallel and unwrapped models are recognized without importing torch's FSDP:
modules and parameters state where elements lie. Their statements are checked against the layouts of the core, so that a recording
never has elements at wrong places.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from crossframe.errors import UsageError
from crossframe.layout import Layout
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from torch_backend.compat._dtypes import as_real
from torch_backend.engine._unit_tree import units_in
from torch_backend.recorder import _module_tree as module_tree
from torch_backend.recorder._context import Context
from torch_backend.recorder._engine import Bucket, Engine, Registered
from torch_backend.recorder._model_parallel import divided_by, in_known_layouts, joined_by, of_sequences
from torch_backend.recorder._model_ranks import full, hash_of
from torch_backend.recorder._partition import Partition, Pieces, local_of
from torch_backend.recorder._pipeline import Bits, Pipeline
from torch_backend.recorder._sharding_libraries import ours, torch_fsdp1, torch_fsdp2, unsharded


@dataclass(frozen=True)
class Held:
    """This rank's part of one parameter.

    Attributes:
        start, stop: which elements, the parameter taken as one row-major line.
        param: the tensor of the optimizer: the parameter, or a flat one that contains it.
        part: the range in the flat parameter; None if `param` has no others.
        gathered: whether ranks gather the whole parameter to record these elements; see [Note: model ranks].
        partition: how ranks divide it without a DTensor.
    """

    unit: str
    name: str
    start: int
    stop: int
    param: Tensor
    part: tuple[int, int] | None = None
    gathered: bool = False
    partition: Partition | Pieces | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of the parameter, its gradient or state of its shape: 1-D, an alias if possible."""
        if self.gathered:
            return as_real(full(tensor.detach(), self.partition)).reshape(-1)[self.start : self.stop]
        local = local_of(tensor.detach()).reshape(-1)
        return local if self.part is None else local[self.part[0] : self.part[1]]


@dataclass(frozen=True)
class ModelView:
    """The description of a model for a recorder.

    Attributes:
        engine: how it is sharded.
        mesh, rank: the ranks, and this one's place among them.
        units: (name, layout), as in a manifest.
        held: this rank's parts of parameters.
        places: the registrations of each parameter, where forward reads it.
        watched: modules whose input and output are recorded, with their names.
        entries: modules with the units whose parameters can be read in full when the module begins.
        compute_dtype: the dtype in which the model computes.
        left_out: names of parameters that are not recorded, since the engine leaves them alone or it is not known how ranks
            divide them.
        pipeline: the stages of which this model is one; None: it is whole. stage: its number.
        context: the ranks that have parts of this rank's sequences; None: it has whole ones.
        path: the path of this model in the whole one, if names include it; "" otherwise.
    """

    engine: Engine
    mesh: MeshSpec
    rank: int
    units: tuple[tuple[str, Layout], ...]
    held: tuple[Held, ...]
    places: dict[str, tuple[Registered, ...]]
    watched: dict[nn.Module, str]
    entries: dict[nn.Module, tuple[str, ...]]
    compute_dtype: str
    left_out: tuple[str, ...]
    pipeline: Pipeline | None = None
    context: Context | None = None
    stage: int = 0
    path: str = ""

    def own_name(self, name: str) -> str:
        """The name that a module or buffer of this model has in the recording."""
        return f"{self.path}.{name}" if self.path else name

    def names_of(self, unit: str) -> list[str]:
        """The parameters of a unit."""
        return [spec.name for name, layout in self.units if name == unit for spec in layout.params]

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups that join the ranks: of the shards, of the replicas, of the model ranks, and of the stages."""
        own = self.engine.place.groups
        return own if self.pipeline is None else (*own, self.pipeline.group)

    @property
    def writes(self) -> bool:
        """Whether this rank writes the recording of its place on the mesh, and this stage is the first one."""
        return self.speaks and self.stage == 0

    @property
    def creates(self) -> bool:
        """Whether this rank creates the recording."""
        return self.writes and self.rank == 0

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one of its model ranks that writes, or sends to the first stage."""
        ranks = self.engine.model_ranks
        return ranks is None or ranks.is_first

    def bits(self) -> dict[str, Bits]:
        """The bits of each parameter that can be recognized by them: with two dims or more, and not constant."""
        shapes = {spec.name: spec.shape for _, layout in self.units for spec in layout.params}
        found = {}
        for held in self.held:
            here = held.of(held.param)
            is_constant = bool(here.numel()) and bool((here == here[0]).all())
            if len(shapes[held.name]) > 1 and not is_constant:
                kind = type(self.places[held.name][0][0]).__name__
                found[held.name] = shapes[held.name], hash_of(here) if here.numel() else None, kind
        return found

    def renamed(self, names: Mapping[str, str]) -> "ModelView":
        """The view with other names of some parameters."""

        def new(spec: ParamSpec) -> ParamSpec:
            aliases = tuple(names.get(alias, alias) for alias in spec.aliases)
            return replace(spec, name=names.get(spec.name, spec.name), aliases=aliases)

        layouts: list[tuple[str, Any]] = list(self.units)
        units = tuple((unit, replace(each, params=tuple(map(new, each.params)))) for unit, each in layouts)
        held = tuple(replace(each, name=names.get(each.name, each.name)) for each in self.held)
        places = {names.get(name, name): where for name, where in self.places.items()}
        return replace(self, units=units, held=held, places=places)

    def inside(self, path: str) -> "ModelView":
        """The view with the names of a model that has this one at a path; the root's input and output keep their name."""

        def new(name: str) -> str:
            return f"{path}.{name}" if name else path

        def new_unit(unit: str) -> str:
            return ", ".join(map(new, unit.split(", ")))

        specs = [spec for _, layout in self.units for spec in layout.params]
        changed = self.renamed({name: new(name) for spec in specs for name in (spec.name, *spec.aliases)})
        return replace(
            changed,
            units=tuple((new_unit(unit), layout) for unit, layout in changed.units),
            held=tuple(replace(each, unit=new_unit(each.unit)) for each in changed.held),
            watched={module: new(name) if name else "" for module, name in self.watched.items()},
            entries={module: tuple(map(new_unit, units)) for module, units in self.entries.items()},
            left_out=tuple(map(new, self.left_out)),
            path=path,
        )


@dataclass(frozen=True)
class Arrangement:
    """What the user states about a model.

    Attributes:
        units: of a model that nothing shards (`torch_backend.recorder._module_tree.choose_units`).
        pipeline: the stages of which the model is one.
        context: the ranks that have parts of the same sequences.
        tensor_parallel: the ranks that divide parameters without DTensors.
        partition: by name or pattern the divided dim of such parameters, if they have no attributes of Megatron-LM.
    """

    units: Any
    pipeline: Pipeline | None
    context: Context | None
    tensor_parallel: dist.ProcessGroup | None
    partition: Mapping[str, int]


def view_of(model: nn.Module, stated: Arrangement, stage: int, inputs: Sequence[Tensor] = ()) -> ModelView:
    """Look at a model while its shards are registered: outside of forward and backward.

    Args:
        stage: the number of the model among the stages of a pipeline.
        inputs: what its forward is given; empty if that is not known.

    Raises:
        UsageError: no parameters, units given for a sharded model.
    """
    places = list(module_tree.named_modules(model))
    engine = joined_by(in_known_layouts(_engine_of(model, places, stated, inputs)), stated.pipeline, inputs)
    if stated.context is not None:
        engine = of_sequences(engine, stated.context, stated.pipeline)
    if stated.pipeline is None and stated.context is None and engine.model_ranks is None:
        names = (spec.name for bucket in engine.buckets for spec in bucket.layout.params)
        engine = replace(engine, place=engine.place.among_copies(names))
    (replica, num_replicas), (shard, num_shards) = engine.place.replicas, engine.place.shards
    if not engine.buckets:
        why = "the model has no parameters of a floating dtype"
        if engine.left_out:
            name, reason = next(iter(engine.left_out.items()))
            why = f"no parameter can be recorded; {name}: {reason}"
        raise UsageError(f"{why}: there is nothing to record")
    read = {
        spec.name: tuple(where)
        for bucket in engine.buckets
        for spec, where in zip(bucket.layout.params, bucket.places, strict=True)
    }
    # A wrapper and the wrapped module have one name: the latter counts. Inside a compiled model, no module does.
    by_name = {place.name: place.module for place in places if not place.compiled}
    units = {bucket.unit: [""] if engine.reads_all_at_once else bucket.modules for bucket in engine.buckets}
    entries: dict[nn.Module, tuple[str, ...]] = {}
    # Parameters that are gathered inside a compiled module cannot be read.
    hidden = set() if engine.reads_all_at_once else {place.name for place in places if place.compiled}
    for unit, names in units.items():
        for name in names:
            if name in by_name and name not in hidden:
                entries[by_name[name]] = (*entries.get(by_name[name], ()), unit)
    owners = {module for where in read.values() for module, _ in where}
    wanted = {
        "",
        *(name for bucket in engine.buckets for name in bucket.modules),
        *(place.name for place in places if place.module in owners),
    }
    known = {id(param) for bucket in engine.buckets for param in bucket.params}
    unmanaged: dict[int, str] = {}
    for place in places:
        for attribute, param in module_tree.params_of(place.module).items():
            if param is not None and id(param) not in known:
                unmanaged.setdefault(id(param), f"{place.name}.{attribute}" if place.name else attribute)
    return ModelView(
        engine,
        MeshSpec(shard=num_shards, replicate=num_replicas),
        replica * num_shards + shard,
        tuple((bucket.unit, bucket.layout) for bucket in engine.buckets),
        tuple(
            replace(each, partition=engine.partitions.get(each.name))
            for bucket in engine.buckets
            for each in _held(bucket, shard, gathered=engine.model_ranks is not None)
        ),
        read,
        {module: name for name, module in by_name.items() if name in wanted},
        entries,
        engine.compute_dtype or engine.buckets[0].layout.params[0].dtype,
        tuple(dict.fromkeys((*unmanaged.values(), *engine.left_out))),
        stated.pipeline,
        stated.context,
        stage,
    )


def _engine_of(
    model: nn.Module, places: Sequence[module_tree.NamedModule], stated: Arrangement, inputs: Sequence[Tensor]
) -> Engine:
    """The engine of a model, without regard to pipelines and contexts."""
    if units_in(model):
        engine = ours(model)
    elif found := [place for place in places if module_tree.is_torch_fsdp1(place.module)]:
        engine = torch_fsdp1(found)
    elif found := [place for place in places if module_tree.is_torch_fsdp2(place.module)]:
        engine = torch_fsdp2(model, found)
    else:
        replicas = None if stated.pipeline is None else stated.pipeline.replicas
        names = module_tree.choose_units(model, stated.units)
        return unsharded(model, names, replicas, stated.tensor_parallel, stated.partition, inputs)
    if stated.units is not None:
        raise UsageError("units: a sharded model has its own units; leave the argument out")
    return divided_by(engine, stated.tensor_parallel, stated.partition)


def _held(bucket: Bucket, shard: int, *, gathered: bool) -> Iterator[Held]:
    """This rank's pieces according to the layout."""
    pieces = {piece.name: piece for piece in bucket.layout.pieces(shard)}
    for i, spec in enumerate(bucket.layout.params):
        piece = pieces.get(spec.name)
        start, stop = (piece.param_start, piece.param_stop) if piece else (0, 0)
        if bucket.is_flat:
            part = (piece.shard_start, piece.shard_stop) if piece else (0, 0)
            yield Held(bucket.unit, spec.name, start, stop, bucket.params[0], part)
        else:
            yield Held(bucket.unit, spec.name, start, stop, bucket.params[i], gathered=gathered)


def warn_of_left_out(views: Sequence[ModelView]) -> None:
    """Warn, on one rank, of parameters that cannot be recorded."""
    names: dict[str, list[str]] = {}
    for view in views:
        for name, reason in view.engine.left_out.items() if view.speaks and view.rank == 0 else ():
            names.setdefault(reason, []).append(name)
    for reason, found in names.items():
        more = f" and {len(found) - 3} more parameters" if len(found) > 3 else ""
        warnings.warn(f"Recorder: not recorded: {', '.join(found[:3])}{more}: {reason}", stacklevel=2)
