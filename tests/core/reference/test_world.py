"""Training by a plan in numpy equals training on one rank that sees all data (R13-R17, R26-R31, R33).

A case that fails is in the assertion's message; every one is drawn from `worlds.CASES` by a seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from crossframe.api import Api
from crossframe.dtypes import numpy_dtype, unit_roundoff
from crossframe.errors import MeshError, ParamError, PlanError, StateError, UnitError
from crossframe.layout import FlatLayout
from crossframe.lifecycle import Residency, UnitState
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.plan import PlannedBucket, Prefetch, Strategy, Sync, plan_units
from crossframe.precision import resolve_precision
from crossframe.reduction import reduction_steps
from crossframe.reference import bucket as bucket_module
from crossframe.reference import unit as unit_module
from crossframe.reference.collectives import all_gather, all_reduce, over_groups, reduce_scatter
from crossframe.reference.net import Batch, Layers
from crossframe.reference.optim import SGD, AdamW, Optimizer, State
from crossframe.reference.world import World
from crossframe.trace import ALL_GATHER, ALL_REDUCE, COMPUTE, FREE, REDUCE_SCATTER, RESHARD_TO_GROUP, STEP, collectives
from tests.core.helpers.small_worlds import MAKE
from tests.core.helpers.training_worlds import (
    CASES,
    LAYERS,
    POLICIES,
    SIZES,
    UNITS,
    Case,
    Integers,
    in_turn,
    integer_batches,
    layer_batches,
    sample,
)

PLAIN = Case("flat", MeshSpec(3), Api.FSDP1, Strategy.FULL_SHARD, None, Sync.EACH, 1, Prefetch.BACKWARD_PRE, 0)
STEPS = 2


def whole(optimizer: Optimizer, params: dict[str, np.ndarray], states: dict[str, State], grads, step: int) -> None:
    """An optimizer's step on whole parameters; those without a gradient are left alone."""
    for name, grad in grads.items():
        state = states.setdefault(name, optimizer.init(params[name]))
        optimizer.update(params[name], grad.astype(params[name].dtype), state, step)


def on_all_data(params: Mapping[str, np.ndarray], batch: Batch) -> dict[str, np.ndarray]:
    """The gradients of the layers' mean loss on one batch, without units, ranks or plans."""
    net = Layers(UNITS, SIZES)
    net.start(0, batch)
    own = {name: {spec.name: params[spec.name] for spec in specs} for name, specs in net.specs().items()}
    for name in UNITS:
        net.forward(name, 0, own[name])
    net.loss(0)
    return {k: v for name in reversed(UNITS) for k, v in net.backward(name, 0, own[name]).items()}


SAMPLES = 4


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(SGD(lr=0.1, momentum=0.9), id="SGD", marks=pytest.mark.exhaustive),
        pytest.param(AdamW(lr=0.1), id="AdamW"),
    ],
)
def test_R14_R26_training_on_shards_equals_training_on_one_rank_with_all_data(optimizer):
    """In float64, whatever the layout, strategy, mesh, interface, accumulation and prefetch.

    The two differ by the order of sums. A gradient's element is a sum over samples, ranks and microbatches, each term of
    which went through four layers of at most 5 products and 4 further roundings: R roundings in all, each relative to the
    sum of the terms' sizes, which is at most A times the sum itself. The first step moves a parameter by at most lr times
    that error (SGD), or its size relative to the gradient, twice: in the first moment and the root of the second (AdamW);
    later steps add as much again, and feel it through the loss, whose curvature times lr is below 1 here. Hence
    8 * steps * lr * R * u * A * largest gradient (SGD), or without that factor (AdamW), and a rounding of each update.
    """
    for i, case in enumerate(sample(40, seed=1)):
        world, ranks = case.world(optimizer), case.mesh.world_size
        plan = case.plan(case.units())
        net, states = Layers(UNITS, SIZES), {}
        params = LAYERS.initial(0)
        amplified = largest = 0.0
        for step in range(1, STEPS + 1):
            batches = [
                [LAYERS.batch(1000 * i + 100 * step + 10 * m + rank, SAMPLES) for rank in range(ranks)]
                for m in range(case.microbatches)
            ]
            losses = world.run(plan, net, batches)
            joined = [(np.concatenate([b[0] for b in all]), np.concatenate([b[1] for b in all])) for all in batches]
            each = [on_all_data(params, batch) for batch in joined]
            grads = {name: np.sum([of[name] for of in each], axis=0) for name in params}
            singles = [on_all_data(params, (x[s : s + 1], y[s : s + 1])) for x, y in joined for s in range(len(x))]
            for name, grad in grads.items():
                sizes = np.sum([np.abs(one[name]) for one in singles], axis=0) / len(joined[0][0])
                amplified = max(amplified, float((sizes / np.abs(grad)).max()))
                largest = max(largest, float(sizes.max()))
            for m, batch in enumerate(joined):
                here = Layers(UNITS, SIZES)
                here.start(0, batch)
                for name, specs in here.specs().items():
                    here.forward(name, 0, {spec.name: params[spec.name] for spec in specs})
                assert abs(losses[m].mean() - here.loss(0)) < 1e-9, case
            whole(optimizer, params, states, grads, step)
        roundings = SAMPLES * ranks * case.microbatches + ranks + case.microbatches + 4 * (5 + 4)
        u = unit_roundoff("float64")
        scale = 1.0 if isinstance(optimizer, AdamW) else largest
        bound = 8 * STEPS * optimizer.lr * roundings * u * amplified * scale + 8 * STEPS * u
        assert bound < 1e-6
        full = world.full_params()
        for name, value in params.items():
            error = float(np.abs(full[name] - value).max())
            assert error <= bound, (case, name, error, bound)


