"""The plan of a step: what is gathered, freed and reduced, when, and how many bytes (R13, R14, R16, R28)."""

# pyright: reportArgumentType=false

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.api import Api
from crossframe.errors import MeshError, PlanError
from crossframe.layout import FlatLayout, PerParamLayout
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.plan import PlannedBucket, PlannedUnit, plan_units, step_plan
from crossframe.precision import PrecisionPolicy, resolve_precision
from crossframe.strategy import Prefetch, Strategy, Sync
from crossframe.trace import (
    ALL_GATHER,
    ALL_REDUCE,
    CAST,
    COLLECTIVES,
    COMPUTE,
    FREE,
    REDUCE_SCATTER,
    RESHARD_TO_GROUP,
    STEP,
    Event,
)
from tests.core.helpers.random_layouts import QUICK, specs

STRATEGIES = st.sampled_from(list(Strategy))
SHORT = {ALL_GATHER: "gather", FREE: "free", REDUCE_SCATTER: "reduce", ALL_REDUCE: "sum"}


def layouts(names: list[str], world_size: int) -> list[tuple[str, FlatLayout]]:
    """One flat unit a name, each of another size."""
    return [
        (name, FlatLayout((ParamSpec(f"{name or 'root'}.w", (3 + i,)),), world_size, keep_original=True))
        for i, name in enumerate(names)
    ]


def moving(events: list[Event]) -> list[Event]:
    """The events that move or free parameters and gradients."""
    return [event for event in events if event.kind in (*COLLECTIVES, FREE)]


def short(events: list[Event]) -> list[str]:
    return [f"{event.phase[0]} {SHORT[event.kind]} {event.unit or 'root'}" for event in moving(events)]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[PlannedUnit], MeshSpec]:
    """Some units, each with its own choice of resharding and training, on a mesh."""
    mesh = MeshSpec(shard=draw(st.integers(2, 4)), replicate=draw(st.integers(1, 3)))
    units = []
    for i in range(draw(st.integers(1, 5))):
        params = tuple(
            ParamSpec(f"u{i}.p{j}", (draw(st.integers(1, 7)),), requires_grad=draw(st.booleans())) for j in range(2)
        )
        make = draw(st.sampled_from([lambda p, n: FlatLayout(p, n, True), PerParamLayout]))
        precision = resolve_precision("float32", draw(st.sampled_from([None, "bfloat16"])), "float64")
        bucket = PlannedBucket(make(params, mesh.shard), precision)
        units.append(PlannedUnit(f"u{i}", (bucket,), draw(st.booleans())))
    return units, mesh


def test_R13_R14_full_shard_gathers_everything_twice_but_the_root():
    units = plan_units(layouts(["", "a", "b"], 2), Strategy.FULL_SHARD)
    assert short(step_plan(units, MeshSpec(2), backward_prefetch=None)) == [
        *("f gather root", "f gather a", "f free a", "f gather b", "f free b"),
        *("b gather b", "b free b", "b reduce b"),
        *("b gather a", "b free a", "b reduce a"),
        *("b free root", "b reduce root"),
    ]


def test_R16_backward_prefetch_issues_a_gather_ahead_of_the_reduction_behind_it():
    units = plan_units(layouts(["", "a", "b", "c"], 2), Strategy.FULL_SHARD)
    assert short(step_plan(units, MeshSpec(2)))[7:] == [
        *("b gather c", "b gather b", "b free c", "b reduce c"),
        *("b gather a", "b free b", "b reduce b"),
        *("b free a", "b reduce a"),
        *("b free root", "b reduce root"),
    ]


def test_R14_shard_grad_op_frees_nothing_before_backward():
    units = plan_units(layouts(["", "a", "b"], 2), Strategy.SHARD_GRAD_OP)
    assert short(step_plan(units, MeshSpec(2))) == [
        *("f gather root", "f gather a", "f gather b"),
        *("b free b", "b reduce b", "b free a", "b reduce a", "b free root", "b reduce root"),
    ]


