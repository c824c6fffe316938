"""R25: replaced data of a sharded parameter, adopted or refused, in torch's FSDP1, in the core and in its reference."""

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from crossframe.dtypes import numpy_dtype
from crossframe.errors import ParamError
from crossframe.layout import FlatLayout
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.plan import plan_units
from crossframe.reference import World
from crossframe.writeback import check_replaced
from experiments.spec.cases import first_values
from experiments.spec.checks import Scope
from experiments.spec.fake_ranks import DTYPES, build_params, fake_world, quiet
from experiments.spec.tally import Tallies

SHAPES = ((5,), (2, 3), (7, 1))
CONVERTED = "torch's FSDP1 adopts data of another dtype, converted as it copies; the core refuses it by both dtypes"
NOT_LOOKED_AT = (
    "torch's FSDP1 does not look at a parameter of which the rank holds no element, and drops whatever was put there; the core "
    "refuses another shape or dtype on that rank too"
)
RESHAPED = (
    "where nothing is sharded torch's FSDP1 adopts data of another shape with as many elements; the core asks for the "
    "parameter's shape"
)
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A rank of a world, one of the parameters there, and the shape and dtype of its replacement."""

    world_size: int
    rank: int
    place: int
    shape: Shape
    dtype: str

    @property
    def layout(self) -> FlatLayout:
        """The unit."""
        specs = tuple(ParamSpec(f"p{i}", shape) for i, shape in enumerate(SHAPES))
        return FlatLayout(specs, self.world_size, keep_original=True)

    @property
    def held(self) -> int:
        """How many elements of the parameter the rank holds."""
        return sum(piece.numel for piece in self.layout.pieces(self.rank) if piece.name == f"p{self.place}")

    @property
    def expected(self) -> Shape:
        """The shape in which the rank's user sees the parameter: flat, unless nothing is sharded."""
        return SHAPES[self.place] if self.world_size == 1 else (self.held,)

    def values(self) -> np.ndarray:
        """What is put there: values that are nowhere else."""
        return -np.arange(1, prod(self.shape) + 1, dtype=np.float32).reshape(self.shape)


def cases() -> list[Case]:
    """The right shape, more, fewer and no elements, other dims, the full shape, and every dtype, on every rank of 1 to 5."""
    found = []
    for size, place in product(range(1, 6), range(len(SHAPES))):
        for rank in range(size):
            held = Case(size, rank, place, (), "float32").held
            full = SHAPES[place]
            shapes = dict.fromkeys(
                [(held,), (held + 1,), (max(held - 1, 0),), (0,), (1, held), (held, 1), full, full[::-1]]
            )
            found += [Case(size, rank, place, shape, dtype) for shape in shapes for dtype in DTYPES]
    return found


def data(tallies: Tallies, scope: Scope) -> None:
    """Every case: adopted or refused, and if adopted, what the shard then holds."""
    for case in scope.take(cases(), num_quick=60):
        _compare(tallies, case)


def _compare(tallies: Tallies, case: Case) -> None:
    tally = tallies["R25"]
    before, after = _put_into_torch(case)
    try:
        check_replaced(f"p{case.place}", case.rank, (case.expected, "float32"), (case.shape, case.dtype))
    except ParamError as error:
        said = str(error)
        named = [
            f"'p{case.place}'",
            f"rank {case.rank}",
            str(case.shape if case.shape != case.expected else case.dtype),
        ]
        if not all(word in said for word in named):
            tally.fail(f"{case}: refused without one of {named}: {said}")
        elif after is None:
            tally.agreed += 1
        elif not case.held and after == before:
            tally.explain(NOT_LOOKED_AT, case)
        elif case.dtype != "float32" and prod(case.shape) == case.held and after == _shard(case, case.values()):
            tally.explain(CONVERTED if case.shape == case.expected else RESHAPED, case)
        elif case.world_size == 1 and prod(case.shape) == case.held and after == _shard(case, case.values()):
            tally.explain(RESHAPED, case)
        else:
            tally.fail(f"{case}: the core refuses ({said}), torch's shard is {after}")
        return
    ours = _shard(case, case.values())
    if tally.compare(ours, after, case):
        tally.compare(_put_into_reference(case), ours, (case, "reference"), "the layout")


def _shard(case: Case, values: np.ndarray) -> list[float]:
    """The rank's shard as the layout says, with new values of one parameter."""
    first = first_values(SHAPES)
    shard = [0.0] * case.layout.padded_shard_numel
    for piece in case.layout.pieces(case.rank):
        place = int(piece.name[1:])
        own = (
            values.reshape(-1) if place == case.place else np.arange(piece.param_start, piece.param_stop) + first[place]
        )
        shard[piece.shard_start : piece.shard_stop] = [float(value) for value in own]
    return _without_padding(case, shard)


def _without_padding(case: Case, shard: list[float]) -> list[float]:
    return [value for piece in case.layout.pieces(case.rank) for value in shard[piece.shard_start : piece.shard_stop]]


def _put_into_torch(case: Case) -> tuple[list[float], list[float] | None]:
    """torch's shard before and after, without padding; None where it refuses."""
    module: Any = nn.Module()
    for i, param in enumerate(build_params(SHAPES)):
        module.register_parameter(f"p{i}", param)
    with fake_world(case.world_size, case.rank), quiet():
        model = FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))
        handle: Any = model._handle
        before = _without_padding(case, handle.flat_param.tolist())
        module.get_parameter(f"p{case.place}").data = torch.from_numpy(case.values()).to(DTYPES[case.dtype])
        try:
            handle._writeback_orig_params()
        except RuntimeError:
            return before, None
        return before, _without_padding(case, handle.flat_param.tolist())


def _put_into_reference(case: Case) -> list[float]:
    """The same shard of the reference, where a user writes what a rank shows."""
    units = plan_units([("", case.layout)])
    params = {
        f"p{i}": np.arange(first, first + prod(shape), dtype=numpy_dtype("float32")).reshape(shape)
        for i, (first, shape) in enumerate(zip(first_values(SHAPES), SHAPES, strict=True))
    }
    world = World(units, MeshSpec(case.world_size), params)
    unit = world.units[""]
    if case.held:
        unit.edit(case.rank, f"p{case.place}", case.values().reshape(-1))
    return _without_padding(case, unit.buckets[0].unit.shards[case.rank].tolist())