def exactly(case: Case, optimizer: Optimizer, *, divide_factor: float | None = None, steps: int = STEPS) -> World:
    """Train a network of exact sums both ways, and compare bit for bit. Every computation looks at its parameters too."""
    policy = POLICIES[case.policy]
    world, plan = case.world(optimizer, divide_factor=divide_factor), case.plan(case.units())
    params, states = LAYERS.initial(0, case.dtype), {}
    shapes = {name: value.shape for name, value in params.items()}
    for step in range(1, steps + 1):
        net = Integers(params, policy.param_dtype or case.dtype)
        batches = integer_batches(case, step)
        world.run(plan, net, batches)
        all_grads = [net.grads(r, shapes, batch) for of_ranks in batches for r, batch in enumerate(of_ranks)]
        mean = {
            name: np.sum([grads[name] for grads in all_grads], axis=0) / (divide_factor or case.mesh.world_size)
            for name in shapes
        }
        whole(optimizer, params, states, mean, step)
        for rank_full in world.units[""].buckets[0].unit.unshard():
            for name, value in rank_full.items():
                assert value.tobytes() == params[name].tobytes(), (case, step, name)
        for name, value in world.full_params().items():
            assert value.tobytes() == params[name].tobytes(), (case, step, name)
        assert len(net.seen) == 2 * len(UNITS) * case.mesh.world_size * case.microbatches, case
        assert_home(world)
    return world


def assert_home(world: World) -> None:
    """Every unit is at its shards, and nothing of a step is left."""
    for unit in world.units.values():
        authoritative_is_full = world.mesh.shard == 1 and not unit.buckets[0].precision.is_mixed
        for state in unit.states:
            assert replace(state, residency=Residency.SHARD) == UnitState()
            assert state.residency is Residency.SHARD or authoritative_is_full
        for bucket in unit.buckets:
            assert authoritative_is_full or set(map(type, bucket.full + bucket.parts)) == {type(None)}
            assert not any(bucket.grads) and bucket.partials is None and not bucket.under_way
            assert set(map(type, bucket.sharded_grads)) == {type(None)} and not any(bucket.reached)


def test_R13_R16_R28_where_sums_are_exact_every_case_gives_the_same_bits():
    for case in sample(80, seed=2):
        exactly(case, SGD(lr=0.5, momentum=0.5))


def test_R33_where_sums_are_exact_mixed_precision_changes_the_bits_of_what_is_computed_with_alone():
    policies = [policy for policy in POLICIES if policy != "as stored"]
    for case in in_turn(sample(60, seed=3, dtype="float32"), policy=policies):
        exactly(case, SGD(lr=0.5, momentum=0.5))


