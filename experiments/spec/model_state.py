"""R36: keys, shapes, dtypes and parts of torch's state dicts of a model on every rank."""

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard

from crossframe.api import Api
from crossframe.layout import FlatLayout, Layout, PerParamLayout, Sharding
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.state import StateKind, local_key, target_of
from experiments.spec.checks import SEED, Scope
from experiments.spec.fake_ranks import DTYPES, fake_mesh, quiet
from experiments.spec.tally import Tallies
from experiments.spec.watch import NESTS, build_nest, dtype_name, specs_of

NUM_MODELS = 800
KEPT_TOO = (
    "where original parameters are kept torch's LOCAL also has the rank's part of each under its own names; the core's has the "
    "flat parameters alone"
)
FULL_INSTEAD = (
    "on one rank torch's FSDP1 acts as NO_SHARD, and its LOCAL is FULL; the core's has the flat parameters there too"
)
# A key's global shape and dtype, and where the rank's own elements begin and how many they are.
Entries = dict[str, tuple[tuple[int, ...], str, int, int]]


@dataclass(frozen=True)
class Case:
    """A model, its interface, a rank, and which state dict is asked for."""

    nest: tuple[str, ...]
    tied: bool
    dtype: str
    api: Api
    keep_original: bool
    world_size: int
    rank: int
    kind: StateKind
    rank0_only: bool

    def model(self) -> nn.Module:
        """The model unsharded; each unit has a buffer and, if `tied`, a second name of its first parameter."""
        model = build_nest(self.nest).to(DTYPES[self.dtype])
        for name in self.nest:
            unit = model.get_submodule(name)
            unit.register_buffer("buffer", torch.zeros(2))
            if self.tied:
                unit.register_parameter("tied", unit.get_parameter("p0"))
        return model

    def sharding(self) -> Sharding:
        """The core's view of it."""
        units: list[tuple[str, Layout]] = []
        for name, specs in specs_of(self.nest):
            alias = (f"{name}.tied".lstrip("."),) if self.tied else ()
            named = tuple(
                ParamSpec(spec.name, spec.shape, self.dtype, aliases=alias if i == 0 else ())
                for i, spec in enumerate(specs)
            )
            if self.api is Api.FSDP2:
                units.append((name, PerParamLayout(named, self.world_size)))
            else:
                units.append((name, FlatLayout(named, self.world_size, self.keep_original)))
        return Sharding(tuple(units), MeshSpec(self.world_size))

    def entries(self) -> Entries:
        """What the core says that the rank's state dict has."""
        found: Entries = {}
        sharding = self.sharding()
        if self.rank0_only and sharding.mesh.group_rank(self.rank):
            return found
        for unit, layout in sharding.units:
            target = target_of(layout, self.kind, unit)
            if self.kind is StateKind.LOCAL:
                assert isinstance(target, FlatLayout)
                start, stop = target.shard_range(self.rank)
                found[local_key(unit)] = (
                    (target.flat_numel,),
                    target.dtype,
                    start if start < stop else 0,
                    stop - start,
                )
                continue
            held = {piece.name: piece for piece in target.pieces(self.rank % target.world_size)}
            for spec in target.params:
                piece = held.get(spec.name)
                start, numel = (piece.param_start, piece.numel) if piece else (0, 0)
                found |= dict.fromkeys((spec.name, *spec.aliases), (spec.shape, spec.dtype, start, numel))
        return found


@cache
def cases() -> tuple[Case, ...]:
    """A seeded sample."""
    rng = random.Random(SEED)
    return tuple(_case(rng) for _ in range(NUM_MODELS))


def _case(rng: random.Random) -> Case:
    api = rng.choice(list(Api))
    kind = rng.choice(list(StateKind)) if api is Api.FSDP1 else StateKind.SHARDED
    size = rng.randint(1, 8)
    return Case(
        rng.choice(NESTS),
        rng.random() < 0.5,
        rng.choice(tuple(DTYPES)),
        api,
        rng.random() < 0.5,
        size,
        rng.randrange(size),
        kind,
        kind is StateKind.FULL and rng.random() < 0.5,
    )


