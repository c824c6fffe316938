"""Full parameters for the user (R18-R24) in JAX: the scenarios that the project set out from, by their names.

JAX has no modules of its own and one process for many ranks. What ranks write differently is an array with another value on
each device; what offload shows is one numpy array for all ranks of the process. Each scenario runs under every layout, on a plain
and on a hybrid mesh, and in mixed precision, whose low precision must never be seen.
"""

import functools
import gc
import os
import weakref
from dataclasses import asdict
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from crossframe import MeshSpec
from crossframe.errors import StateError, UnitError, UnsupportedError
from crossframe.param_map import MapEntry, ParamMap
from crossframe.precision import PrecisionPolicy
from crossframe.strategy import Strategy
from crossframe.unshard import UnshardRequest
from jax_backend import make_mesh, pieces_of, shard, shards_of, summon_full_params, trace_of, unshard, value_and_grad
from jax_backend.nnx import ShardedModule
from tests.conftest import EXHAUSTIVE
from tests.on_jax.helpers.nnx_model import Net, net_map

KINDS = {
    "flat": {"layout": "flat"},
    "one flat parameter": {"layout": "flat", "keep_original": False},
    "per_param": {"layout": "per_param"},
    "ragged": {"layout": "ragged"},
}
KEPT = [kind for kind in KINDS if kind != "one flat parameter"]
SHARDED = (MeshSpec(2), MeshSpec(shard=2, replicate=2))
UNSHARDED = (MeshSpec(1), MeshSpec(shard=1, replicate=2))
REQUESTS = [UnshardRequest(*flags) for flags in product([True, False], repeat=3)]
UNITS = ("blocks.0", "blocks.0.norm")
SHAPES = {
    "blocks.0.down": (5, 3),
    "blocks.0.norm.scale": (5,),
    "blocks.0.up": (3, 5),
    "head.bias": (3,),
    "head.kernel": (3, 3),
}
UNIT_OF = {name: max((unit for unit in ("", *UNITS) if name.startswith(unit)), key=len) for name in SHAPES}


def legal(request, spec):
    return not (request.writeback and request.rank0_only) and (spec.shard > 1 or not request.offload_to_cpu)


def plain():
    rng = np.random.default_rng(0)
    made = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    block = {"down": made["blocks.0.down"], "up": made["blocks.0.up"], "norm": {"scale": made["blocks.0.norm.scale"]}}
    return {"blocks": [block], "head": {"bias": made["head.bias"], "kernel": made["head.kernel"]}}


def param_map():
    """Kernels stand transposed to torch's, and in torch's order."""
    entries = [MapEntry("head.weight", "head.kernel", "i o -> o i"), MapEntry("head.bias", "head.bias")]
    entries += [MapEntry(f"blocks.0.{name}.weight", f"blocks.0.{name}", "i o -> o i") for name in ("up", "down")]
    return ParamMap((*entries, MapEntry("blocks.0.norm.weight", "blocks.0.norm.scale")))


@functools.cache
def sharded_of(kind, spec, mixed=True, units=UNITS):
    policy = PrecisionPolicy("bfloat16", reduce_dtype="float32") if mixed else None
    return shard(plain(), make_mesh(spec), units=units, param_map=param_map(), mp_policy=policy, **KINDS[kind])


def cases(meshes, kinds=KINDS):
    return [pytest.param(kind, spec, id=f"{kind}-{spec.replicate}x{spec.shard}") for kind in kinds for spec in meshes]


def by_path(tree):
    """All leaves, None among them."""
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def same(a, b):
    """Equal bit for bit, in dtype and structure."""
    a, b = by_path(a), by_path(b)
    assert list(a) == list(b)
    for path, leaf in a.items():
        left, right = np.asarray(leaf), np.asarray(b[path])
        assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes()), path


def own_values(mesh, shape, dtype, value):
    """An array in which rank r has `value + r` everywhere."""
    parts = [jax.device_put(np.full(shape, value + r, dtype), device) for r, device in enumerate(mesh.devices.flat)]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, P()), parts)


def overwrite(tree, mesh, value):
    """Every rank writes its own number into all that is shown."""
    return jax.tree.map(lambda leaf: own_values(mesh, leaf.shape, leaf.dtype, value), tree)


def visible(request, spec):
    return [rank for rank in range(spec.world_size) if request.visible(spec.group_rank(rank))]


