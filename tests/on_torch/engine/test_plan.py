"""The core's plan beside the engine's trace, in order; and beside the collectives that torch's own FSDP issues: kinds, dtypes,
bytes and groups, as multisets, also for strategies that the engine does not run yet (R08, R14, R15, R28, R33)."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch

from crossframe.api import Api
from crossframe.mesh import MeshSpec
from crossframe.plan import plan_units, step_plan
from crossframe.strategy import Strategy, Sync
from crossframe.trace import collectives, difference
from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers.collectives import LOW, WORLD_SIZE, Collectives
from tests.on_torch.helpers.interfaces import APIS, our_fsdp1, our_fsdp2
from tests.on_torch.helpers.models import Block, build_net, loss_of
from torch_backend.observe import record_trace
from torch_backend.shards import layouts_of

# How many microbatches a step has and which of them reduce. In a last of two all that accumulation changes has happened once.
STEPS = [(1, Sync.EACH), (2, Sync.LAST)]
if EXHAUSTIVE in os.environ:
    STEPS.append((2, Sync.EACH))


def _planned(units, mesh, rank, **options):
    plan = collectives(step_plan(units, mesh, rank, **options))
    return Counter((e.kind, e.dtype, e.num_bytes, tuple(e.group)) for e in plan)


def _fsdp1(rank, world_size, strategy, shard, low, microbatches, sync):
    """One step of torch's FSDP1 on a mesh, and the plan's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel as Peer
    from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    strategy = Strategy[strategy]
    mesh = strategy.mesh(world_size, shard)
    options = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)} if low else {}
    if strategy.is_hybrid:
        options["device_mesh"] = init_device_mesh("cpu", (mesh.replicate, mesh.shard), mesh_dim_names=("r", "s"))
    name = "_HYBRID_SHARD_ZERO2" if strategy is Strategy.HYBRID_SHARD_ZERO2 else strategy.name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = Peer(
            build_net(),
            sharding_strategy=ShardingStrategy[name],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=False,
            device_id=torch.device("cpu"),
            **options,
        )
        seen = _steps(peer, rank, microbatches, sync, peer.no_sync)
    ours = our_fsdp1(build_net(), strategy="FULL_SHARD", use_orig_params=False)
    layouts = [(name, layout.over(mesh.shard)) for name, layout in layouts_of(ours)]
    units = plan_units(layouts, strategy, policy=LOW if low else None)
    return seen, _planned(units, mesh, rank, microbatches=microbatches, sync=sync)


def _steps(model, rank, microbatches, sync, no_sync):
    """The collectives of a second step, whose first has set everything up."""
    for _ in range(2):
        with Collectives() as watcher:
            for microbatch in range(microbatches):
                waits = sync is Sync.LAST and microbatch < microbatches - 1
                with no_sync() if waits else nullcontext():
                    loss_of(model, microbatch, rank).backward()
    return watcher.seen


def _fsdp2(rank, world_size, shard, reshard, low, microbatches, sync):
    """One step of torch's FSDP2 on a mesh, and the plan's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = MeshSpec(shard=shard, replicate=world_size // shard)
    sizes, names = ((mesh.shard,), ("s",)) if mesh.replicate == 1 else ((mesh.replicate, mesh.shard), ("r", "s"))
    options = {"mesh": init_device_mesh("cpu", sizes, mesh_dim_names=names)}
    if reshard is not None:
        options["reshard_after_forward"] = reshard
    if low:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    peer = build_net()
    for block in peer.blocks:
        fully_shard(block, **options)
    fully_shard(peer, **options)
    # torch's own first step differs: its root gathers later than it does from then on.
    for _ in range(2):
        with Collectives() as watcher:
            for microbatch in range(microbatches):
                last = microbatch == microbatches - 1
                peer.set_requires_gradient_sync(last or sync is not Sync.LAST)
                if mesh.replicate > 1:
                    peer.set_requires_all_reduce(last or sync is not Sync.ALL_REDUCE_LAST)
                loss_of(peer, microbatch, rank).backward()
    ours = our_fsdp2(build_net(), strategy="FULL_SHARD")
    layouts = [(name, layout.over(mesh.shard)) for name, layout in layouts_of(ours)]
    policy = LOW if low else None
    units = plan_units(layouts, api=Api.FSDP2, reshard_after_forward=reshard, policy=policy)
    plan = _planned(units, mesh, rank, microbatches=microbatches, sync=sync)
    return watcher.seen, plan


def _ours(rank, world_size, api, strategy, microbatches, sync):
    """The engine's own trace, and the plan's."""
    options = {"strategy": strategy}
    if api is Api.FSDP1:
        model = our_fsdp1(build_net(), use_orig_params=True, **options)
    else:
        model = our_fsdp2(build_net(), **options)
    for _ in range(2):
        with record_trace() as events:
            for microbatch in range(microbatches):
                waits = sync is Sync.LAST and microbatch < microbatches - 1
                if api is Api.FSDP2:
                    model.set_requires_gradient_sync(not waits)
                with model.no_sync() if waits and api is Api.FSDP1 else nullcontext():
                    loss_of(model, microbatch, rank).backward()
    layouts = layouts_of(model)
    units = plan_units(layouts, Strategy[strategy], api=api)
    plan = step_plan(units, MeshSpec(world_size), rank, microbatches=microbatches, sync=sync)
    return difference(plan, events, ordered=True)


def _frozen(rank, world_size, api):
    """The engine's trace, the plan's, and torch's count where the first blocks are frozen."""
    seen = []
    for wrap in APIS[api]:
        net = build_net()
        for part in (net.embedding, net.blocks[0], net.blocks[1]):
            part.requires_grad_(False)
        model = wrap(net, **{"strategy": "FULL_SHARD"} | ({"use_orig_params": True} if api == "fsdp1" else {}))
        for _ in range(2):
            with record_trace() as events, Collectives() as watcher:
                loss_of(model, 0, rank).backward()
        seen.append(watcher.seen)
    layouts = layouts_of(model)
    plan = step_plan(plan_units(layouts, api=Api(api)), MeshSpec(world_size), rank)
    return difference(plan, events, ordered=True), seen[0].total(), seen[1].total()


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_R14_units_ahead_of_all_that_is_trained_have_no_backward(ranks, api):
    for differences, theirs, ours in ranks.run(2, _frozen, api):
        assert differences == []
        # 4 gathers in forward, one of the trained block in backward, 2 reductions; torch also gathers frozen blocks for a
        # backward that never comes.
        assert ours == 7 < theirs


