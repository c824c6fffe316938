"""optax over shards beside optax over full parameters."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from crossframe import MeshSpec
from crossframe.errors import UnsupportedError, UsageError
from jax_backend import apply_updates, make_mesh, shard, sharded_optimizer, unshard, value_and_grad
from jax_backend.optimizer._known_transformations import LAYOUT_INDEPENDENT, check_elementwise, parts_of
from jax_backend.recorder._optimizer_updates import following_optimizers
from tests.on_jax.helpers.small import (
    ATOL,
    UNITS,
    WIDE,
    mesh_of_size,
    small_batch,
    small_loss,
    small_map,
    small_params,
    wide,
)

STEPS = 3


def drawn(seed):
    rng = np.random.default_rng(seed)
    return small_params(draw=lambda shape: rng.normal(size=shape))


def close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=ATOL), found, wanted)


def on_full(tx, params, all_grads):
    """What optax gives on parameters: by path in a dict, as sharded_optimizer says."""
    state = tx.init(params)
    for grads in all_grads:
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def on_shards(tx, sharded, all_grads):
    state = jax.jit(tx.init)(sharded)
    update = jax.jit(lambda grads, state, params: step(tx, grads, state, params))
    for grads in all_grads:
        sharded, state = update(grads, state, sharded)
    return sharded, state


def step(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return apply_updates(params, updates), state


def padding_is_zero(sharded):
    for name, arrays in sharded.shards.items():
        jax.tree.map(np.testing.assert_array_equal, arrays, sharded.tree.by_name[name].zero_padding(arrays))


@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        pytest.param("flat", MeshSpec(3), marks=pytest.mark.exhaustive),
        ("ragged", MeshSpec(shard=2, replicate=2)),
        ("per_param", MeshSpec(3)),
    ],
)
def test_R05_R30_optax_trains_shards_as_it_trains_parameters(layout, spec):
    tx: Any = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1))
    mesh, params = make_mesh(spec), small_params()
    optim = sharded_optimizer(tx)
    sharded = shard(params, mesh, units=UNITS, param_map=small_map(), layout=layout, frozen=("blocks.0", "out.bias"))
    grads_of = value_and_grad(small_loss, mesh)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train(sharded, state, batch):
        return step(optim, grads_of(sharded, batch).grads, state, sharded)

    first = jax.tree.map(lambda leaf: leaf.sharding, sharded)
    state = optim.init(sharded)
    where = jax.tree.map(lambda leaf: leaf.sharding, state)
    for i in range(STEPS):
        sharded, state = train(sharded, state, small_batch(seed=i))
    assert jax.tree.map(lambda leaf: leaf.sharding, (sharded, state)) == (first, where)
    padding_is_zero(sharded)

    def trained(params):
        """None where frozen: optax leaves these out."""
        return {"blocks": [None, params["blocks"][1]], "inp": params["inp"], "out": {"kernel": params["out"]["kernel"]}}

    expected: Any = jax.tree.map(jnp.asarray, params)
    full_state = tx.init(trained(expected))
    full_grads, full_update = (
        jax.jit(jax.grad(small_loss)),
        jax.jit(tx.update),
    )  # one program each, not one an operation
    for i in range(STEPS):
        grads = trained(full_grads(expected, small_batch(seed=i)))
        updates, full_state = full_update(grads, full_state, trained(expected))
        new: Any = optax.apply_updates(trained(expected), updates)
        new["blocks"][0], new["out"]["bias"] = params["blocks"][0], params["out"]["bias"]
        expected = new
    close(unshard(sharded), expected)


def by_path(params):
    return {
        f"{name}.{key}": jnp.asarray(value)
        for name, module in {"inp": params["inp"], "out": params["out"]}.items()
        for key, value in module.items()
    } | {
        f"blocks.{i}.{key}": jnp.asarray(value)
        for i, block in enumerate(params["blocks"])
        for key, value in block.items()
    }


def kernels_alone(params):
    return {path: path.endswith("kernel") for path in params}


BY_LEAF = {
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9, dtype_momentum=WIDE),
    "factored": lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "mask of ndim": lambda: optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda a: a.ndim > 1, p)),
    "mask of names": lambda: optax.adamw(1e-2, mask=kernels_alone),
    "block rms": lambda: optax.clip_by_block_rms(1e9),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "lamb",
        "adafactor",
        "muon",
        "mask of ndim",
        "mask of names",
    ],
)
def test_R07_what_goes_by_leaves_sees_parameters_in_their_true_shapes_under_per_param(name):
    tx, mesh, params = BY_LEAF[name](), mesh_of_size(3), small_params()
    sharded = shard(params, mesh, units=UNITS, param_map=small_map(), layout="per_param")
    options = {"units": UNITS, "param_map": small_map(), "layout": "per_param"}
    all_grads = [drawn(seed) for seed in range(1, 1 + STEPS)]
    found, state = on_shards(
        sharded_optimizer(tx, mesh), sharded, [shard(grads, mesh, **options) for grads in all_grads]
    )
    close(by_path(unshard(found)), on_full(tx, by_path(params), map(by_path, all_grads)))
    padding_is_zero(found)
    shapes = {path: jax.tree.leaves(tree)[0].shape for path, tree in by_path(params).items()}
    assert jax.tree.leaves(found)[0].sharding == jax.tree.leaves(sharded)[0].sharding
    stored = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        assert leaf.sharding.mesh == mesh
        shape = shapes.get(getattr(path[-1], "key", ""))
        if shape is not None and leaf.ndim == len(shape) and leaf.size > 1:
            # 5 of 5 or 3 columns of a kernel, which torch has as rows, on 3 ranks: 6 of them.
            assert leaf.shape == (*shape[:-1], -(-shape[-1] // 3) * 3) and not leaf.is_fully_replicated
            stored += 1
    assert stored >= 4


@pytest.mark.parametrize("name", BY_LEAF)
def test_what_goes_by_leaves_is_refused_where_a_leaf_is_a_whole_unit(name):
    optim = sharded_optimizer(BY_LEAF[name]())
    sharded = shard(small_params(), mesh_of_size(2), units=("blocks",), layout="flat")
    with pytest.raises(UnsupportedError, match=r"layout 'flat'.*(leaf|leaves).*layout=\"per_param\"") as caught:
        jax.eval_shape(optim.init, sharded)
    if name == "lamb":
        assert "scale_by_trust_ratio" in str(caught.value)


def elementwise():
    """A transformation of each name that is listed, with arguments where it needs some."""
    given = {
        "add_decayed_weights": (0.1,), "clip": (0.5,), "clip_by_global_norm": (0.5,), "ema": (0.9,), "scale": (0.5,),
        "scale_by_dog": (("heuristic", 1e-6),), "scale_by_madgrad": (0.1,), "scale_by_rprop": (1e-2,),
        "scale_by_schedule": (lambda count: 0.5 + count,), "trace": (0.9,),
    }  # fmt: skip
    makers = vars(optax.contrib._dog) | vars(optax.contrib) | vars(optax)
    return {name: makers[name](*given.get(name, ())) for name in sorted(LAYOUT_INDEPENDENT)}


def test_transformations_listed_as_elementwise_give_flat_shards_the_updates_of_parameters():
    made, mesh, params = elementwise(), mesh_of_size(3), small_params()
    assert {name: set(parts_of(tx.update)) for name, tx in made.items()} == {name: {name} for name in made}
    options: Any = {"units": UNITS, "param_map": small_map(), "layout": "flat"}
    grads = [drawn(seed) for seed in (1, 2)]

    def run(params, grads):
        found = {}
        for name, tx in made.items():
            state = tx.init(params)
            for each in grads:
                found[name], state = tx.update(each, state, params)
        return found

    lines = jax.jit(run)(shard(params, mesh, **options), [shard(each, mesh, **options) for each in grads])
    for name, wanted in jax.jit(run)(jax.tree.map(jnp.asarray, params), grads).items():
        close(unshard(lines[name]), wanted)


def test_wrapped_transformations_are_known_by_their_parts():
    adam, named = optax.adam(1e-2), optax.named_chain(("a", optax.clip(1.0)), ("b", optax.lamb(1e-2)))
    wrapped = [optax.MultiSteps(adam, 2), optax.apply_if_finite(adam, 2), optax.inject_hyperparams(optax.adamw)(1e-2)]
    for tx in wrapped:
        check_elementwise(tx, "flat")
    mask = lambda params: jax.tree.map(lambda leaf: True, params)  # noqa: E731
    for tx in (named, optax.inject_hyperparams(optax.adamw)(1e-2, mask=mask), optax.MultiSteps(optax.lamb(1e-2), 2)):
        with pytest.raises(UnsupportedError, match="layout 'ragged'"):
            check_elementwise(tx, "ragged")


def test_a_transformation_of_the_users_own_is_stated_to_be_elementwise():
    own = optax.GradientTransformation(lambda params: (), lambda grads, state, params=None: (grads, state))
    sharded = shard(small_params(), mesh_of_size(2), layout="flat")
    with pytest.raises(UnsupportedError, match=r"not known to treat elements one by one.*elementwise=True"):
        jax.eval_shape(sharded_optimizer(own).init, sharded)
    jax.eval_shape(sharded_optimizer(own, elementwise=True).init, sharded)


STACKED: Any = wide({"blocks": {"w": np.random.default_rng(0).normal(size=(2, 5, 3))}, "b": np.arange(4.0)})


@pytest.mark.parametrize("layout", ["per_param", "ragged"])
def test_stacked_and_shared_parameters_train_as_the_users_leaves_do(layout):
    mesh, tx = mesh_of_size(2), optax.adam(1e-2) if layout == "ragged" else optax.lamb(1e-2)
    params = {**STACKED, "tied": STACKED["b"]}
    sharded = shard(params, mesh, layout=layout, stacked=("blocks",), shared={"tied": "b"})
    found, _ = on_shards(sharded_optimizer(tx), sharded, [sharded])
    expected: Any = on_full(tx, jax.tree.map(jnp.asarray, STACKED), [STACKED])
    close(unshard(found), {**expected, "tied": expected["b"]})


def test_the_state_is_made_by_one_program_that_gathers_nothing():
    # Operation by operation, every parameter would be gathered, and over gloo such programs block each other.
    programs = []
    tx = optax.adam(1e-2)

    def init(params):
        programs.append(all(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params)))
        return tx.init(params)

    optim = sharded_optimizer(optax.GradientTransformation(init, tx.update))
    sharded = shard(small_params(), mesh_of_size(2), units=UNITS, param_map=small_map(), layout="per_param")
    optim.init(sharded)
    assert programs == [True]
    assert "all-gather" not in jax.jit(optim.init).lower(sharded).compile().as_text()


def test_wrong_arguments_are_refused():
    optim, sharded = sharded_optimizer(optax.adam(1e-2)), shard(STACKED, mesh_of_size(2), layout="per_param")
    with pytest.raises(UsageError, match="expected a transformation of optax"):
        sharded_optimizer(optax.adam)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="params: expected ShardedParams"):
        optim.init(STACKED)
    other = sharded_optimizer(optax.sgd(1e-2, momentum=0.9)).init(sharded)
    with pytest.raises(UsageError, match=r"state: expected that of this transformation"):
        optim.update(sharded, other, sharded)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_one_optimizer_updates_parameters_on_several_meshes():
    tx = sharded_optimizer(optax.adam(1e-2))
    update, found = jax.jit(tx.update), []
    on = [shard(small_params(), make_mesh(MeshSpec(2), jax.devices()[at : at + 2])) for at in (0, 2)]
    states = [tx.init(each) for each in on]
    for sharded, state in zip(on, states, strict=True):
        updates, after = update(sharded, state, sharded)
        for leaf, like in zip(jax.tree.leaves((updates, after)), jax.tree.leaves((sharded, state)), strict=True):
            assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
        found.append(unshard(updates))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)


def test_parts_of_an_optimizer_that_a_recorder_follows_are_known():
    with following_optimizers():
        check_elementwise(optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3)), "flat")
        with pytest.raises(UnsupportedError, match="scale_by_trust_ratio cannot update shards of layout 'flat'"):
            check_elementwise(optax.lamb(1e-3), "flat")
