# pyright: reportArgumentType=false
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from crossframe import MeshSpec
from crossframe.errors import UsageError
from jax_backend import make_mesh, per_rank, value_and_grad
from tests.on_jax.helpers.small import mesh_of_size, small_loss


def test_R10_rank_i_is_device_i_and_the_axis_is_auto():
    mesh = make_mesh(MeshSpec(3), jax.devices()[::-1])
    assert list(mesh.devices.flat) == jax.devices()[:0:-1]
    assert mesh.axis_names == ("shard",)
    assert mesh.axis_types == (AxisType.Auto,)


def test_R10_ranks_of_a_shard_group_are_neighbours_in_a_mesh_with_replicas():
    mesh = make_mesh(MeshSpec(shard=2, replicate=2))
    assert mesh.axis_names == ("replicate", "shard")
    assert mesh.devices.tolist() == [jax.devices()[:2], jax.devices()[2:]]


def test_too_few_devices_says_how_to_get_more():
    with pytest.raises(UsageError, match=rf"at least 9 devices .*got {jax.device_count()}.*jax_num_cpu_devices', 9"):
        make_mesh(MeshSpec(9))


@pytest.mark.parametrize("axes", [{"shard": 2, "other": 1}, {"shard": 2}])
def test_a_mesh_of_other_axes_or_of_explicit_type_is_refused(axes):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))
    with pytest.raises(UsageError, match=r"'shard', of type Auto, got 'shard'.*make_mesh"):
        value_and_grad(small_loss, mesh)


def test_what_is_no_mesh_is_refused():
    with pytest.raises(UsageError, match="expected a jax Mesh, got int"):
        value_and_grad(small_loss, 4)


def test_per_rank_copies_arrays_and_folds_keys_with_the_rank():
    keys = jax.random.split(jax.random.key(3), 2)
    spread = per_rank({"count": jnp.int32(7), "keys": keys, "mean": np.ones((2, 3))}, mesh_of_size(3))
    assert spread["count"].dtype == jnp.int32
    np.testing.assert_array_equal(spread["count"], [7, 7, 7])
    assert spread["mean"].shape == (3, 2, 3)
    assert spread["keys"].shape == (3, 2)
    for rank in range(3):
        for i in range(2):
            expected = jax.random.key_data(jax.random.fold_in(keys[i], rank))
            np.testing.assert_array_equal(jax.random.key_data(spread["keys"][rank, i]), expected)
