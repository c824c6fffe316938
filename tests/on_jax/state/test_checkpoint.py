"""Checkpoints of JAX in crossframe's own format."""

# pyright: reportArgumentType=false

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossframe import MeshSpec
from crossframe.checkpoint import STATE, AsyncSaver, CheckpointError, read
from crossframe.param_map import MapEntry, ParamMap
from jax_backend import load_checkpoint, make_mesh, save_checkpoint, shard, sharded_optimizer, unshard
from tests.core.helpers.checkpoints import writing_waits
from tests.on_jax.helpers.small import UNITS, WIDE, small_map, small_params, wide


def sharded_as(params, spec, layout, **more):
    return shard(params, make_mesh(spec), units=UNITS, param_map=small_map(), layout=layout, **more)


def trained(sharded, tx):
    """A state whose moments are no zeros."""
    state = tx.init(sharded)
    return jax.jit(tx.update)(sharded.trainable, state, sharded)[1]


def same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype and a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_R36_R37_parameters_and_state_load_on_any_mesh_and_layout(tmp_path):
    params: Any = small_params()
    tx = sharded_optimizer(optax.adam(1e-2, mu_dtype=jnp.float32))
    cases = [("flat", MeshSpec(3)), ("ragged", MeshSpec(2)), ("per_param", MeshSpec(shard=2, replicate=2))]
    made = []
    for layout, spec in cases:
        sharded = sharded_as(params, spec, layout, frozen=("inp.bias",))
        made.append((sharded, trained(sharded, tx), tx.init(sharded)))
    for i, (sharded, state, _) in enumerate(made):
        save_checkpoint(tmp_path / str(i), sharded, state)
    for i in range(3):
        sharded, state, empty = made[(i + 1) % 3]
        found, found_state = load_checkpoint(tmp_path / str(i), jax.tree.map(lambda leaf: leaf * 0, sharded), empty)
        same(found, sharded)
        same(found_state, state)


@pytest.mark.parametrize("layout", ["per_param", "flat"])
def test_R37_training_goes_on_from_a_loaded_state_of_optax_itself(tmp_path, layout):
    sharded, tx = sharded_as(small_params(), MeshSpec(2), layout), optax.adam(1e-2)
    state, update = trained(sharded, tx), jax.jit(tx.update)
    save_checkpoint(tmp_path / "saved", sharded, state)
    found, found_state = load_checkpoint(tmp_path / "saved", sharded, tx.init(sharded))
    same(update(found, found_state, found), update(sharded, state, sharded))


