"""FSDP1's API under every strategy: the engine's trace is the core's plan, an observer that the engine knows nothing of sees the
same, and torch's FSDP1 never sends less (R14, R15, R16, R28, R33)."""

# pyright: reportAttributeAccessIssue=false

import os
import warnings
from collections import Counter
from contextlib import nullcontext

import pytest
import torch

import torch_backend
from crossframe.plan import plan_units, step_plan
from crossframe.strategy import Prefetch, Strategy, Sync
from crossframe.trace import collectives, difference
from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers.collectives import Collectives, by_group, num_bytes
from tests.on_torch.helpers.models import Block, build_net, loss_of
from torch_backend.observe import record_trace
from torch_backend.shards import layouts_of

# Backward prefetch, forward prefetch, microbatches, which of them reduce; and whether it is compared with torch too.
CASES = [
    (Prefetch.BACKWARD_PRE, False, 3, Sync.LAST, True),
    (Prefetch.BACKWARD_POST, True, 2, Sync.EACH, False),
    (None, False, 1, Sync.EACH, False),
]


def _wrapped(api, strategy, mesh, low, **options):
    """A Net under one API's FullyShardedDataParallel, one unit a block."""
    if strategy.is_hybrid:
        sizes = (mesh.replicate, mesh.shard)
        options["device_mesh"] = torch.distributed.device_mesh.init_device_mesh(
            "cpu", sizes, mesh_dim_names=("replicate", "shard")
        )
    if low:
        options["mixed_precision"] = api.MixedPrecision(torch.bfloat16, torch.float32)
    name = "_HYBRID_SHARD_ZERO2" if strategy is Strategy.HYBRID_SHARD_ZERO2 else strategy.name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return api.FullyShardedDataParallel(
            build_net(),
            sharding_strategy=api.ShardingStrategy[name],
            auto_wrap_policy=api.ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            **options,
        )


def _step(model, rank, microbatches, sync):
    for microbatch in range(microbatches):
        with model.no_sync() if sync is Sync.LAST and microbatch < microbatches - 1 else nullcontext():
            loss_of(model, microbatch, rank).backward()


def _seen(model, rank, microbatches, sync):
    """What a second step sends, whose first has set everything up: by the engine's own account, and by the observer's."""
    _step(model, rank, microbatches, sync)
    with Collectives() as watcher, record_trace() as events:
        _step(model, rank, microbatches, sync)
    return events, watcher.seen


def _compare(rank, world_size, strategy, shard, cases):
    import torch.distributed.fsdp as theirs
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    theirs.ModuleWrapPolicy = ModuleWrapPolicy
    strategy = Strategy[strategy]
    mesh = strategy.mesh(world_size, shard)
    problems = []
    for case, low, use_orig_params in cases:
        prefetch, forward_prefetch, microbatches, sync, asks_torch = case

        def wrapped(
            api, prefetch=prefetch, forward_prefetch=forward_prefetch, low=low, use_orig_params=use_orig_params
        ):
            backward_prefetch = None if prefetch is None else api.BackwardPrefetch[prefetch.name]
            settings = {"forward_prefetch": forward_prefetch, "use_orig_params": use_orig_params}
            return _wrapped(api, strategy, mesh, low, backward_prefetch=backward_prefetch, **settings)

        model = wrapped(torch_backend)
        events, seen = _seen(model, rank, microbatches, sync)
        layouts = layouts_of(model)
        plan = step_plan(
            plan_units(layouts, strategy, policy=model.mixed_precision.policy),
            mesh,
            rank,
            backward_prefetch=prefetch,
            forward_prefetch=int(forward_prefetch),
            microbatches=microbatches,
            sync=sync,
        )
        planned, traced = by_group(plan), by_group(events)
        if planned.keys() != traced.keys():
            problems.append((case, "groups", list(planned), list(traced)))
        for group in planned.keys() & traced.keys():
            problems += [(case, line) for line in difference(planned[group], traced[group], ordered=True)]
        told = Counter((e.kind, e.dtype, e.num_bytes, tuple(e.group)) for e in collectives(events))
        if told != seen:
            problems.append((case, "not what the observer saw", told - seen, seen - told))
        if asks_torch:
            _, peer = _seen(wrapped(theirs), rank, microbatches, sync)
            if seen.total() > peer.total() or num_bytes(seen) > num_bytes(peer):
                problems.append((case, "more than torch", seen, peer))
    return problems


STRATEGIES = [
    ("FULL_SHARD", None),
    ("SHARD_GRAD_OP", None),
    ("NO_SHARD", None),
    ("HYBRID_SHARD", 2),
    ("HYBRID_SHARD_ZERO2", 2),
]


@pytest.mark.parametrize(("strategy", "shard"), STRATEGIES)
def test_R14_R16_R28_every_strategys_trace_is_the_plan_and_sends_no_more_than_torch(ranks, strategy, shard):
    # Every case of every strategy, in turn with flat parameters in float32 and with the original ones in bfloat16.
    first = STRATEGIES.index((strategy, shard))
    cases = [
        (case, low, low)
        for i, case in enumerate(CASES)
        for low in ((False, True) if os.environ.get(EXHAUSTIVE) else ((first + i) % 2 == 1,))
    ]
    assert ranks.run(4, _compare, strategy, shard, cases) == [[]] * 4
