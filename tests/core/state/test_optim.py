"""Optimizer state (R37): roles, copies to other layouts and world sizes, and whether it fits the parameters."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.checkpoint import state_layout
from crossframe.dtypes import numpy_dtype
from crossframe.errors import StateDictError
from crossframe.layout import FlatLayout, PerParamLayout, RaggedLayout, Sharding, overlay
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.reference.redistribute import apply_overlay
from crossframe.state import (
    Role,
    Seen,
    StateKind,
    agreed,
    classify,
    merged,
    rekeyed_groups,
    role_in_full,
    same_value,
    seen,
    target_of,
    unfit_state,
)
from tests.core.helpers.random_layouts import QUICK, WORLD_SIZES, params, same_bits


@st.composite
def layouts(draw, owned=None):
    """A layout of any kind and dim."""
    owned = owned or draw(params(min_dims=1))
    world_size = draw(WORLD_SIZES)
    kind = draw(st.sampled_from(["flat", "kept", "per_param", "ragged"]))
    if kind == "per_param":
        dims = [
            draw(st.sampled_from([i for i, size in enumerate(spec.shape) if i == 0 or size % world_size == 0]))
            for spec in owned
        ]
        return PerParamLayout(owned, world_size, tuple(dims))
    return RaggedLayout(owned, world_size) if kind == "ragged" else FlatLayout(owned, world_size, kind == "kept")


def shards_of(layout, arrays, dtype):
    """Every rank's shard of full arrays, cut without the layout's pieces."""
    shards = [np.zeros(layout.padded_shard_numel, dtype) for _ in range(layout.world_size)]
    if layout.contiguous:
        line = np.zeros(layout.gathered_numel, dtype)
        for offset, spec in zip(layout.offsets, layout.params, strict=True):
            line[offset : offset + spec.numel] = arrays[spec.name].reshape(-1)
        return np.split(line, layout.world_size)
    for column, spec, dim in zip(layout.columns, layout.params, layout.shard_dims, strict=True):
        chunk = -(-spec.shape[dim] // layout.world_size)
        for rank, shard in enumerate(shards):
            rows = np.arange(spec.shape[dim])[rank * chunk : (rank + 1) * chunk]
            part = np.take(arrays[spec.name], rows, axis=dim).reshape(-1)
            shard[column.start : column.start + part.size] = part
    return shards


def moved(source, target, lines):
    """Every rank's line of the target, by the core's copies; padding 0."""
    here, there = (Sharding((("", layout),), MeshSpec(layout.world_size)) for layout in (source, target))
    found = [[np.zeros(target.padded_shard_numel, lines[0].dtype)] for _ in range(target.world_size)]
    apply_overlay(overlay(here, there), [[line] for line in lines], found)
    return [line for (line,) in found]


@QUICK
@given(st.data(), st.integers(0, 99), st.sampled_from(["float32", "float64"]))
def test_R37_state_goes_to_another_world_size_and_layout_as_the_shards_go(data, seed, dtype):
    owned = data.draw(params(min_dims=1))
    source, target = (state_layout(data.draw(layouts(owned)), "exp_avg", dtype) for _ in range(2))
    rng = np.random.default_rng(seed)
    bits = {
        spec.name: rng.integers(0, 256, spec.numel * numpy_dtype(dtype).itemsize, np.uint8) for spec in source.params
    }
    full = {spec.name: bits[spec.name].view(dtype).reshape(spec.shape) for spec in source.params}
    lines = shards_of(source, full, dtype)
    there = moved(source, target, lines)
    assert all(map(same_bits, there, shards_of(target, full, dtype)))
    assert all(map(same_bits, moved(target, source, there), lines))
    whole = target_of(source, StateKind.FULL)
    (line,) = moved(target, whole, there)
    assert same_bits(line, np.concatenate([full[spec.name].reshape(-1) for spec in source.params]))
    assert all(map(same_bits, moved(whole, source, [line]), lines))


ROLES = [  # per rank: shape or None for a plain value, "-" for absent; how much each holds; the role
    ([None, None], [2, 1], Role.SCALAR),
    ([(), ()], [1, 1], Role.SCALAR),
    ([(), ()], [0, 0], Role.SCALAR),
    ([(2,), (1,)], [2, 1], Role.ELEMENTWISE),
    ([(2, 3), (0, 3)], [6, 0], Role.ELEMENTWISE),
    ([(2,), "-"], [2, 0], Role.ELEMENTWISE),
    ([(1,), (1,)], [2, 1], Role.SCALAR),
    ([(1, 1), (1, 1)], [5, 0], Role.SCALAR),
    ([(1,), (1,)], [1, 1], Role.ELEMENTWISE),
    ([(0,), (0,)], [0, 0], Role.ELEMENTWISE),
]


def what(shapes):
    return [None if shape == "-" else Seen(shape, "float32") for shape in shapes]


@pytest.mark.parametrize(("shapes", "held", "role"), ROLES)
def test_R37_roles(shapes, held, role):
    assert classify("w", "e", what(shapes), held) is role


@pytest.mark.parametrize(
    ("shapes", "held", "said"),
    [
        (
            [(3,), (3,)],
            [6, 6],
            r"'row_sums' of 'w': rank 0 holds 6 elements and has a value of shape \(3,\)",
        ),  # Adafactor
        ([(6,), (5,)], [6, 6], r"rank 1 holds 6 elements and has a value of shape \(5,\)"),
        ([(6,), ()], [6, 6], r"rank 1 holds 6 elements and has a value of shape \(\)"),
        ([(6,), ()], [6, 1], r"rank 1 holds 1 elements and has a value of shape \(\)"),
        ([(6,), None], [6, 6], r"rank 1 .* shape None"),
        ([(2,), "-"], [2, 1], r"ranks \[1\] hold elements and have no such state, ranks \[0\] have it"),
        (["-", None, "-"], [1, 1, 1], r"ranks \[0, 2\] hold elements"),
    ],
)
def test_R37_what_is_of_neither_role_is_refused_by_name(shapes, held, said):
    with pytest.raises(StateDictError, match=said):
        classify("w", "row_sums", what(shapes), held)


def test_R37_elementwise_state_has_one_dtype_on_all_ranks():
    with pytest.raises(StateDictError, match=r"'m' of 'w'.*0: 'float32', 1: 'float64'"):
        classify("w", "m", [Seen((2,), "float32"), Seen((2,), "float64")], [2, 2])


def test_R37_what_a_rank_tells_of_a_value():
    assert seen(np.zeros((2, 3), np.float32)) == Seen((2, 3), "float32")
    assert seen(np.array(1.0)) == seen(np.float64(1.0)) == Seen((), "float64")
    assert seen(1.0) == Seen(None, "float")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (3, 4), (3, 3.0), (1, True), (None, 0), (np.array(3.0), np.array(4.0)), (np.array(3.0), 3.0),
        (np.array(3.0), np.array(3.0, np.float32)), (np.array(3.0), np.array([3.0])),
    ],
)  # fmt: skip
def test_R37_scalars_that_differ_between_ranks_are_refused(a, b):
    for one, two in ((a, b), (b, a)):
        with pytest.raises(StateDictError, match=r"'step' of 'p0'.*rank 0 has .*rank 1 has "):
            agreed("p0", "step", {0: one, 1: two}, [2, 2])
        assert agreed("p0", "step", {0: one, 1: two}, [2, 0]) is one  # a rank without elements may have stayed behind


@pytest.mark.parametrize("value", [3, None, "x", float("nan"), np.array(np.nan), np.array([2.0]), np.float32(2)])
def test_R37_a_scalar_is_the_same_as_itself(value):
    other = value.copy() if isinstance(value, np.ndarray) else value
    assert same_value(value, other) and agreed("p0", "step", {0: value, 1: other}, [1, 1]) is value


def test_R37_a_rank_without_elements_may_lack_state_or_have_stayed_behind():
    moment, here, behind = (Seen((2, 3), "float32"), None), seen(7), seen(0)
    told = [{"step": (here, 7), "m": moment}, {"step": (behind, 0)}, {}, {"m": moment, "step": (here, 7)}]
    assert merged("w", told, [6, 0, 0, 6]) == {"step": (Role.SCALAR, here, 7), "m": (Role.ELEMENTWISE, moment[0], None)}
    assert merged("w", [{}, {}], [6, 6]) == {}
    with pytest.raises(StateDictError, match=r"'step' of 'w'.*rank 0 has 7, rank 1 has 0"):
        merged("w", told[:2], [6, 6])


# State dicts


PARAMS = (ParamSpec("a", (4,)), ParamSpec("b", (1, 3)))


def entry(value, dtype="float32"):
    """A scalar, or elementwise state of a shape."""
    if isinstance(value, tuple):
        return Seen(value, dtype), None
    return seen(value), value


def test_R37_the_role_of_a_full_value_follows_from_the_shape():
    a, b = PARAMS
    assert role_in_full(a, Seen((4,), "float32")) is role_in_full(b, Seen((1, 3), "float32")) is Role.ELEMENTWISE
    assert role_in_full(a, Seen((1,), "float32")) is role_in_full(a, Seen(None, "int")) is Role.SCALAR
    assert role_in_full(a, Seen((2, 2), "float32")) is role_in_full(b, Seen((3,), "float32")) is None


@pytest.mark.parametrize(
    ("state", "said"),
    [
        pytest.param({"a": {"m": (2, 2)}}, "'m' of 'a' has shape (2, 2), expected (4,)", id="shape"),
        pytest.param({"b": {"m": (3,)}, "a": {"m": (4,)}}, "'m' of 'b' has shape (3,), expected (1, 3)", id="dims"),
    ],
)
def test_R37_misshapen_state_is_refused_by_name(state, said):
    told = {name: {key: entry(value) for key, value in own.items()} for name, own in state.items()}
    assert unfit_state(PARAMS, told) == unfit_state(PARAMS, told, as_one=True) == [said]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        pytest.param({"v": (1, 3), "step": 3}, r"'b' has \['step', 'v'\] and 'a' has \['m', 'step'\]", id="names"),
        pytest.param({"m": 1.0, "step": 3}, r"'b' has 'm' 1.0 and 'a' has of float32 \(4,\)", id="roles"),
        pytest.param({"m": (1, 3), "step": 4}, "'b' has 'step' 4 and 'a' has 3", id="values"),
        pytest.param({}, "'b' has no state and 'a' has 'step'", id="none"),
    ],
)
def test_R37_parameters_of_a_flat_one_keep_state_of_one_kind(own, said):
    told = {"a": {"step": entry(3), "m": entry((4,))}, "b": {key: entry(value) for key, value in own.items()}}
    assert unfit_state(PARAMS, told) == []
    (found,) = unfit_state(PARAMS, told, as_one=True)
    assert re.search(said + ".*, but one flat parameter holds both", found), found


def test_R37_elementwise_state_of_a_flat_parameter_has_one_dtype():
    told = {"a": {"m": entry((4,))}, "b": {"m": entry((1, 3), "float64")}}
    assert unfit_state(PARAMS, told) == []
    (found,) = unfit_state(PARAMS, told, as_one=True)
    assert "'b' has 'm' of float64 (1, 3) and 'a' has of float32 (4,)" in found


def test_R37_an_untouched_parameter_of_a_flat_one_counts_as_zeros_without_scalars():
    assert unfit_state(PARAMS, {"b": {"momentum_buffer": entry((1, 3))}}, as_one=True) == []
    assert unfit_state(PARAMS, {}, as_one=True) == unfit_state(PARAMS, {"a": {}}, as_one=True) == []


# Parameter groups


def test_R37_flat_parameters_are_groups_of_what_is_inside_and_back():
    groups = [{"params": [2, 0], "lr": 0.1, "betas": [1, 2]}, {"params": [1], "lr": 0.2}]
    inside = {0: ("a", "b"), 1: ("c",), 2: ("d", "e")}
    found = rekeyed_groups(groups, {key: inside[key] for group in groups for key in group["params"]})
    assert found == [
        {"params": ["d", "e", "a", "b"], "lr": 0.1, "betas": [1, 2]},
        {"params": ["c"], "lr": 0.2},
    ]
    assert found[0]["betas"] is not groups[0]["betas"]
    back = rekeyed_groups(found, {name: (key,) for key, names in inside.items() for name in names})
    assert [group["params"] for group in back] == [[0, 2], [1]]  # in the optimizer's order


def test_R31_any_name_of_a_shared_parameter_is_its_key_and_both_are_it_once():
    keys = {"w": (0,), "wte": (1,), "head": (1,)}
    assert rekeyed_groups([{"params": ["head", "w", "wte"]}], keys) == [{"params": [0, 1]}]


def test_R37_one_flat_parameter_cannot_be_in_two_groups():
    groups = [{"params": ["a", "c"]}, {"params": ["d", "b"]}]
    with pytest.raises(StateDictError, match=r"'a' is in parameter group 0 and 'b' in group 1.*use_orig_params"):
        rekeyed_groups(groups, {"a": (0,), "b": (0,), "c": (1,), "d": (2,)})


def test_R37_groups_of_unknown_parameters_are_refused_by_name():
    with pytest.raises(StateDictError, match=r"'c', 'd', which the optimizer does not hold: expected \['a'\]"):
        rekeyed_groups([{"params": ["a", "c", "d"]}], {"a": (0,)})


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1.0, 1.0, True),
        (1.0, 2.0, False),
        (1.0, 1, False),
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (np.zeros(2), np.zeros(2), True),
        (np.zeros(2), np.zeros(2, np.float32), False),
        (np.zeros(2), np.zeros((2, 1)), False),
        (np.array(math.nan), np.array(math.nan), True),
        (np.array(0.0), 0.0, False),
    ],
)
def test_values_are_the_same_with_their_type_and_dtype(a, b, same):
    assert same_value(a, b) is same and same_value(b, a) is same