def test_R13_the_root_is_the_unit_of_the_empty_name_wherever_it_stands():
    for names in (["", "a"], ["a", ""], ["a", "b"]):
        for strategy in Strategy:
            for unit in plan_units(layouts(names, 2), strategy):
                reshards = strategy in (Strategy.FULL_SHARD, Strategy.HYBRID_SHARD)
                assert unit.reshard_after_forward == (reshards and unit.name != "")
    assert Strategy("full_shard").reshards_after_forward and not Strategy("shard_grad_op").reshards_after_forward


def test_units_are_planned_in_the_order_and_dtype_in_which_they_are_given():
    given_units = layouts(["b", "", "a"], 2)
    planned = plan_units(given_units, Strategy.FULL_SHARD)
    assert [(unit.name, unit.buckets[0].layout) for unit in planned] == given_units
    assert {unit.buckets[0].precision for unit in planned} == {resolve_precision("float32")}


def reached(units):
    """The units from the first that trains something on: what lies ahead of it has no backward."""
    trains = [any(param.requires_grad for param in unit.buckets[0].layout.params) for unit in units]
    return units[trains.index(True) :] if True in trains else []


@QUICK
@given(steps(), st.sampled_from([None, *Prefetch]))
def test_R14_a_unit_is_full_when_it_computes_and_nothing_is_full_at_the_end(step, prefetch):
    units, mesh = step
    full: set[str] = set()
    computed = Counter()
    for event in moving(step_plan(units, mesh, backward_prefetch=prefetch)):
        if event.kind == ALL_GATHER:
            assert event.unit not in full
            full.add(event.unit)
        elif event.kind == FREE:  # a unit has computed when it is freed
            full.remove(event.unit)
            computed[event.unit, event.phase] += 1
        else:
            assert event.phase == "backward" and event.unit not in full
    assert not full
    for unit in units:
        assert computed[unit.name, "forward"] == unit.reshard_after_forward
        assert computed[unit.name, "backward"] == (unit in reached(units) or not unit.reshard_after_forward)


@QUICK
@given(steps())
def test_R14_units_are_gathered_in_order_and_reduced_in_reverse(step):
    units, mesh = step
    events = moving(step_plan(units, mesh))
    forward = [event.unit for event in events if (event.kind, event.phase) == (ALL_GATHER, "forward")]
    assert forward == [unit.name for unit in units]
    reduced = [event.unit for event in events if event.kind == REDUCE_SCATTER]
    assert reduced == [
        unit.name for unit in reversed(units) if any(param.requires_grad for param in unit.buckets[0].layout.params)
    ]
    backward = [event.unit for event in events if (event.kind, event.phase) == (ALL_GATHER, "backward")]
    assert backward == [unit.name for unit in reversed(reached(units)) if unit.reshard_after_forward]


@QUICK
@given(steps())
def test_R16_prefetch_moves_gathers_and_nothing_else(step):
    units, mesh = step
    plain, ahead = (
        moving(step_plan(units, mesh, backward_prefetch=prefetch)) for prefetch in (None, Prefetch.BACKWARD_PRE)
    )
    assert Counter(plain) == Counter(ahead)
    for kept in (lambda e: e.kind != ALL_GATHER, lambda e: e.kind == ALL_GATHER, lambda e: e.phase == "forward"):
        assert [e for e in plain if kept(e)] == [e for e in ahead if kept(e)]
    # Each unit is freed with the gather of the one before it, and no earlier one, already issued.
    frees = [event for event in ahead if (event.kind, event.phase) == (FREE, "backward")]
    for i, freed in enumerate(frees):
        issued = {event.unit for event in ahead[: ahead.index(freed)] if event.kind == ALL_GATHER}
        behind = list(reversed(reached(units)))
        expected = {u.name for j, u in enumerate(behind) if u.reshard_after_forward and j <= i + 1}
        backward = {
            event.unit for event in ahead[: ahead.index(freed)] if (event.kind, event.phase) == (ALL_GATHER, "backward")
        }
        assert backward == expected and issued == {unit.name for unit in units}


