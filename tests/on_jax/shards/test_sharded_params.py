# pyright: reportArgumentType=false
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossframe import FlatLayout, ParamSpec, PerParamLayout
from crossframe.errors import LayoutError, MappingError, MeshError, UnitError, UsageError
from crossframe.param_map import MapEntry, ParamMap
from crossframe.reference import ReferenceUnit
from jax_backend import ShardedParams, pieces_of, shard, shards_of, unshard, value_and_grad
from tests.on_jax.helpers.small import UNITS, WIDE, WORLDS, canonical, mesh_of_size, small_map, small_params, wide


def bits(array):
    return np.asarray(array).tobytes()


@pytest.mark.parametrize("dtype", dict.fromkeys([WIDE, "float32", "bfloat16"]))
@pytest.mark.parametrize("keep_original", [True, False])
@pytest.mark.parametrize("world_size", WORLDS)
def test_R04_R05_the_shard_of_rank_i_is_the_references_bit_for_bit(world_size, keep_original, dtype):
    params = small_params(dtype)
    mesh = mesh_of_size(world_size)
    sharded = shard(params, mesh, units=UNITS, param_map=small_map(), keep_original=keep_original, layout="flat")
    for unit, layout in sharded.tree.units:
        reference = ReferenceUnit(layout, canonical(params), fill=False)
        array = sharded.shards[unit]
        assert array.shape == (layout.gathered_numel,)
        for rank, device in enumerate(mesh.devices.flat):
            (part,) = [part.data for part in array.addressable_shards if part.device == device]
            assert bits(part) == bits(reference.shards[rank])
            assert bits(shards_of(sharded, rank)[unit]) == bits(reference.shards[rank])


def test_R01_R02_units_and_order_are_torchs_whatever_the_order_of_the_pytree():
    sharded = shard(small_params(), mesh_of_size(2), units=UNITS, param_map=small_map(), layout="flat")
    assert [name for name, _ in sharded.tree.units] == ["", "blocks.0", "blocks.1"]
    layouts = sharded.tree.layouts
    assert [spec.name for spec in layouts[""].params] == ["inp.weight", "inp.bias", "out.weight", "out.bias"]
    assert [spec.shape for spec in layouts[""].params] == [(5, 3), (5,), (2, 5), (2,)]
    assert layouts["blocks.1"] == FlatLayout(
        (ParamSpec("blocks.1.weight", (5, 5), WIDE), ParamSpec("blocks.1.bias", (5,), WIDE)), 2, True
    )


def test_R01_the_order_inside_a_unit_is_the_maps_also_across_modules():
    params = wide({"a": {"u": np.zeros(2), "v": np.ones(3)}, "b": {"w": np.full(2, 2.0)}})
    names = ("a.v", "b.w", "a.u")
    pmap = ParamMap(tuple(MapEntry(name, name) for name in names))
    sharded = shard(params, mesh_of_size(1), param_map=pmap, keep_original=False, layout="flat")
    assert tuple(spec.name for spec in sharded.tree.layouts[""].params) == names
    np.testing.assert_array_equal(shards_of(sharded, 0)[""], [1, 1, 1, 2, 2, 0, 0])


def test_without_a_map_paths_and_axes_are_the_pytrees_own():
    params = wide({"b": [np.arange(6.0).reshape(2, 3)], "a": np.float64([9.0])})
    sharded = shard(params, mesh_of_size(1), keep_original=False, layout="flat")
    assert [spec.name for spec in sharded.tree.layouts[""].params] == ["a", "b.0"]
    np.testing.assert_array_equal(shards_of(sharded, 0)[""], [9, 0, 1, 2, 3, 4, 5])


def test_R06_pieces_are_the_references_and_hold_no_padding():
    params = small_params()
    sharded = shard(params, mesh_of_size(4), units=UNITS, param_map=small_map(), layout="flat")
    for rank in range(4):
        expected = {}
        for _, layout in sharded.tree.units:
            reference = ReferenceUnit(layout, canonical(params))
            expected |= reference.pieces(reference.shards[rank], rank)
        found = pieces_of(sharded, rank)
        assert found.keys() == expected.keys()
        for name, piece in expected.items():
            assert bits(found[name]) == bits(piece)


