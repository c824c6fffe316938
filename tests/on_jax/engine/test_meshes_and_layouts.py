"""Layouts, meshes, precision, frozen, shared and stacked parameters, microbatches: each beside plain autodiff in float64."""

import os
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossframe import MeshSpec
from crossframe.api import Api
from crossframe.errors import LayoutError, UnitError, UnsupportedError, UsageError
from crossframe.plan import plan_units, step_plan
from crossframe.precision import PrecisionPolicy
from crossframe.strategy import Strategy, Sync
from crossframe.trace import COLLECTIVES, difference
from jax_backend import (
    LocalGrads,
    LossOutput,
    make_mesh,
    pieces_of,
    scan,
    shard,
    trace_of,
    unshard,
    value_and_grad,
    writeback,
)
from tests.conftest import EXHAUSTIVE
from tests.on_jax.helpers.small import ATOL, UNITS, small_batch, small_loss, small_map, small_params, wide
from tests.on_jax.helpers.stacked import MODES, stacked_loss, stacked_params

LAYOUTS = ("flat", "per_param", "ragged")
HYBRID = MeshSpec(shard=2, replicate=2)
MESHES = [MeshSpec(1), MeshSpec(3), HYBRID, MeshSpec(shard=1, replicate=3)]


def some(every, few):
    """All combinations, or in the short form those that differ: each takes seconds to compile."""
    return list(every) if os.environ.get(EXHAUSTIVE) else few


def ids(value):
    return f"{value.replicate}x{value.shard}" if isinstance(value, MeshSpec) else str(value)


def parts(batch, num):
    return [jax.tree.map(lambda leaf, i=i: np.split(leaf, num)[i], batch) for i in range(num)]


def expected(loss_of, params, batch, num_ranks):
    """The mean of the ranks' losses, and its gradient."""

    def mean(params):
        return sum(loss_of(params, part) for part in parts(batch, num_ranks)) / num_ranks

    return jax.value_and_grad(mean)(jax.tree.map(jnp.asarray, params))


def close(found, wanted, atol=ATOL):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), found, wanted)


def same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize(
    ("spec", "layout", "mode"),
    some(
        product(MESHES, LAYOUTS, MODES),
        [
            *((HYBRID, layout, "shard_map") for layout in LAYOUTS),
            (MeshSpec(1), "flat", "shard_map"),
            *(
                (HYBRID, "flat", "jit"),
                (MeshSpec(3), "per_param", "jit"),
                (MeshSpec(shard=1, replicate=3), "ragged", "jit"),
            ),
        ],
    ),
    ids=ids,
)
def test_R10_R28_any_layout_on_any_mesh_trains_on_the_mean_over_all_ranks(spec, layout, mode):
    mesh, params, batch = make_mesh(spec), small_params(), small_batch()
    sharded = shard(params, mesh, units=UNITS, param_map=small_map(), layout=layout)
    same(unshard(sharded), params)
    result = value_and_grad(small_loss, mesh, mode=mode)(sharded, batch)
    loss, grads = expected(small_loss, params, batch, spec.world_size)
    pairs = zip(jax.tree.leaves(result.grads), jax.tree.leaves(sharded), strict=True)
    assert all(grad.sharding.is_equivalent_to(param.sharding, param.ndim) for grad, param in pairs)
    np.testing.assert_allclose(result.loss, loss, rtol=ATOL)
    close(unshard(result.grads), grads)
    moved = jax.tree.map(lambda a, b: a - 0.1 * b, sharded, result.grads)
    close(unshard(moved), jax.tree.map(lambda a, b: a - 0.1 * b, params, grads))
    same(unshard(writeback(sharded, jax.tree.map(lambda a: a + 1, params))), jax.tree.map(lambda a: a + 1, params))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_R06_every_ranks_pieces_are_those_of_the_layout(layout):
    spec, params = MeshSpec(shard=2, replicate=2), small_params()
    sharded = shard(params, make_mesh(spec), units=UNITS, layout=layout)
    full = {"inp.kernel": params["inp"]["kernel"], "blocks.0.bias": params["blocks"][0]["bias"]}
    for rank in range(spec.world_size):
        held = pieces_of(sharded, rank)
        for name, value in full.items():
            bucket = sharded.tree.bucket_of[name]
            for piece in bucket.layout.pieces(spec.coordinate(rank)[1]):
                if piece.name == name:
                    np.testing.assert_array_equal(held[name], value.reshape(-1)[piece.param_start : piece.param_stop])


