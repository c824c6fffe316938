"""R07: the per-parameter layout beside torch's FSDPParam and fully_shard, on every rank."""

from itertools import groupby, product

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo
from torch.distributed.tensor import Shard

from crossframe.errors import LayoutError
from crossframe.layout import PerParamLayout, views
from crossframe.params import ParamSpec
from experiments.spec.cases import Shapes, SingleCase, expected_shard, single_cases
from experiments.spec.checks import Scope
from experiments.spec.fake_ranks import DTYPES, build_params, fake_mesh
from experiments.spec.tally import Tallies

EMPTY_ROWS = (
    "torch says 0 rows on every rank for a parameter without elements; the core chunks its rows as those of any other"
)


def build_param(
    shape: tuple[int, ...], dim: int, mesh_info: FSDPMeshInfo, smaller: FSDPMeshInfo | None = None
) -> FSDPParam:
    """What torch builds of one parameter, sharded on a dim, on the rank that the mesh is of."""
    module, (param,) = nn.Module(), build_params((shape,))
    module.register_parameter("p0", param)
    return FSDPParam(
        param,
        ParamModuleInfo(module, "p0"),
        mesh_info,
        smaller,
        torch.device("cpu"),
        (lambda _: Shard(dim)) if dim else None,
        MixedPrecisionPolicy(),
        OffloadPolicy(),
    )


def single(tallies: Tallies, scope: Scope) -> None:
    """Every single parameter on every rank: shapes, strides, padded sizes, every value, and refusals of uneven dims."""
    cases = sorted(scope.take(single_cases(), num_quick=1500), key=lambda case: case.world_size)
    for size, group in groupby(cases, key=lambda case: case.world_size):
        in_world = list(group)
        shards: dict[SingleCase, list[torch.Tensor]] = {case: [] for case in in_world}
        for rank in range(size):
            with fake_mesh(rank, size) as mesh:
                mesh_info = FSDPMeshInfo(mesh, shard_mesh_dim=0)
                for case in in_world:
                    _compare_single(tallies, case, rank, mesh_info, shards[case])
        for case, parts in shards.items():
            if parts:
                # torch's shards of all ranks, read with the core's columns, are the parameter.
                read = views(case.layout(), torch.cat(parts).numpy())["p0"]
                (param,) = build_params((case.shape,))
                tallies["R07"].compare(read.tolist(), param.tolist(), (case, "gathered"))


def _compare_single(
    tallies: Tallies, case: SingleCase, rank: int, mesh_info: FSDPMeshInfo, shards: list[torch.Tensor]
) -> None:
    tally, here = tallies["R07"], (case, f"rank {rank}")
    try:
        layout, refused = case.layout(), False
    except LayoutError as error:
        layout, refused = None, f"dim {case.dim % len(case.shape)}" in str(error)
    try:
        built = build_param(case.shape, case.dim, mesh_info)
    except NotImplementedError:
        tally.compare(refused, True, here)
        return
    if layout is None:
        tally.fail(f"{here}: the core refuses, torch does not")
        return
    local = built.sharded_param._local_tensor  # type: ignore[attr-defined]
    shape, (column,) = layout.shard_shape(0, rank), layout.columns
    theirs = (tuple(built.sharded_size), tuple(local.shape))
    if (shape, shape) != theirs and not layout.params[0].numel and theirs[0][case.dim] == theirs[1][case.dim] == 0:
        tally.explain(EMPTY_ROWS, here)
    else:
        tally.compare((shape, shape), theirs, here)
        strides = torch.empty(shape).stride()
        tally.compare(strides, built.contiguous_sharded_stride, here)
    tally.compare(column.width, built.padded_sharded_param_size.numel(), here)
    tally.compare(expected_shard(layout, rank), built._sharded_param_data.tolist(), here)
    shards.append(built._sharded_param_data)


LISTS: tuple[Shapes, ...] = tuple(
    shapes for length in (1, 2, 3) for shapes in product(((5,), (1, 3), (4, 2), (0, 3), (7,), (2, 2, 2)), repeat=length)
)


def units(tallies: Tallies, scope: Scope) -> None:
    """Units of up to three parameters in every dtype: what each rank sends into the all-gather, in order."""
    cases = scope.take(list(product(range(1, 9), LISTS)), num_quick=100)
    for size, shapes in cases:
        for rank in range(size):
            with fake_mesh(rank, size) as mesh:
                for dtype in DTYPES:
                    module = nn.Module()
                    for i, param in enumerate(build_params(shapes, DTYPES[dtype])):
                        module.register_parameter(f"p{i}", param)
                    fully_shard(module, mesh=mesh)
                    specs = tuple(ParamSpec(f"p{i}", shape, dtype) for i, shape in enumerate(shapes))
                    layout = PerParamLayout(specs, size)
                    group = fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]
                    for built in group.fsdp_params:
                        built.init_dtype_attrs(group.mp_policy)
                    sent = torch.cat([part for built in group.fsdp_params for part in built.all_gather_inputs])
                    here = (shapes, dtype, f"world size {size}", f"rank {rank}")
                    tallies["R07"].compare(expected_shard(layout, rank), sent.tolist(), here)