def test_R26_every_exact_case_with_adamw_gives_the_same_bits():
    # A gradient that is kept low enters the optimizer in the parameter's dtype.
    for case in in_turn(sample(40, seed=4), policy=("as stored", "kept low"), dtype=("float64", "float32")):
        exactly(case, AdamW(lr=0.1))


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("api", Api)
def test_R14_one_rank_alone_steps_on_its_own_gradients(kind, api):
    for sync, microbatches in ((Sync.EACH, 1), (Sync.EACH, 3), (Sync.LAST, 3)):
        case = replace(PLAIN, kind=kind, api=api, mesh=MeshSpec(1), sync=sync, microbatches=microbatches)
        exactly(case, SGD(lr=0.5, momentum=0.5))


def test_optimizers_follow_their_definitions_number_by_number():
    """In Python floats, from the formulas: AdamW as in Loshchilov and Hutter (algorithm 2), SGD as in torch's manual."""
    grads = [0.5, -2.0, 0.25, 3.0]
    adamw, sgd = AdamW(lr=0.1, betas=(0.8, 0.9), eps=0.01, weight_decay=0.2), SGD(0.1, momentum=0.9, weight_decay=0.3)
    values = {adamw: np.array([1.5]), sgd: np.array([1.5])}
    states = {adamw: adamw.init(values[adamw]), sgd: sgd.init(values[sgd])}
    theta, m, v, phi, b = 1.5, 0.0, 0.0, 1.5, 0.0
    for t, g in enumerate(grads, 1):
        for optimizer in (adamw, sgd):
            optimizer.update(values[optimizer], np.array([g]), states[optimizer], t)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        theta -= 0.1 * (m / (1 - 0.8**t) / ((v / (1 - 0.9**t)) ** 0.5 + 0.01) + 0.2 * theta)
        b = 0.9 * b + g + 0.3 * phi
        phi -= 0.1 * b
        # Fewer than 20 roundings a step, of numbers whose differences are of their own size.
        assert abs(values[adamw][0] - theta) < 100 * t * 2**-53 and abs(values[sgd][0] - phi) < 100 * t * 2**-53
    assert SGD().init(np.zeros(3)) == {}


def test_R27_a_custom_divide_factor_takes_the_place_of_the_number_of_ranks():
    for case in in_turn(sample(40, seed=5), dtype=("float64", "float32")):
        exactly(case, SGD(lr=0.5), divide_factor=8.0, steps=1)


