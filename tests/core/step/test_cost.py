"""What a step costs: bytes, memory and time, each against sums written out by hand or taken another way."""

# pyright: reportArgumentType=false

import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.api import Api
from crossframe.cost import PASSING, Hardware, step_cost
from crossframe.errors import PlanError
from crossframe.layout import FlatLayout, PerParamLayout, RaggedLayout
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.plan import plan_units, step_plan
from crossframe.precision import PrecisionPolicy
from crossframe.strategy import Prefetch, Strategy, Sync
from crossframe.trace import ALL_GATHER, ALL_REDUCE, COLLECTIVES, COMPUTE, FREE, REDUCE_SCATTER, RESHARD_TO_GROUP, STEP
from tests.core.helpers.random_layouts import QUICK

# 1 byte a second and no latency: a collective of b bytes on 2 ranks takes b / 2 seconds. 1 operation a second.
SLOW = Hardware(flops_per_second=1.0, bytes_per_second=1.0, latency_seconds=0.0)
KINDS = [
    lambda params, n: FlatLayout(params, n, False),
    lambda params, n: FlatLayout(params, n, True),
    PerParamLayout,
    RaggedLayout,
]


def units_of(names, numel=8, world_size=2, **options):
    layouts = [(name, FlatLayout((ParamSpec(f"{name or 'root'}.w", (numel,)),), world_size, False)) for name in names]
    return plan_units(layouts, **options)


@st.composite
def steps(draw):
    """A plan with its units."""
    shard, replicate = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2]))
    mesh = MeshSpec(shard, replicate)
    make = draw(st.sampled_from(KINDS))
    names = draw(st.sampled_from([("",), ("", "a"), ("", "a", "a.b", "c"), ("x", "y", "z")]))
    layouts = []
    for name in names:
        sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
        params = tuple(
            ParamSpec(f"{name}.p{i}", (n, 2), requires_grad=draw(st.booleans())) for i, n in enumerate(sizes)
        )
        if make is KINDS[0]:
            params = tuple(ParamSpec(p.name, p.shape) for p in params)
        layouts.append((name, make(params, shard)))
    api = draw(st.sampled_from(Api))
    reshard = draw(st.sampled_from([None, True, False, 2] if shard == 4 else [None, True, False]))
    policy = PrecisionPolicy(draw(st.sampled_from([None, "bfloat16"])), draw(st.sampled_from([None, "float64"])))
    units = plan_units(
        layouts,
        draw(st.sampled_from(Strategy)),
        api=api,
        reshard_after_forward=reshard,
        policy=policy,
    )
    syncs = [Sync.EACH, Sync.LAST, *([Sync.ALL_REDUCE_LAST] if api is Api.FSDP2 and replicate > 1 else [])]
    plan = step_plan(
        units,
        mesh,
        draw(st.integers(0, mesh.world_size - 1)),
        backward_prefetch=draw(st.sampled_from([None, *Prefetch])),
        forward_prefetch=draw(st.integers(0, 2)),
        microbatches=draw(st.integers(1, 3)),
        sync=draw(st.sampled_from(syncs)),
    )
    return plan, units


def test_a_step_by_hand():
    """Two units of 8 float32 on 2 ranks: a gather of 32 bytes takes 16 s, a forward of 1 token 16 s, a backward 32 s."""
    units = units_of(["", "a"])
    cost = step_cost(step_plan(units, MeshSpec(2)), units, SLOW, optimizer_states=2)
    told = [(s.event.kind, s.event.unit, s.start_seconds, s.stop_seconds, s.memory_bytes) for s in cost.spans]
    shards = 2 * 16 * 3  # 4 elements a unit, with two optimizer states each
    assert told == [
        (ALL_GATHER, "", 0, 16, shards + 32),
        (ALL_GATHER, "a", 16, 32, shards + 64),
        (COMPUTE, "a", 32, 48, shards + 64),
        (FREE, "a", 48, 48, shards + 32),
        (COMPUTE, "", 48, 64, shards + 32),
        (ALL_GATHER, "a", 64, 80, shards + 64),  # prefetched while the root's backward computes
        (COMPUTE, "", 64, 96, shards + 64 + 32),
        (COMPUTE, "a", 96, 128, shards + 64 + 64),
        (FREE, "a", 128, 128, shards + 32 + 64),
        (REDUCE_SCATTER, "a", 128, 144, shards + 32 + 32 + 32 + 16 + 16),
        (FREE, "", 128, 128, shards + 32 + 32 + 16 + 16),
        (REDUCE_SCATTER, "", 144, 160, shards + 32 + 16 + 32),
        (STEP, "", 160, 160, shards),
    ]
    assert (cost.compute_seconds, cost.communication_seconds) == (96, 80)
    # Computing waits for the first two gathers and, at the end, for both reductions.
    assert cost.exposed_seconds == 32 + 32 and cost.seconds == 160
    assert cost.peak.event.kind == COMPUTE and cost.peak_bytes == shards + 128