def _alternate(rows: Sequence[Any], columns: Iterable[Any], values: tuple[Any, Any]) -> list[Any]:
    """Every row with every column, each with one of two values in turn, as on a checkerboard: every pair of row, column and
    value occurs. With both values in `pytest --exhaustive`."""
    cells = [(i + j, row, column) for (i, row), (j, column) in product(enumerate(rows), enumerate(columns))]
    both = EXHAUSTIVE in os.environ
    return [(*row, *column, value) for at, row, column in cells for value in (values if both else (values[at % 2],))]


@pytest.mark.parametrize(
    ("api", "strategy", "microbatches", "sync", "world_size"),
    _alternate(
        list(product(Api, ("FULL_SHARD", "SHARD_GRAD_OP"))), [(1, Sync.EACH), (3, Sync.EACH), (3, Sync.LAST)], (1, 3)
    ),
)
def test_R14_R15_the_engines_trace_is_the_plan_in_order(ranks, api, strategy, microbatches, sync, world_size):
    assert ranks.run(world_size, _ours, api, strategy, microbatches, sync) == [[]] * world_size


FSDP1 = [
    ("FULL_SHARD", None),
    ("SHARD_GRAD_OP", None),
    ("HYBRID_SHARD", 2),
    ("HYBRID_SHARD_ZERO2", 2),
    ("NO_SHARD", None),
]


@pytest.mark.parametrize(("strategy", "shard", "microbatches", "sync", "low"), _alternate(FSDP1, STEPS, (False, True)))
def test_R14_R15_R28_R33_the_plan_is_what_torchs_fsdp1_sends(ranks, strategy, shard, low, microbatches, sync):
    for seen, plan in ranks.run(WORLD_SIZE, _fsdp1, strategy, shard, low, microbatches, sync):
        assert seen == plan


@pytest.mark.parametrize(
    ("shard", "reshard", "microbatches", "sync", "low"),
    [
        *_alternate([(4, None), (4, True), (4, False), (4, 2)], STEPS, (False, True)),
        # Only a sum over replicas can be put off.
        *_alternate([(2, None), (2, False)], [*STEPS, (2, Sync.ALL_REDUCE_LAST)], (False, True)),
    ],
)
def test_R08_R13_R15_R28_R34_the_plan_is_what_torchs_fsdp2_sends(ranks, shard, reshard, low, microbatches, sync):
    for seen, plan in ranks.run(WORLD_SIZE, _fsdp2, shard, reshard, low, microbatches, sync):
        # Between forward and backward torch cuts its padded buffer over the reshard group, where ours cuts the parameter
        # itself (R08): torch's gather is as large as that over all ranks, ours is at most that.
        if reshard == 2:
            assert _small_groups(plan).total() == _small_groups(seen).total() == 4 * microbatches
            assert sum(key[2] * n for key, n in _small_groups(plan).items()) < sum(
                key[2] * n for key, n in _small_groups(seen).items()
            )
            assert {key[2] for key in _small_groups(seen)} <= {key[2] for key in seen if len(key[3]) == WORLD_SIZE}
            seen, plan = seen - _small_groups(seen), plan - _small_groups(plan)
        assert seen == plan


def _small_groups(counts):
    return Counter({key: n for key, n in counts.items() if len(key[3]) == 2})