@QUICK
@given(steps(), st.data())
def test_R28_bytes_dtypes_and_groups_of_every_event(step, data):
    units, mesh = step
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    by_name = {unit.name: unit for unit in units}
    itemsize = {"float64": 8, "float32": 4, "bfloat16": 2}
    for event in moving(step_plan(units, mesh, rank)):
        bucket = by_name[event.unit].buckets[0]
        layout, precision = bucket.layout, bucket.precision
        shard_numel = sum(p.numel for p in layout.pieces(0)) + sum(r.stop - r.start for r in layout.padding(0))
        whole_numel = shard_numel * mesh.shard
        if event.kind in (ALL_GATHER, FREE):
            assert event.dtype == precision.gathered
            assert event.num_bytes == whole_numel * itemsize[precision.gathered]
        else:
            assert event.dtype == precision.reduced
            if (
                layout.kind == "per_param"
            ):  # frozen parameters have no gradients; the first rank's chunks are never short
                trained = {spec.name for spec in layout.params if spec.requires_grad}
                shard_numel = sum(p.numel for p in layout.pieces(0) if p.name in trained)
                whole_numel = shard_numel * mesh.shard
            numel = whole_numel if event.kind == REDUCE_SCATTER else shard_numel
            assert event.num_bytes == numel * itemsize[precision.reduced]
        group = mesh.replicate_group(rank) if event.kind == ALL_REDUCE else mesh.shard_group(rank)
        assert event.group == group and rank in group


@QUICK
@given(steps())
def test_R28_replicas_sum_each_reduced_gradient_right_after_the_reduction(step):
    units, mesh = step
    events = moving(step_plan(units, mesh))
    sums = [i for i, event in enumerate(events) if event.kind == ALL_REDUCE]
    reductions = [i for i, event in enumerate(events) if event.kind == REDUCE_SCATTER]
    assert sums == ([i + 1 for i in reductions] if mesh.replicate > 1 else [])
    assert all((events[i].unit, events[i].phase) == (events[i - 1].unit, "backward") for i in sums)


@QUICK
@given(steps())
def test_R29_whoever_is_in_a_group_does_the_same_at_the_same_place(step):
    units, mesh = step
    plans = [moving(step_plan(units, mesh, rank)) for rank in range(mesh.world_size)]
    for place in zip(*plans, strict=True):
        for event in place:
            assert all(place[rank] == event for rank in event.group)


def test_R28_a_step_on_two_replicas_of_two_shards():
    layout = PerParamLayout(specs([(5, 3)]), 2)  # 3 and 2 rows: 9 elements a shard
    units = plan_units([("", layout)], Strategy.FULL_SHARD)
    assert moving(step_plan(units, MeshSpec(shard=2, replicate=2), rank=3)) == [
        Event(ALL_GATHER, "", "forward", "float32", 72, (2, 3)),
        Event(FREE, "", "backward", "float32", 72, (2, 3)),
        Event(REDUCE_SCATTER, "", "backward", "float32", 72, (2, 3)),
        Event(ALL_REDUCE, "", "backward", "float32", 36, (1, 3)),
    ]


def test_frozen_units_are_gathered_but_not_reduced():
    frozen, trained = ParamSpec("f", (2,), requires_grad=False), ParamSpec("t", (2,))
    units = plan_units(
        [(name, FlatLayout(params, 2, True)) for name, params in (("", (frozen,)), ("a", (frozen, trained)))],
        Strategy.FULL_SHARD,
    )
    assert [unit.buckets[0].trained for unit in units] == [False, True]
    events = step_plan(units, MeshSpec(shard=2, replicate=2))
    assert {event.unit for event in events if event.kind in (REDUCE_SCATTER, ALL_REDUCE)} == {"a"}
    assert {event.unit for event in events if event.kind == ALL_GATHER} == {"", "a"}


def test_steps_that_cannot_be_planned_are_refused():
    with pytest.raises(PlanError, match="at least one unit"):
        step_plan((), MeshSpec(2))
    units = plan_units([*layouts([""], 2), *layouts(["a"], 3)], Strategy.FULL_SHARD)
    with pytest.raises(PlanError, match=r"unit 'a' is laid out over 3 ranks, the mesh shards over 2"):
        step_plan(units, MeshSpec(shard=2, replicate=3))
    with pytest.raises(MeshError, match="from 0 to 1"):
        step_plan(units[:1], MeshSpec(2), rank=2)