@QUICK
@given(steps(), st.integers(0, 2))
def test_every_span_lies_in_order_and_the_time_adds_up(step, optimizer_states):
    plan, units = step
    cost = step_cost(plan, units, tokens=7, optimizer_states=optimizer_states)
    assert [span.event for span in cost.spans] == list(plan)
    assert cost.spans[-1].stop_seconds == pytest.approx(cost.seconds, rel=1e-12)
    busy = defaultdict(float)  # compute, and each group's collectives: one at a time, in order
    for span in cost.spans:
        lane = span.event.group if span.event.kind in COLLECTIVES else "compute"
        assert span.start_seconds >= busy[lane] - 1e-18
        assert span.stop_seconds >= span.start_seconds
        busy[lane] = span.stop_seconds
    for kind in COLLECTIVES:
        assert cost.collectives[kind]["num_bytes"] == sum(e.num_bytes for e in plan if e.kind == kind)
    assert sum(s.stop_seconds - s.start_seconds for s in cost.spans if s.event.kind in COLLECTIVES) == pytest.approx(
        cost.communication_seconds
    )
    assert cost.compute_seconds <= cost.seconds <= cost.compute_seconds + cost.communication_seconds + 1e-15


@QUICK
@given(steps())
def test_nothing_computes_before_it_is_gathered_and_memory_returns_to_what_it_was(step):
    plan, units = step
    cost = step_cost(plan, units, SLOW)
    arrived = defaultdict(float)
    for span in cost.spans:
        if span.event.kind == ALL_GATHER:
            arrived[span.event.unit] = span.stop_seconds
        elif span.event.kind == COMPUTE:
            assert span.start_seconds >= arrived[span.event.unit]
        assert all(num_bytes >= 0 for num_bytes in span.memory.values())
    last = cost.spans[-1].memory
    shards = sum(b.layout.padded_shard_numel * 4 for unit in units for b in unit.buckets)
    assert last["shards"] == shards
    assert {purpose: last[purpose] for purpose in PASSING} == dict.fromkeys(PASSING, 0)


@QUICK
@given(steps())
def test_full_parameters_are_held_from_their_gather_until_they_are_freed(step):
    plan, units = step
    layouts = {unit.name: unit.buckets[0].layout for unit in units}
    held = {}
    for span in step_cost(plan, units).spans:
        event = span.event
        if event.kind in (ALL_GATHER, "cast"):
            width = {"float32": 4, "bfloat16": 2}[event.dtype]
            held[event.unit] = layouts[event.unit].unsharded_numel * width
        elif event.kind == FREE:
            held[event.unit] = 0
        elif event.kind == RESHARD_TO_GROUP:
            width = {"float32": 4, "bfloat16": 2}[event.dtype]
            held[event.unit] = layouts[event.unit].over(2).padded_shard_numel * width
        assert span.memory["full parameters"] == sum(held.values())


