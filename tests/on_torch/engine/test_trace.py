"""The plan, the engine's trace, and what an independent observer sees of torch's own dispatcher: all the same."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_backend
from crossframe.mesh import MeshSpec
from crossframe.plan import plan_units, step_plan
from crossframe.strategy import Strategy
from crossframe.trace import ALL_GATHER, REDUCE_SCATTER, collectives, difference, summary
from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers.interfaces import APIS, OPTIONS, our_fsdp1
from tests.on_torch.helpers.models import build_net, loss_of
from torch_backend.observe import record_trace
from torch_backend.shards import layouts_of


class Watcher(TorchDispatchMode):
    """Sees every c10d operator that passes the dispatcher, whoever calls it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and ("gather" in name or "reduce" in name):
            tensors = [a for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, torch.Tensor)]
            # The unsharded side, be it one tensor or a list of chunks, is all but the shard.
            num_bytes = sum(t.nbytes for t in tensors) - min(t.nbytes for t in tensors)
            kind = ALL_GATHER if "gather" in name else REDUCE_SCATTER if "scatter" in name else name
            group = next(a for a in args if isinstance(a, torch.ScriptObject))
            ranks = torch.distributed.get_process_group_ranks(torch.distributed.ProcessGroup.unbox(group))
            self.seen.append((kind, str(tensors[0].dtype).removeprefix("torch."), num_bytes, tuple(ranks)))
        return func(*args, **(kwargs or {}))


def _trace(rank, world_size, api, options):
    """One step: the plan, the trace, the watcher's and CommDebugMode's accounts, and the watcher's of torch's FSDP."""
    from torch.distributed.tensor.debug import CommDebugMode

    peer, model = (wrap(build_net(), **options) for wrap in APIS[api])
    loss_of(model, 0, rank).backward()  # the first step also agrees on the units
    loss_of(peer, 0, rank).backward()
    with record_trace() as events, Watcher() as watcher, CommDebugMode() as debug:
        loss_of(model, 1, rank).backward()
    with Watcher() as peer_watcher:
        loss_of(peer, 1, rank).backward()
    layouts = layouts_of(model)
    plan = step_plan(plan_units(layouts, Strategy[options["strategy"]]), MeshSpec(shard=world_size), rank)
    assert difference(plan, events, ordered=True) == []
    told = [(e.kind, e.dtype, e.num_bytes, tuple(e.group)) for e in collectives(events)]
    assert told == watcher.seen
    assert debug.get_total_counts() == len(told)
    kinds = summary(events)
    units = len(layouts)
    gathers = units + (units - 1 if options["strategy"] == "FULL_SHARD" else 0)
    assert (kinds[ALL_GATHER]["count"], kinds[REDUCE_SCATTER]["count"]) == (gathers, units)
    total = [sum(seen[2] for seen in account) for account in (watcher.seen, peer_watcher.seen)]
    assert total[0] <= total[1], (watcher.seen, peer_watcher.seen)
    assert len(watcher.seen) <= len(peer_watcher.seen)
    return total[0]


# Three ranks pad what two need not.
@pytest.mark.parametrize("world_size", [2, 3] if EXHAUSTIVE in os.environ else [3])
@pytest.mark.parametrize(("api", "options"), OPTIONS)
def test_R14_trace_equals_plan_and_never_moves_more_than_torch(ranks, world_size, api, options):
    assert all(ranks.run(world_size, _trace, api, options))


def _order(rank, world_size, prefetch):
    model = torch_backend.FullyShardedDataParallel(
        build_net(depth=2),
        auto_wrap_policy=torch_backend.ModuleWrapPolicy({type(build_net().blocks[0])}),
        backward_prefetch=torch_backend.BackwardPrefetch.BACKWARD_PRE if prefetch else None,
    )
    with record_trace() as events:
        loss_of(model, 0, rank).backward()
    return [(e.kind, e.unit) for e in collectives(events) if e.phase == "backward"]


def test_R16_prefetch_moves_gathers_forward_and_changes_nothing_else(ranks):
    eager, lazy = ranks.run(2, _order, True)[0], ranks.run(2, _order, False)[0]
    g, r = "all_gather", "reduce_scatter"
    assert eager == [(g, "blocks.1"), (g, "blocks.0"), (r, "blocks.1"), (r, "blocks.0"), (r, "")]
    assert lazy == [(g, "blocks.1"), (r, "blocks.1"), (g, "blocks.0"), (r, "blocks.0"), (r, "")]


def _observed_grads(rank, world_size):
    from torch_backend.observe import Observer, observe

    class Keeper(Observer):
        def __init__(self):
            self.grads = {}

        def local_grads(self, unit, grads):
            self.grads |= {name: grad.clone() for name, grad in grads.items()}

    plain = build_net()
    loss_of(plain, 0, rank).backward()
    model = our_fsdp1(build_net(), strategy="FULL_SHARD", use_orig_params=False)
    with observe(Keeper()) as keeper:
        loss_of(model, 0, rank).backward()
    return all(torch.equal(p.grad, keeper.grads[name]) for name, p in plain.named_parameters())


def test_observers_are_told_each_ranks_own_gradients(ranks):
    assert all(ranks.run(2, _observed_grads))