def check_pieces(found, before, spec, value, units, ranks):
    """On these ranks the pieces of these units are `value + rank`, or the one of a list; all else is as before."""
    for rank in range(spec.world_size):
        now, then = pieces_of(found, rank), pieces_of(before, rank)
        assert list(now) == list(then)
        for name, piece in now.items():
            wanted = then[name]
            if rank in ranks and found.tree.bucket_of[name].unit in units:
                wanted = np.full_like(piece, value + rank if isinstance(value, float) else value[0])
            assert piece.tobytes() == wanted.tobytes(), (rank, name)
        for name, line in shards_of(found, rank).items():
            for run in found.tree.layouts[name].padding(spec.coordinate(rank)[1]):
                assert not line[run.start : run.stop].any(), (rank, name)


# What persists


def check_writeback(kind, spec):
    sharded, mesh = sharded_of(kind, spec), make_mesh(spec)
    for request, recurse in product(REQUESTS, (True, False)):
        if not legal(request, spec):
            continue
        with summon_full_params(sharded, recurse=recurse, **asdict(request)) as summoned:
            if request.offload_to_cpu:
                for leaf in jax.tree.leaves(summoned.params):
                    leaf[...] = 50
            else:
                summoned.params = overwrite(summoned.params, mesh, 10.0)
        persists = request.writeback or spec.shard == 1
        ranks = visible(request, spec) if persists else []
        value = [50] if request.offload_to_cpu else 10.0
        check_pieces(summoned.sharded, sharded, spec, value, ("", *UNITS) if recurse else ("",), ranks)
        same(unshard(sharded), plain())
        assert persists or summoned.sharded is sharded


@pytest.mark.parametrize(("kind", "spec"), cases(SHARDED))
def test_unshard_params_writeback(kind, spec):
    """R20: each rank persists the slice that it owns, padding excluded, and without writeback nothing."""
    check_writeback(kind, spec)


@pytest.mark.parametrize(("kind", "spec"), cases(UNSHARDED, ("flat", "per_param")))
def test_unshard_params_writeback_no_shard(kind, spec):
    """R20: where nothing is sharded every write persists, with writeback or without, and of each rank that writes."""
    check_writeback(kind, spec)


@pytest.mark.parametrize(("kind", "spec"), cases((MeshSpec(3), SHARDED[1])))
def test_unshard_singleton_param_writeback(kind, spec):
    """R04, R20: one rank of a shard group owns the element; what the others write to it is lost."""
    mesh, place = make_mesh(spec), spec.coordinate
    sharded = shard({"w": np.zeros((1, 1), np.float32)}, mesh, **KINDS[kind])
    (owner,) = {place(rank)[1] for rank in range(spec.world_size) if pieces_of(sharded, rank).get("w", np.ones(0)).size}
    with summon_full_params(sharded) as summoned:
        summoned.params["w"] = own_values(mesh, (1, 1), np.float32, 5.0)
    written = summoned.sharded
    check_pieces(written, sharded, spec, 5.0, ("",), range(spec.world_size))
    with summon_full_params(written) as summoned:
        full = summoned.params["w"]
        for rank, part in enumerate(full.addressable_shards):
            assert float(part.data[0, 0]) == 5 + spec.shard_group(rank)[owner]
        owners = [spec.shard_group(rank)[owner] for rank in range(spec.world_size)]
        values = [np.full((1, 1), 5 + r if r in owners else 99, np.float32) for r in range(spec.world_size)]
        parts = [jax.device_put(*each) for each in zip(values, mesh.devices.flat, strict=True)]
        summoned.params["w"] = jax.make_array_from_single_device_arrays((1, 1), full.sharding, parts)
    check_pieces(summoned.sharded, written, spec, 0.0, (), ())


# What is shown


def check_param_data(kind, spec):
    sharded, mesh = sharded_of(kind, spec), make_mesh(spec)
    for request in REQUESTS:
        if not legal(request, spec):
            continue
        with summon_full_params(sharded, **asdict(request)) as summoned:
            same(summoned.params, plain())
            for leaf in jax.tree.leaves(summoned.params):
                if request.offload_to_cpu:
                    assert isinstance(leaf, np.ndarray) and leaf.flags.writeable
                else:
                    shown = {mesh.devices.flat[rank] for rank in visible(request, spec)}
                    assert leaf.sharding.device_set == shown and leaf.is_fully_replicated
        assert summoned.params is None and summoned.grads is None
        same(unshard(summoned.sharded), plain())


@pytest.mark.parametrize(("kind", "spec"), cases(SHARDED))
def test_unshard_params_param_data(kind, spec):
    """R19: full parameters in full precision, also under mixed precision, on every rank or on the first alone."""
    check_param_data(kind, spec)


