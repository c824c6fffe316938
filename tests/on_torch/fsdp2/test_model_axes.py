"""fully_shard next to tensor, expert and pipeline parallelism, torch's and ours: what each rank holds and
sends is what the core states (R39)."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import torch_backend
from crossframe.api import Api
from crossframe.cost import step_cost
from crossframe.mesh import ParallelMesh
from crossframe.parallel import ParallelSharding, model_traffic
from crossframe.plan import plan_units, step_plan
from crossframe.precision import PrecisionPolicy
from crossframe.strategy import Schedule, Sync
from crossframe.trace import ALL_GATHER, SEND, collectives, difference
from tests.on_torch.helpers.collectives import LOW, Collectives, FunctionalCollectives, by_group
from tests.on_torch.helpers.model_axes import VOCABULARY, WIDTH, Net, parallel
from torch_backend.observe import record_trace
from torch_backend.shards import layouts_of, sharded_units

TOKENS = 8  # two samples of four positions
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
        if api is torch_backend:
            layouts = list(sharding.layouts(rank))
            units = plan_units(layouts, api=Api.FSDP2, expert_units=model.expert_units)
            memory = step_cost(step_plan(units, mesh, rank), units).spans[-1].memory["shards"]
            stored = sum(bucket.store.buffer.nbytes for _, buckets in sharded_units(net) for bucket in buckets)
            if layouts_of(net) != layouts or memory != stored:
                problems.append((layouts_of(net), layouts, memory, stored))
    return problems


@pytest.mark.parametrize("name", MESHES)
def test_R39_ranks_hold_the_elements_that_the_core_states(ranks, name):
    assert ranks.run(4, _held, MESHES[name]) == [[]] * 4


@dataclass(frozen=True)
class Case:
    """A step on a mesh.

    Attributes:
        microbatches, sync, schedule, reshard: as in `step_plan` and `plan_units`.
        low: parameters in bfloat16, reductions in float32.
    """

    mesh: ParallelMesh
    microbatches: int = 2
    sync: Sync = Sync.EACH
    schedule: Schedule = Schedule.ONE_F_ONE_B
    reshard: bool | int | None = None
    low: bool = False
    sequence: bool = False

    @property
    def keeps_between_microbatches(self) -> bool:
        """Whether a unit is kept for its backward while another microbatch begins."""
        return self.mesh.size("pp") > 1 and self.reshard is not True


CASES = {
    "tp": [Case(MESHES["tp"]), Case(MESHES["tp"], sync=Sync.LAST, low=True), Case(MESHES["tp outside"], reshard=False)],
    "sequence": [Case(MESHES["tp"], sequence=True)],
    "ep": [Case(MESHES["ep"]), Case(MESHES["ep"], sync=Sync.LAST, reshard=True)],
    "pp": [
        Case(MESHES["pp"], 3, sync=Sync.LAST),
        Case(MESHES["pp"], 3, sync=Sync.LAST, reshard=False),
        Case(MESHES["pp"], 3, sync=Sync.LAST, schedule=Schedule.GPIPE, reshard=True),
        Case(MESHES["pp"], 3, schedule=Schedule.GPIPE),
        Case(MESHES["pp and tp"], 2, sync=Sync.LAST),
    ],
}


def _step(net, model, rank, case):
    """A step of a stage, whose inputs and gradients are made up: data parallelism sends the same for any.

    Returns (phase, bytes) of the messages that a pipeline would send to other stages.
    """
    mesh = case.mesh
    coordinate = mesh.coordinate(rank)
    is_first = coordinate.get("pp", 0) == 0
    generator = torch.Generator().manual_seed(coordinate["dp"])
    given, outputs, sent = {}, {}, Counter()
    for phase, i in case.schedule.order(coordinate.get("pp", 0), mesh.size("pp"), case.microbatches):
        if phase == "forward":
            x = torch.randint(VOCABULARY, (2, 4), generator=generator)
            given[i] = x if is_first else torch.randn(2, 4, WIDTH, generator=generator).requires_grad_()
            outputs[i] = net(given[i])
            if coordinate.get("pp", 0) < mesh.size("pp") - 1:
                sent["forward", outputs[i].nbytes] += 1
            continue
        reduces = i == case.microbatches - 1 or case.sync is not Sync.LAST
        net.set_requires_gradient_sync(reduces)
        net.set_is_last_backward(reduces)
        (output.to_local() if isinstance(output := outputs.pop(i), DTensor) else output).float().sum().backward()
        if not is_first:
            sent["backward", given[i].grad.nbytes] += 1
    return sent


def _traffic(model, rank, case):
    """The collectives of model axes and the sends that the core states, as an observer counts them."""
    stated = model_traffic(
        model,
        rank,
        tokens=TOKENS,
        microbatches=case.microbatches,
        dtype="bfloat16" if case.low else None,
        experts_per_token=2 if case.mesh.size("ep") > 1 else None,
    )
    found, sends = Counter(), Counter()
    for each in stated:
        if each.kind == SEND:
            sends[each.phase, each.num_bytes] += each.count
        else:
            found[each.kind, each.num_bytes, tuple(each.group)] += each.count
    return found, sends


def _compare(rank, world_size, cases):
    import torch.distributed.fsdp as theirs

    problems = []
    for case in cases:
        seen = {}
        for api in (torch_backend, theirs):
            options = {"mp_policy": api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if case.low else {}
            net, model = parallel(api, case.mesh, sequence=case.sequence, reshard_after_forward=case.reshard, **options)
            _step(net, model, rank, case)
            with Collectives() as watcher, FunctionalCollectives() as of_model, record_trace() as events:
                sent = _step(net, model, rank, case)
            seen[api] = watcher.seen
            traffic, sends = _traffic(model, rank, case)
            if of_model.seen != traffic or sent != sends:
                problems.append((case, api.__name__, "model axes", of_model.seen, traffic, sent, sends))
            if api is theirs:
                continue
            layouts = ParallelSharding(model, "per_param").layouts(rank)
            policy = LOW if case.low else PrecisionPolicy()
            units = plan_units(
                layouts,
                api=Api.FSDP2,
                reshard_after_forward=case.reshard,
                policy=policy,
                expert_units=model.expert_units,
            )
            plan = step_plan(
                units, case.mesh, rank, microbatches=case.microbatches, sync=case.sync, schedule=case.schedule
            )
            planned, traced = by_group(plan), by_group(events)
            if planned.keys() != traced.keys():
                problems.append((case, "groups", list(planned), list(traced)))
            # While forwards of other microbatches wait for their backwards, a backward reduces all units at its end.
            ordered = case.mesh.size("pp") == 1 or case.sync is Sync.LAST
            for group in planned.keys() & traced.keys():
                problems += [(case, line) for line in difference(planned[group], traced[group], ordered=ordered)]
            told = Counter((e.kind, e.dtype, e.num_bytes, tuple(e.group)) for e in collectives(events))
            if told != seen[api]:
                problems.append((case, "not what the observer saw", told - seen[api], seen[api] - told))
        more, less = seen[torch_backend] - seen[theirs], seen[theirs] - seen[torch_backend]
        # A forward of ours gathers parameters again that an earlier microbatch keeps for its backward.
        if less or (more and not case.keeps_between_microbatches) or {kind for kind, *_ in more} - {ALL_GATHER}:
            problems.append((case, "torch", more, less))
    return problems


@pytest.mark.parametrize("name", CASES)
def test_R39_each_ranks_trace_is_the_plan_of_its_part(ranks, name):
    assert ranks.run(4, _compare, CASES[name]) == [[]] * 4
