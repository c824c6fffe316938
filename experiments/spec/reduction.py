"""R26, R27: divide factors beside torch's."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

from crossframe.api import Api
from crossframe.mesh import MeshSpec
from crossframe.reduction import DivideFactors, custom_factors, divide_factors, factors_of, mean_factors
from experiments.spec.checks import Scope
from experiments.spec.fake_ranks import DTYPES, fake_mesh, quiet
from experiments.spec.mesh import MAX_RANKS
from experiments.spec.tally import Tallies

MAX_FACTOR_RANKS = 4096


@dataclass(frozen=True)
class Group:
    """All that torch's factors ask of a group."""

    num_ranks: int

    def size(self) -> int:
        """Number of ranks."""
        return self.num_ranks


def flat_factors(tallies: Tallies, scope: Scope) -> None:
    """FSDP1: every number of ranks up to 4096, and what a wrapped module holds on every grid of up to 24 ranks."""
    for num_ranks in scope.take(range(1, MAX_FACTOR_RANKS + 1), num_quick=500):
        before = DefaultState._get_gradient_predivide_factor(num_ranks)
        tallies["R26"].compare(divide_factors(num_ranks), DivideFactors(before, num_ranks / before), num_ranks)
    grids = [(a, b) for a in range(1, MAX_RANKS + 1) for b in range(1, MAX_RANKS // a + 1)]
    for replicate, shard in scope.take(grids, num_quick=20):
        with fake_mesh(0, shard, replicate) as mesh, quiet():
            model = FullyShardedDataParallel(
                nn.Linear(2, 2),
                sharding_strategy=ShardingStrategy.HYBRID_SHARD,
                device_id=torch.device("cpu"),
                device_mesh=mesh,
            )
        theirs = DivideFactors(float(model._gradient_predivide_factor), float(model._gradient_postdivide_factor))
        spec = MeshSpec(shard=shard, replicate=replicate)
        tallies["R26"].compare(factors_of(spec, Api.FSDP1, "float32"), theirs, spec)


def per_param_factors(tallies: Tallies, scope: Scope) -> None:
    """FSDP2: every number of ranks up to 4096 in every dtype, on every grid of that many; and a user's own factors."""
    cases = [(n, replicas) for n in range(1, MAX_FACTOR_RANKS + 1) for replicas in range(1, n + 1) if n % replicas == 0]
    for num_ranks, replicate in scope.take(cases, num_quick=2000):
        shards = Group(num_ranks // replicate)
        for name, dtype in DTYPES.items():
            here = (f"{num_ranks} ranks, {replicate} replicas", name)
            replicas = Group(replicate) if replicate > 1 else None
            theirs = _factors(shards, replicas, dtype)
            tallies["R26"].compare(mean_factors(num_ranks, name, replicate=replicate), theirs, here)
    for factor in scope.take([n / 4 for n in range(1, 1025)], num_quick=200):
        for name in ("float64", "float16"):
            before, after, *_ = _get_gradient_divide_factors(Group(2), None, DTYPES[name], "cpu", factor)  # type: ignore[arg-type]
            ours = custom_factors(factor, name)
            tallies["R27"].compare((ours.before, ours.between, ours.after), (before, 1.0, after), (factor, name))


def _factors(shards: Group, replicas: Group | None, dtype: torch.dtype) -> DivideFactors:
    """torch's answer as factors: an average in a collective divides by that collective's ranks behind its sum."""
    before, after, over_shards, over_replicas = _get_gradient_divide_factors(shards, replicas, dtype, "cpu")  # type: ignore[arg-type]
    assert over_shards == over_replicas
    if before is not None and after is not None:
        assert over_shards == ReduceOp.SUM
        return DivideFactors(float(before), float(after))
    average = over_shards == ReduceOp.AVG
    assert average or shards.size() == 1
    if replicas is None:
        return DivideFactors(1.0, float(shards.size()))
    return DivideFactors(1.0, float(replicas.size()), float(shards.size()))
