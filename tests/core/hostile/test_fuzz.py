"""Whatever Python value is passed to what the core describes and computes, only a CrossframeError comes out."""

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossframe.api import Api
from crossframe.cost import Hardware, step_cost
from crossframe.errors import CrossframeError, LayoutError, MeshError, ParamError
from crossframe.grad_norm import check_max_norm, check_norm_type
from crossframe.layout import (
    FlatLayout,
    PerParamLayout,
    RaggedLayout,
    Sharding,
    layout_from_json,
    overlay,
    post_forward,
    post_forward_group,
)
from crossframe.mesh import MAX_WORLD_SIZE, MeshSpec
from crossframe.param_map import MapEntry, ParamMap
from crossframe.params import ParamSpec
from crossframe.plan import plan_units, step_plan
from crossframe.precision import Precision, PrecisionPolicy, resolve_precision
from crossframe.quoting import LONGEST, quote
from crossframe.reduction import custom_factors, divide_factors, factors_of, mean_factors, reduction_steps
from crossframe.reference.redistribute import apply_overlay
from crossframe.strategy import Strategy, Sync
from crossframe.unshard import UnshardRequest
from tests.conftest import EXHAUSTIVE
from tests.core.helpers.random_layouts import QUICK


class Unshowable:
    """A value whose own repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


W, V = ParamSpec("w", (4, 6)), ParamSpec("v", (5,), aliases=("u",))
FLAT, ROWS, RAGGED = FlatLayout((W, V), 2, True), PerParamLayout((W, V), 2), RaggedLayout((W, V), 2)
MESH = MeshSpec(2, 2)
SHARDING = Sharding((("a", FLAT),), MESH)
UNITS = plan_units(SHARDING.units)
# Values that cannot be written out are drawn by name, since hypothesis writes out what it draws from.
UNWRITABLE = {"huge": 10**5000, "least": -(10**5000), "unshowable": Unshowable()}
ATOMS = (
    st.none() | st.booleans() | st.integers(-3, 6) | st.integers() | st.floats() | st.complex_numbers()
    | st.text(max_size=3) | st.binary(max_size=2)
    | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**100, float("nan"), "w", "float32", "flat",
                       W, V, FLAT, ROWS, RAGGED, MESH, SHARDING, UNITS[0], MapEntry("w", "w"), object(), int,
                       np.int64(2), np.ones(2)])
    | st.sampled_from(sorted(UNWRITABLE)).map(lambda name: UNWRITABLE[name])
)  # fmt: skip
ANYTHING = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=6,
)
# Every function and the arguments with which it is right; some of them are then replaced.
RIGHT: dict[Any, dict[str, Any]] = {
    ParamSpec: {"name": "w", "shape": (2, 3), "dtype": "float32", "aliases": ("v",), "requires_grad": True},
    MeshSpec: {"shard": 2, "replicate": 2},
    FlatLayout: {"params": (W, V), "world_size": 2, "keep_original": True, "compute_dtype": None},
    PerParamLayout: {"params": (W, V), "world_size": 2, "dims": (1, 0)},
    RaggedLayout: {"params": (W, V), "world_size": 2, "blocks": (2, 1)},
    Sharding: {"units": (("a", FLAT),), "mesh": MESH},
    overlay: {"source": SHARDING, "target": SHARDING, "rank": None},
    post_forward: {"layout": ROWS.over(4), "group_size": 2},
    post_forward_group: {"mesh": MeshSpec(4, 2), "rank": 1, "group_size": 2},
    layout_from_json: {"fields": ROWS.to_json(), "params": (W, V)},
    MESH.coordinate: {"rank": 1},
    MESH.shard_group: {"rank": 1},
    MESH.replicate_group: {"rank": 1},
    SHARDING.pieces: {"rank": 1},
    SHARDING.where: {"name": "u", "element": 1},
    MapEntry: {"name": "w", "path": "k", "pattern": "i o -> o i"},
    ParamMap: {"entries": (MapEntry("w", "k"),)},
    ParamMap.from_json: {"rows": [["w", "k", "i o -> o i"]]},
    Precision: {"stored": "float32", "gathered": "float32", "reduced": "float32", "kept": "float32"},
    PrecisionPolicy: {"param_dtype": "bfloat16", "keep_low_precision_grads": True, "cast_forward_inputs": None},
    resolve_precision: {"stored": "float32", "param_dtype": "bfloat16", "reduce_dtype": None},
    divide_factors: {"num_ranks": 2},
    mean_factors: {"num_ranks": 4, "dtype": "float32", "replicate": 2},
    custom_factors: {"factor": 2.0, "dtype": "float32"},
    factors_of: {"mesh": MESH, "api": Api.FSDP1, "dtype": "float32", "custom": None},
    reduction_steps: {"mesh": MESH, "api": Api.FSDP2, "all_reduce": False},
    UnshardRequest: {"writeback": False, "rank0_only": True, "offload_to_cpu": True, "with_grads": False},
    Strategy.HYBRID_SHARD.mesh: {"world_size": 4, "shard": 2},
    plan_units: {
        "layouts": SHARDING.units,
        "strategy": Strategy.FULL_SHARD,
        "api": Api.FSDP1,
        "policy": None,
        "reshard_after_forward": None,
    },
    step_plan: {
        "units": UNITS,
        "mesh": MESH,
        "rank": 1,
        "backward_prefetch": None,
        "forward_prefetch": 1,
        "microbatches": 2,
        "sync": Sync.EACH,
    },
    Hardware: {"flops_per_second": 1.0, "bytes_per_second": 2, "latency_seconds": 0, "replica_bytes_per_second": None},
    step_cost: {
        "plan": step_plan(UNITS, MESH),
        "units": UNITS,
        "hardware": Hardware(),
        "tokens": 1,
        "optimizer_states": 2,
        "activation_bytes": None,
    },
    check_max_norm: {"max_norm": 1.0},
    check_norm_type: {"norm_type": 2.0},
    **{layout.find: {"i": 0, "start": 1, "stop": 3} for layout in (FLAT, ROWS, RAGGED)},
    **{layout.over: {"world_size": 3} for layout in (FLAT, ROWS, RAGGED)},
    **{layout.pieces: {"rank": 1} for layout in (FLAT, ROWS, RAGGED)},
    **{layout.padding: {"rank": 1} for layout in (FLAT, ROWS, RAGGED)},
}
KINDS = (FlatLayout, PerParamLayout, RaggedLayout)


def made_or_refused(make: Any, *args: Any, **fields: Any) -> Any:
    """What is made of these; any error but a CrossframeError with a message goes through."""
    try:
        return make(*args, **fields)
    except CrossframeError as error:
        assert len(str(error)) > 10
        return None


def use(made: Any) -> None:
    """Ask what is made everything that is asked of it: what was let through has to work."""
    hash(made)
    if isinstance(made, KINDS):
        assert made.padded_shard_numel * made.world_size == made.gathered_numel
        assert made.unsharded_numel >= sum(param.numel for param in made.params) and len(made.offsets) == len(
            made.params
        )
        for rank in (0, made.world_size - 1):
            made.pieces(rank), made.padding(rank)
        assert layout_from_json(made.to_json(), made.params) == made
    if isinstance(made, Sharding):
        list(made.pieces(made.mesh.world_size - 1))


@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__qualname__)
@settings(QUICK, max_examples=100 if os.environ.get(EXHAUSTIVE) else 12)
@given(st.data())
def test_one_or_more_wrong_arguments(make, data):
    wrong = data.draw(st.sets(st.sampled_from(sorted(RIGHT[make])), min_size=1))
    use_if(made_or_refused(make, **(RIGHT[make] | {name: data.draw(ANYTHING) for name in sorted(wrong)})))


def use_if(made: Any) -> None:
    if isinstance(made, (ParamSpec, MeshSpec, Sharding, *KINDS)):
        use(made)


@settings(QUICK, max_examples=200 if os.environ.get(EXHAUSTIVE) else 100)
@given(st.data())
def test_fields_of_a_layout_that_are_wrong_or_gone(data):
    right = data.draw(st.sampled_from([FLAT.to_json(), ROWS.to_json(), RAGGED.to_json()]))
    wrong = {name: data.draw(ANYTHING) for name in sorted(data.draw(st.sets(st.sampled_from(sorted(right)))))}
    gone = data.draw(st.sets(st.sampled_from(sorted(right)), max_size=1))
    use_if(made_or_refused(layout_from_json, {k: v for k, v in (right | wrong).items() if k not in gone}, (W, V)))


@pytest.mark.parametrize(
    "kind", [np.ones(2), np.array(["flat", "flat"]), ["flat"], 10**5000, None, Unshowable()], ids=quote
)
def test_a_kind_of_layout_that_is_no_name_is_refused(kind):
    with pytest.raises(LayoutError, match="unknown layout kind"):
        layout_from_json(FLAT.to_json() | {"kind": kind}, (W, V))


@settings(QUICK, max_examples=100)
@given(st.lists(ANYTHING, max_size=3) | ANYTHING)
def test_rows_that_are_no_map(rows):
    made = made_or_refused(ParamMap.from_json, rows)
    assert made is None or ParamMap.from_json(made.to_json()) == made


SHAPES = st.lists(st.integers(0, 5) | st.sampled_from([2**20, 2**31, 2**40, 2**62, 2**63, 10**30]), max_size=4).map(
    tuple
)


@settings(QUICK, max_examples=150)
@given(
    SHAPES,
    st.sampled_from(["float64", "float32", "bfloat16"]),
    st.integers(1, 9) | st.sampled_from([2**20, MAX_WORLD_SIZE]),
)
def test_shapes_near_the_largest_that_there_can_be(shape, dtype, world_size):
    param = made_or_refused(ParamSpec, "w", shape, dtype)
    if param is not None:
        for make in (
            lambda p: FlatLayout(p, world_size, True),
            lambda p: PerParamLayout(p, world_size),
            lambda p: RaggedLayout(p, world_size),
        ):
            use_if(made_or_refused(make, (param,)))


@pytest.mark.parametrize(
    "shape", [(2**61,), (2**31, 2**30), (2**63,), (0, 2**62), (0, 2**40, 2**40), (10**5000,), (10,) * 100], ids=quote
)
def test_a_shape_that_overflows_is_refused_by_name(shape):
    with pytest.raises(ParamError, match="'w': a shape that overflows"):
        ParamSpec("w", shape)


def test_the_largest_shapes_that_do_not_overflow():
    assert ParamSpec("w", (2**61 - 1,)).numel == 2**61 - 1
    assert ParamSpec("w", (2**62 - 1,), "bfloat16").numel == 2**62 - 1
    with pytest.raises(ParamError, match="overflows"):  # its bytes do, not its elements
        ParamSpec("w", (2**60,), "float64")


def test_more_ranks_than_can_be_numbered_are_refused():
    assert MeshSpec(MAX_WORLD_SIZE).world_size == MAX_WORLD_SIZE
    for fields in ({"shard": MAX_WORLD_SIZE, "replicate": 2}, {"shard": 2, "replicate": 10**5000}, {"shard": 2**31}):
        with pytest.raises(MeshError, match="at most 2147483647 ranks"):
            MeshSpec(**fields)
    with pytest.raises(MeshError, match="at most 2147483647"):
        PerParamLayout((V,), 2**31)


def test_values_in_messages_are_short_and_never_raise():
    assert quote((1, "a")) == "(1, 'a')" and quote(Unshowable()) == "a Unshowable that cannot be written out"
    assert quote(10**5000) == "an int that cannot be written out"
    assert len(quote("x" * 1000)) == LONGEST + 3 and len(quote("x" * (LONGEST - 2))) == LONGEST


def test_the_right_arguments_are_right():
    for make, fields in RIGHT.items():
        assert make(**fields) is not None or make in (check_max_norm, check_norm_type)
    apply_overlay([], [], [])