@pytest.mark.parametrize(("kind", "spec"), cases(UNSHARDED, ("flat", "per_param")))
def test_unshard_params_param_data_no_shard(kind, spec):
    """R19: the same where nothing is sharded."""
    check_param_data(kind, spec)


def shown_units(summoned):
    """The units of which something is shown, and that of each it is all."""
    found = by_path(summoned.params)
    assert list(found) == list(SHAPES)
    units = {UNIT_OF[name] for name, leaf in found.items() if leaf is not None}
    assert all((leaf is not None) == (UNIT_OF[name] in units) for name, leaf in found.items())
    return units


@pytest.mark.parametrize(("kind", "spec"), cases(SHARDED[:1]))
def test_unshard_params_recurse(kind, spec):
    """R19: with `recurse=False` a unit alone, and not those inside it, which are None: a tree of JAX has no place for what a
    rank alone holds. Units may be summoned one inside another, none twice (R18)."""
    sharded = sharded_of(kind, spec)
    with summon_full_params(sharded) as everything:
        assert shown_units(everything) == {"", *UNITS}
    with summon_full_params(sharded, recurse=False) as root:
        assert shown_units(root) == {""}
        with summon_full_params(sharded, unit="blocks.0", recurse=False) as block:
            assert shown_units(block) == {"blocks.0"}
            for unit, names in (("blocks.0", "blocks.0"), ("blocks", "blocks.0"), ("", "")):
                with (
                    pytest.raises(StateError, match=rf"unit '{names}': cannot unshard .*use the context that is open"),
                    summon_full_params(sharded, unit=unit),
                ):
                    pass
        with summon_full_params(sharded, unit="blocks.0") as inner:
            assert shown_units(inner) == set(UNITS)
    with summon_full_params(sharded) as again:
        assert shown_units(again) == {"", *UNITS}


@pytest.mark.parametrize("kind", KINDS)
def test_named_parameters_and_buffers(kind):
    """R19: names, order and shapes are those of the tree before it was sharded. JAX's trees have no buffers: flax's modules have,
    and inside show what they showed."""
    with summon_full_params(sharded_of(kind, SHARDED[0])) as summoned:
        assert jax.tree.structure(summoned.params) == jax.tree.structure(plain())
        assert {name: leaf.shape for name, leaf in by_path(summoned.params).items()} == SHAPES


def test_named_parameters_and_buffers_of_a_module():
    from flax import nnx

    net = Net(nnx.Rngs(0))
    holder = ShardedModule(net, make_mesh(MeshSpec(2)), units=("blocks.0",), param_map=net_map())
    with summon_full_params(holder) as summoned:
        assert isinstance(summoned.module, Net) and summoned.params is None
        for kind in (nnx.Param, nnx.BatchStat):
            same(nnx.to_pure_dict(nnx.state(summoned.module, kind)), nnx.to_pure_dict(nnx.state(net, kind)))


@pytest.mark.parametrize(("kind", "spec"), cases(SHARDED[:1]))
def test_unshard_submodule(kind, spec):
    """R19, R20: only the units of a submodule are shown and written back: a unit, a module with units, a module without."""
    sharded, mesh = sharded_of(kind, spec), make_mesh(spec)
    for unit, recurse, units in (
        ("blocks.0", True, UNITS),
        ("blocks.0", False, UNITS[:1]),
        ("blocks", True, UNITS),
        ("blocks", False, ()),
        ("head", True, ()),
    ):
        with summon_full_params(sharded, unit=unit, recurse=recurse) as summoned:
            assert shown_units(summoned) == set(units)
            summoned.params = overwrite(summoned.params, mesh, 10.0)
        check_pieces(summoned.sharded, sharded, spec, 10.0, units, range(spec.world_size))
        for name, arrays in sharded.shards.items():
            assert (summoned.sharded.shards[name] is arrays) == (sharded.tree.by_name[name].unit not in units)
    with pytest.raises(UnitError, match="'nowhere' is not a module"), summon_full_params(sharded, unit="nowhere"):
        pass


# Memory


def loss_of(params, batch):
    block = params["blocks"][0]
    hidden = (batch @ block["up"] * block["norm"]["scale"]) @ block["down"]
    return jnp.mean((hidden @ params["head"]["kernel"] + params["head"]["bias"]).astype(jnp.float32) ** 2)


