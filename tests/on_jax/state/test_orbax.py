"""Checkpoints of orbax: from any mesh and layout onto any other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from crossframe import MeshSpec
from crossframe.checkpoint import CheckpointError
from jax_backend import make_mesh, shard, sharded_optimizer, unshard
from jax_backend.orbax import ShardedRestore, ShardedSave
from tests.on_jax.helpers.small import WIDE, small_params, wide
from tests.on_jax.state.test_checkpoint import same, sharded_as, trained

CASES = (("flat", MeshSpec(3)), ("ragged", MeshSpec(2)), ("per_param", MeshSpec(shard=2, replicate=2)))


def test_R36_R37_orbax_restores_parameters_and_state_on_any_mesh_and_layout(tmp_path):
    tx = sharded_optimizer(optax.adam(1e-2, mu_dtype=jnp.float32))
    made = []
    for layout, spec in CASES:
        sharded = sharded_as(small_params(), spec, layout, frozen=("inp.bias",))
        made.append((sharded, trained(sharded, tx), tx.init(sharded)))
    with ocp.CheckpointManager(tmp_path) as manager:
        for i, (sharded, state, _) in enumerate(made):
            manager.save(i, args=ShardedSave(sharded, state))
        for i in range(3):
            sharded, state, empty = made[(i + 1) % 3]
            like = jax.tree.map(lambda leaf: leaf * 0, sharded)
            same(manager.restore(i, args=ShardedRestore(like, empty)), (sharded, state))
            same(manager.restore(i, args=ShardedRestore(like)), sharded)


def test_orbax_alone_reads_true_shapes_by_canonical_name(tmp_path):
    sharded = sharded_as(small_params(), MeshSpec(3), "flat")
    tx = sharded_optimizer(optax.adam(1e-2))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(
            0, args=ocp.args.Composite(train=ShardedSave(sharded, tx.init(sharded)), data=ocp.args.JsonSave({"at": 3}))
        )
    found = ocp.StandardCheckpointer().restore(tmp_path / "0" / "train")
    params: Any = unshard(sharded)
    np.testing.assert_array_equal(found["model"]["inp.bias"], params["inp"]["bias"])
    assert {name: array.shape for name, array in found["model"].items()} == {
        spec.name: spec.shape for bucket in sharded.tree.buckets for spec in bucket.layout.params
    }
    assert set(found["state"]) == {f"{entry}:{name}" for entry in ("exp_avg", "exp_avg_sq") for name in found["model"]}
    assert int(found["values"]["step"]) == 0


def test_orbax_restores_stacked_layers_into_a_list_of_blocks(tmp_path):
    weights = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(WIDE)
    tx = sharded_optimizer(optax.adam(1e-2))
    stacked = shard({"blocks": {"w": weights}}, make_mesh(MeshSpec(2)), stacked=("blocks",))
    full: Any = wide({"blocks": [{"w": weights[0]}, {"w": weights[1]}]})
    lists = shard(full, make_mesh(MeshSpec(3)), layout="ragged")
    made = [(each, trained(each, tx)) for each in (stacked, lists)]
    with ocp.CheckpointManager(tmp_path) as manager:
        for i, each in enumerate(made):
            manager.save(i, args=ShardedSave(*each))
        for i, (sharded, state) in enumerate(reversed(made)):
            same(manager.restore(i, args=ShardedRestore(sharded, tx.init(sharded))), (sharded, state))


def test_orbax_refuses_another_model_or_optimizer_by_name(tmp_path):
    sharded = sharded_as(small_params(), MeshSpec(2), "flat")
    adam, sgd = (sharded_optimizer(tx) for tx in (optax.adam(1e-2), optax.sgd(1e-2, momentum=0.9)))
    other = shard(wide({"w": np.ones(3)}), make_mesh(MeshSpec(2)))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ShardedSave(sharded, sgd.init(sharded)))
        with pytest.raises(
            CheckpointError, match=r"'w': expected .* \(3,\), got nothing; 'blocks.0.bias': expected nothing"
        ):
            manager.restore(0, args=ShardedRestore(other))
        with pytest.raises(CheckpointError, match=r"section 'state': 'exp_avg:.*': expected .*, got nothing"):
            manager.restore(0, args=ShardedRestore(sharded, adam.init(sharded)))
