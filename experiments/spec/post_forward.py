"""R08: resharding to a smaller group beside torch's, which shows wrong rows where dim 0 is uneven."""

import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info

from crossframe.layout import PerParamLayout, post_forward, post_forward_group
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from experiments.spec.cases import expected_shard
from experiments.spec.checks import Scope
from experiments.spec.fake_ranks import build_params, fake_mesh
from experiments.spec.per_param import build_param
from experiments.spec.tally import Tallies

Shape = tuple[int, ...]
WRONG_ROWS = (
    "torch cuts its padded gathered buffer, and so its k-group DTensors hold wrong rows (full_tensor() too); "
    "the core's chunks put together are the parameter"
)


def smaller_groups(tallies: Tallies, scope: Scope) -> None:
    """Every world size up to 8, every smaller group, up to 17 rows: the group, and what each rank's tensor holds."""
    groups = [(size, k) for size in range(2, 9) for k in range(2, size) if size % k == 0]
    shapes: list[Shape] = [shape for rows in range(1, 18) for shape in ((rows,), (rows, 3))]
    for shape in scope.take(shapes, num_quick=12):
        for size, k in groups:
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
            assert smaller is not None
            group = smaller.mesh.mesh[smaller.mesh.get_coordinate()[0]].tolist()  # type: ignore[index]
            tally.compare(
                list(post_forward_group(MeshSpec(size), rank, k)),
                group,
                (f"{size} ranks", f"groups of {k}", f"rank {rank}"),
            )
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