def test_R07_per_parameter_shards_may_be_cut_on_other_dims():
    params, mesh = wide({"w": np.arange(12.0).reshape(3, 4), "v": np.arange(5.0)}), make_mesh(MeshSpec(2))
    sharded = shard(params, mesh, layout="per_param", dims=lambda spec: len(spec.shape) - 1)
    assert [part.data.shape for part in sharded.shards[""]["w"].addressable_shards] == [(3, 2)] * 2
    assert sharded.shards[""]["v"].shape == (6,)
    same(unshard(sharded), params)
    grads = value_and_grad(lambda p, x: (p["w"] * p["w"]).sum() + p["v"][0] * x.sum(), mesh)(sharded, np.ones(2)).grads
    close(unshard(grads), {"w": 2 * params["w"], "v": np.eye(5)[0]})
    with pytest.raises(LayoutError, match="dim 1 has size 3"):
        shard(wide({"w": np.ones((4, 3))}), mesh, layout="per_param", dims=lambda spec: 1)


def test_R11_a_unit_of_two_dtypes_has_two_buckets_or_is_refused():
    params = {"w": np.ones((3, 2), np.float32), "s": np.ones(3, np.float16)}
    mesh = make_mesh(MeshSpec(2))
    with pytest.raises(LayoutError, match="'s' is float16, 'w' is float32"):
        shard(params, mesh, layout="flat")
    sharded = shard(params, mesh, layout="per_param")
    assert [bucket.name for bucket in sharded.tree.buckets] == ["", ":float32"]
    result = value_and_grad(lambda p, x: p["w"].sum() * p["s"].sum() * x.sum(), mesh)(sharded, np.ones(2))
    close(unshard(result.grads), {"w": np.full((3, 2), 3.0), "s": np.full(3, 6.0)})


@pytest.mark.parametrize("spec", [MeshSpec(2), MeshSpec(shard=2, replicate=2)], ids=ids)
@pytest.mark.parametrize("api", Api)
def test_R26_R33_precision_is_the_policys(spec, api):
    policy = PrecisionPolicy("bfloat16", reduce_dtype="float32")
    mesh = make_mesh(spec)
    sharded = shard(small_params("float32"), mesh, units=UNITS, mp_policy=policy, layout="flat")
    seen = []

    def loss(params, batch):
        seen.append((params["inp"]["kernel"].dtype, batch["x"].dtype))
        return small_loss(params, batch).astype(jnp.float32)

    step = value_and_grad(loss, mesh, api=api)
    args = sharded, small_batch(dtype="float32")
    result = step(*args)
    assert seen[-1] == (jnp.bfloat16, jnp.bfloat16)
    assert all(grad.dtype == jnp.float32 for grad in jax.tree.leaves(result.grads))
    strategy = Strategy.FULL_SHARD if spec.replicate == 1 else Strategy.HYBRID_SHARD
    units = plan_units(sharded.tree.units, strategy, api=api, policy=policy)
    assert (
        difference(
            collectives(step_plan(units, spec)), trace_of(step, *args, mesh=mesh), ordered=False, kinds=COLLECTIVES
        )
        == []
    )


def collectives(events):
    return [event for event in events if event.kind in ("all_gather", "reduce_scatter", "all_reduce")]


@pytest.mark.parametrize("reshards", [None, True, False])
def test_R13_R14_what_is_gathered_again_is_the_users_choice(reshards):
    mesh, spec = make_mesh(MeshSpec(2)), MeshSpec(2)
    sharded = shard(small_params(), mesh, units=UNITS, reshard_after_forward=reshards, layout="flat")
    step = value_and_grad(small_loss, mesh)
    units = plan_units(sharded.tree.units, Strategy.FULL_SHARD, reshard_after_forward=reshards)
    found = trace_of(step, sharded, small_batch(), mesh=mesh)
    assert difference(collectives(step_plan(units, spec)), found, ordered=False, kinds=COLLECTIVES) == []


@pytest.mark.parametrize("mode", MODES)
def test_R27_a_custom_divide_factor_takes_the_place_of_the_number_of_ranks(mode):
    mesh, params, batch = make_mesh(MeshSpec(shard=2, replicate=2)), small_params(), small_batch()
    result = value_and_grad(small_loss, mesh, mode=mode, gradient_divide_factor=3.0)(shard(params, mesh), batch)
    _, grads = expected(small_loss, params, batch, 4)
    close(unshard(result.grads), jax.tree.map(lambda grad: grad * 4 / 3, grads))


