"""R10: the grid of ranks beside torch's DeviceMesh."""

import torch.distributed as dist

from crossframe.mesh import MeshSpec
from experiments.spec.checks import Scope
from experiments.spec.fake_ranks import fake_mesh
from experiments.spec.tally import Tallies

MAX_RANKS = 24


def coordinates(tallies: Tallies, scope: Scope) -> None:
    """Every grid of up to 24 ranks, and every row of shards alone: each rank's coordinate and its groups."""
    grids: list[tuple[int | None, int]] = [(None, shard) for shard in range(1, MAX_RANKS + 1)]
    grids += [(a, b) for a in range(1, MAX_RANKS + 1) for b in range(1, MAX_RANKS // a + 1)]
    tally = tallies["R10"]
    for replicate, shard in scope.take(grids, num_quick=40):
        spec = MeshSpec(shard=shard, replicate=replicate or 1)
        for rank in range(spec.world_size):
            with fake_mesh(rank, shard, replicate) as mesh:
                coordinate = list(mesh.get_coordinate() or ())
                groups = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in range(mesh.ndim)]
            if replicate is None:
                coordinate, groups = [0, *coordinate], [[rank], *groups]
            ours = [list(spec.coordinate(rank)), [list(spec.replicate_group(rank)), list(spec.shard_group(rank))]]
            tally.compare(ours, [coordinate, groups], (spec, f"rank {rank}"))