def nested(*names: str, world_size: int = 2, **options) -> tuple[PlannedUnit, ...]:
    return plan_units(layouts(list(names), world_size), **options)


def lines(events: list[Event]) -> list[str]:
    """All but what is computed and freed, as short words with the microbatch in front."""
    words = {**SHORT, RESHARD_TO_GROUP: "shrink", STEP: "step", CAST: "cast"}
    return [
        f"{event.microbatch}{event.phase[0]} {words[event.kind]} {event.unit or 'root'}"
        for event in events
        if event.kind not in (FREE, COMPUTE)
    ]


def test_units_nest_as_their_names_do_wherever_they_stand_in_the_list():
    expected = [
        *("f gather root", "f gather a", "f gather a.b", "f free a.b", "f free a", "f gather ab", "f free ab"),
        *("b gather ab", "b free ab", "b reduce ab"),
        *("b gather a", "b gather a.b", "b free a.b", "b reduce a.b", "b free a", "b reduce a"),
        *("b free root", "b reduce root"),
    ]
    for names in (["", "a", "a.b", "ab"], ["a.b", "a", "ab", ""]):
        assert short(step_plan(nested(*names), MeshSpec(2), backward_prefetch=None)) == expected
    computed = [
        (event.phase[0], event.unit)
        for event in step_plan(nested("", "a", "a.b"), MeshSpec(2))
        if event.kind == COMPUTE
    ]
    assert computed == [("f", "a.b"), ("f", "a"), ("f", ""), ("b", ""), ("b", "a"), ("b", "a.b")]


def test_R16_prefetch_behind_a_unit_and_in_forward():
    events = step_plan(nested("", "a", "b", "c"), MeshSpec(2), backward_prefetch=Prefetch.BACKWARD_POST)
    assert short(events)[7:] == [
        *("b gather c", "b free c", "b gather b", "b reduce c"),
        *("b free b", "b gather a", "b reduce b"),
        *("b free a", "b reduce a", "b free root", "b reduce root"),
    ]
    ahead = step_plan(nested("", "a", "b", "c"), MeshSpec(2), forward_prefetch=2)
    assert short(ahead)[:7] == [
        *("f gather root", "f gather a", "f gather b", "f gather c"),
        *("f free a", "f free b", "f free c"),
    ]


@pytest.mark.parametrize("strategy", Strategy)
def test_R15_what_a_microbatch_without_reduction_leaves_full(strategy):
    """FSDP1 keeps what its strategy keeps after forward; FSDP2 frees behind every backward."""
    units = nested("", "a", strategy=strategy)
    events = step_plan(units, MeshSpec(2), microbatches=2, sync=Sync.LAST)
    gathers = [line for line in lines(events) if "gather" in line]
    if strategy.reshards_after_forward:
        assert gathers == [
            "0f gather root",
            "0f gather a",
            "0b gather a",
            "1f gather root",
            "1f gather a",
            "1b gather a",
        ]
    else:
        assert gathers == ["0f gather root", "0f gather a"]
    assert [line for line in lines(events) if "reduce" in line] == ["1b reduce a", "1b reduce root"]
    again = step_plan(nested("", "a", strategy=strategy, api=Api.FSDP2), MeshSpec(2),
                      microbatches=2, sync=Sync.LAST)  # fmt: skip
    assert sum("f gather" in line for line in lines(again)) == 4


def test_R28_the_sum_over_replicas_waits_for_the_last_microbatch():
    mesh, units = MeshSpec(2, 2), nested("a", api=Api.FSDP2)
    for sync, reductions, sums in ((Sync.EACH, 3, 3), (Sync.ALL_REDUCE_LAST, 3, 1), (Sync.LAST, 1, 1)):
        events = lines(step_plan(units, mesh, microbatches=3, sync=sync))
        assert (sum("reduce" in e for e in events), sum("sum" in e for e in events)) == (reductions, sums)
        assert events[-2:] == ["2b sum a", "2s step root"]
    with pytest.raises(PlanError, match="use no_sync, or FSDP2's set_requires_all_reduce"):
        step_plan(nested("a"), mesh, microbatches=3, sync=Sync.ALL_REDUCE_LAST)
    with pytest.raises(PlanError, match=r"one API: .*'fsdp2'.*'fsdp1'"):
        step_plan((*units, *nested("b")), mesh)
    with pytest.raises(PlanError, match="one replica of 2 shards"):
        step_plan(units, MeshSpec(2), microbatches=3, sync=Sync.ALL_REDUCE_LAST)