def test_what_each_purpose_holds_in_low_precision():
    params = (ParamSpec("w", (5, 3)), ParamSpec("b", (3,)))
    layout = PerParamLayout(params, 2)  # shards of 9 and 2 elements
    units = plan_units([("", layout)], policy=PrecisionPolicy("bfloat16", "float32", keep_low_precision_grads=True))
    cost = step_cost(step_plan(units, MeshSpec(2)), units, optimizer_states=1, activation_bytes={"": 1000})
    at = {(s.event.kind, s.event.phase): s.memory for s in cost.spans}
    gathered = at[ALL_GATHER, "forward"]
    assert (gathered["shards"], gathered["optimizer"]) == (11 * 4, 11 * 4)
    assert gathered["full parameters"] == layout.unsharded_numel * 2
    assert gathered["gather buffers"] == 22 * 2 + 11 * 2  # where the gather lands, and the shard in low precision
    computed = at[COMPUTE, "forward"]
    assert (computed["gather buffers"], computed["activations"]) == (0, 1000)
    backward = at[COMPUTE, "backward"]
    assert (backward["full gradients"], backward["activations"]) == (18 * 2, 1000)  # until the gradients are made
    reduced = at[REDUCE_SCATTER, "backward"]
    assert (reduced["full gradients"], reduced["activations"]) == (0, 0)
    assert reduced["reduction buffers"] == (22 + 11) * 4
    assert reduced["sharded gradients"] == 11 * 2  # kept in low precision


def test_R14_one_shard_is_copied_without_a_gather_buffer():
    layout = PerParamLayout((ParamSpec("w", (5, 3)), ParamSpec("b", (3,))), 1)
    for low, copied in (("float32", 0), ("bfloat16", 18 * 2)):
        units = plan_units([("a", layout)], policy=PrecisionPolicy(low, "float32"))
        copy = next(s for s in step_cost(step_plan(units, MeshSpec(1)), units).spans if s.event.kind == "cast")
        assert copy.memory["full parameters"] == layout.unsharded_numel * {"float32": 4, "bfloat16": 2}[low]
        assert copy.memory["gather buffers"] == copied


def test_R15_under_no_sync_full_gradients_wait_and_reducing_each_time_frees_them():
    units = units_of(["", "a"])
    for sync, waiting in ((Sync.EACH, 0), (Sync.LAST, 2 * 32)):
        cost = step_cost(step_plan(units, MeshSpec(2), microbatches=2, sync=sync), units)
        second = next(s for s in cost.spans if s.event.microbatch == 1 and s.event.kind == COMPUTE)
        assert second.memory["full gradients"] == waiting


@pytest.mark.parametrize(("api", "waiting"), [(Api.FSDP1, 2), (Api.FSDP2, 4)])
def test_R15_gradients_wait_in_the_dtype_of_the_api_beside_fresh_ones(api, waiting):
    units = units_of(["a"], numel=8, api=api, policy=PrecisionPolicy("bfloat16", "float32"))
    cost = step_cost(step_plan(units, MeshSpec(2), microbatches=3, sync=Sync.LAST), units)
    backward = [
        s.memory["full gradients"] for s in cost.spans if s.event.kind == COMPUTE and s.event.phase == "backward"
    ]
    assert backward == [8 * 2, 8 * (2 + waiting), 8 * (2 + waiting)]
    between = [s.memory["full gradients"] for s in cost.spans if s.event.kind == COMPUTE and s.event.phase == "forward"]
    assert between == [0, 8 * waiting, 8 * waiting]


def test_R14_what_is_not_sharded_moves_nothing_and_holds_everything():
    units = units_of(["", "a"], world_size=1, strategy=Strategy.NO_SHARD)
    cost = step_cost(step_plan(units, MeshSpec(1)), units)
    assert cost.collectives == {kind: {"count": 0, "num_bytes": 0} for kind in COLLECTIVES}
    assert cost.exposed_seconds == cost.communication_seconds == 0
    assert cost.peak_bytes == 2 * 32 * (1 + 2) + 2 * 32  # values, moments, gradients
    replicas = step_cost(step_plan(units, MeshSpec(1, 4)), units)
    assert replicas.collectives[ALL_REDUCE] == {"count": 2, "num_bytes": 64}


