"""R39: groups of a mesh with model axes beside torch's DeviceMesh, and local parts beside torch's fully_shard over DTensors."""

from collections.abc import Sequence
from itertools import permutations, product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from crossframe.mesh import EXPERT, MODEL_AXES, REPLICATE, SHARD, TENSOR, ParallelMesh
from crossframe.parallel import ParallelModel, ParallelSharding, Style
from crossframe.params import ParamSpec
from crossframe.shapes import ModelShapes
from experiments.spec.checks import Scope
from experiments.spec.fake_ranks import fake_world
from experiments.spec.tally import Tallies

SIZES = (1, 2, 3)
NAMES = ("pp", "replicate", "dp", "ep", "tp")
# A linear of 6 output and 12 input features in each style, and experts.
STYLES: dict[str, tuple[Style, tuple[tuple[int, ...], ...]]] = {
    "colwise": (Style.COLWISE, ((6, 12), (6,))),
    "rowwise": (Style.ROWWISE, ((6, 12), (6,))),
    "vocab": (Style.VOCAB, ((12, 5),)),
    "plain": (Style.REPLICATED, ((5, 3), (7,))),
    "experts": (Style.EXPERTS, ((6, 5, 2), (6, 3))),
}


def groups(tallies: Tallies, scope: Scope) -> None:
    """Meshes of up to three axes of up to three ranks in every order: each rank's coordinate and its group on each axis."""
    meshes = [
        ParallelMesh(names, sizes)
        for count in (1, 2, 3)
        for names in permutations(NAMES, count)
        for sizes in product(SIZES, repeat=count)
    ]
    for mesh in scope.take(meshes, num_quick=40):
        for rank in range(mesh.world_size):
            with fake_world(mesh.world_size, rank):
                theirs: Any = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
                seen = [dist.get_process_group_ranks(theirs[name].get_group()) for name in mesh.names]
                coordinate = list(theirs.get_coordinate())
            ours = [list(mesh.group(rank, name)) for name in mesh.names]
            tallies["R39"].compare(
                [list(mesh.coordinate(rank).values()), ours], [coordinate, seen], (mesh, f"rank {rank}")
            )


def parts(tallies: Tallies, scope: Scope) -> None:
    """Each style on meshes (replicate, dp, ep, tp): the elements that each rank holds after fully_shard."""
    cases = [(style, sizes) for style in STYLES for sizes in product((1, 2), SIZES, SIZES, SIZES)]
    for style, sizes in scope.take(cases, num_quick=40):
        mesh = ParallelMesh((REPLICATE, SHARD, EXPERT, TENSOR), sizes)
        kind, shapes = STYLES[style]
        params = tuple(ParamSpec(f"part.p{i}", shape) for i, shape in enumerate(shapes))
        rules = [("part", kind)] if kind.axis is None or mesh.size(kind.axis) > 1 else []
        # Styles whose axis has one rank divide nothing; a model needs something to divide on each larger axis.
        other = [axis for axis in MODEL_AXES if mesh.size(axis) > 1 and axis != kind.axis]
        extra = tuple(ParamSpec(f"{axis}.w", (6,)) for axis in other)
        rules += [(axis, Style.EXPERTS if axis == EXPERT else Style.COLWISE) for axis in other]
        sharding = ParallelSharding(ParallelModel(ModelShapes("m", (*params, *extra)), mesh, rules), "per_param")
        for rank in range(mesh.world_size):
            held: dict[str, list[int]] = {param.name: [] for param in params}
            for _, piece in sharding.pieces(rank):
                if piece.name in held:
                    held[piece.name] += [
                        k for run in piece.runs() for k in range(run.param_start, run.param_start + run.numel)
                    ]
            with fake_world(mesh.world_size, rank):
                theirs = _sharded(mesh, kind, shapes)
            tallies["R39"].compare(list(held.values()), theirs, (style, mesh, f"rank {rank}"))


def _sharded(mesh: ParallelMesh, style: Style, shapes: Sequence[tuple[int, ...]]) -> list[list[float]]:
    """The local elements of parameters whose values count up, after torch's fully_shard."""
    replicate, shard, ep, tp = mesh.sizes
    sizes = (replicate, shard, ep, tp) if style is Style.EXPERTS else (replicate, shard * ep, tp)
    names = (REPLICATE, SHARD, EXPERT, TENSOR) if style is Style.EXPERTS else (REPLICATE, SHARD, TENSOR)
    theirs: Any = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    module = nn.Module()
    for i, shape in enumerate(shapes):
        param: Any = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        if style.axis is not None:
            dim, axis = style.dim(len(shape)), theirs[style.axis]
            part = param if dim is None else param.chunk(axis.size(), dim)[axis.get_local_rank()].contiguous()
            param = DTensor.from_local(part, axis, [Replicate() if dim is None else Shard(dim)], run_check=False)
        module.register_parameter(f"p{i}", nn.Parameter(param))
    fully_shard(module, mesh=theirs[REPLICATE, SHARD])
    return [param.to_local().flatten().tolist() for param in module.parameters()]  # type: ignore[attr-defined]