def test_R08_a_smaller_group_keeps_its_part_between_forward_and_backward():
    layout = PerParamLayout(specs([(5, 3)]), 4)  # 2, 2, 1 and 0 rows; over 2 ranks 3 and 2
    units = plan_units([("", layout)], api=Api.FSDP2, reshard_after_forward=2)
    events = step_plan(units, MeshSpec(4, 2), rank=7)
    assert [e for e in events if e.kind not in (COMPUTE, REDUCE_SCATTER, ALL_REDUCE, STEP)] == [
        Event(ALL_GATHER, "", "forward", "float32", 4 * 24, range(4, 8)),
        Event(RESHARD_TO_GROUP, "", "forward", "float32", 4 * (24 - 9), range(4, 8)),
        Event(ALL_GATHER, "", "backward", "float32", 4 * 18, range(6, 8)),
        Event(FREE, "", "backward", "float32", 4 * 24, range(4, 8)),
    ]


def test_R13_a_users_own_choice_holds_for_the_root_too():
    given_units = layouts(["", "a"], 4)
    for asked, meant in ((None, [False, True]), (True, [True] * 2), (False, [False] * 2), (2, [2] * 2), (4, [True] * 2),
                         (1, [False] * 2)):  # fmt: skip
        planned = plan_units(given_units, reshard_after_forward=asked, api=Api.FSDP2)
        assert [unit.reshard_after_forward for unit in planned] == meant
    with pytest.raises(MeshError, match="divides the 4 ranks"):
        plan_units(given_units, reshard_after_forward=3)
    for wrong in ("2", 2.0, [2]):
        with pytest.raises(PlanError, match="reshard_after_forward: expected None, a bool or a number"):
            plan_units(given_units, reshard_after_forward=wrong)


def test_R14_without_shards_nothing_is_gathered_or_freed_and_replicas_average():
    units = nested("", "a", world_size=1, strategy=Strategy.NO_SHARD)
    assert lines(step_plan(units, MeshSpec(1))) == ["0s step root"]
    assert lines(step_plan(units, MeshSpec(1, 3))) == ["0b sum a", "0b sum root", "0s step root"]
    mixed = plan_units(layouts(["a"], 1), Strategy.FULL_SHARD, policy=PrecisionPolicy("bfloat16"))
    events = step_plan(mixed, MeshSpec(1, 3))
    assert lines(events) == ["0f cast a", "0b cast a", "0b sum a", "0s step root"]
    assert [(e.dtype, e.num_bytes) for e in events if e.kind == CAST] == [("bfloat16", 6)] * 2


def test_R11_a_unit_of_two_dtypes_has_two_buckets_that_go_together():
    wide, narrow = FlatLayout(specs([(4,)]), 2, True), FlatLayout((ParamSpec("n", (4,), "bfloat16"),), 2, True)
    (unit,) = plan_units([("", wide), ("", narrow)])
    assert [bucket.layout for bucket in unit.buckets] == [wide, narrow]
    events = step_plan([unit], MeshSpec(2))
    assert [(e.kind, e.bucket, e.num_bytes) for e in events if e.kind in COLLECTIVES] == [
        (ALL_GATHER, 0, 16), (ALL_GATHER, 1, 8), (REDUCE_SCATTER, 0, 16), (REDUCE_SCATTER, 1, 8),
    ]  # fmt: skip