class Watch:
    """Listens to every collective of the reference where it is made, beside the events that are executed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: list[tuple[str, list[list[int]], str, int]] = []
        kinds = {all_gather: ALL_GATHER, reduce_scatter: REDUCE_SCATTER, all_reduce: ALL_REDUCE}

        def listen(collective, arrays, groups):
            groups = [list(group) for group in groups]
            if len(groups[0]) > 1:
                nbytes = arrays[0].nbytes * (len(groups[0]) if collective is all_gather else 1)
                self.heard.append((kinds[collective], sorted(groups), arrays[0].dtype.name, nbytes))
            return over_groups(collective, arrays, groups)

        monkeypatch.setattr(unit_module, "over_groups", listen)
        monkeypatch.setattr(bucket_module, "over_groups", listen)


def test_R08_R16_R28_the_collectives_that_are_made_are_those_of_the_plan_in_every_group(monkeypatch):
    watch = Watch(monkeypatch)
    for case in in_turn(sample(60, seed=6, dtype="float32"), policy=list(POLICIES)):
        watch.heard.clear()
        units = case.units()
        world = case.world(SGD(lr=0.5))
        params = LAYERS.initial(0, case.dtype)
        net = Integers(params, POLICIES[case.policy].param_dtype or case.dtype)
        world.run(case.plan(units), net, integer_batches(case, 0))
        heard = list(watch.heard)
        for rank in range(case.mesh.world_size):
            planned = [(e.kind, list(e.group), e.dtype, e.num_bytes) for e in collectives(case.plan(units, rank))]
            made = [
                (kind, next(group for group in groups if rank in group), dtype, nbytes)
                for kind, groups, dtype, nbytes in heard
            ]
            assert made == planned, (case, rank)


def test_R08_R12_R14_memory_holds_what_the_plan_says_after_every_event():
    held = {
        FREE: Residency.SHARD,
        RESHARD_TO_GROUP: Residency.RESHARD_GROUP,
        COMPUTE: Residency.FULL,
        ALL_GATHER: Residency.FULL,
    }
    for case in sample(40, seed=7):
        world, plan = case.world(SGD()), case.plan(case.units())
        net = Integers(LAYERS.initial(0), "float64")
        for rank, batch in enumerate(integer_batches(case, 0)[0]):
            net.start(rank, batch)
        for event in plan:
            if event.kind == COMPUTE and case.mesh.shard > 1:
                assert world.units[event.unit].state.residency is Residency.FULL, (case, event)
            world.execute(event, net)
            if event.kind in held:
                assert {state.residency for state in world.units[event.unit].states} == {held[event.kind]}, (
                    case,
                    event,
                )
        assert_home(world)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize("kind", MAKE)
def test_R15_R33_every_tensor_has_the_dtype_of_its_stage(policy, api, kind):
    case = replace(PLAIN, kind=kind, api=api, policy=policy, dtype="float32", microbatches=2, sync=Sync.LAST)
    world, units = case.world(AdamW()), case.units()
    precision = units[0].buckets[0].precision
    net = Integers(LAYERS.initial(0, "float32"), precision.gathered)
    seen = set()
    for event in case.plan(units):
        for rank, batch in enumerate(integer_batches(case, 0)[0]):
            net.start(rank, batch)
        world.execute(event, net)
        bucket = world.units[event.unit].buckets[0]
        stages = {
            "stored": [*bucket.unit.shards],
            "gathered": [full for full in bucket.full if full is not None],
            "accumulated": [grad for grads in bucket.grads for grad in grads.values()],
            "kept": [grad for grad in bucket.sharded_grads if grad is not None],
            "state": [array for states in bucket.optimizer_state for s in states.values() for array in s.values()],
        }
        wanted = {"accumulated": precision.accumulated(api), "state": precision.stored}
        for stage, arrays in stages.items():
            dtype = wanted[stage] if stage in wanted else getattr(precision, stage)
            assert {array.dtype for array in arrays} <= {numpy_dtype(dtype)}, (stage, event)
            seen |= {stage} if arrays else set()
    assert seen == {"stored", "gathered", "accumulated", "kept", "state"}


@pytest.mark.parametrize("kind", MAKE)
def test_R17_R28_partial_sums_wait_are_added_once_and_are_dropped_with_the_step_that_fails(kind):
    case = replace(PLAIN, kind=kind, mesh=MeshSpec(2, 2), api=Api.FSDP2, microbatches=3, sync=Sync.ALL_REDUCE_LAST)
    world, batches = case.world(SGD()), integer_batches(case, 0)
    first_two = [event for event in case.plan(case.units()) if event.microbatch < 2]
    net, unit = Integers(LAYERS.initial(0), "float64", unused={None: {"b.bias"}}), world.units["b"]
    shapes = {"b.weight": (5, 4)}

    def total(*microbatches: int) -> np.ndarray:
        return np.sum([net.grads(r, shapes, batches[m][r])["b.weight"] for m in microbatches for r in range(4)], axis=0)

    world.run(first_two, net, batches[:2])
    assert (
        world.full_grads() == {} and unit.buckets[0].partials is not None and unit.buckets[0].under_way == {"b.weight"}
    )
    for expected in (total(0, 1, 2), total(0, 1, 2) + total(2)):
        for rank in range(4):
            net.start(rank, batches[2][rank])
        unit.compute("backward", lambda rank, params: net.backward("b", rank, params))
        unit.reshard()
        world.reduce("b")
        assert list(world.full_grads()) == ["b.weight"]
        assert world.full_grads()["b.weight"].tobytes() == (expected / 4).tobytes()
    world.run(first_two, net, batches[:2])
    world.reset()
    assert_home(world)


# Gradients that are missing, frozen, shared


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("mesh", [MeshSpec(3), MeshSpec(2, 2), MeshSpec(1, 2), MeshSpec(1)])
@pytest.mark.parametrize("api", Api)
def test_R29_an_unused_parameter_gets_zeros_or_none_and_adamw_decays_it_or_does_not(api, mesh, kind):
    case = replace(PLAIN, kind=kind, mesh=mesh, api=api, strategy=Strategy.FULL_SHARD)
    optimizer = AdamW(lr=0.25, weight_decay=0.5)
    world, plan = case.world(optimizer), case.plan(case.units())
    before = LAYERS.initial(0)
    unit_b = {"b.weight", "b.bias"}
    net = Integers(before, "float64", unused={None: {"a.bias", *unit_b}})
    world.run([event for event in plan if event.kind != STEP], net, integer_batches(case, 0))
    if mesh.world_size == 1:
        world.reduce("a")
    grads = world.full_grads()
    assert ("a.bias" in grads) == (api is Api.FSDP1) and not unit_b & set(grads)
    assert set(map(type, world.units["b"].buckets[0].sharded_grads)) == {type(None)}
    world.step()
    after = world.full_params()
    for name in unit_b:
        assert after[name].tobytes() == before[name].tobytes()
    expected = before["a.bias"] * (1 - 0.25 * 0.5) if api is Api.FSDP1 else before["a.bias"]
    assert after["a.bias"].tobytes() == expected.tobytes()
    assert (after["a.weight"] != before["a.weight"]).any()


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize("kind", MAKE)
def test_R29_ranks_that_leave_different_parameters_unused_count_as_zeros_there(kind, api):
    case = replace(PLAIN, kind=kind, api=api)
    world, plan = case.world(SGD()), case.plan(case.units())
    net = Integers(LAYERS.initial(0), "float64", unused={0: {"a.weight"}, 1: {"a.bias"}})
    batches = integer_batches(case, 0)
    world.run(plan[:-1], net, batches)
    shapes = {name: value.shape for name, value in LAYERS.initial(0).items()}
    each = [net.grads(rank, shapes, batches[0][rank]) for rank in range(3)]
    for name, grad in world.full_grads().items():
        expected = np.sum([grads[name] for grads in each if name in grads], axis=0) / 3
        assert grad.tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize("kind", [kind for kind in MAKE if kind != "one flat parameter"])
def test_R11_R29_a_frozen_parameter_has_no_gradient_and_never_changes(kind, api):
    specs = {
        name: tuple(replace(spec, requires_grad=not spec.name.endswith("bias") and name != "b") for spec in of_unit)
        for name, of_unit in LAYERS.specs().items()
    }
    case = replace(PLAIN, kind=kind, api=api)
    world, plan = case.world(AdamW(weight_decay=0.5), specs=specs), case.plan(case.units(specs))
    before = LAYERS.initial(0)
    world.run(plan[:-1], Integers(before, "float64"), integer_batches(case, 0))
    trained = {spec.name for of_unit in specs.values() for spec in of_unit if spec.requires_grad}
    assert set(world.full_grads()) == trained == {"a.0.weight", "a.weight", "weight"}
    world.step()
    for name, value in world.full_params().items():
        assert (value.tobytes() == before[name].tobytes()) == (name not in trained)


class Tied:
    """One matrix used twice: y = w (w x), and loss 0.5 |y|^2."""

    def start(self, rank, batch):
        self.x = getattr(self, "x", {}) | {rank: batch[0]}

    def forward(self, unit, rank, params):
        (w,) = params.values()
        self.hidden = getattr(self, "hidden", {}) | {rank: w @ self.x[rank]}

    def loss(self, rank):
        return 0.0

    def backward(self, unit, rank, params):
        (w,) = params.values()
        outer = w @ self.hidden[rank]
        return {"w": np.outer(outer, self.hidden[rank]) + np.outer(w.T @ outer, self.x[rank])}


@pytest.mark.parametrize("kind", MAKE)
def test_R31_a_shared_parameter_gets_the_sum_of_its_uses_once(kind):
    params = {"w": np.array([[1.0, 2.0, 0.0], [0.0, 1.0, -1.0], [2.0, 0.0, 1.0]])}
    specs = {"": (ParamSpec("w", (3, 3), "float64", aliases=("head.w",)),)}
    case = replace(PLAIN, kind=kind, mesh=MeshSpec(4))
    world = case.world(SGD(lr=0.5), params, specs)
    inputs = [np.array([1.0, r, 2.0]) for r in range(4)]
    world.run(case.plan(case.units(specs)), Tied(), [[(x, x) for x in inputs]])

    def loss(w):
        return sum(0.5 * np.sum((w @ (w @ x)) ** 2) for x in inputs) / 4

    # The loss is of degree 4 in w: the difference at steps h and 2 h, combined, is exact but for rounding.
    grad, h = np.zeros((3, 3)), 0.5
    for at in np.ndindex(3, 3):
        e = np.zeros((3, 3))
        e[at] = h
        w = params["w"]
        grad[at] = (8 * (loss(w + e) - loss(w - e)) - (loss(w + 2 * e) - loss(w - 2 * e))) / (12 * h)
    assert list(world.full_params()) == ["w"]
    assert np.allclose(world.full_params()["w"], params["w"] - 0.5 * grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, np.inf])
def test_R30_clipping_counts_each_element_once_on_any_mesh(norm_type, api):
    for mesh in (MeshSpec(4), MeshSpec(2, 2), MeshSpec(1, 3), MeshSpec(3, 2)):
        for kind in MAKE:
            case = replace(PLAIN, kind=kind, mesh=mesh, api=api)
            world = case.world(SGD())
            world.run(case.plan(case.units())[:-1], Layers(UNITS, SIZES), layer_batches(mesh))
            for unit in world.units.values():  # what lies in padding is in no norm
                for rank, grad in enumerate(unit.buckets[0].sharded_grads):
                    for run in unit.buckets[0].layout.padding(mesh.coordinate(rank)[1]):
                        assert grad is not None
                        grad[run.start : run.stop] = np.nan
            before = world.full_grads()
            line = np.concatenate([grad.reshape(-1) for grad in before.values()])
            expected = float(np.linalg.norm(line, norm_type))
            # A sum over 76 elements, a root and a quotient: fewer than 100 roundings.
            assert abs(world.clip_grad_norm(expected / 2, norm_type) / expected - 1) < 100 * 2**-53
            for name, grad in world.full_grads().items():
                scaled = before[name] * (expected / 2 / (expected + 1e-6))
                assert np.allclose(grad, scaled, rtol=100 * 2**-53, atol=0)
            kept = world.full_grads()
            world.clip_grad_norm(expected, norm_type)
            assert all(world.full_grads()[name].tobytes() == kept[name].tobytes() for name in kept)


# Exceptions, and what is refused


@pytest.mark.parametrize("policy", ["as stored", "mixed"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("unit", UNITS)
def test_R17_after_an_exception_every_unit_is_at_its_shards_and_the_next_step_is_right(unit, phase, policy):
    for case in sample(30, seed=8, policy=policy, dtype="float32")[::6]:
        for rank in (0, case.mesh.world_size - 1):
            optimizer = SGD(lr=0.5, momentum=0.5)
            failed, right = case.world(optimizer), case.world(optimizer)
            plan, params = case.plan(case.units()), LAYERS.initial(0, "float32")
            dtype = POLICIES[policy].param_dtype or case.dtype
            with pytest.raises(KeyboardInterrupt):
                failed.run(plan, Integers(params, dtype, fail_at=(unit, phase, rank)), integer_batches(case, 0))
            for live in failed.units.values():
                assert set(live.states) == {UnitState()}, case
                for bucket in live.buckets:
                    assert set(map(type, bucket.full + bucket.parts + bucket.sharded_grads)) == {type(None)}
                    assert not any(bucket.grads) and bucket.partials is None and not any(bucket.reached)
            for world in (failed, right):
                world.run(plan, Integers(params, dtype), integer_batches(case, 1))
            for name, value in right.full_params().items():
                assert value.tobytes() == failed.full_params()[name].tobytes(), (case, name)


def test_R18_a_step_inside_a_summon_is_refused_and_the_summon_stays():
    world, plan = PLAIN.world(SGD()), PLAIN.plan(PLAIN.units())
    with world.summon_full_params():
        for rank in range(3):
            world.units["a"].edit(rank, "a.bias", np.full(4, 7.0))
        for refused in (lambda: world.run(plan, Layers(UNITS, SIZES), layer_batches(PLAIN.mesh)), world.step):
            with pytest.raises(StateError, match=r"unit 'a\.0': cannot"):
                refused()
        with pytest.raises(StateError, match=r"unit 'b': cannot reshard .*leave summon_full_params"):
            world.units["b"].reshard()
        assert world.summoned and (world.units["a"].shown(0)["a.bias"] == 7).all()
    assert not world.summoned and (world.full_params()["a.bias"] == 7).all()


def test_R18_a_step_is_refused_by_all_units_where_one_of_them_is_summoned():
    world, plan = PLAIN.world(SGD()), PLAIN.plan(PLAIN.units())
    world.run(plan[:-1], Layers(UNITS, SIZES), layer_batches(PLAIN.mesh))
    grads = world.full_grads()
    with world.summon_full_params(names=["b"]), pytest.raises(StateError, match="unit 'b': cannot edit the shards"):
        world.step()
    assert {name: grad.tobytes() for name, grad in world.full_grads().items()} == {
        k: v.tobytes() for k, v in grads.items()
    }
    assert all(value.tobytes() == LAYERS.initial(0)[name].tobytes() for name, value in world.full_params().items())


def test_R17_a_reset_inside_a_summon_ends_it():
    world = PLAIN.world(SGD())
    with world.summon_full_params():
        world.units["a"].edit(0, "a.bias", np.full(4, 7.0))
        world.reset()
    assert_home(world)
    assert all(value.tobytes() == LAYERS.initial(0)[name].tobytes() for name, value in world.full_params().items())


def test_a_model_whose_root_has_no_parameters_trains():
    net = Layers(("a", "b"), (SIZES[0], 4, SIZES[-1]))
    units = PLAIN.units(net.specs())
    world = World(units, PLAIN.mesh, net.initial(0), optimizer=SGD(lr=0.1))
    first, second = (world.run(PLAIN.plan(units), net, layer_batches(PLAIN.mesh)) for _ in range(2))
    assert (second < first).all()


def test_a_world_without_an_optimizer_takes_the_steps_of_sgd():
    params = []
    for optimizer in (None, SGD()):
        world = World(units := PLAIN.units(), PLAIN.mesh, LAYERS.initial(0), optimizer=optimizer)
        world.run(PLAIN.plan(units), Layers(UNITS, SIZES), layer_batches(PLAIN.mesh))
        params.append(world.full_params())
    assert all(value.tobytes() == params[1][name].tobytes() for name, value in params[0].items())
    assert any(value.tobytes() != LAYERS.initial(0)[name].tobytes() for name, value in params[0].items())


def test_a_plan_or_batches_that_do_not_fit_the_world_are_refused_before_anything_happens():
    world, plan = PLAIN.world(SGD()), PLAIN.plan(PLAIN.units())
    batches, net = layer_batches(PLAIN.mesh), Layers(UNITS, SIZES)
    for refused, message in (
        ((plan, net, batches * 2), "batches of 1 microbatches for 3 ranks, got those of 2"),
        ((plan, net, [batches[0][:2]]), r"for 3 ranks, got those of 1 for \[2\]"),
        (([], net, batches), "at least one event, got none"),
        (
            ([replace(plan[0], unit="c")], net, batches),
            r"a unit 'c': expected those of the world, \['a.0', 'a', 'b', ''\]",
        ),
    ):
        with pytest.raises(PlanError, match=message):
            world.run(*refused)
    assert_home(world)
    with pytest.raises(ParamError, match=r"expected shape .* got nothing"):
        PLAIN.world(SGD(), {})
    with pytest.raises(MeshError, match="over 3 ranks, the mesh shards over 2"):
        World(PLAIN.units(), MeshSpec(2), LAYERS.initial(0))
    for names in (["c"], ["a", "a"], "a"):
        with pytest.raises(UnitError, match="names of units out of"), world.summon_full_params(names=names):
            pass
    assert not world.summoned


@pytest.mark.parametrize("kind", MAKE)
def test_a_gradient_of_a_wrong_shape_or_of_no_parameter_is_refused(kind):
    """Also where it would fit: a row is broadcast to a matrix that waits."""
    case = replace(PLAIN, kind=kind, microbatches=2, sync=Sync.LAST)

    class Wrong(Layers):
        def backward(self, unit, rank, params):
            grads = super().backward(unit, rank, params)
            waits = bool(world.units["b"].buckets[0].grads[rank])
            return grads | {"b.weight": grads["b.weight"][:1]} if unit == "b" and waits else grads

    class Unknown(Layers):
        def backward(self, unit, rank, params):
            return super().backward(unit, rank, params) | {"c": np.zeros(1)}

    for net, message in (
        (Wrong(UNITS, SIZES), r"'b.weight': expected shape \(5, 4\), got \(1, 4\) on rank 0"),
        (Unknown(UNITS, SIZES), r"unit '': expected gradients of \['weight', 'bias'\], got one of 'c'"),
    ):
        world = case.world(SGD())
        with pytest.raises(ParamError, match=message):
            world.run(case.plan(case.units()), net, layer_batches(case.mesh, microbatches=2))
        assert_home(world)


def test_R11_a_unit_of_two_dtypes_trains_each_in_its_own():
    specs = {"": (ParamSpec("w", (5, 2), "float32"),), "2": (ParamSpec("v", (3,), "bfloat16"),)}
    layouts = [("", MAKE["per parameter"](params, 3)) for params in specs.values()]
    params = {"w": np.ones((5, 2), np.float32), "v": np.ones(3, numpy_dtype("bfloat16"))}
    units = plan_units(layouts, api=Api.FSDP2)
    case = replace(PLAIN, api=Api.FSDP2)
    world = World(units, MeshSpec(3), params, optimizer=SGD(lr=0.5))
    seen: Sequence[set] = (set(), set())

    class Two(Integers):
        def _look(self, phase, unit, rank, params):
            seen[phase == "backward"].update((name, value.dtype.name) for name, value in params.items())

    net = Two(params, "float32")
    batches = integer_batches(case, 0)
    world.run(case.plan(units), net, batches)
    assert seen[0] == seen[1] == {("w", "float32"), ("v", "bfloat16")}
    each = [net.grads(r, {"w": (5, 2), "v": (3,)}, batches[0][r]) for r in range(3)]
    for name, value in world.full_params().items():
        expected = params[name] - 0.5 * np.sum([g[name] for g in each], axis=0) / 3
        assert value.dtype == params[name].dtype and (value.astype(float) == expected.astype(float)).all()


def test_the_cases_are_many():
    assert len(CASES) > 5000


def test_a_plan_of_another_mesh_is_refused():
    case = replace(PLAIN, mesh=MeshSpec(4))
    other = replace(PLAIN, mesh=MeshSpec(2))
    for mesh in (MeshSpec(2), MeshSpec(2, 2), MeshSpec(1, 4)):
        world = replace(PLAIN, mesh=mesh).world(SGD())
        with pytest.raises(PlanError, match="made for another mesh: expected MeshSpec"):
            world.run(case.plan(case.units()), Layers(UNITS, SIZES), [])
    with pytest.raises(PlanError, match="made for another mesh"):
        case.world(SGD()).run(other.plan(other.units()), Layers(UNITS, SIZES), [])
    world, plan = PLAIN.world(SGD()), list(PLAIN.plan(PLAIN.units()))
    at = next(i for i, event in enumerate(plan) if event.kind == "compute")
    plan[at] = replace(plan[at], group=(0, 1, 3))  # ranks 0, 1 and 2 are there
    with pytest.raises(PlanError, match=r"expected MeshSpec.* got a compute over ranks \(0, 1, 3\)"):
        world.run(plan, Layers(UNITS, SIZES), layer_batches(PLAIN.mesh))


def test_R33_gradients_that_are_kept_low_are_rounded_after_their_sum():
    precision = resolve_precision("float32", "bfloat16", "float32", keep_low_precision_grads=True)
    mesh, weight = MeshSpec(2), {"w": np.zeros(2, "float32")}
    planned = PlannedBucket(FlatLayout((ParamSpec("w", (2,)),), 2, keep_original=False), precision)
    bucket = bucket_module.LiveBucket(planned, mesh, weight, Api.FSDP1, fill=True)
    found = []
    for own in (
        (1.0, 1.0),
        (2.0**-7, 2.0**-19),
    ):  # the mean of the second alone rounds to 2**-8, by which 1 does not grow
        for rank, value in enumerate(own):
            bucket.add_grads(rank, {"w": np.full(2, value)})
        bucket.reduce(reduction_steps(mesh, Api.FSDP1), None)
        grad = bucket.sharded_grads[0]
        assert grad is not None and grad.dtype == numpy_dtype("bfloat16")
        found.append(float(grad[0]))
    assert found == [1.0, 1 + 2.0**-7]
