"""R08: reshard groups beside torch's, which goes wrong where dim 0 is uneven and on other dims."""

from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info
from torch.distributed.tensor import Shard

from crossframe.errors import MeshError
from crossframe.layout import PerParamLayout, post_forward, post_forward_group
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from experiments.spec.cases import expected_shard
from experiments.spec.checks import Scope
from experiments.spec.fake_ranks import build_params, fake_mesh, quiet
from experiments.spec.per_param import build_param
from experiments.spec.tally import Tallies

Shape = tuple[int, ...]
WRONG_ROWS = (
    "torch cuts its padded gathered buffer, and so its DTensors over the reshard group hold wrong rows; "
    "the core's chunks put together are the parameter"
)


OTHER_DIM = (
    "torch fails on a parameter sharded on another dim: it cuts dim 0 for the reshard group (RuntimeError where that is "
    "uneven), and cannot gather again what it cut (IndexError); "
    "the core's chunks put together are the parameter"
)
NO_GROUP = "not a reshard group"


def groups(tallies: Tallies, scope: Scope) -> None:
    """Every grid of up to 3 replicas of up to 8 shards, every number of ranks: which group, or which refusal."""
    for replicate, shard in scope.take(list(product((1, 2, 3), range(1, 9))), num_quick=24):
        spec = MeshSpec(shard, replicate)
        for rank in range(spec.world_size):
            with fake_mesh(rank, shard, replicate) as mesh, quiet():
                mesh_info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
                for k in range(-1, shard + 3):
                    case = (spec, f"groups of {k}", f"rank {rank}")
                    tallies["R08"].compare(_our_group(spec, rank, k), _torch_group(mesh_info, k), case)


def _our_group(spec: MeshSpec, rank: int, k: int) -> str | list[int]:
    try:
        return list(post_forward_group(spec, rank, k))
    except MeshError as error:
        return NO_GROUP if NO_GROUP in str(error) else "refused"


def _torch_group(mesh_info: FSDPMeshInfo, k: int) -> str | list[int]:
    try:
        smaller = _get_post_forward_mesh_info(k, mesh_info)
    except ValueError:
        return "refused"
    if smaller is None or smaller is mesh_info:
        return NO_GROUP
    coordinate = smaller.mesh.get_coordinate()
    assert coordinate is not None
    return smaller.mesh.mesh[coordinate[0]].tolist()


def other_dims(tallies: Tallies, scope: Scope) -> None:
    """Parameters sharded on a dim above 0, which torch loses on the way."""
    tally = tallies["R08"]
    for (size, k), (shape, dim) in product(
        [(4, 2), (6, 2), (6, 3), (8, 4)], [((5, 24), 1), ((2, 24), 1), ((3, 2, 24), 2)]
    ):
        (param,) = build_params((shape,))
        layout = post_forward(PerParamLayout((ParamSpec("p0", shape),), size, (dim,)), k)
        assert isinstance(layout, PerParamLayout)
        chunks = [torch.tensor(expected_shard(layout, rank)).view(layout.shard_shape(0, rank)) for rank in range(k)]
        for rank in range(size):
            case = f"{shape} sharded on dim {dim} over {size} ranks, groups of {k}, rank {rank}"
            if not torch.equal(torch.cat(chunks, dim), param):
                tally.fail(f"{case}: the core's chunks put together are {torch.cat(chunks, dim).tolist()}")
            elif _gathers_again(param, dim, size, k, rank):
                tally.fail(f"{case}: torch gathers it again")
            else:
                tally.explain(OTHER_DIM, case)


def _gathers_again(param: nn.Parameter, dim: int, size: int, k: int, rank: int) -> bool:
    """Whether torch's unit gathers its parameter twice; nothing is communicated, so that only the shapes can be wrong."""
    module: Any = nn.ReLU()
    module.register_parameter("p0", nn.Parameter(param.detach().clone()))
    with fake_mesh(rank, size) as mesh:
        fully_shard(module, mesh=mesh, reshard_after_forward=k, shard_placement_fn=lambda _: Shard(dim))
        try:
            module(torch.ones(1))
            module.unshard()
        except (IndexError, RuntimeError):
            return False
    return True


def smaller_groups(tallies: Tallies, scope: Scope) -> None:
    """Every world size up to 8, every reshard group, up to 17 rows: what each rank's tensor holds."""
    pairs = [(size, k) for size in range(2, 9) for k in range(2, size) if size % k == 0]
    shapes: list[Shape] = [shape for rows in range(1, 18) for shape in ((rows,), (rows, 3))]
    for shape in scope.take(shapes, num_quick=8):
        for size, k in pairs:
            _compare(tallies, shape, size, k)


def _compare(tallies: Tallies, shape: Shape, size: int, k: int) -> None:
    tally = tallies["R08"]
    (param,) = build_params((shape,))
    layout = post_forward(PerParamLayout((ParamSpec("p0", shape),), size), k)
    assert isinstance(layout, PerParamLayout)
    gathered = torch.cat([_shard(shape, size, rank) for rank in range(size)])
    ours, theirs = [], []
    for rank in range(size):
        with fake_mesh(rank, size) as mesh:
            mesh_info = FSDPMeshInfo(mesh, shard_mesh_dim=0)
            smaller = _get_post_forward_mesh_info(k, mesh_info)
            built = build_param(shape, 0, mesh_info, smaller)
            # What torch does between forward and backward, with the all-gather's output put in by hand.
            built.init_all_gather_outputs([gathered.numel() // size], [gathered.dtype], size, gathered.device)
            built.all_gather_outputs[0].copy_(gathered)
            built.init_unsharded_param()
            built.to_unsharded()
            built.to_sharded_post_forward()
            local = built._sharded_post_forward_param._local_tensor  # type: ignore[union-attr]
            theirs.append(local.detach().clone())
        values = torch.tensor(expected_shard(layout, rank % k), dtype=torch.float32)
        rows = layout.shard_shape(0, rank % k)
        ours.append(values[: torch.Size(rows).numel()].view(rows))
    for first in range(0, size, k):
        here = f"{shape} on {size} ranks, groups of {k}, ranks {first} to {first + k - 1}"
        mine, torchs = torch.cat(ours[first : first + k]), torch.cat(theirs[first : first + k])
        if not torch.equal(mine, param):
            tally.fail(f"{here}: the core's chunks put together are {mine.tolist()}")
        elif any(
            not torch.equal(a, b) for a, b in zip(ours[first : first + k], theirs[first : first + k], strict=True)
        ):
            if torch.equal(torchs, param):
                tally.fail(f"{here}: torch cuts elsewhere, and its parts put together are the parameter too")
                continue
            wrong = [row for row in range(shape[0]) if not torch.equal(torchs[row], param[row])]
            tally.explain(WRONG_ROWS, f"{here}: rows {wrong} are wrong in torch")
        else:
            tally.agreed += 1


def _shard(shape: Shape, size: int, rank: int) -> torch.Tensor:
    with fake_mesh(rank, size) as mesh:
        return build_param(shape, 0, FSDPMeshInfo(mesh, shard_mesh_dim=0))._sharded_param_data