@pytest.mark.parametrize("world_size", [2, 3])
def test_R07_other_layouts_of_the_core_can_be_given_by_unit(world_size):
    params = small_params()
    specs = tuple(ParamSpec(f"blocks.0.{n}", s, WIDE) for n, s in (("bias", (5,)), ("weight", (5, 5))))
    given = {"blocks.0": PerParamLayout(specs, world_size)}
    sharded = shard(
        params, mesh_of_size(world_size), units=UNITS, param_map=small_map(), unit_layouts=given, layout="flat"
    )
    assert sharded.tree.layouts["blocks.0"] is given["blocks.0"]
    reference = ReferenceUnit(given["blocks.0"], canonical(params), fill=False)
    for rank in range(world_size):
        assert bits(shards_of(sharded, rank)["blocks.0"]) == bits(reference.shards[rank])
    back = unshard(sharded)
    assert bits(back["blocks"][0]["kernel"]) == bits(params["blocks"][0]["kernel"])


def test_a_pytree_whose_static_part_survives_tree_map_and_jit():
    sharded = shard(small_params(), mesh_of_size(2), units=UNITS, param_map=small_map(), layout="flat")
    doubled = jax.jit(lambda tree: jax.tree.map(lambda leaf: 2 * leaf, tree))(sharded)
    assert isinstance(doubled, ShardedParams)
    assert doubled.tree == sharded.tree and hash(doubled.tree) == hash(sharded.tree)
    np.testing.assert_array_equal(doubled.shards["blocks.0"], 2 * sharded.shards["blocks.0"])
    same = shard(small_params(seed=5), mesh_of_size(2), units=UNITS, param_map=small_map(), layout="flat")
    assert same.tree == sharded.tree and hash(same.tree) == hash(sharded.tree)
    other = shard(small_params(), mesh_of_size(2), units=UNITS[:1], param_map=small_map(), layout="flat")
    assert other.tree != sharded.tree


def refused(error, match, params=None, world_size=2, **kwargs):
    with pytest.raises(error, match=match):
        shard(small_params() if params is None else params, mesh_of_size(world_size), **{"layout": "flat", **kwargs})


def test_leaves_that_are_no_floating_arrays_are_refused_by_path():
    refused(UsageError, r"\{'a.step': 'int32'\}; .*go with state", {"a": {"step": np.int32([1]), "w": np.ones(2)}})
    refused(UsageError, r"expected an array at every leaf, got other objects at \['a.w'\]", {"a": {"w": 1.5}})
    refused(UsageError, "at least one parameter, got none", {})
    refused(UsageError, "two leaves have the path 'a.b'", {"a.b": np.ones(1), "a": {"b": np.ones(1)}})


def test_float64_is_refused_where_jax_would_round_it():
    with jax.enable_x64(False):
        refused(UsageError, r"\['w'\] are float64.*jax_enable_x64", {"w": np.ones(2)})


def test_a_map_that_does_not_fit_is_refused():
    short = ParamMap(small_map().entries[:-1])
    refused(MappingError, r"not in the map, by path: \['out.bias'\]", param_map=short)
    long = ParamMap((*small_map().entries, MapEntry("x", "y")))
    refused(MappingError, r"in the map but not in the model, by path: \['y'\]", param_map=long)
    flat = ParamMap((MapEntry("w", "w", "i o -> o i"),))
    refused(
        MappingError,
        r"'w', 'w' of shape \(2,\): expected 2 dims for 'i o -> o i'",
        wide({"w": np.ones(2)}),
        param_map=flat,
    )


@pytest.mark.parametrize("layout", ["flat", "per_param"])
def test_parameters_joined_within_each_head_are_sharded(layout):
    rng = np.random.default_rng(0)
    params = wide({part: rng.normal(size=(6, 2, 4)) for part in "qkv"})
    joined = ParamMap((MapEntry("qkv", ("q", "k", "v"), "i h w=4 -> (h + w) i"),))
    sharded = shard(params, mesh_of_size(2), param_map=joined, layout=layout)
    ((_, bucket),) = [(bucket.name, bucket) for bucket in sharded.tree.buckets]
    assert bucket.layout.params[0].shape == (24, 6)
    jax.tree.map(np.testing.assert_array_equal, unshard(sharded), params)