@pytest.mark.parametrize(
    ("layout", "mode"),
    some(product(LAYOUTS, MODES), [("flat", "shard_map"), ("per_param", "shard_map"), ("ragged", "jit")]),
)
def test_frozen_parameters_are_gathered_and_get_no_gradient(layout, mode):
    mesh, params, batch = make_mesh(MeshSpec(3)), small_params(), small_batch()
    sharded = shard(params, mesh, units=UNITS, layout=layout, frozen=("blocks.0", "inp.bias"))
    assert {spec.name for b in sharded.tree.buckets if not b.trainable for spec in b.layout.params} == {
        "blocks.0.kernel",
        "blocks.0.bias",
        "inp.bias",
    }
    step = value_and_grad(small_loss, mesh, mode=mode)
    result = step(sharded, batch)
    assert not result.grads.frozen and jax.tree.structure(result.grads) == jax.tree.structure(sharded.trainable)
    _, grads = expected(small_loss, params, batch, 3)
    moved = jax.tree.map(lambda a, b: a - b, sharded.trainable, result.grads)
    found = unshard(sharded.with_trainable(moved))
    wanted = jax.tree.map(lambda a, b: a - b, params, grads)
    wanted["blocks"][0], wanted["inp"]["bias"] = params["blocks"][0], params["inp"]["bias"]
    close(found, wanted)
    same(found["blocks"][0], params["blocks"][0])
    with pytest.raises(UsageError, match=r"frozen buckets.*with_trainable"):
        step(moved, batch)


def test_R31_a_shared_parameter_gets_the_sum_of_its_uses_gradients():
    rng, mesh = np.random.default_rng(0), make_mesh(MeshSpec(2))
    table = rng.normal(size=(4, 3))
    params, batch = wide({"embed": {"table": table}, "head": {"table": table}}), rng.normal(size=(4, 3))

    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["embed"]["table"].T) @ params["head"]["table"]) ** 2)

    sharded = shard(params, mesh, shared={"head.table": "embed.table"})
    assert [spec.aliases for spec in sharded.tree.units[0][1].params] == [("head.table",)]
    result = value_and_grad(loss, mesh)(sharded, batch)
    _, grads = expected(loss, params, batch, 2)
    summed = grads["embed"]["table"] + grads["head"]["table"]
    close(unshard(result.grads), {"embed": {"table": summed}, "head": {"table": summed}})
    with pytest.raises(UsageError, match="'nowhere'"):
        shard(params, mesh, shared={"nowhere": "embed.table"})


# Microbatches


@pytest.mark.parametrize(("api", "mode"), some(product(Api, MODES), [(Api.FSDP1, "shard_map"), (Api.FSDP2, "jit")]))
def test_R15_microbatches_that_reduce_nothing_accumulate_and_are_reduced_once(api, mode):
    spec, params = MeshSpec(shard=2, replicate=2), small_params()
    mesh = make_mesh(spec)
    first, second = small_batch(seed=1), small_batch(seed=2)
    sharded = shard(params, mesh, units=UNITS)
    waits = value_and_grad(small_loss, mesh, mode=mode, api=api, reduces=False)
    waiting = waits(sharded, first).grads
    assert isinstance(waiting, LocalGrads)
    assert mode == "jit" or not [
        event for event in trace_of(waits, sharded, first, mesh=mesh) if event.kind != "all_gather"
    ]
    step = value_and_grad(small_loss, mesh, mode=mode, api=api)
    result = step(sharded, second, accumulated=waiting + waits(sharded, second).grads)
    wanted = [expected(small_loss, params, batch, 4)[1] for batch in (first, second, second)]
    close(unshard(result.grads), jax.tree.map(lambda *grads: sum(grads), *wanted), atol=3 * ATOL)
    if mode == "jit":
        return
    units = plan_units(sharded.tree.units, Strategy.HYBRID_SHARD, api=api)
    last = [e for e in step_plan(units, spec, microbatches=2, sync=Sync.LAST) if e.microbatch == 1]
    found = trace_of(step, sharded, second, mesh=mesh, accumulated=waiting)
    reductions = [e for e in found if e.kind != "all_gather"]
    assert (
        difference(
            [e for e in collectives(last) if e.kind != "all_gather"], reductions, ordered=False, kinds=COLLECTIVES
        )
        == []
    )


@pytest.mark.parametrize("mode", MODES)
def test_ranks_with_fewer_samples_count_for_less(mode):
    mesh, rng = make_mesh(MeshSpec(3)), np.random.default_rng(0)
    params = wide({"w": rng.normal(size=4)})
    x, there = rng.normal(size=(6, 4)), np.array([1.0, 1, 1, 0, 0, 0])

    def loss(params, batch):
        rows, mask = batch
        weight = mask.sum()
        loss = ((rows @ params["w"]) ** 2 * mask).sum() / jnp.maximum(weight, 1)
        return LossOutput(loss, weight=weight)

    def over_samples(params):
        return jnp.mean((x[:3] @ params["w"]) ** 2)

    result = value_and_grad(loss, mesh, mode=mode)(shard(params, mesh), (x, there))
    wanted, grads = jax.value_and_grad(over_samples)(params)
    np.testing.assert_allclose(result.loss, wanted, rtol=ATOL)
    close(unshard(result.grads), grads)