# A step is compiled for each; which layout is cut by rows or by elements is no matter to what is gathered again.
@pytest.mark.parametrize("kind", KEPT if os.environ.get(EXHAUSTIVE) else ["flat", "per_param"])
def test_unshard_params_respects_reshard(kind):
    """R21: JAX keeps nothing in memory from forward to backward that a user could come between. What is shown is free again after
    exit, an exception or not, and a step with the new shards gathers what it gathered before, in the strategy's way, without
    being compiled again, since the arrays lie as they lay."""
    sharded, mesh = sharded_of(kind, SHARDED[0], mixed=False), make_mesh(SHARDED[0])
    for fails in (False, True):
        held = []
        try:
            with summon_full_params(sharded) as summoned:
                held += [weakref.ref(leaf) for leaf in jax.tree.leaves(summoned.params)]
                summoned.params = jax.tree.map(lambda leaf: leaf + 1, summoned.params)
                held += [weakref.ref(leaf) for leaf in jax.tree.leaves(summoned.params)]
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        gc.collect()
        assert len(held) == 10 and not any(ref() is not None for ref in held)
    after, batch = summoned.sharded, np.ones((4, 3), np.float32)
    where = lambda tree: jax.tree.map(lambda a: (a.sharding, a.shape, a.dtype), tree)  # noqa: E731
    assert jax.tree.structure(after) == jax.tree.structure(sharded)
    assert where(after.shards) == where(sharded.shards)
    for strategy, gathers in ((Strategy.FULL_SHARD, 5), (Strategy.SHARD_GRAD_OP, 3)):
        step = value_and_grad(loss_of, mesh, strategy=strategy)
        events = [trace_of(step, each, batch, mesh=mesh) for each in (sharded, after)]
        assert events[0] == events[1]
        assert sum(event.kind == "all_gather" for event in events[0]) == gathers


# Gradients


@pytest.mark.parametrize(("kind", "spec"), cases((*SHARDED, UNSHARDED[1]), KEPT))
def test_with_grads_core(kind, spec):
    """R22, R20: the full gradients are what they are before they are sharded; edits persist slice by slice with writeback, and
    else only where nothing is sharded; the first rank alone sees them where it alone sees parameters."""
    mesh, sharded = make_mesh(spec), sharded_of(kind, spec, mixed=False)
    mean = jax.tree.map(lambda leaf: leaf * 2, plain())
    grads = shard(mean, mesh, units=UNITS, param_map=param_map(), **KINDS[kind])
    for request, recurse in product(REQUESTS, (True, False)):
        if request.offload_to_cpu or not legal(request, spec):
            continue
        kwargs = asdict(request) | {"recurse": recurse, "with_grads": True, "grads": grads}
        with summon_full_params(sharded, **kwargs) as summoned:
            found, wanted = by_path(summoned.grads), by_path(mean)
            for name, leaf in found.items():
                if recurse or UNIT_OF[name] == "":
                    assert np.asarray(leaf).tobytes() == wanted[name].tobytes()
                    shown = {mesh.devices.flat[rank] for rank in visible(request, spec)}
                    assert leaf.sharding.device_set == shown
                else:
                    assert leaf is None
            summoned.grads = overwrite(summoned.grads, mesh, 7.0)
        persists = request.writeback or spec.shard == 1
        units = ("", *UNITS) if recurse else ("",)
        check_pieces(summoned.sharded_grads, grads, spec, 7.0, units, visible(request, spec) if persists else ())
        check_pieces(summoned.sharded, sharded, spec, 0.0, (), ())
        assert jax.tree.structure(summoned.sharded_grads) == jax.tree.structure(grads)


def test_with_grads_core_of_a_step():
    """R22: what a step returned is shown as the mean over ranks, and what is made of it is what an optimizer then sees."""
    spec, batch = SHARDED[1], np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
    mesh, sharded = make_mesh(spec), sharded_of("flat", spec, mixed=False)
    grads = value_and_grad(loss_of, mesh)(sharded, batch).grads
    mean = jax.grad(loss_of)(plain(), batch)  # of equal parts, the mean of whose means is that of all
    with summon_full_params(sharded, with_grads=True, grads=grads) as summoned:
        # Sums of some hundred float32 products of order 1, in another order.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), summoned.grads, mean)
        summoned.grads = jax.tree.map(jnp.ones_like, summoned.grads)
    moved = jax.tree.map(lambda a, b: a - b, summoned.sharded, summoned.sharded_grads)
    same(unshard(moved), jax.tree.map(lambda leaf: leaf - 1, plain()))