def test_a_map_of_portions_is_refused():
    layers = ParamMap(tuple(MapEntry(f"h.{i}.w", "h.w", f"[{i}/2] i o -> o i") for i in range(2)))
    refused(MappingError, r"'h.0.w', 'h.1.w'\] are portions", wide({"h": {"w": np.ones((2, 3, 4))}}), param_map=layers)
    padded = ParamMap((MapEntry("w", "w", "v -> v[0:3/4]"),))
    refused(MappingError, r"\['w'\] are portions of leaves or padded", wide({"w": np.ones(3)}), param_map=padded)


def test_R11_unknown_units_and_mixed_dtypes_are_refused():
    refused(UnitError, r"units \['blocks.2'\] are not modules", units=("blocks.2",), param_map=small_map())
    halves = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float16)}
    refused(LayoutError, "'a' is float32, 'b' is float16", halves)


def test_given_layouts_that_do_not_fit_are_refused():
    def given(*specs, world_size=2, unit=""):
        return {"unit_layouts": {unit: FlatLayout(tuple(specs), world_size, True)}}

    params = wide({"w": np.ones(2)})
    refused(LayoutError, "over 2 ranks, got one over 3", params, **given(ParamSpec("w", (2,), WIDE), world_size=3))
    refused(LayoutError, rf"'w', \(2,\), '{WIDE}'.*'w', \(3,\), '{WIDE}'", params, **given(ParamSpec("w", (3,), WIDE)))
    refused(LayoutError, r"\['u'\] are not units", params, **given(ParamSpec("w", (2,), WIDE), unit="u"))
    frozen = ParamSpec("w", (2,), WIDE, requires_grad=False)
    refused(LayoutError, rf"'w', \(2,\), '{WIDE}', True.*'w', \(2,\), '{WIDE}', False", params, **given(frozen))


def test_reading_shards_of_what_is_not_there_is_refused():
    sharded = shard(small_params(), mesh_of_size(2), layout="flat")
    with pytest.raises(MeshError, match="rank from 0 to 1, got 2"):
        shards_of(sharded, 2)
    with pytest.raises(UsageError, match="expected ShardedParams, got dict"):
        shards_of({}, 0)
    with pytest.raises(UsageError, match="outside jit and grad"):
        jax.jit(lambda tree: jnp.asarray(shards_of(tree, 0)[""]))(sharded)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("units", 5),
        ("units", (5,)),
        ("stacked", 5),
        ("frozen", 5),
        ("frozen", [None]),
        ("layout", 5),
        ("shared", 5),
        ("unit_layouts", 5),
        ("param_map", 5),
        ("dims", 5),
        ("blocks", 5),
        ("keep_original", 5),
    ],
)
def test_options_of_another_kind_are_refused(name, value):
    with pytest.raises(UsageError, match=rf"^{name}: expected .*(got|not).* "):
        shard(small_params("float32"), mesh_of_size(2), **{"layout": "flat", name: value})


def test_units_given_as_one_string_are_refused():
    with pytest.raises(UsageError, match=r"pass \('block',\)"):
        shard(wide({"block": {"w": np.ones(3)}}), mesh_of_size(2), units="block", layout="flat")


def test_a_unit_without_elements_is_sharded_and_trained_around():
    mesh = mesh_of_size(2)
    sharded = shard(wide({"w": np.ones(3), "empty": {"z": np.zeros((0,))}}), mesh, units=("empty",), layout="flat")
    step = value_and_grad(lambda params, batch: (params["w"] * batch).sum() + params["empty"]["z"].sum(), mesh)
    result = step(sharded, np.ones((2, 3)))
    assert float(result.loss) == 3.0
    assert unshard(result.grads)["empty"]["z"].shape == (0,)
    assert np.array_equal(unshard(result.grads)["w"], np.ones(3))


@pytest.mark.parametrize("layout", ["per_param", "flat", "ragged"])
def test_shapes_without_values_are_sharded_as_arrays_are(layout):
    options = {"units": UNITS, "param_map": small_map(), "layout": layout, "frozen": ("inp.bias",)}
    arrays = shard(small_params(), mesh_of_size(3), **options)
    structs = shard(jax.eval_shape(small_params), mesh_of_size(3), **options)
    assert structs == jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), arrays
    )