def dicts(tallies: Tallies, scope: Scope) -> None:
    """FULL, SHARDED and LOCAL of FSDP1, the DTensors of FSDP2; buffers are the same on every rank, and left out."""
    for case in scope.take(cases(), num_quick=25):
        ours, theirs = case.entries(), _torchs(case)
        if case.kind is StateKind.LOCAL and case.keep_original and theirs.keys() > ours.keys():
            more = {name: theirs.pop(name)[3] for name in theirs.keys() - ours.keys()}
            if more == _held(case):
                tallies["R36"].explain(KEPT_TOO, case)
            else:
                tallies["R36"].fail(f"{case}: torch's LOCAL also has {more}, the rank holds {_held(case)}")
        if (
            case.kind is StateKind.LOCAL
            and case.world_size == 1
            and theirs == replace(case, kind=StateKind.FULL).entries()
        ):
            tallies["R36"].explain(FULL_INSTEAD, case)
        else:
            tallies["R36"].compare(ours, theirs, case)


def _held(case: Case) -> dict[str, int]:
    """How many elements of each parameter the rank holds, under each of its names."""
    held = {name: 0 for spec in case.sharding().params for name in (spec.name, *spec.aliases)}
    for bucket, piece in case.sharding().pieces(case.rank):
        (spec,) = [spec for spec in case.sharding().units[bucket][1].params if spec.name == piece.name]
        for name in (spec.name, *spec.aliases):
            held[name] += piece.numel
    return held


def _torchs(case: Case) -> Entries:
    model = case.model()
    with fake_mesh(case.rank, case.world_size) as mesh, quiet():
        if case.api is Api.FSDP2:
            for name in [*reversed([name for name in case.nest if name]), ""]:
                fully_shard(model.get_submodule(name), mesh=mesh)
            return _entries(case, model.state_dict())
        wrapped = _wrap(case, model)
        config = FullStateDictConfig(rank0_only=case.rank0_only) if case.kind is StateKind.FULL else None
        kind = StateDictType[f"{case.kind.name}_STATE_DICT"]
        # The metadata of a ShardedTensor is gathered from all ranks, which are not there: keep what this rank gives.
        with (
            FullyShardedDataParallel.state_dict_type(wrapped, kind, config),
            patch("torch.distributed.fsdp._state_dict_utils.init_from_local_shards", _given),
            patch(
                "torch.distributed.fsdp._shard_utils.ShardedTensor._init_from_local_shards_and_global_metadata", _made
            ),
        ):
            return _entries(case, wrapped.state_dict())


def _given(shards: list[Any], *size: Any, process_group: Any) -> tuple[Any, tuple[int, ...]]:
    return (shards, tuple(size))


def _made(shards: list[Any], sharded_tensor_metadata: Any, process_group: Any) -> tuple[Any, tuple[int, ...]]:
    return (shards, tuple(sharded_tensor_metadata.size))


def _wrap(case: Case, model: nn.Module) -> FullyShardedDataParallel:
    def wrap(module: nn.Module) -> FullyShardedDataParallel:
        device = torch.device("cpu")
        return FullyShardedDataParallel(module, use_orig_params=case.keep_original, device_id=device)

    for name in reversed([name for name in case.nest if name]):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, wrap(model.get_submodule(name)))
    return wrap(model)


def _entries(case: Case, state: dict[str, Any]) -> Entries:
    found: Entries = {}
    for key, value in state.items():
        if key.rpartition(".")[2] == "buffer":
            continue
        if isinstance(value, tuple):
            shards, size = value
            numel = sum(shard.tensor.numel() for shard in shards)
            row = torch.Size(size[1:]).numel()
            start = shards[0].metadata.shard_offsets[0] * row if numel else 0
            dtype = shards[0].tensor.dtype if shards else DTYPES[case.dtype]
            found[key] = (size, dtype_name(dtype), start, numel)
            continue
        local = getattr(value, "_local_tensor", value)
        start = 0
        if local is not value and local.numel():
            # torch.chunk's chunks: all before this one are full.
            start = -(-value.shape[0] // case.world_size) * case.rank * torch.Size(value.shape[1:]).numel()
        found[key] = (tuple(value.shape), dtype_name(value.dtype), start, local.numel())
    return found
