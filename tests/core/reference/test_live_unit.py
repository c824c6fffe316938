"""Full parameters for the user in numpy (R18-R25): the scenarios that the project set out from, by their names.

numpy has no modules and no devices. So `named_parameters` is `World.full_params` and what units show, in the plan's order;
buffers do not exist, and the nearest is that nothing but parameters is shown; and `offload_to_cpu` changes what is refused and
warned of, and no memory, since all of it is the CPU's.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from crossframe.api import Api
from crossframe.dtypes import numpy_dtype
from crossframe.errors import ParamError, PlanError, StateError, UnsupportedError
from crossframe.layout import FlatLayout
from crossframe.lifecycle import Exposure, Residency, UnitState
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.plan import Prefetch, Strategy, Sync, plan_units
from crossframe.reference import live_unit as live_module
from crossframe.reference.net import Layers
from crossframe.reference.optim import SGD
from crossframe.reference.world import World
from crossframe.unshard import ExitStep, UnshardRequest
from tests.core.helpers.small_worlds import MAKE
from tests.core.helpers.training_worlds import (
    LAYERS,
    POLICIES,
    SIZES,
    UNITS,
    Case,
    Integers,
    integer_batches,
    layer_batches,
)

BASE = Case("flat", MeshSpec(3), Api.FSDP1, Strategy.FULL_SHARD, None, Sync.EACH, 1, Prefetch.BACKWARD_PRE, 0)
KEPT = [kind for kind in MAKE if kind != "one flat parameter"]
SHARDED = (MeshSpec(3), MeshSpec(2, 2))
UNSHARDED = (MeshSpec(1), MeshSpec(1, 3))
REQUESTS = [UnshardRequest(*flags) for flags in product([False, True], repeat=3)]


def legal(request: UnshardRequest, mesh: MeshSpec) -> bool:
    return not (request.writeback and request.rank0_only) and (mesh.shard > 1 or not request.offload_to_cpu)


def cases(meshes) -> list[Case]:
    return [
        replace(BASE, kind=kind, mesh=mesh, policy=policy, dtype="float32")
        for kind, mesh, policy in product(MAKE, meshes, ("as stored", "mixed"))
    ]


def initial() -> dict[str, np.ndarray]:
    return LAYERS.initial(0, "float32")


def own_values(world: World, rank: int, name: str, value: float) -> np.ndarray:
    spec = next(s for u in world.units.values() for s in u.buckets[0].layout.params if s.name == name)
    return np.full(spec.shape, value + rank)


def owner_of(world: World, name: str) -> np.ndarray:
    """Which shard holds each element."""
    bucket = next(u.buckets[0] for u in world.units.values() if name in u.buckets[0].specs)
    found = np.full(bucket.specs[name].shape, -1)
    for index in range(world.mesh.shard):
        for piece in bucket.layout.pieces(index):
            for run in piece.runs() if piece.name == name else ():
                found.reshape(-1)[run.param_start : run.param_start + run.numel] = index
    return found


def check_writeback(meshes) -> None:
    for case, request in product(cases(meshes), REQUESTS):
        if not legal(request, case.mesh):
            continue
        world = case.world(SGD(lr=0.5))
        before = initial()
        with world.summon_full_params(request):
            for unit, rank in product(world.units.values(), range(case.mesh.world_size)):
                if request.visible(world.mesh.group_rank(rank)):
                    for name in unit.shown(rank):
                        unit.edit(rank, name, own_values(world, rank, name, 100))
        persists = request.writeback or case.mesh.shard == 1
        # Each rank's slice of its own edit, in every replica: different edits of ranks merge (R20).
        for unit in world.units.values():
            for rank, full in enumerate(unit.buckets[0].unit.unshard()):
                first = case.mesh.shard_group(rank)[0]
                for name, value in full.items():
                    if persists and request.visible(world.mesh.group_rank(rank)):
                        assert (value == 100 + first + owner_of(world, name)).all(), (case, request, rank, name)
                    else:
                        assert value.tobytes() == before[name].tobytes(), (case, request, rank, name)


def test_unshard_params_writeback():
    """R20: every legal combination of flags, ranks writing different values; without writeback nothing persists."""
    check_writeback(SHARDED)


def test_unshard_params_writeback_no_shard():
    """R20: where nothing is sharded what is shown is the truth, and every write persists, with writeback or without."""
    check_writeback(UNSHARDED)


def check_param_data(meshes) -> None:
    for case, request in product(cases(meshes), REQUESTS):
        if not legal(request, case.mesh):
            continue
        world = case.world(SGD())
        with world.summon_full_params(request):
            for unit, rank in product(world.units.values(), range(case.mesh.world_size)):
                shown = unit.shown(rank)
                if request.visible(world.mesh.group_rank(rank)):
                    assert list(shown) == [spec.name for spec in unit.buckets[0].layout.params]
                    for name, value in shown.items():  # full precision, original shape, bit for bit
                        assert value.dtype == np.float32 and value.shape == initial()[name].shape
                        assert value.tobytes() == initial()[name].tobytes(), (case, request, rank, name)
                else:
                    assert unit.buckets[0].full[rank] is None
                    assert all(value.ndim == 1 for value in shown.values())
        for unit in world.units.values():
            assert {state.exposure for state in unit.states} == {Exposure.SHARDED}


def test_unshard_params_param_data():
    """R19: full parameters in full precision, also under mixed precision, on every rank or on rank 0 alone."""
    check_param_data(SHARDED)


def test_unshard_params_param_data_no_shard():
    """R19: the same where nothing is sharded."""
    check_param_data(UNSHARDED)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_unshard_singleton_param_writeback(kind, ranks):
    """R20: one element is owned by one rank (under ragged sharding by the one whose shard holds it); what others write to it
    is lost."""
    layout = MAKE[kind]((ParamSpec("w", (1, 1)),), ranks)
    owner = [rank for rank in range(ranks) if layout.pieces(rank)]
    world = World(plan_units([("", layout)]), MeshSpec(ranks), {"w": np.zeros((1, 1), np.float32)})
    with world.summon_full_params():
        for rank in range(ranks):
            world.units[""].edit(rank, "w", np.full((1, 1), 5.0 + rank))
    assert len(owner) == 1 and world.full_params()["w"] == 5 + owner[0]
    with world.summon_full_params():
        for rank in set(range(ranks)) - set(owner):
            world.units[""].edit(rank, "w", np.full((1, 1), 9.0))
    assert world.full_params()["w"] == 5 + owner[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reshards", [True, False, 2])
def test_unshard_params_respects_reshard(reshards, policy):
    """R21: between forward and backward memory returns to what it was: full, the part in a reshard group, or the shard; the
    low-precision copy of mixed precision is freed."""
    for kind in MAKE:
        case = replace(
            BASE, kind=kind, mesh=MeshSpec(4), reshard_after_forward=reshards, policy=policy, dtype="float32"
        )
        for request, failed in product(REQUESTS, (False, True)):
            if not legal(request, case.mesh):
                continue
            world, plan = case.world(SGD()), case.plan(case.units())
            net = Integers(initial(), POLICIES[policy].param_dtype or "float32")
            forward = [event for event in plan if event.phase == "forward"]
            world.run(forward, net, integer_batches(case, 0))
            before = {True: Residency.SHARD, False: Residency.FULL, 2: Residency.RESHARD_GROUP}[reshards]
            for unit in world.units.values():
                assert {state.residency for state in unit.states} == {before}
            try:
                with world.summon_full_params(request):
                    for unit, rank in product(world.units.values(), range(4)):
                        if request.visible(world.mesh.group_rank(rank)):
                            assert unit.states[rank].residency is Residency.FULL
                    if failed:
                        raise KeyboardInterrupt
            except KeyboardInterrupt:
                pass
            freed = POLICIES[policy].param_dtype is not None or failed
            for unit in world.units.values():
                assert {state.residency for state in unit.states} == {Residency.SHARD if freed else before}
                for full, part in zip(unit.buckets[0].full, unit.buckets[0].parts, strict=True):
                    assert (full is not None) == (not freed and before is Residency.FULL)
                    assert (part is not None) == (not freed and before is Residency.RESHARD_GROUP)


def test_R21_a_kept_copy_holds_what_the_user_wrote_and_backward_computes_with_it():
    for kind, reshards in product(MAKE, (False, 2)):
        case = replace(BASE, kind=kind, mesh=MeshSpec(4), reshard_after_forward=reshards)
        world, plan = case.world(SGD()), case.plan(case.units())
        params = LAYERS.initial(0)
        net = Integers(params, "float64")
        world.run([event for event in plan if event.phase == "forward"], net, integer_batches(case, 0))
        with world.summon_full_params():
            for unit, rank in product(world.units.values(), range(4)):
                for name, value in unit.shown(rank).items():
                    unit.edit(rank, name, value + 1)
        for value in params.values():
            value += 1
        for unit in world.units.values():
            unit.compute(
                "backward", lambda rank, full, net=net, name=unit.name: net._look("backward", name, rank, full)
            )


@pytest.mark.parametrize("kind", MAKE)
def test_unshard_params_recurse(kind):
    """R19: a unit alone, and not those inside it. numpy has no modules: units are named."""
    world = replace(BASE, kind=kind).world(SGD())
    with world.summon_full_params(names=["a"]):
        shows = {name: unit.state.exposure for name, unit in world.units.items()}
        assert shows == {name: Exposure.SUMMONED if name == "a" else Exposure.SHARDED for name in UNITS}
        assert all(value.ndim == 1 for value in world.units["a.0"].shown(0).values())
        twice = pytest.raises(StateError, match=r"unit 'a': cannot unshard .*use the context that is open")  # R18
        with twice, world.summon_full_params():
            pass
        assert {name: unit.state.exposure for name, unit in world.units.items()} == shows
        with world.summon_full_params(names=["a.0", "b"]):
            assert world.units["b"].shown(1)["b.weight"].shape == (5, 4)
        assert world.units["a"].state.exposure is Exposure.SUMMONED
    with world.summon_full_params():
        assert {unit.state.exposure for unit in world.units.values()} == {Exposure.SUMMONED}


@pytest.mark.parametrize("kind", MAKE)
def test_named_parameters_and_buffers(kind):
    """R19: the names and shapes of the model that was sharded, in its order, each once. The reference has no buffers."""
    world = replace(BASE, kind=kind).world(SGD())
    expected = [(spec.name, spec.shape) for specs in LAYERS.specs().values() for spec in specs]
    with world.summon_full_params():
        for rank in range(3):
            shown = [(k, v.shape) for unit in world.units.values() for k, v in unit.shown(rank).items()]
            assert shown == expected
    assert [(k, v.shape) for k, v in world.full_params().items()] == expected


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("mesh", [*SHARDED, MeshSpec(1, 3)])
def test_with_grads_core(kind, mesh):
    """R22: the full gradients are the mean over ranks; edits persist slice by slice with writeback, and else only where the
    gradients are not sharded; rank 0 alone sees them where it alone sees parameters."""
    for policy, writeback, rank0_only in product(("as stored", "mixed"), (True, False), (True, False)):
        if writeback and rank0_only:
            continue
        case = replace(BASE, kind=kind, mesh=mesh, policy=policy, dtype="float32")
        world, plan = case.world(SGD()), case.plan(case.units())
        net, batches = Integers(initial(), POLICIES[policy].param_dtype or "float32"), integer_batches(case, 0)
        world.run(plan[:-1], net, batches)
        shapes = {name: value.shape for name, value in initial().items()}
        each = [net.grads(rank, shapes, batches[0][rank]) for rank in range(mesh.world_size)]
        mean = {name: np.sum([g[name] for g in each], axis=0) / mesh.world_size for name in shapes}
        request = UnshardRequest(writeback=writeback, rank0_only=rank0_only, with_grads=True)
        with world.summon_full_params(request):
            for unit, rank in product(world.units.values(), range(mesh.world_size)):
                shown = unit.grads_shown(rank)
                assert list(shown) == (
                    list(unit.buckets[0].specs) if request.visible(world.mesh.group_rank(rank)) else []
                )
                for name, grad in shown.items():
                    assert grad.dtype == np.float32 and (grad == mean[name]).all()
                    unit.edit_grad(rank, name, own_values(world, rank, name, 7))
        grads, params = world.full_grads(), world.full_params()
        for name, value in mean.items():
            persists = writeback or mesh.shard == 1
            assert (grads[name] == (7 + owner_of(world, name) if persists else value)).all(), (policy, request, name)
            assert params[name].tobytes() == initial()[name].tobytes()
        for unit in world.units.values():
            assert set(map(type, unit.buckets[0].shown_grads)) == {type(None)}


@pytest.mark.parametrize("kind", KEPT)
def test_with_grads_none_grads(kind):
    """R22: none on all ranks shows none. None on some ranks counts as zeros there, and stays none there after exit."""
    for mesh in (*SHARDED, MeshSpec(1, 2)):
        case = replace(BASE, kind=kind, mesh=mesh)
        world, plan = case.world(SGD()), case.plan(case.units())
        with world.summon_full_params(UnshardRequest(with_grads=True)):
            assert not any(unit.grads_shown(rank) for unit in world.units.values() for rank in range(mesh.world_size))
            with pytest.raises(
                ParamError, match=r"gradient of parameter 'b.bias': rank 0 shows nothing .*with_grads=True"
            ):
                world.units["b"].edit_grad(0, "b.bias", np.zeros(5))
        world.run(plan[:-1], Integers(LAYERS.initial(0), "float64"), integer_batches(case, 0))
        full = world.full_grads()
        unit = world.units["b"]
        unit.zero_grad([0])
        last = mesh.world_size - 1
        with world.summon_full_params(UnshardRequest(with_grads=True)):
            for name, grad in unit.grads_shown(0).items():
                assert (grad == np.where(owner_of(world, name) == 0, 0, full[name])).all()
            for rank in range(mesh.world_size):
                unit.edit_grad(rank, "b.weight", np.full((5, 4), 3.0))
        assert unit.buckets[0].sharded_grads[0] is None and unit.buckets[0].sharded_grads[last] is not None
        before = unit.buckets[0].unit.shards[0].copy()
        world.step()
        assert unit.buckets[0].unit.shards[0].tobytes() == before.tobytes()


@pytest.mark.parametrize("kind", MAKE)
def test_unshard_submodule(kind):
    """R19, R20: the units of a submodule are shown and written back, and no other unit's memory is touched."""
    world = replace(BASE, kind=kind).world(SGD())
    others = {name: [s.copy() for s in world.units[name].buckets[0].unit.shards] for name in ("b", "")}
    with world.summon_full_params(names=["a", "a.0"]):
        for name, rank in product(("a", "a.0"), range(3)):
            world.units[name].edit(rank, f"{name}.weight", own_values(world, 0, f"{name}.weight", 4))
        assert all(full is None for name in others for full in world.units[name].buckets[0].full)
    for name in ("a", "a.0"):
        assert (world.full_params()[f"{name}.weight"] == 4).all()
    for name, shards in others.items():
        for now, then in zip(world.units[name].buckets[0].unit.shards, shards, strict=True):
            assert now.tobytes() == then.tobytes()