def test_R16_prefetch_hides_what_it_can_and_costs_memory():
    units = units_of(["", "a", "b", "c"])
    plans = {p: step_plan(units, MeshSpec(2), backward_prefetch=p) for p in (None, Prefetch.BACKWARD_PRE)}
    costs = {p: step_cost(plan, units, SLOW) for p, plan in plans.items()}
    assert costs[Prefetch.BACKWARD_PRE].exposed_seconds < costs[None].exposed_seconds
    assert costs[Prefetch.BACKWARD_PRE].peak_bytes > costs[None].peak_bytes
    ahead = step_cost(step_plan(units, MeshSpec(2), forward_prefetch=1), units, SLOW)
    assert ahead.exposed_seconds < costs[Prefetch.BACKWARD_PRE].exposed_seconds


def test_R08_a_smaller_group_holds_less_than_all_and_gathers_less_than_all():
    units = [units_of(["", "a"], world_size=4, numel=16, reshard_after_forward=r) for r in (True, 2, False)]
    costs = [step_cost(step_plan(u, MeshSpec(4)), u) for u in units]
    between = [next(s for s in cost.spans if s.event.phase == "backward").memory["full parameters"] for cost in costs]
    # A gather of the root opens backward for the first two: 64 bytes of it, beside nothing, half of a, or all of both.
    assert between == [64, 64 + 32, 128]
    assert [len([s for s in cost.spans if s.event.kind == ALL_GATHER]) for cost in costs] == [4, 4, 2]
    assert [len(s.event.group) for s in costs[1].spans if s.event.kind == ALL_GATHER] == [4, 4, 2, 2]


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 1000])
def test_the_time_of_a_collective_is_the_formulas(kind, num_ranks):
    hardware = Hardware(bytes_per_second=2.0, replica_bytes_per_second=0.5, latency_seconds=3.0)
    rounds = math.ceil(math.log2(num_ranks))
    bandwidth = 0.5 if kind == ALL_REDUCE else 2.0
    once = 3 * rounds + 100 / bandwidth * (num_ranks - 1) / num_ranks
    expected = 2 * once if kind == ALL_REDUCE else once
    assert hardware.collective_seconds(kind, 100, num_ranks) == pytest.approx(expected)
    assert Hardware(bytes_per_second=2.0, latency_seconds=0).collective_seconds(ALL_REDUCE, 8, 2) == 4.0


def test_computing_takes_two_operations_a_parameter_and_token_and_twice_that_in_backward():
    assert (SLOW.compute_seconds(10, 3, "forward"), SLOW.compute_seconds(10, 3, "backward")) == (60, 120)


@pytest.mark.parametrize(
    ("field", "value"),
    [("flops_per_second", 0), ("bytes_per_second", -1.0), ("latency_seconds", math.nan), ("latency_seconds", "1"),
     ("replica_bytes_per_second", math.inf), ("flops_per_second", True), ("bytes_per_second", None)],
)  # fmt: skip
def test_hardware_that_cannot_be_is_refused_by_name(field, value):
    with pytest.raises(PlanError, match=field):
        Hardware(**{field: value})
    assert Hardware(latency_seconds=0, replica_bytes_per_second=None) is not None


def test_costs_that_make_no_sense_are_refused():
    units = units_of(["", "a"])
    plan = step_plan(units, MeshSpec(2))
    for field, value in (("tokens", 0), ("tokens", 1.5), ("optimizer_states", -1), ("optimizer_states", True)):
        with pytest.raises(PlanError, match=field):
            step_cost(plan, units, **{field: value})
    with pytest.raises(PlanError, match="at least one unit"):
        step_cost(plan, [])
    for wrong in ({"b": 1}, {"a": -1}, 5):
        with pytest.raises(PlanError, match="activation_bytes"):
            step_cost(plan, units, activation_bytes=wrong)
    with pytest.raises(PlanError, match="unit 'a', bucket 0, which is not among the units"):
        step_cost(plan, units[:1])
    for wrong in (5, [5], None):
        with pytest.raises(PlanError, match="as plan_units gives them"):
            step_cost(plan, wrong)
        with pytest.raises(PlanError, match="as step_plan gives it"):
            step_cost(wrong, units)
