"""fully_shard next to tensor, expert and pipeline parallelism, torch's and ours: what each rank holds is
what the core states (R39)."""

from typing import Any

import pytest
import torch

import torch_backend
from crossframe.mesh import ParallelMesh
from crossframe.parallel import ParallelSharding
from tests.on_torch.helpers.model_axes import Net, parallel
from torch_backend.shards import layouts_of

MESHES = {
    "tp": ParallelMesh.of(dp=2, tp=2),
    "ep": ParallelMesh.of(dp=2, ep=2),
    "pp": ParallelMesh.of(pp=2, dp=2),
    "pp and tp": ParallelMesh.of(pp=2, dp=1, tp=2),
    "tp outside": ParallelMesh.of(tp=2, dp=2),
}


def _held(rank, world_size, mesh):
    import torch.distributed.fsdp as theirs

    whole = {name: param.detach().flatten() for name, param in Net(mesh.size("ep") > 1).named_parameters()}
    problems = []
    for api in (torch_backend, theirs):
        net, model = parallel(api, mesh)
        sharding = ParallelSharding(model, "per_param")
        expected = {name: [] for name, _ in net.named_parameters()}
        for _, piece in sharding.pieces(rank):
            expected[piece.name] += [whole[piece.name][run.param_start :][: run.numel] for run in piece.runs()]
        params: dict[str, Any] = dict(net.named_parameters())
        for name, param in params.items():
            local = torch.cat(expected[name]) if expected[name] else torch.empty(0)
            if not torch.equal(param.to_local().flatten(), local):
                problems.append((api.__name__, name, param.placements))
            if not torch.equal(param.full_tensor().flatten(), whole[name]):
                problems.append((api.__name__, name, "full"))
        if api is torch_backend and layouts_of(net) != list(sharding.layouts(rank)):
            problems.append((layouts_of(net), sharding.layouts(rank)))
    return problems


@pytest.mark.parametrize("name", MESHES)
def test_R39_ranks_hold_the_elements_that_the_core_states(ranks, name):
    assert ranks.run(4, _held, MESHES[name]) == [[]] * 4