def raises_from(phase: str) -> None:
    refused = []

    class Summons(Layers):
        def forward(self, unit, rank, params):
            self.ask("forward", unit, rank)
            super().forward(unit, rank, params)

        def backward(self, unit, rank, params):
            self.ask("backward", unit, rank)
            return super().backward(unit, rank, params)

        def ask(self, now, unit, rank):
            if now == phase and rank == 0:
                for names in (None, ["b"], [unit]):
                    with pytest.raises(StateError) as error, world.summon_full_params(names=names):
                        pass
                    refused.append((unit, str(error.value)))

    for kind in MAKE:
        case = replace(BASE, kind=kind)
        world, right = case.world(SGD()), case.world(SGD())
        for of, net in ((world, Summons(UNITS, SIZES)), (right, Layers(UNITS, SIZES))):
            of.run(case.plan(case.units()), net, layer_batches(case.mesh))
        # Refused without a trace: the step is what it would have been.
        assert all(value.tobytes() == right.full_params()[k].tobytes() for k, value in world.full_params().items())
    assert len(refused) == 3 * len(UNITS) * len(MAKE)
    for unit, message in refused:
        assert message.startswith(f"unit {unit!r}: cannot unshard the parameters for the user while memory holds")
        assert message.endswith(f": not during {phase}; wait until it is over")


