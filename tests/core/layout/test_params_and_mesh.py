"""Parameters, dtypes and meshes (R10)."""

# pyright: reportArgumentType=false

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.dtypes import FLOATING, itemsize, numpy_dtype, unit_roundoff
from crossframe.errors import MeshError, ParamError
from crossframe.mesh import MAX_WORLD_SIZE, MeshSpec, check_world_size
from crossframe.params import ParamSpec, check_params, check_unique_names
from tests.core.helpers.random_layouts import QUICK

MESHES = st.builds(MeshSpec, shard=st.integers(1, 9), replicate=st.integers(1, 5))


@QUICK
@given(MESHES)
def test_R10_ranks_are_a_grid_of_replicas_times_shards(mesh):
    assert mesh.world_size == mesh.replicate * mesh.shard
    grid = [(replica, shard) for replica in range(mesh.replicate) for shard in range(mesh.shard)]
    assert [mesh.coordinate(rank) for rank in range(mesh.world_size)] == grid


@QUICK
@given(MESHES)
def test_R10_a_shard_group_varies_along_shard_only_and_a_replicate_group_along_replicas_only(mesh):
    ranks = range(mesh.world_size)
    for rank in ranks:
        replica, shard = mesh.coordinate(rank)
        assert tuple(mesh.shard_group(rank)) == tuple(r for r in ranks if mesh.coordinate(r)[0] == replica)
        assert tuple(mesh.replicate_group(rank)) == tuple(r for r in ranks if mesh.coordinate(r)[1] == shard)


@pytest.mark.parametrize("rank", [-1, 6, 1.0, True, None, "0"])
def test_a_rank_outside_the_mesh_is_refused(rank):
    mesh = MeshSpec(shard=3, replicate=2)
    for question in (mesh.coordinate, mesh.shard_group, mesh.replicate_group):
        with pytest.raises(MeshError, match="from 0 to 5"):
            question(rank)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None, "2", np.int64(2)])
def test_a_mesh_axis_that_is_no_size_is_refused_by_name(size):
    with pytest.raises(MeshError, match="'shard'"):
        MeshSpec(shard=size)
    with pytest.raises(MeshError, match="'replicate'"):
        MeshSpec(shard=2, replicate=size)


@QUICK
@given(st.lists(st.integers(0, 7), max_size=4).map(tuple))
def test_a_parameter_counts_its_elements(shape):
    assert ParamSpec("w", shape).numel == len(list(np.ndindex(shape)))


def test_what_a_parameter_is_unless_told():
    assert ParamSpec("w", (2,)) == ParamSpec("w", (2,), "float32", (), True)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": ""}, "needs a name"),
        ({"name": None}, "needs a name"),
        ({"name": b"w"}, "needs a name"),
        ({"shape": (2, -1)}, "'w': expected a tuple of sizes"),
        ({"shape": [2]}, "'w': expected a tuple of sizes"),
        ({"shape": 2}, "'w': expected a tuple of sizes"),
        ({"shape": (2.0,)}, "'w': expected a tuple of sizes"),
        ({"shape": (True,)}, "'w': expected a tuple of sizes"),
        ({"dtype": "int32"}, "unknown dtype 'int32'.*float64.*bfloat16"),
        ({"dtype": np.float32}, "unknown dtype"),
        ({"dtype": ["float32"]}, "unknown dtype"),
        ({"aliases": ("w",)}, "'w': the same name twice"),
        ({"aliases": ("v", "v")}, "'w': the same name twice"),
        ({"aliases": "v"}, "'w': expected a tuple of names"),
        ({"aliases": (1,)}, "'w': expected a tuple of names"),
        ({"aliases": ("",)}, "'w': expected a tuple of names"),
        ({"aliases": None}, "'w': expected a tuple of names"),
        ({"requires_grad": 1}, "'w': expected a bool"),
    ],
)
def test_a_parameter_that_cannot_be_is_refused(fields, said):
    with pytest.raises(ParamError, match=said):
        ParamSpec(**({"name": "w", "shape": (2,)} | fields))


def test_names_and_aliases_belong_to_one_parameter_each():
    a, b = ParamSpec("a", (), aliases=("x",)), ParamSpec("b", (), aliases=("y",))
    check_unique_names([a, b])
    check_params((a, b))
    for other in (ParamSpec("x", ()), ParamSpec("c", (), aliases=("x",))):
        with pytest.raises(ParamError, match=f"'x' belongs to two parameters, 'a' and '{other.name}'"):
            check_params((a, b, other))
    with pytest.raises(ParamError, match="'a' belongs to two parameters"):
        check_unique_names(iter([b, a, a]))
    for wrong in ([a, b], ("a",), None, 3):
        with pytest.raises(ParamError, match="tuple of ParamSpec"):
            check_params(wrong)


@pytest.mark.parametrize(
    ("dtype", "num_bytes", "digits"),
    [("float64", 8, 53), ("float32", 4, 24), ("float16", 2, 11), ("bfloat16", 2, 8), ("float8_e4m3fn", 1, 4)],
)
def test_dtypes_have_their_bytes_and_their_rounding(dtype, num_bytes, digits):
    assert itemsize(dtype) == numpy_dtype(dtype).itemsize == num_bytes
    assert numpy_dtype(dtype).name == dtype
    assert unit_roundoff(dtype) == 2.0**-digits
    # One more than the unit roundoff is where 1 moves; at it, it rounds back to even.
    one = numpy_dtype(dtype).type(1)
    assert numpy_dtype(dtype).type(1 + 2 * unit_roundoff(dtype)) > one
    assert math.isclose(float(numpy_dtype(dtype).type(1 + unit_roundoff(dtype) / 2)), 1.0, rel_tol=0, abs_tol=0)


def test_every_dtype_that_is_named_is_known():
    assert {numpy_dtype(name).name for name in FLOATING} == set(FLOATING)


def test_a_shape_may_have_fewer_than_2_to_the_63_bytes():
    for shape in ((2**61 - 1,), (2**60, 1, 1), (2**60, 0, 1)):
        assert ParamSpec("w", shape).shape == shape
    # A size of 0 counts as 1, as strides overflow all the same.
    for shape, dtype in (
        ((2**61,), "float32"),
        ((2**61, 0), "float32"),
        ((2**62,), "bfloat16"),
        ((2**63,), "float8_e4m3fn"),
    ):
        with pytest.raises(ParamError, match="overflows"):
            ParamSpec("w", shape, dtype)
    assert ParamSpec("w", (2**62,), "float8_e4m3fn").numel == 2**62


def test_parameters_come_as_a_tuple_of_nothing_else():
    w = ParamSpec("w", (2,))
    for wrong in ([w], (w, 3), (3, w), None, w):
        with pytest.raises(ParamError, match="a tuple of ParamSpec"):
            check_params(wrong)


def test_R10_a_rank_is_a_32_bit_int():
    assert MAX_WORLD_SIZE == 2_147_483_647
    check_world_size(1)
    check_world_size(MAX_WORLD_SIZE)
    assert MeshSpec(MAX_WORLD_SIZE).world_size == MAX_WORLD_SIZE and MeshSpec(3).replicate == 1
    for wrong in (0, -1, MAX_WORLD_SIZE + 1, True, 2.0, "2", None):
        with pytest.raises(MeshError, match="at least 1 and at most 2147483647"):
            check_world_size(wrong)
    with pytest.raises(MeshError, match="at most 2147483647 ranks"):
        MeshSpec(shard=2**30, replicate=2)
