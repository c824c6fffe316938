"""FSDP2 under its choices: the engine's trace, frees included, is the core's plan, an observer that the engine knows nothing of
sees the same, and torch's fully_shard never sends less (R08, R11, R13, R14, R15, R28, R34). FSDP1 is in fsdp1/test_plan.py."""

from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import torch_backend
from crossframe.api import Api
from crossframe.mesh import MeshSpec
from crossframe.plan import plan_units, step_plan
from crossframe.precision import PrecisionPolicy
from crossframe.strategy import Sync
from crossframe.trace import collectives, difference
from tests.on_torch.helpers.collectives import LOW, WORLD_SIZE, Collectives, by_group, num_bytes
from tests.on_torch.helpers.models import build_net, loss_of
from torch_backend.observe import record_trace
from torch_backend.shards import layouts_of


@dataclass(frozen=True)
class Case:
    """What a script asks for, of every unit.

    Attributes:
        mesh: (shard,), or (replicate, shard).
        low: parameters in bfloat16, reductions in float32.
        nested: two units inside each block too.
        frozen: "start" freezes the units that come first in forward, "middle" one behind others that are trained, "part" a part
            of the root.
        across: parameters whose last dim allows it are cut on that one.
        mixed: a block of two dtypes, and so a unit of two buckets.
        layout: how a unit's shards lie.
    """

    mesh: tuple[int, ...] = (4,)
    reshard: bool | int | None = None
    microbatches: int = 2
    sync: Sync = Sync.EACH
    low: bool = False
    nested: bool = False
    frozen: str = ""
    across: bool = False
    mixed: bool = False
    layout: str = "per_param"

    @property
    def asks_torch(self) -> bool:
        """Whether torch can do it. It has no other layouts; to a reshard group it cuts on dim 0 what lies cut on another, and
        goes beyond its memory."""
        return self.layout == "per_param" and not (self.across and type(self.reshard) is int)

    @property
    def is_possible(self) -> bool:
        """Whether there is such a case: a line has no dims, a reshard group divides the shards, and a sum over replicas can be
        put off where there are replicas. The block of two dtypes casts by itself."""
        puts_off = self.sync is Sync.ALL_REDUCE_LAST
        shards, replicas = self.spec.shard, self.spec.replicate
        divides = type(self.reshard) is not int or (self.reshard < shards and shards % self.reshard == 0)
        lines, clash = self.layout != "per_param", self.low and self.mixed
        return divides and not clash and not (self.across and lines) and not (puts_off and replicas == 1)

    @property
    def spec(self) -> MeshSpec:
        """The same for the core."""
        return MeshSpec(*reversed(self.mesh))


# Each mesh with each way to reshard, to reduce and to lay out shards; nested units, low precision and two dtypes with shards of
# several ranks and of one; each way to freeze; cut on other dims with a reshard group, replicas and one shard.
CASES = {
    "shards": [
        Case(),
        Case(reshard=False, sync=Sync.LAST, low=True, nested=True),
        Case(nested=True, reshard=2, frozen="start"),
        Case(reshard=True, frozen="part", sync=Sync.LAST),
        Case(across=True, reshard=2),
        Case(nested=True, mixed=True, frozen="start", reshard=False),
        Case((1, 4), low=True, reshard=2),
    ],
    "replicas": [
        Case((2, 2), reshard=True, frozen="middle", mixed=True),
        Case((2, 2), reshard=False, sync=Sync.LAST, low=True),
        Case((2, 2), sync=Sync.ALL_REDUCE_LAST, low=True, nested=True, across=True),
    ],
    "layouts": [
        Case(reshard=2, layout="ragged", nested=True, sync=Sync.LAST),
        Case(reshard=2, layout="flat", low=True),
        Case((2, 2), layout="ragged", reshard=True, sync=Sync.ALL_REDUCE_LAST, low=True),
        Case((2, 2), layout="flat", reshard=False, frozen="part"),
    ],
    "one shard": [
        Case((4, 1), sync=Sync.ALL_REDUCE_LAST, low=True),
        Case((4, 1), reshard=True, nested=True, sync=Sync.LAST, frozen="middle"),
        Case((4, 1), across=True, mixed=True, reshard=False),
        Case((4, 1), layout="flat", reshard=True, low=True),
        Case((4, 1), layout="ragged", mixed=True),
    ],
}
# Every combination, in parts. A nested block of two dtypes is itself frozen, around units that are trained.
ALL = [
    case
    for mesh in [(4,), (2, 2), (4, 1)]
    for layout in ("per_param", "flat", "ragged")
    for reshard in (None, True, False, 2)
    for sync in Sync
    for low in (False, True)
    for mixed in (False, True)
    for across in (False, True)
    for frozen in ("", "start", "middle", "part")
    if (case := Case(mesh, reshard, 2, sync, low, frozen != "", frozen, across, mixed, layout)).is_possible
]