def test_unshard_params_from_forward_raises():
    """R18: from any unit's forward, for any units; the message says which unit is in its forward."""
    raises_from("forward")


def test_unshard_params_from_backward_raises():
    """R18: from any unit's backward."""
    raises_from("backward")


@pytest.mark.parametrize("mesh", [*SHARDED, *UNSHARDED])
def test_rank0_only_with_writeback_raises(mesh):
    """R23, and nothing is touched."""
    world = replace(BASE, mesh=mesh).world(SGD())
    refused = pytest.raises(NotImplementedError, match="writeback=True with rank0_only=True")
    with refused, world.summon_full_params(UnshardRequest(rank0_only=True)):
        pass
    assert {state for unit in world.units.values() for state in unit.states} == {UnitState()}


@pytest.mark.parametrize("mesh", UNSHARDED)
def test_offload_to_cpu_no_shard_raises(mesh):
    """R23: with every other flag; where something is sharded it is granted, and warns unless rank 0 alone is shown."""
    for request in REQUESTS:
        for where, refused in ((mesh, True), (MeshSpec(3), False)):
            world = replace(BASE, mesh=where).world(SGD())
            if request.offload_to_cpu and refused:
                with pytest.raises(UnsupportedError), world.summon_full_params(request):
                    pass
                assert not world.summoned
        assert (request.warning is not None) == (request.offload_to_cpu and not request.rank0_only)


