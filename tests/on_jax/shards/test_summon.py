"""What `summon_full_params` refuses and keeps, beyond the scenarios."""

# pyright: reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossframe import MeshSpec
from crossframe.errors import ReplacedError, UnsupportedError, UsageError
from crossframe.param_map import MapEntry, ParamMap
from crossframe.precision import PrecisionPolicy
from jax_backend import make_mesh, shard, summon_full_params, unshard, writeback
from tests.on_jax.helpers.small import WIDE, wide

MESH = MeshSpec(2)
SHARED = {"head.table": "embed.table"}


def params():
    table = np.arange(6.0).reshape(3, 2)
    return wide({"embed": {"table": table}, "head": {"table": table, "bias": np.ones(3)}})


def small(**kwargs):
    return shard(params(), make_mesh(MESH), shared=SHARED, units=("head",), **{"layout": "flat", **kwargs})


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def refused(match, edit, sharded=None, **kwargs):
    """The edit is refused on exit, nothing is written, and the next summon is right."""
    sharded = sharded or small()
    with pytest.raises(ReplacedError, match=match), summon_full_params(sharded, **kwargs) as summoned:
        edit(summoned)
    assert summoned.sharded is sharded
    with summon_full_params(sharded) as summoned:
        same(summoned.params, params())


def put(path, value):
    def edit(summoned):
        *parts, last = path.split(".")
        node = summoned.params
        for part in parts:
            node = node[part]
        node[last] = wide(value)

    return edit


def test_R20_what_does_not_fit_is_refused_by_name_and_nothing_is_written():
    both = put("head.bias", np.ones(4))
    refused(rf"'head.bias' \('head.bias'\): expected the unsharded shape .*\(\(3,\), '{WIDE}'\), got \(\(4,\)", both)
    refused(r"got \(\(3,\), 'float16'\)", put("head.bias", np.ones(3, np.float16)))
    refused("got None", put("head.bias", None))
    refused(rf"got \(\(\), '{WIDE}'\)", put("head.bias", 1.0))
    refused(r"missing \[\], unexpected \['head.more'\]", put("head.more", np.ones(3)))
    refused(r"missing \['embed.table'", lambda summoned: setattr(summoned, "params", {}))


def test_R19_what_is_not_shown_cannot_be_replaced():
    edit = put("embed.table", np.zeros((3, 2)))
    refused("'embed.table'.*expected None, since it is not shown", edit, unit="head")


@pytest.mark.parametrize("places", [("embed",), ("head",), ("embed", "head")])
@pytest.mark.parametrize("offload", [True, False])
def test_R31_a_shared_parameter_is_one_whichever_of_its_places_is_edited(places, offload):
    sharded = small()
    with summon_full_params(sharded, offload_to_cpu=offload) as summoned:
        assert summoned.params["embed"]["table"] is summoned.params["head"]["table"]
        for place in places:
            summoned.params[place]["table"] = np.full((3, 2), 9.0, WIDE)
    wanted = {"embed": {"table": np.full((3, 2), 9.0)}, "head": {"table": np.full((3, 2), 9.0), "bias": np.ones(3)}}
    same(unshard(summoned.sharded), wanted)


def test_R31_places_of_a_shared_parameter_that_were_given_different_values_are_refused():
    def edit(summoned):
        put("embed.table", np.zeros((3, 2)))(summoned)
        put("head.table", np.ones((3, 2)))(summoned)

    refused("'embed.table' and 'head.table' are one", edit)


@pytest.mark.parametrize("layout", ["flat", "per_param", "ragged"])
def test_R24_an_exception_inside_ends_it_as_any_exit_does(layout):
    sharded = small(layout=layout)
    for persists in (True, False):
        with (
            pytest.raises(KeyError, match="mine"),
            summon_full_params(sharded, unit="head", writeback=persists) as summoned,
        ):
            summoned.params["head"]["bias"] = jnp.full(3, 4.0)
            raise KeyError("mine")
        np.testing.assert_array_equal(unshard(summoned.sharded)["head"]["bias"], [4.0 if persists else 1.0] * 3)
    with summon_full_params(sharded) as summoned:
        same(summoned.params, params())


def test_R20_frozen_parameters_are_shown_and_persist_and_trained_ones_alone_do_not_do():
    sharded = small(frozen=("head.bias",))
    with summon_full_params(sharded) as summoned:
        summoned.params["head"]["bias"] = np.zeros(3, WIDE)
    assert set(summoned.sharded.frozen) == set(sharded.frozen) == {"head"}
    np.testing.assert_array_equal(unshard(summoned.sharded)["head"]["bias"], np.zeros(3))
    with pytest.raises(UsageError, match=r"frozen buckets.*with_trainable"), summon_full_params(sharded.trainable):
        pass
    with pytest.raises(UsageError, match=r"frozen buckets.*with_trainable"):
        unshard(sharded.trainable)