# Stacked blocks


# Each mode and each mesh: how a layer is cut does not depend on the mesh, and modes differ in what they gather.
SCANS = [("shard_map", HYBRID, "flat"), ("jit", MeshSpec(3), "per_param")]


@pytest.mark.parametrize(
    ("mode", "spec", "layout"), some(product(MODES, [MeshSpec(3), HYBRID], LAYOUTS), SCANS), ids=ids
)
def test_stacked_blocks_are_gathered_one_by_one_inside_a_scan(spec, layout, mode):
    params, batch, mesh = stacked_params(), small_batch(), make_mesh(spec)
    sharded = shard(params, mesh, stacked=("blocks",), layout=layout)
    same(unshard(sharded), params)
    step = value_and_grad(stacked_loss, mesh, mode=mode)
    result = step(sharded, batch)
    loss, grads = expected(stacked_loss, params, batch, spec.world_size)
    np.testing.assert_allclose(result.loss, loss, rtol=ATOL)
    close(unshard(result.grads), grads)
    waits = value_and_grad(stacked_loss, mesh, mode=mode, reduces=False)(sharded, batch).grads
    close(unshard(step(sharded, batch, accumulated=waits).grads), jax.tree.map(lambda g: 2 * g, grads))
    if mode == "jit":
        return
    events = [event for event in trace_of(step, sharded, batch, mesh=mesh) if event.unit == "blocks"]
    counts = {(e.kind, e.phase): sum((e.kind, e.phase) == (o.kind, o.phase) for o in events) for e in events}
    reductions = {("reduce_scatter", "backward"): 4} | ({("all_reduce", "backward"): 4} if spec.replicate > 1 else {})
    assert counts == {("all_gather", "forward"): 4, ("all_gather", "backward"): 4} | reductions


def test_stacked_blocks_outside_of_a_scan_are_refused():
    mesh, batch = make_mesh(MeshSpec(2)), small_batch()
    sharded = shard(stacked_params(), mesh, stacked=("blocks",))
    with pytest.raises(UsageError, match=r"'blocks.kernel' belongs to a stacked unit.*jax_backend.scan"):
        value_and_grad(lambda params, batch: params["blocks"]["kernel"].sum(), mesh)(sharded, batch)
    part = lambda params, batch: scan(lambda c, b, _: (c, None), 0.0, {"kernel": params["blocks"]["kernel"]})[0]  # noqa: E731
    with pytest.raises(UsageError, match="all leaves of one stacked unit"):
        value_and_grad(part, mesh)(sharded, batch)
    with pytest.raises(UnitError, match="one leading dim"):
        shard(wide({"b": {"x": np.ones((2, 3)), "y": np.ones((3, 3))}}), mesh, stacked=("b",))
    with pytest.raises(UnitError, match="'nowhere' is not a module"):
        shard(stacked_params(), mesh, stacked=("nowhere",))


# Misuse


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"layout": "square"}, "layout: expected one of"),
        ({"mp_policy": "bfloat16"}, "mp_policy: expected a PrecisionPolicy"),
        ({"reshard_after_forward": 2}, "reshard_after_forward: expected None, True or False, got 2"),
        ({"dims": lambda spec: 0, "layout": "flat"}, "dims: expected None with layout='flat'"),
        ({"frozen": "blocks"}, r"pass \('blocks',\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_options_of_shard_raise(option, message):
    with pytest.raises(UsageError, match=message):
        shard(small_params(), make_mesh(MeshSpec(2)), **option)


def test_invalid_options_of_value_and_grad_raise():
    mesh, params = make_mesh(MeshSpec(2)), small_params()
    with pytest.raises(UsageError, match="mode: expected one of"):
        value_and_grad(small_loss, mesh, mode="pmap")
    with pytest.raises(UnsupportedError, match=r"NO_SHARD needs a mesh with shard=1, got 1 x 2"):
        value_and_grad(small_loss, mesh, strategy=Strategy.NO_SHARD)
    with pytest.raises(UsageError, match="accumulated: expected None or LocalGrads"):
        value_and_grad(small_loss, mesh)(shard(params, mesh), small_batch(), accumulated={})


def test_donated_shards_used_again_are_refused():
    mesh = make_mesh(MeshSpec(2))
    sharded, step = shard(small_params(), mesh), value_and_grad(small_loss, mesh)
    jax.jit(lambda params: jax.tree.map(lambda a: a + 1, params), donate_argnums=0)(sharded)
    with pytest.raises(UsageError, match="donated to an earlier step"):
        step(sharded, small_batch())