def test_R23_with_grads_is_refused_with_offload_and_without_original_parameters():
    grads = UnshardRequest(with_grads=True)
    with pytest.raises(UnsupportedError, match="without original parameters"):
        replace(BASE, kind="one flat parameter").world(SGD()).summon_full_params(grads).__enter__()
    for kind in KEPT:
        with pytest.raises(UnsupportedError, match="offload_to_cpu=True"):
            offloaded = replace(grads, offload_to_cpu=True)
            replace(BASE, kind=kind).world(SGD()).summon_full_params(offloaded).__enter__()


@pytest.mark.parametrize("failed", [False, True])
def test_R24_what_ends_a_summon_ends_it_in_order(monkeypatch, failed):
    """Each step of every unit is taken in the order of ExitStep, also when the user's code raises; each sees the memory
    that the one before left."""
    taken = []
    take = live_module.LiveBucket.exit

    def exit_bucket(bucket, step):
        taken.append((step, bucket.full[0] is not None, bucket.shown_grads[0] is not None))
        take(bucket, step)

    monkeypatch.setattr(live_module.LiveBucket, "exit", exit_bucket)
    world, plan = BASE.world(SGD()), BASE.plan(BASE.units())
    world.run(plan[:-1], Integers(LAYERS.initial(0), "float64"), integer_batches(BASE, 0))
    try:
        with world.summon_full_params(UnshardRequest(with_grads=True), names=["b"]):
            for rank in range(3):
                world.units["b"].edit(rank, "b.bias", np.full(5, 2.0))
            if failed:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert taken == [
        (ExitStep.WRITEBACK, True, True),
        (ExitStep.RESHARD, True, True),
        (ExitStep.RESHARD_GRADS, False, True),
    ]
    assert (world.full_params()["b.bias"] == 2).all()
    taken.clear()
    with world.summon_full_params(UnshardRequest(writeback=False, offload_to_cpu=True), names=["b"]):
        pass
    assert [step for step, *_ in taken] == [ExitStep.BACK_FROM_CPU, ExitStep.RESHARD]


