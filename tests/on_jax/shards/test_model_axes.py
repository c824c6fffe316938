"""FSDP over the data axes of a mesh next to tensor parallelism over a model axis, which XLA partitions."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

from crossframe import MeshSpec
from crossframe.errors import LayoutError, UsageError
from crossframe.precision import PrecisionPolicy
from crossframe.trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from jax_backend import (
    apply_updates,
    clip_grad_norm,
    compiled_trace,
    from_torch,
    init,
    load_checkpoint,
    make_mesh,
    pieces_of,
    save_checkpoint,
    shard,
    sharded_optimizer,
    shards_of,
    summon_full_params,
    to_torch,
    trace_of,
    unshard,
    value_and_grad,
    writeback,
)
from jax_backend.orbax import ShardedRestore, ShardedSave
from tests.on_jax.helpers.small import ATOL, ITEMSIZE, wide
from tests.on_jax.helpers.stacked import MODES
from tests.on_jax.helpers.tensor_parallel import (
    ALONE,
    DIM,
    HIDDEN,
    HYBRID,
    LAYERS,
    PARALLEL,
    SHARDED,
    VOCAB,
    dims,
    loss_fn,
    model_partition,
    on_mesh,
    params,
    tokens,
)


def equal(found, wanted, atol=0.0):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=atol), found, wanted
    )


def trained(kind, mode="shard_map"):
    """(parameters, optimizer state, (loss, gradients) of each step) of three steps with AdamW and clipping."""
    mesh, sharded = on_mesh(kind)
    step = value_and_grad(loss_fn, mesh, mode=mode)
    # An update changes by at most a few times lr / eps = 1 times the change of the gradients.
    optimizer = sharded_optimizer(optax.adamw(1e-2, eps=1e-2))

    @jax.jit
    def train(sharded, state, batch):
        result = step(sharded, batch)
        grads, _ = clip_grad_norm(result.grads, 1.0)
        updates, state = optimizer.update(grads, state, sharded)
        return apply_updates(sharded, updates), state, result.loss, result.grads

    state, seen = optimizer.init(sharded), []
    for _ in range(3):
        sharded, state, loss, grads = train(sharded, state, tokens())
        seen.append((loss, unshard(grads)))
    return sharded, state, seen


@cache
def references():
    return [trained(kind) for kind in (ALONE, SHARDED)]


KINDS = [pytest.param(PARALLEL, id="2_tp2"), pytest.param(HYBRID, id="2x2_tp2", marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_training_equals_that_of_one_device_and_of_ranks_alone(mode, kind):
    sharded, state, seen = trained(kind, mode)
    for other, _, wanted in references():
        equal(seen, wanted, atol=10 * ATOL)
        equal(unshard(sharded), unshard(other), atol=10 * ATOL)
    half = {
        "embed": (VOCAB // 2, DIM // 2),
        "head": (DIM // 2, VOCAB // 2),
        "query": (LAYERS, DIM // 2, DIM // 2),
        "out": (LAYERS, DIM // 2, DIM // 2),
        "up": (LAYERS, DIM // 2, HIDDEN // 2),
        "down": (LAYERS, HIDDEN // 2, DIM // 2),
        "scale": (LAYERS, DIM // 2),
    }
    moments = [node.mu for node in state if hasattr(node, "mu")]
    for leaves in (*sharded.shards.values(), *moments):
        for name, leaf in leaves.items():
            assert leaf.addressable_shards[3].data.shape == half[name.split(".")[-1]], name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_collectives_over_ranks_move_divided_parameters_and_none_over_the_model_axis(mode, kind):
    mesh, sharded = on_mesh(kind)
    step = value_and_grad(loss_fn, mesh, mode=mode)
    events = compiled_trace(step, sharded, tokens(), mesh=mesh, rank=1)
    # Rank 1 has the devices 2 and 3.
    over_ranks, over_axis = (0, 2), (2, 3)
    numel = {"": 2 * VOCAB * DIM // 2, "blocks": (2 * DIM * DIM + 2 * DIM * HIDDEN) // 2 + DIM}
    divided = {(unit, each * ITEMSIZE, over_ranks) for unit, each in numel.items()}
    assert {_moved(event) for event in events if event.kind == ALL_GATHER} == divided
    reduced = {
        _moved(event) for event in events if event.kind in (REDUCE_SCATTER, ALL_REDUCE) and event.unit == "blocks"
    }
    over_replicas = {("blocks", numel["blocks"] // 2 * ITEMSIZE, (2, 6))} if kind == HYBRID else set()
    assert reduced == {each for each in divided if each[0] == "blocks"} | over_replicas
    activation = tokens()[: len(tokens()) // kind[0].world_size, :-1].size * DIM * ITEMSIZE
    over_model_axis = [event for event in events if tuple(event.group) == over_axis]
    assert {(event.kind, event.num_bytes > activation) for event in over_model_axis} == {(ALL_REDUCE, False)}
    if mode == "shard_map":
        written = [event for event in trace_of(step, sharded, tokens(), mesh=mesh, rank=1) if event.kind == ALL_GATHER]
        assert {(event.unit, event.num_bytes, (0, 2)) for event in written} == divided


def _moved(event):
    return event.unit, event.num_bytes, tuple(event.group)


@pytest.mark.parametrize("mode", MODES)
def test_microbatches_replicas_and_precision_are_those_of_ranks_alone(mode):
    mesh, sharded = on_mesh(HYBRID, mp_policy=PrecisionPolicy("float32", "float32"))
    plain, alone = on_mesh((HYBRID[0], {}), mp_policy=PrecisionPolicy("float32", "float32"))

    def accumulated(mesh, sharded):
        first = value_and_grad(loss_fn, mesh, mode=mode, reduces=False)(sharded, tokens())
        result = value_and_grad(loss_fn, mesh, mode=mode, local_grads=True)(sharded, tokens(), accumulated=first.grads)
        return result.losses, unshard(result.grads), result.local_grads.lines

    float32_rounding = 4500 * np.finfo(np.float32).eps
    equal(accumulated(mesh, sharded), accumulated(plain, alone), atol=float32_rounding)


def test_each_rank_has_the_shards_that_it_has_without_model_axes(tmp_path):
    _, sharded = on_mesh(PARALLEL)
    _, alone = on_mesh(SHARDED)
    for rank in range(2):
        equal(shards_of(sharded, rank), shards_of(alone, rank))
        equal(pieces_of(sharded, rank), pieces_of(alone, rank))
    equal(unshard(sharded), params())
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(unshard(sharded)))
    back = from_torch(sharded, {rank: to_torch(sharded, rank) for rank in range(2)})
    _same_arrays(back, sharded)


def test_edits_of_full_parameters_reach_the_shards():
    _, sharded = on_mesh(PARALLEL)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, params())
    _same_arrays(writeback(sharded, doubled), on_mesh(PARALLEL, doubled)[1])
    with summon_full_params(sharded) as summoned:
        summoned.params["head"] = 3 * summoned.params["head"]
    _same_arrays(summoned.sharded, on_mesh(PARALLEL, {**params(), "head": 3 * params()["head"]})[1])


def test_checkpoints_move_between_meshes_with_and_without_model_axes(tmp_path):
    sharded, state, _ = trained(PARALLEL)
    alone, other, _ = references()[1]
    save_checkpoint(tmp_path / "parallel", sharded, state)
    moved = load_checkpoint(tmp_path / "parallel", _zeros(alone), _zeros(other))
    assert moved[0].tree == alone.tree
    equal(unshard(moved[0]), unshard(sharded))
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        manager.save(0, args=ShardedSave(sharded, state))
        manager.wait_until_finished()
        _same_arrays(manager.restore(0, args=ShardedRestore(_zeros(alone), _zeros(other))), moved)
    save_checkpoint(tmp_path / "alone", *moved)
    _same_arrays(load_checkpoint(tmp_path / "alone", _zeros(sharded), _zeros(state)), (sharded, state))


def test_parameters_are_initialised_and_compiled_in_their_partitions():
    mesh, sharded = on_mesh(PARALLEL)
    options = {"stacked": ("blocks",), "dims": dims, "model_partition": model_partition}
    _same_arrays(init(lambda: jax.tree.map(jnp.asarray, params()), mesh, **options), sharded)
    structs = shard(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params()), mesh, **options)
    assert {a.sharding == b.sharding for a, b in zip(*map(jax.tree.leaves, (structs, sharded)), strict=True)} == {True}
    compiled = jax.jit(lambda sharded: value_and_grad(loss_fn, mesh)(sharded, tokens()).loss).lower(structs).compile()
    own = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(sharded))
    assert compiled.memory_analysis().argument_size_in_bytes == own


def _zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)


def _same_arrays(found, wanted):
    """Equal, and on the same devices."""
    equal(found, wanted)
    assert all(a.sharding == b.sharding for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True))


KERNEL = {"kernel": np.zeros((4, 6), np.float32)}


@pytest.mark.parametrize(
    ("partition", "options", "message"),
    [
        (lambda spec: P("tp"), {}, "dim 0 is sharded over the ranks and cannot be divided over .*tp.* too.*dims="),
        (
            lambda spec: P(None, None, "tp"),
            {},
            "'kernel' of shape .*: expected None or a PartitionSpec of at most 2 dims",
        ),
        (lambda spec: "tp", {}, "expected None or a PartitionSpec of at most 2 dims, got 'tp'"),
        (lambda spec: P(None, "shard"), {}, "expected model axes of the mesh, \\['tp', 'cp'\\], got .*shard.*dims="),
        (lambda spec: P(None, ("tp", "cp")), {}, "expected dim 1 to be a multiple of 4, .*got 6; return None"),
        (None, {"layout": "flat"}, "expected layout='per_param' on a mesh with the model axes .*got 'flat'"),
        (None, {"layout": "ragged"}, "expected layout='per_param' on a mesh with the model axes .*got 'ragged'"),
    ],
)
def test_partitions_that_do_not_fit_raise(partition, options, message):
    mesh = make_mesh(MeshSpec(1), model_axes={"tp": 2, "cp": 2})
    with pytest.raises(LayoutError, match=message):
        shard(KERNEL, mesh, model_partition=partition, **options)


def test_parameters_divided_over_an_axis_that_the_mesh_lacks_raise():
    _, sharded = on_mesh(PARALLEL)
    with pytest.raises(UsageError, match=r"a mesh with the model axes \['tp'\].*got one with \[\]"):
        value_and_grad(loss_fn, make_mesh(MeshSpec(2)))(sharded, tokens())
    with pytest.raises(LayoutError, match=r"expected model axes of the mesh, \[\], got .*model_axes="):
        shard(params(), make_mesh(MeshSpec(2)), dims=dims, model_partition=model_partition)


def test_R14_backward_gathers_units_again_next_to_a_model_axis():
    mesh = make_mesh(MeshSpec(2), model_axes={"tp": 2})
    values = wide({"net": {"up": np.ones((4, 8)), "down": np.ones((8, 4))}, "head": np.ones((4, 2))})
    sharded = shard(
        values, mesh, units=("net",), model_partition=lambda spec: P(None, "tp") if spec.name == "net.up" else None
    )

    def loss(params, x):
        hidden = jnp.tanh(x @ params["net"]["up"])
        return (jnp.tanh(hidden @ params["net"]["down"]) @ params["head"]).mean()

    found = trace_of(value_and_grad(loss, mesh), sharded, np.ones((4, 4)), mesh=mesh)
    assert [(event.unit, event.phase) for event in found if event.kind == ALL_GATHER] == [
        ("", "forward"),
        ("net", "forward"),
        ("net", "backward"),
    ]