@cache
def _mesh(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def _on_last_dim(shards):
    """A placement function: the last dim, where that gives all of `shards` ranks the same."""

    def place(param):
        return Shard(param.ndim - 1) if param.ndim > 1 and param.shape[-1] % shards == 0 else None

    return place


def _sharded(api, case):
    """A Net under one API's fully_shard, one unit a block and one for the rest."""
    net = build_net(width=8)
    if case.mixed:
        norm: nn.LayerNorm = net.blocks[1].norm  # type: ignore[assignment]
        norm.to(torch.float64).requires_grad_(False)  # torch wants one dtype of all trained parameters
        norm.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        norm.register_forward_hook(lambda *args: args[-1].float())
    first = [net.embedding, net.blocks[0], net.blocks[1]]
    for part in {"": [], "start": first, "middle": [net.blocks[1]], "part": [net.embedding]}[case.frozen]:
        part.requires_grad_(False)
    options = {"mesh": _mesh(*case.mesh), "reshard_after_forward": case.reshard}
    if case.low:
        options["mp_policy"] = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if case.across:
        options["shard_placement_fn"] = _on_last_dim(case.mesh[-1])
    if case.layout != "per_param":
        options["layout"] = case.layout
    if case.frozen == "start":
        api.fully_shard(net.embedding, **options)
    for block in net.blocks:
        for part in (block.up, block.down) if case.nested else ():
            api.fully_shard(part, **options)
        api.fully_shard(block, **options)
    return api.fully_shard(net, **options)


def _step(model, rank, case):
    for microbatch in range(case.microbatches):
        last = microbatch == case.microbatches - 1
        model.set_requires_gradient_sync(last or case.sync is not Sync.LAST)
        if case.sync is Sync.ALL_REDUCE_LAST:
            model.set_requires_all_reduce(last)
        loss_of(model, microbatch, rank).backward()


def _seen(model, rank, case):
    """What a second step sends: by the engine's own account, and by the observer's. Torch's own first step differs: its root
    gathers later than it does from then on."""
    _step(model, rank, case)
    with Collectives() as watcher, record_trace() as events:
        _step(model, rank, case)
    return events, watcher.seen


def _compare(rank, world_size, cases):
    import torch.distributed.fsdp as theirs

    problems = []
    for case in cases:
        model = _sharded(torch_backend, case)
        events, seen = _seen(model, rank, case)
        layouts = layouts_of(model)
        policy = LOW if case.low else PrecisionPolicy()
        units = plan_units(layouts, api=Api.FSDP2, reshard_after_forward=case.reshard, policy=policy)
        plan = step_plan(units, case.spec, rank, microbatches=case.microbatches, sync=case.sync)
        planned, traced = by_group(plan), by_group(events)
        if planned.keys() != traced.keys():
            problems.append((case, "groups", list(planned), list(traced)))
        for group in planned.keys() & traced.keys():
            problems += [(case, line) for line in difference(planned[group], traced[group], ordered=True)]
        told = Counter((e.kind, e.dtype, e.num_bytes, tuple(e.group)) for e in collectives(events))
        if told != seen:
            problems.append((case, "not what the observer saw", told - seen, seen - told))
        if case.asks_torch:
            _, peer = _seen(_sharded(theirs, case), rank, case)
            # What torch sends in one collective, as bytes, we send in one a dtype (R11).
            if (seen.total() > peer.total() and not case.mixed) or num_bytes(seen) > num_bytes(peer):
                problems.append((case, "more than torch", seen, peer))
    return problems


@pytest.mark.parametrize("what", CASES)
def test_R08_R13_R14_R15_R28_R34_fully_shards_trace_is_the_plan(ranks, what):
    assert all(case.is_possible for case in CASES[what])
    assert ranks.run(WORLD_SIZE, _compare, CASES[what]) == [[]] * WORLD_SIZE


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(32))
def test_R08_R13_R14_R15_R28_R34_every_trace_is_the_plan(ranks, part):
    assert ranks.run(WORLD_SIZE, _compare, ALL[part::32], seconds=600) == [[]] * WORLD_SIZE