def test_R20_an_edit_in_mixed_precision_keeps_every_bit_of_full_precision():
    case = replace(BASE, policy="mixed", dtype="float32")
    world = case.world(SGD())
    fine = np.full(5, 1 + 2.0**-20, np.float32)  # no bfloat16
    world.units["b"].unshard()
    with world.summon_full_params(names=["b"]):
        for rank in range(3):
            world.units["b"].edit(rank, "b.bias", fine)
    assert world.full_params()["b.bias"].tobytes() == fine.tobytes()


def test_R21_a_unit_of_which_one_bucket_is_mixed_is_freed():
    low, high = ParamSpec("low", (4,), "bfloat16"), ParamSpec("high", (4,), "float32")
    layouts = [("", MAKE["per parameter"]((spec,), 2)) for spec in (low, high)]
    units = plan_units(layouts, api=Api.FSDP2, reshard_after_forward=False, policy=POLICIES["mixed"])
    params = {spec.name: np.ones(4, numpy_dtype(spec.dtype)) for spec in (low, high)}
    world = World(units, MeshSpec(2), params)
    world.units[""].gather()
    with world.summon_full_params():
        assert {v.dtype.name for v in world.units[""].shown(1).values()} == {"bfloat16", "float32"}
    assert world.units[""].state.residency is Residency.SHARD


