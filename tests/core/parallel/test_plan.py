"""Plans and costs of one rank of a mesh with model axes (R39)."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.api import Api
from crossframe.cost import step_cost
from crossframe.draw.steps import lanes
from crossframe.errors import PlanError
from crossframe.mesh import MeshSpec, ParallelMesh
from crossframe.parallel import ParallelModel, ParallelSharding
from crossframe.plan import plan_units, step_plan
from crossframe.shapes import model_shapes
from crossframe.strategy import Schedule, Strategy, Sync
from crossframe.trace import COLLECTIVES, COMPUTE, FREE
from tests.core.helpers.random_layouts import QUICK
from tests.core.parallel.test_model import RULES, meshes, shapes_of


def units_of(model, rank, kind="per_param", **options):
    layouts = ParallelSharding(model, kind).layouts(rank)
    return plan_units(layouts, api=Api.FSDP2, expert_units=model.expert_units, **options)


@QUICK
@given(meshes(), st.sampled_from(Sync), st.sampled_from([None, True, False]), st.sampled_from(Schedule), st.booleans())
def test_R39_ranks_of_a_group_issue_its_collectives_alike(mesh, sync, reshard, schedule, numbered):
    if sync is Sync.ALL_REDUCE_LAST and mesh.size("replicate") == 1:
        return
    model = ParallelModel(shapes_of(numbered=numbered), mesh, RULES)
    issued, members = {}, defaultdict(list)
    for rank in range(mesh.world_size):
        units = units_of(model, rank, reshard_after_forward=reshard)
        plan = step_plan(units, mesh, rank, microbatches=3, sync=sync, schedule=schedule)
        by_group = defaultdict(list)
        for event in plan:
            if event.kind in COLLECTIVES:
                assert rank in event.group and len(event.group) > 1
                coordinate = mesh.coordinate(rank)
                axes = {
                    axis
                    for other in event.group
                    for axis, at in mesh.coordinate(other).items()
                    if at != coordinate[axis]
                }
                assert axes <= ({"replicate", "dp"} if event.unit in model.expert_units else {"replicate", "dp", "ep"})
                by_group[tuple(event.group)].append(event)
        for group, events in by_group.items():
            assert issued.setdefault(group, events) == events
            members[group].append(rank)
    assert all(tuple(ranks) == group for group, ranks in members.items())


@QUICK
@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from(Strategy), st.sampled_from(Api))
def test_R39_without_model_axes_the_plan_is_that_of_the_mesh(shard, replicate, strategy, api):
    shapes = model_shapes("gpt-tiny")
    model = ParallelModel(shapes, ParallelMesh.of(replicate=replicate, dp=shard))
    plain = plan_units(shapes.layouts("per_param", shard), strategy, api=api)
    for rank in range(shard * replicate):
        units = plan_units(ParallelSharding(model, "per_param").layouts(rank), strategy, api=api)
        assert units == plain
        assert step_plan(units, model.mesh, rank, microbatches=2) == step_plan(
            plain, MeshSpec(shard, replicate), rank, microbatches=2
        )


@QUICK
@given(st.integers(1, 5), st.integers(1, 6), st.sampled_from(Schedule), st.data())
def test_schedules_order_each_microbatch_once_and_forward_first(num_stages, microbatches, schedule, data):
    orders = [schedule.order(stage, num_stages, microbatches) for stage in range(num_stages)]
    for stage, order in enumerate(orders):
        for phase in ("forward", "backward"):
            assert [i for each, i in order if each == phase] == list(range(microbatches))
        ahead, most = 0, 0
        for phase, _ in order:
            ahead += 1 if phase == "forward" else -1
            most = max(most, ahead)
            assert ahead >= 0
        expected = microbatches if schedule is Schedule.GPIPE else min(microbatches, num_stages - stage)
        assert most == expected
    # No deadlock: run each stage's next operation as soon as what it needs has been computed.
    done, at = set(), [0] * num_stages
    for _ in range(2 * num_stages * microbatches):
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                phase, i = order[at[stage]]
                needs = (stage - 1, phase, i) if phase == "forward" else (stage + 1, phase, i)
                if 0 <= needs[0] < num_stages and needs not in done:
                    break
                done.add((stage, phase, i))
                at[stage] += 1
    assert len(done) == 2 * num_stages * microbatches


def test_one_stage_runs_each_microbatch_in_turn():
    assert Schedule.ONE_F_ONE_B.order(0, 1, 2) == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]


def test_activations_of_all_forwards_ahead_are_held():
    model = ParallelModel(shapes_of(), ParallelMesh.of(pp=2, dp=2))
    units = units_of(model, 0)
    for schedule, most in ((Schedule.GPIPE, 4), (Schedule.ONE_F_ONE_B, 2)):
        plan = step_plan(units, model.mesh, 0, microbatches=4, sync=Sync.LAST, schedule=schedule)
        cost = step_cost(plan, units, activation_bytes={"h.0": 10})
        assert max(span.memory["activations"] for span in cost.spans) == 10 * most
        assert cost.spans[-1].memory["activations"] == 0


def test_memory_and_compute_fall_with_tensor_parallelism():
    """At the same number of devices, tp trades gathered bytes and full parameters of a rank against shards of the rest."""
    shapes = model_shapes("llama-3-8b")
    costs = {}
    for tp in (1, 2, 4):
        model = ParallelModel(shapes, ParallelMesh.of(dp=16 // tp, tp=tp))
        units = units_of(model, 0)
        costs[tp] = step_cost(step_plan(units, model.mesh, 0), units)
    gathered = {tp: cost.collectives["all_gather"]["num_bytes"] for tp, cost in costs.items()}
    norms = sum(param.numel for param in shapes.params if "norm" in param.name)
    # Each block is gathered twice, the root once; all but the norms is divided.
    root_norm = 4096
    whole = 2 * 4 * (shapes.numel - 2 * 128256 * 4096) + 4 * 2 * 128256 * 4096 - 4 * root_norm
    undivided = 2 * 4 * norms - 4 * root_norm
    assert gathered == {tp: (whole - undivided) // tp + undivided for tp in (1, 2, 4)}
    shards = {tp: cost.spans[-1].memory["shards"] for tp, cost in costs.items()}
    assert shards[1] * 16 == 4 * shapes.numel
    assert all(shards[tp] * 16 == 4 * (shapes.numel + (tp - 1) * norms) for tp in (2, 4))


def test_units_over_another_number_of_ranks_are_refused():
    model = ParallelModel(shapes_of(), ParallelMesh.of(dp=2, ep=2), RULES)
    units = units_of(model, 0)
    assert {event.kind for event in step_plan(units, model.mesh)} >= {COMPUTE, FREE}
    with pytest.raises(PlanError, match=r"unit 'h.0.experts' is laid out over 2 ranks, the mesh shards over 4"):
        step_plan(plan_units(ParallelSharding(model, "per_param").layouts(0)), model.mesh)


def test_experts_have_a_lane_of_their_own():
    model = ParallelModel(shapes_of(), ParallelMesh.of(dp=4, ep=2), RULES)
    units = units_of(model, 0)
    cost = step_cost(step_plan(units, model.mesh), units)
    found = lanes(cost)
    assert {bar.unit for bar in found["expert shards"]} == {"h.0.experts", "h.1.experts"}
    assert {bar.unit for bar in found["shard group"]} == {"(root)", "h.0", "h.1"}
    units = units_of(model, 0, reshard_after_forward=2)
    found = lanes(step_cost(step_plan(units, model.mesh), units))
    assert {bar.unit for bar in found["reshard group"]} == {"(root)", "h.0", "h.1", "h.0.experts", "h.1.experts"}
