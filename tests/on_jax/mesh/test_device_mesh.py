# pyright: reportArgumentType=false
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from crossframe import MeshSpec
from crossframe.errors import UsageError
from jax_backend import make_mesh, per_rank, value_and_grad
from jax_backend.mesh._device_mesh import devices_of, num_ranks
from jax_backend.mesh._rank_parts import check_in_one_process
from tests.on_jax.helpers.small import mesh_of_size, small_loss


def test_R10_rank_i_is_device_i_and_the_axis_is_auto():
    mesh = make_mesh(MeshSpec(3), jax.devices()[3::-1])
    assert list(mesh.devices.flat) == jax.devices()[3:0:-1]
    assert mesh.axis_names == ("shard",)
    assert mesh.axis_types == (AxisType.Auto,)


def test_R10_ranks_of_a_shard_group_are_neighbours_in_a_mesh_with_replicas():
    mesh = make_mesh(MeshSpec(shard=2, replicate=2))
    assert mesh.axis_names == ("replicate", "shard")
    assert mesh.devices.tolist() == [jax.devices()[:2], jax.devices()[2:4]]


def test_R10_a_rank_has_the_devices_along_the_model_axes():
    mesh = make_mesh(MeshSpec(2), model_axes={"tp": 2})
    assert mesh.axis_names == ("shard", "tp") and set(mesh.axis_types) == {AxisType.Auto}
    assert [devices_of(mesh, rank) for rank in range(num_ranks(mesh))] == [jax.devices()[:2], jax.devices()[2:4]]
    assert per_rank(np.zeros(3), mesh).addressable_shards[0].data.shape == (1, 3)


@dataclass(frozen=True)
class Tpu:
    """A description of a TPU of a v5e."""

    id: int
    coords: tuple[int, int, int]
    slice_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    process_index: int = 0


def tpus(num_slices=1):
    """Slices of 4 x 2."""
    return [Tpu(i, (i % 4, i // 4 % 2, 0), i // 8) for i in range(num_slices * 8)]


@pytest.fixture
def ids_on(monkeypatch):
    """The ids of devices on the mesh that `make_mesh` makes of all."""

    def ids_on(devices, spec, **options):
        monkeypatch.setattr(jax, "devices", lambda: devices)
        return np.vectorize(lambda device: device.id)(make_mesh(spec, **options).devices).tolist()

    return ids_on


def test_tpus_of_a_slice_are_ordered_as_jax_orders_them(ids_on):
    ring = ids_on(tpus(), MeshSpec(8))
    assert ring == [device.id for device in jax.make_mesh((8,), ("shard",), devices=tpus()).devices]
    at = np.array([tpus()[i].coords for i in [*ring, ring[0]]])
    assert abs(np.diff(at, axis=0)).sum(axis=1).tolist() == [1] * 8  # each is next to the one before
    assert ids_on(tpus(), MeshSpec(shard=4, replicate=2)) == [ring[:4], ring[4:]]
    assert ids_on(tpus(), MeshSpec(4), model_axes={"tp": 2}) == [ring[i : i + 2] for i in range(0, 8, 2)]


def test_devices_in_a_given_order_keep_it_on_tpus():
    assert make_mesh(MeshSpec(8), tpus()).devices.tolist() == tpus()


def test_tpus_that_fill_no_box_keep_their_order(ids_on):
    assert ids_on(tpus(), MeshSpec(5)) == list(range(5))


@pytest.mark.parametrize(
    "spec", [MeshSpec(16), MeshSpec(shard=8, replicate=2), MeshSpec(shard=4, replicate=4)], ids=str
)
def test_slices_of_tpus_are_on_the_outermost_axes(ids_on, spec):
    ring = ids_on(tpus(), MeshSpec(8))
    assert np.ravel(ids_on(tpus(2), spec)).tolist() == ring + [8 + i for i in ring]


def test_slices_with_different_numbers_of_tpus_keep_their_order(ids_on):
    assert ids_on(tpus(2), MeshSpec(12)) == list(range(12))


def test_a_rank_with_devices_in_several_processes_has_no_readable_shard():
    devices = np.array([SimpleNamespace(process_index=i) for i in (0, 0, 0, 1)], object).reshape(2, 2)
    mesh = SimpleNamespace(devices=devices, shape={"shard": 2, "tp": 2}, axis_names=("shard", "tp"))
    check_in_one_process(mesh, 0)
    with pytest.raises(UsageError, match=r"rank 1 has devices in the processes \[0, 1\].*make_mesh.*orbax"):
        check_in_one_process(mesh, 1)


def test_too_few_devices_says_how_to_get_more():
    with pytest.raises(UsageError, match=rf"at least 9 devices .*got {jax.device_count()}.*jax_num_cpu_devices', 9"):
        make_mesh(MeshSpec(9))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"shard": 2}, "names other than 'replicate' and 'shard', got 'shard'"),
        ({"tp": 0}, "a size of at least 1 for 'tp', got 0"),
        (("tp", 2), "the sizes of axes by name, such as"),
    ],
)
def test_invalid_model_axes_raise(axes, message):
    with pytest.raises(UsageError, match=f"model_axes: expected {message}"):
        make_mesh(MeshSpec(1), model_axes=axes)


@pytest.mark.parametrize(
    ("axes", "kind"),
    [({"tp": 2, "shard": 2}, AxisType.Auto), ({"tp": 2}, AxisType.Auto), ({"shard": 2}, AxisType.Explicit)],
)
def test_a_mesh_of_other_axes_or_of_explicit_type_is_refused(axes, kind):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))
    with pytest.raises(UsageError, match=rf"'shard', of type Auto, got '{next(iter(axes))}'.*make_mesh.*model_axes"):
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