@pytest.mark.parametrize("kind", KEPT)
def test_with_grads_none_grads(kind):
    """R22: none on all ranks is none: of a frozen parameter, or where no gradients are given. JAX has a gradient on all ranks or
    on none: where a rank's loss does not use a parameter it is zeros there, and in the mean counts as such."""
    spec = SHARDED[0]
    mesh, given = make_mesh(spec), {"w": np.ones(3, np.float32), "fixed": {"v": np.ones(3, np.float32)}}
    with summon_full_params(sharded_of(kind, spec), with_grads=True) as summoned:
        assert summoned.grads is None
    assert summoned.sharded_grads is None
    sharded = shard(given, mesh, frozen=("fixed",), **KINDS[kind])

    def used_by_the_second(params, batch):
        return jax.lax.cond(batch[0] > 0, lambda w: (w * params["fixed"]["v"]).sum(), lambda w: 0 * w[0], params["w"])

    grads = value_and_grad(used_by_the_second, mesh)(sharded, np.arange(2.0)).grads
    with summon_full_params(sharded, with_grads=True, grads=grads) as summoned:
        assert summoned.grads["fixed"]["v"] is None
        np.testing.assert_array_equal(summoned.grads["w"], [0.5] * 3)
        summoned.grads["w"] = None
    assert summoned.sharded_grads is not None
    for rank in range(2):
        assert not any(piece.any() for piece in pieces_of(summoned.sharded_grads, rank).values())
    same(unshard(summoned.sharded), given)


# What is refused


REFUSED = r"unit '{}': cannot unshard the parameters for the user inside jit, .*: not during forward or backward; wait"


def attempt(sharded, said):
    for request, unit in product(REQUESTS, ("", "blocks.0", "blocks.0.norm")):
        if legal(request, SHARDED[0]):
            with (
                pytest.raises(StateError, match=REFUSED.format(unit)),
                summon_full_params(sharded, unit=unit, **asdict(request)),
            ):
                pass
            said.append(unit)


def check_phase(kind, attempts_in):
    """From a step's phase the shards around it and the arrays inside it cannot be summoned; the step is what it would be."""
    sharded, mesh = sharded_of(kind, SHARDED[0]), make_mesh(SHARDED[0])
    said = []
    step = value_and_grad(attempts_in(sharded, said), mesh)
    batch = np.ones((4, 3), np.float32)
    events = trace_of(step, sharded, batch, mesh=mesh)
    assert said and events == trace_of(value_and_grad(loss_of, mesh), sharded, batch, mesh=mesh)
    said.clear()
    jax.eval_shape(value_and_grad(attempts_in(sharded, said), mesh, mode="jit"), sharded, batch)
    assert said
    with summon_full_params(sharded) as summoned:
        same(summoned.params, plain())


@pytest.mark.parametrize("kind", KINDS)
def test_unshard_params_from_forward_raises(kind):
    """R18: from a loss function, whatever is asked; and with shards that jit or grad have made part of a function. JAX traces
    forward and backward together, and does not tell which of them it is in: the message names both."""

    def attempts_in(sharded, said):
        def loss(params, batch):
            attempt(sharded, said)
            return loss_of(params, batch)

        return loss

    check_phase(kind, attempts_in)
    for transform in (jax.jit, jax.grad):
        said = []
        transform(lambda each, said=said: [attempt(each, said), 0.0][1])(sharded_of(kind, SHARDED[0]))
        assert said


@pytest.mark.parametrize("kind", KINDS)
def test_unshard_params_from_backward_raises(kind):
    """R18: from the backward of a function with a derivative of its own."""

    def attempts_in(sharded, said):
        @jax.custom_vjp
        def marked(bias):
            return bias

        def backward(_, grad):
            attempt(sharded, said)
            return (grad,)

        marked.defvjp(lambda bias: (bias, None), backward)

        def loss(params, batch):
            head = params["head"] | {"bias": marked(params["head"]["bias"])}
            return loss_of(params | {"head": head}, batch)

        return loss

    check_phase(kind, attempts_in)


@pytest.mark.parametrize(("kind", "spec"), cases((*SHARDED, *UNSHARDED), ("flat", "per_param")))
def test_rank0_only_with_writeback_raises(kind, spec):
    """R23, as the core words it; and nothing is left open."""
    sharded = sharded_of(kind, spec)
    for _ in range(2):
        with (
            pytest.raises(UnsupportedError, match="writeback=True with rank0_only=True: the other ranks hold no full"),
            summon_full_params(sharded, rank0_only=True),
        ):
            pass


@pytest.mark.parametrize(("kind", "spec"), cases(UNSHARDED, ("flat", "per_param")))
def test_offload_to_cpu_no_shard_raises(kind, spec):
    """R23: with every other flag."""
    for request in REQUESTS:
        if request.offload_to_cpu:
            with (
                pytest.raises(NotImplementedError, match=r"writeback=True with|where nothing is sharded"),
                summon_full_params(sharded_of(kind, spec), **asdict(request)),
            ):
                pass