def test_R37_random_keys_of_a_state_are_loaded(tmp_path):
    tx = sharded_optimizer(optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1, momentum=0.9)))
    sharded, other = (sharded_as(small_params(), MeshSpec(size), "per_param") for size in (2, 3))
    state = trained(sharded, tx)
    save_checkpoint(tmp_path / "saved", sharded, state)
    _, found = load_checkpoint(tmp_path / "saved", other, tx.init(other))
    key, wanted = found[0].rng_key, state[0].rng_key
    assert key.dtype == wanted.dtype and np.array_equal(jax.random.key_data(key), jax.random.key_data(wanted))
    # The next update draws the same noise; XLA adds numbers of at most order 1 in another order on other shards.
    first, second = (
        jax.jit(tx.update)(each.trainable, own, each)[0] for each, own in ((sharded, state), (other, found))
    )
    for a, b in zip(jax.tree.leaves(unshard(first)), jax.tree.leaves(unshard(second)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=8 * np.finfo(a.dtype).eps)


def test_R37_state_of_joined_and_split_parameters_is_saved_canonically(tmp_path):
    """Of parameters that are several arrays of the user's, or arrays with a dim more: padded in the user's own shapes."""
    rng = np.random.default_rng(0)
    full = wide(
        {
            "q": rng.normal(size=(3, 2, 2)),
            "k": rng.normal(size=(3, 2, 2)),
            "out": {"kernel": rng.normal(size=(2, 2, 5))},
            "w": rng.normal(size=(3, 5)),
        }
    )
    entries = (
        MapEntry("in_proj", ("q", "k"), "i h w=2 -> (h w) i"),
        MapEntry("out.weight", "out.kernel", "h w=2 o -> o (h w)"),
        MapEntry("w", "w", "i o -> o i"),
    )
    tx = sharded_optimizer(optax.adam(1e-2))
    made = []
    for layout, world_size in (("per_param", 3), ("flat", 2)):
        sharded = shard(full, make_mesh(MeshSpec(world_size)), param_map=ParamMap(entries), layout=layout)
        made.append((sharded, trained(sharded, tx)))
        save_checkpoint(tmp_path / layout, *made[-1])
    for layout, (sharded, state) in zip(("flat", "per_param"), made, strict=True):
        same(load_checkpoint(tmp_path / layout, sharded, tx.init(sharded)), (sharded, state))
    names = {spec.name for spec in read(tmp_path / "per_param").sections[STATE].params}
    assert names == {f"{moment}:{entry.name}" for moment in ("exp_avg", "exp_avg_sq") for entry in entries}
    assert set(read(tmp_path / "per_param").values) == {"step"}


def test_R37_a_schedule_counts_the_same_steps_and_what_torch_has_not_keeps_its_path(tmp_path):
    sharded = sharded_as(small_params(), MeshSpec(2), "flat")
    scheduled = sharded_optimizer(optax.adam(optax.constant_schedule(1e-2)))
    state = trained(sharded, scheduled)
    save_checkpoint(tmp_path / "one", sharded, state)
    assert set(read(tmp_path / "one").values) == {"step"}
    same(load_checkpoint(tmp_path / "one", sharded, scheduled.init(sharded))[1], state)
    apart = state[0], state[1]._replace(count=state[1].count + 4)
    save_checkpoint(tmp_path / "two", sharded, apart)
    same(load_checkpoint(tmp_path / "two", sharded, scheduled.init(sharded))[1], apart)
    plain = sharded_optimizer(optax.adam(1e-2))
    with pytest.raises(CheckpointError, match=r"with the values \['step'\], got \['\[1\].count', 'step'\]"):
        load_checkpoint(tmp_path / "two", sharded, plain.init(sharded))
    twice = sharded_optimizer(optax.chain(optax.scale_by_adam(), optax.scale_by_adam()))
    state = trained(sharded, twice)
    save_checkpoint(tmp_path / "twice", sharded, state)
    assert set(read(tmp_path / "twice").values) == {"[0].count", "[1].count"}
    same(load_checkpoint(tmp_path / "twice", sharded, twice.init(sharded))[1], state)


def test_R37_state_of_plain_optax_and_where_xla_chose_to_put_it(tmp_path):
    sharded = sharded_as(small_params(), MeshSpec(2), "per_param")
    tx = optax.adam(1e-2)
    state: Any = tx.init(sharded)
    elsewhere = jax.device_put(jax.tree.map(lambda leaf: leaf + 1, state), jax.devices()[0])
    save_checkpoint(tmp_path / "c", sharded, elsewhere)
    found = load_checkpoint(tmp_path / "c", sharded, state)[1]
    expected = [np.ones_like(leaf) for leaf in jax.tree.leaves(unshard(sharded))]
    for a, b in zip(jax.tree.leaves(unshard(found[0].mu)), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(found[0].count) == 1


def test_stacked_layers_have_the_names_of_a_list_of_blocks(tmp_path):
    weights = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(WIDE)
    stacked = shard({"blocks": {"w": weights}}, make_mesh(MeshSpec(2)), stacked=("blocks",))
    save_checkpoint(tmp_path / "c", stacked)
    lists = shard(wide({"blocks": [{"w": np.zeros((5, 3))}, {"w": np.zeros((5, 3))}]}), make_mesh(MeshSpec(3)))
    found: Any = unshard(load_checkpoint(tmp_path / "c", lists))
    np.testing.assert_array_equal(np.stack([block["w"] for block in found["blocks"]]), weights)
    same(load_checkpoint(tmp_path / "c", jax.tree.map(lambda leaf: leaf * 0, stacked)), stacked)


def test_R37_state_of_stacked_layers_is_saved_layer_by_layer_in_canonical_order(tmp_path):
    full = wide({"blocks": {"w": np.random.default_rng(0).normal(size=(2, 5, 3))}})
    entry = ParamMap((MapEntry("blocks.w", "blocks.w", "i o -> o i"),))
    tx, made = sharded_optimizer(optax.adam(1e-2)), []
    for layout in ("per_param", "flat"):
        sharded = shard(full, make_mesh(MeshSpec(2)), stacked=("blocks",), param_map=entry, layout=layout)
        made.append((sharded, trained(sharded, tx)))
        save_checkpoint(tmp_path / layout, *made[-1])
    for layout, (sharded, state) in zip(("flat", "per_param"), made, strict=True):
        same(load_checkpoint(tmp_path / layout, sharded, tx.init(sharded)), (sharded, state))
    specs = {spec.name: spec.shape for spec in read(tmp_path / "per_param").sections[STATE].params}
    assert specs == {f"{entry}:blocks.{i}.w": (3, 5) for entry in ("exp_avg", "exp_avg_sq") for i in range(2)}


def test_another_model_or_optimizer_is_refused_by_name(tmp_path):
    sharded = sharded_as(small_params(), MeshSpec(2), "flat")
    adam, sgd = (sharded_optimizer(tx) for tx in (optax.adam(1e-2), optax.sgd(1e-2, momentum=0.9)))
    save_checkpoint(tmp_path / "c", sharded, sgd.init(sharded))
    other = shard(wide({"w": np.ones(3)}), make_mesh(MeshSpec(2)))
    with pytest.raises(CheckpointError, match=r"nothing was loaded.*'w'.*'inp.weight'"):
        load_checkpoint(tmp_path / "c", other)
    with pytest.raises(
        CheckpointError, match=r"expected the state of an optimizer with the values \['step'\], got \[\]"
    ):
        load_checkpoint(tmp_path / "c", sharded, adam.init(sharded))
    with pytest.raises(CheckpointError, match="expected nothing there"):
        save_checkpoint(tmp_path / "c", sharded)
    save_checkpoint(tmp_path / "d", sharded, {"seen": jnp.arange(3)})
    assert load_checkpoint(tmp_path / "d", sharded, {"seen": jnp.zeros(3, int)})[1]["seen"].tolist() == [0, 1, 2]
    for other in (jnp.zeros(2, int), jnp.zeros(3)):
        with pytest.raises(
            CheckpointError,
            match=rf"nothing was loaded: value .*seen.*expected .*, got {jnp.zeros(3, int).dtype} \(3,\)",
        ):
            load_checkpoint(tmp_path / "d", sharded, {"seen": other})


@pytest.mark.parametrize("layout", ["per_param", "flat", "ragged"])
def test_a_checkpoint_has_the_values_from_before_a_donating_update(tmp_path, layout):
    sharded = sharded_as(small_params(), MeshSpec(2), layout)
    tx = sharded_optimizer(optax.adam(1e-2))
    state = trained(sharded, tx)
    expected = jax.tree.map(jnp.copy, (sharded, state))

    @partial(jax.jit, donate_argnums=0)
    def update(both):
        return jax.tree.map(lambda leaf: leaf + 1, both)

    with AsyncSaver() as saver, writing_waits():
        save_checkpoint(tmp_path / "c", sharded, state, saver=saver)
        after = update((sharded, state))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((sharded, state)))
    same(load_checkpoint(tmp_path / "c", *after), expected)