def test_R12_an_edit_of_the_shards_between_forward_and_backward_is_seen_by_backward():
    for kind, reshards in product(MAKE, (False, True, 2)):
        case = replace(BASE, kind=kind, mesh=MeshSpec(4), reshard_after_forward=reshards)
        world = case.world(SGD())
        unit = world.units["b"]
        unit.compute("forward", lambda rank, params: None)
        unit.after_forward()
        for rank in range(4):
            for name, piece in unit.shown(rank).items():
                unit.edit(rank, name, np.full(piece.shape, 3.0))

        def look(rank, params):
            assert all((value == 3).all() for value in params.values())

        unit.compute("backward", look)


def test_R25_values_of_another_shape_and_unknown_names_are_refused_and_a_unit_without_a_group_keeps_none():
    unit = BASE.world(SGD()).units["b"]
    for name, shape, shows in (("b.weight", (5, 4), r"shape \(\d+,\)"), ("c", (1,), "nothing")):
        with pytest.raises(
            ParamError, match=rf"unit 'b', parameter '{name}': rank 0 shows {shows}.*; unshard or summon"
        ):
            unit.edit(0, name, np.zeros(shape))
    unit.unshard()
    with pytest.raises(
        PlanError, match=r"unit 'b': expected the size of a reshard group, .*plan the unit with a number"
    ):
        unit.reshard_to_group()
    assert unit.state.exposure is Exposure.FULL
    with pytest.raises(StateError, match="there is no unsharding to end"):
        unit.dismiss()


def test_a_collection_starts_with_any_gradient_even_none():
    layout = FlatLayout((ParamSpec("a", (2,), "bfloat16"), ParamSpec("b", (2,), "bfloat16")), 1, True)
    world = World(plan_units([("", layout)]), MeshSpec(1), {name: np.zeros(2) for name in "ab"})
    grads: dict[str, Any] = {"a": None, "b": np.ones(2, np.float32)}
    (buffer,) = world.units[""].buckets[0].unit.collect([grads])
    assert buffer.dtype == np.float32