@pytest.mark.parametrize("strategy", Strategy)
def test_R10_the_mesh_of_each_strategy(strategy):
    if strategy.is_hybrid:
        assert strategy.mesh(12, 3) == MeshSpec(3, 4)
        with pytest.raises(PlanError, match="expected the number of ranks in a shard group, got None"):
            strategy.mesh(12)
        with pytest.raises(PlanError, match="whose size divides 12 ranks, got 5"):
            strategy.mesh(12, 5)
    else:
        assert strategy.mesh(12) == (MeshSpec(1, 12) if strategy is Strategy.NO_SHARD else MeshSpec(12))
        with pytest.raises(PlanError, match="expected no size of a shard group, got 3"):
            strategy.mesh(12, 3)
    for wrong in (0, -1, 2.0, "4", None, True):
        with pytest.raises(MeshError):
            strategy.mesh(wrong, 1 if strategy.is_hybrid else None)


def test_what_is_no_plan_is_refused_by_name():
    units = nested("", "a")
    for field, value in (("sync", "each"), ("backward_prefetch", True), ("forward_prefetch", -1),
                         ("forward_prefetch", 1.0), ("microbatches", 0), ("microbatches", True)):  # fmt: skip
        with pytest.raises(PlanError, match=field):
            step_plan(units, MeshSpec(2), **{field: value})
    for wrong in (5, [5], None, "ab"):
        with pytest.raises(PlanError, match="as plan_units gives them"):
            step_plan(wrong, MeshSpec(2))
        with pytest.raises(PlanError, match=r"a list of \(unit name, layout\)"):
            plan_units(wrong)
    layout = layouts([""], 2)[0][1]
    for pair in (("a", 5), (5, layout), ("a", layout, 1), ["a", layout]):
        with pytest.raises(PlanError, match=r"a list of \(unit name, layout\)"):
            plan_units([("b", layout), pair])
    with pytest.raises(PlanError, match="mesh: expected a MeshSpec"):
        step_plan(units, 2)
    with pytest.raises(PlanError, match=r"unit stands twice among \['', 'a', ''\]"):
        step_plan((*units, units[0]), MeshSpec(2))
    for field in ("strategy", "api", "policy"):
        with pytest.raises(PlanError, match=f"{field}: expected a"):
            plan_units(layouts([""], 2), **{field: 3})
    with pytest.raises(PlanError, match="expected a layout and a Precision"):
        PlannedBucket(layouts([""], 2)[0][1], "float32")
    bucket = units[0].buckets[0]
    for args in ((5, (bucket,), True), ("a", (), True), ("a", [bucket], True), ("a", (bucket,), None),
                 ("a", (bucket,), True, 5), ("a", (bucket,), True, False, "fsdp1")):  # fmt: skip
        with pytest.raises(PlanError):
            PlannedUnit(*args)


def test_R14_what_is_frozen_ahead_of_all_that_is_trained_has_no_backward():
    def unit(name, *trained):
        layouts = [FlatLayout((ParamSpec(f"{name}.p{i}", (4,), dtype, requires_grad=t),), 2, True)
                   for i, (t, dtype) in enumerate(zip(trained, ("float32", "bfloat16"), strict=False))]  # fmt: skip
        return [(name, layout) for layout in layouts]

    given_units = [*unit("", True), *unit("a", False), *unit("b", False, True), *unit("c", False)]
    events = step_plan(plan_units(given_units), MeshSpec(2))
    backward = [(e.kind, e.unit) for e in events if e.phase == "backward" and e.kind in COLLECTIVES]
    assert backward == [
        (ALL_GATHER, "c"),
        (ALL_GATHER, "b"),
        (ALL_GATHER, "b"),
        (REDUCE_SCATTER, "b"),
        (REDUCE_SCATTER, ""),
    ]
    computed = [e.unit for e in events if e.phase == "backward" and e.kind == COMPUTE]
    assert computed == ["", "c", "b", "b"]
    # What a strategy keeps full after forward is freed when backward ends.
    kept = step_plan(plan_units(given_units, Strategy.SHARD_GRAD_OP), MeshSpec(2))
    assert [e.unit for e in kept if e.kind == FREE] == ["c", "b", "b", "", "a"]
    frozen = step_plan(plan_units(unit("a", False)), MeshSpec(2))
    assert [e.phase for e in frozen if e.kind in COLLECTIVES] == ["forward"]