@pytest.mark.parametrize("offload", [True, False])
def test_R20_stacked_units_are_shown_with_all_layers(offload):
    full = wide({"blocks": {"w": np.arange(15.0).reshape(3, 5)}, "out": np.ones(2)})
    for layout in ("flat", "per_param"):
        sharded = shard(full, make_mesh(MESH), stacked=("blocks",), layout=layout)
        with summon_full_params(sharded, offload_to_cpu=offload) as summoned:
            same(summoned.params, full)
            summoned.params["blocks"]["w"] = summoned.params["blocks"]["w"] * 2
        same(unshard(summoned.sharded), {"blocks": {"w": full["blocks"]["w"] * 2}, "out": np.ones(2)})


def test_R20_one_of_several_leaves_that_are_one_parameter_is_edited_alone():
    full = wide({name: np.arange(6.0).reshape(2, 3) + i for i, name in enumerate("qkv")})
    joined = ParamMap((MapEntry("qkv", ("q", "k", "v"), "i o -> o i"),))
    sharded = shard(full, make_mesh(MESH), param_map=joined, layout="flat")
    with summon_full_params(sharded) as summoned:
        same(summoned.params, full)
        summoned.params["k"] = summoned.params["k"] * 2
    same(unshard(summoned.sharded), full | {"k": full["k"] * 2})


def test_R20_writeback_of_replicas_that_differ_leaves_each_its_own():
    mesh = make_mesh(MeshSpec(shard=1, replicate=2))
    sharded = shard(wide({"w": np.zeros(2)}), mesh, layout="flat")
    spread = jax.shard_map(
        lambda: jnp.full(2, jax.lax.axis_index("replicate"), float),
        mesh=mesh,
        in_specs=(),
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    written = writeback(sharded, {"w": jax.jit(spread)()})
    assert [float(part.data[0]) for part in written.shards[""].addressable_shards] == [0, 1]


def test_R22_gradients_that_are_kept_in_low_precision_stay_so():
    policy, mesh = PrecisionPolicy("bfloat16", keep_low_precision_grads=True), make_mesh(MESH)
    full = {"w": np.ones(3, np.float32), "v": np.ones(2, np.float32)}
    sharded = shard(full, mesh, mp_policy=policy, layout="flat")
    grads = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), sharded)
    with summon_full_params(sharded, with_grads=True, grads=grads) as summoned:
        assert summoned.grads["w"].dtype == "bfloat16"
        summoned.grads["w"] = summoned.grads["w"] * 3
    assert [leaf.dtype for leaf in jax.tree.leaves(summoned.sharded_grads)] == ["bfloat16"]
    same(unshard(summoned.sharded_grads), {"w": np.full(3, 3.0), "v": np.ones(2)})


def test_R23_gradients_are_refused_where_they_have_no_meaning():
    flat, grads = small(keep_original=False), {"with_grads": True}
    for sharded, kwargs, match in (
        (flat, grads, "with_grads=True without original parameters"),
        (small(), grads | {"offload_to_cpu": True}, "with_grads=True with offload_to_cpu=True"),
    ):
        with pytest.raises(UnsupportedError, match=match), summon_full_params(sharded, **kwargs):
            pass


def test_R23_processes_that_each_offload_all_parameters_are_warned(monkeypatch):
    sharded = small()
    with summon_full_params(sharded, offload_to_cpu=True):  # one process has one copy
        pass
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with (
        pytest.warns(UserWarning, match="offload_to_cpu=True on every rank"),
        summon_full_params(sharded, offload_to_cpu=True),
    ):
        pass
    with summon_full_params(sharded, offload_to_cpu=True, writeback=False, rank0_only=True):
        pass


def test_arguments_of_another_kind_are_refused():
    sharded = small()
    for args, match in (
        ({"grads": sharded}, "pass with_grads=True to be shown them"),
        ({"grads": params(), "with_grads": True}, "expected gradients of these parameters as ShardedParams, got dict"),
        ({"grads": small(layout="ragged"), "with_grads": True}, "expected gradients of these parameters"),
        ({"writeback": 1}, "writeback: expected True or False, got 1"),
        ({"recurse": "no"}, "expected ShardedParams or a holder .* got ShardedParams, 'no'"),
        ({"unit": None}, "got ShardedParams, True, None"),
    ):
        with pytest.raises(UsageError, match=match), summon_full_params(sharded, **args):
            pass
    with pytest.raises(UsageError, match="got dict"), summon_full_params(params()):  # type: ignore[arg-type]
        pass
    with (
        pytest.raises(UsageError, match="none were given to be edited"),
        summon_full_params(sharded, with_grads=True) as summoned,
    ):
        summoned.grads = params()
