"""Optimizer state over shards and over full parameters (R37): roles, all forms and back, other world sizes, refusals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.dtypes import numpy_dtype
from crossframe.errors import MeshError, StateDictError
from crossframe.layout import FlatLayout, PerParamLayout, RaggedLayout, Sharding, overlay
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.state import Role, Seen, classify, flatten_state, gather_state, seen, shard_state, unflatten_state
from tests.core.random_layouts import QUICK, WORLD_SIZES, params, same_bits, specs


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


def full_state(layout, seed, *, absent=()):
    """Random bits as Adam's state of every parameter, a tensor and a plain value as scalars."""
    rng = np.random.default_rng(seed)
    dtype = numpy_dtype(layout.dtype)
    return {
        spec.name: {
            "step": np.array(7.0, np.float32),
            "exp_avg": rng.integers(0, 256, spec.numel * dtype.itemsize, np.uint8).view(dtype).reshape(spec.shape),
            "exp_avg_sq": rng.standard_normal(spec.shape),
            "lr_scale": 0.5,
        }
        for spec in layout.params
        if spec.name not in absent
    }


def assert_same(got, expected):
    assert list(got) == list(expected)
    for name, state in expected.items():
        assert set(got[name]) == set(state)
        for entry, value in state.items():
            other = got[name][entry]
            assert type(other) is type(value)
            assert same_bits(other, value) if isinstance(value, np.ndarray) else other == value


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


def ranks(layout):
    return range(layout.world_size)


@QUICK
@given(layouts(), st.integers(0, 99), st.data())
def test_R37_what_all_ranks_hold_gathers_to_the_full_state(layout, seed, data):
    absent = data.draw(st.sets(st.sampled_from([spec.name for spec in layout.params])))
    full = full_state(layout, seed, absent=absent)
    held = [shard_state(layout, full, rank) for rank in ranks(layout)]
    for rank, state in enumerate(held):
        assert list(state) == list(full)  # a parameter without state is absent, one without elements here is not
        numels = {spec.name: 0 for spec in layout.params}
        for piece in layout.pieces(rank):
            numels[piece.name] += piece.numel
        for name, entries in state.items():
            assert entries["exp_avg"].shape == entries["exp_avg_sq"].shape == (numels[name],)
            assert entries["exp_avg"].dtype == full[name]["exp_avg"].dtype
            assert entries["step"].shape == () and entries["step"] == 7 and entries["lr_scale"] == 0.5
    assert_same(gather_state(layout, held), full)


@QUICK
@given(layouts(), st.integers(0, 99))
def test_R37_a_rank_that_holds_no_element_may_lack_the_state_or_have_stayed_behind(layout, seed):
    full = full_state(layout, seed)
    held = [shard_state(layout, full, rank) for rank in ranks(layout)]
    for rank, state in enumerate(held):
        here = {piece.name for piece in layout.pieces(rank)}
        for spec in layout.params:
            if spec.name not in here and spec.numel:
                if rank % 2:
                    del state[spec.name]
                else:
                    state[spec.name]["step"] = np.array(0.0, np.float32)
    gathered = gather_state(layout, held)
    assert_same({spec.name: gathered[spec.name] for spec in layout.params}, full)


@QUICK
@given(layouts(), st.integers(0, 99))
def test_R37_state_of_a_flat_parameter_lies_as_the_shard_lies_and_padding_is_zero(layout, seed):
    full = full_state(layout, seed)
    flat = [flatten_state(layout, full, rank) for rank in ranks(layout)]
    for entry in ("exp_avg", "exp_avg_sq"):
        arrays = {name: state[entry] for name, state in full.items()}
        expected = shards_of(layout, arrays, next(iter(arrays.values())).dtype)
        for rank in ranks(layout):
            assert same_bits(flat[rank][entry], expected[rank])
    for state in flat:
        assert state["step"].shape == () and state["step"] == 7
        for rank in ranks(layout):  # what an optimizer made of the padding is of no effect
            for run in layout.padding(rank):
                flat[rank]["exp_avg_sq"][run.start : run.stop] = np.nan
    assert_same(unflatten_state(layout, flat), full)


@QUICK
@given(st.data(), st.integers(0, 99))
def test_R37_state_goes_to_another_world_size_and_layout_as_the_shards_go(data, seed):
    owned = data.draw(params(min_dims=1))
    source, target = data.draw(layouts(owned)), data.draw(layouts(owned))
    full = full_state(source, seed)
    flat = [flatten_state(source, full, rank) for rank in ranks(source)]
    moved = [np.zeros(target.padded_shard_numel, flat[0]["exp_avg"].dtype) for _ in ranks(target)]
    pair = [Sharding((("", layout),), MeshSpec(layout.world_size)) for layout in (source, target)]
    for step in overlay(*pair):
        part = flat[step.source_rank]["exp_avg"][step.source_start : step.source_start + step.numel]
        moved[step.target_rank][step.target_start : step.target_start + step.numel] = part
    for rank in ranks(target):
        assert same_bits(moved[rank], flatten_state(target, full, rank)["exp_avg"])
    held = [shard_state(target, unflatten_state(source, flat), rank) for rank in ranks(target)]
    assert_same(gather_state(target, held), full)


def test_R37_state_of_rows_in_their_shape_is_gathered_too():
    layout = PerParamLayout(specs([(5, 3)]), 4)  # FSDP2's optimizer keeps 2, 2, 1 and 0 rows
    full = np.arange(15.0).reshape(5, 3)
    held = [{"p0": {"exp_avg": full[2 * rank : 2 * rank + 2], "step": 3}} for rank in range(4)]
    assert held[3]["p0"]["exp_avg"].shape == (0, 3)
    assert_same(gather_state(layout, held), {"p0": {"exp_avg": full, "step": 3}})


def test_R37_nothing_stepped_is_no_state():
    layout = FlatLayout(specs([(5,), (2,)]), 2, False)
    assert gather_state(layout, [{}, {}]) == unflatten_state(layout, [{}, {}]) == {}
    assert gather_state(layout, [{"p0": {}}, {}]) == {}
    assert shard_state(layout, {}, 0) == flatten_state(layout, {}, 0) == {}


def test_R37_an_untouched_parameter_of_a_flat_one_counts_as_zeros_where_no_scalar_is_kept():
    layout = FlatLayout(specs([(2,), (3,)]), 1, False)
    momentum = {"p1": {"momentum_buffer": np.ones(3)}}
    assert flatten_state(layout, momentum, 0)["momentum_buffer"].tolist() == [0, 0, 1, 1, 1]
    adam = {"p1": {"exp_avg": np.ones(3), "step": 4}}
    with pytest.raises(StateDictError, match=r"unit 'head'.*'step'.*'p1' has 4, 'p0' has None.*use_orig_params"):
        flatten_state(layout, adam, 0, unit="head")


def test_R31_a_shared_parameters_state_stands_under_its_first_name_and_loads_under_any():
    layout = FlatLayout((ParamSpec("wte", (4,), aliases=("head",)),), 2, True)
    held = [shard_state(layout, {"head": {"m": np.arange(4.0)}}, rank) for rank in range(2)]
    assert [list(state) for state in held] == [["wte"], ["wte"]]
    assert gather_state(layout, [{"wte": held[0]["wte"]}, {"head": held[1]["wte"]}])["wte"]["m"].tolist() == [
        0,
        1,
        2,
        3,
    ]


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
    held = [{"p0": {"m": np.ones(2, dtype)}} for dtype in (np.float32, np.float64)]
    with pytest.raises(StateDictError, match="one dtype"):
        gather_state(FlatLayout(specs([(4,)]), 2, True), held)


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
    layout = FlatLayout(specs([(4,)]), 2, True)
    for states in ([{"p0": {"step": a}}, {"p0": {"step": b}}], [{"p0": {"step": b}}, {"p0": {"step": a}}]):
        with pytest.raises(StateDictError, match=r"'step' of 'p0'.*rank 0 has .*rank 1 has "):
            gather_state(layout, states)
        with pytest.raises(StateDictError, match=r"'step' of \"?'head' as one flat parameter"):
            unflatten_state(layout, [state["p0"] for state in states], unit="head")


@pytest.mark.parametrize("value", [3, None, "x", float("nan"), np.array(np.nan), np.array([2.0]), np.float32(2)])
def test_R37_scalars_stay_what_they_are(value):
    layout = FlatLayout(specs([(4,), (3,)]), 2, True)
    full = {name: {"s": value} for name in ("p0", "p1")}
    for gathered in (
        gather_state(layout, [shard_state(layout, full, rank) for rank in range(2)]),
        unflatten_state(layout, [flatten_state(layout, full, rank) for rank in range(2)]),
    ):
        for state in gathered.values():
            assert seen(state["s"]) == seen(value)
            assert str(state["s"]) == str(value)


def test_R37_no_array_of_a_converted_state_is_another_ones_memory():
    layout = FlatLayout(specs([(4,), (3,)]), 1, True)
    full = {name: {"step": np.array(1.0), "m": np.zeros(n)} for name, n in (("p0", 4), ("p1", 3))}
    flat = flatten_state(layout, full, 0)
    for converted in (
        shard_state(layout, full, 0), gather_state(layout, [full]), {"flat": flat}, unflatten_state(layout, [flat]),
    ):  # fmt: skip
        for state in converted.values():
            state["step"] += 1
            state["m"] += 1
    assert all(state["step"] == 1 and not state["m"].any() for state in full.values())
    spread = unflatten_state(layout, [flat])
    spread["p0"]["step"] += 5
    assert spread["p1"]["step"] == flat["step"] == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"p0": {"m": np.ones((2, 2))}}, r"'m' of 'p0': expected the parameter's shape \(4,\)"),
        ({"p0": {"m": np.ones(8)}}, r"'m' of 'p0'"),
        ({"p2": {"m": np.ones(4)}}, r"state of 'p2': expected parameters of this unit, \['p0', 'p1'\]"),
        ({3: {}}, r"state of 3"),
        ({"p0": [1]}, r"state of 'p0': expected values by entry name"),
        (None, "by name"),
    ],
)
def test_R37_full_state_that_does_not_fit_is_refused_by_name(change, said):
    layout = FlatLayout(specs([(4,), (3,)]), 2, True)
    for convert in (shard_state, flatten_state):
        with pytest.raises(StateDictError, match=said):
            convert(layout, change, 0)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"v": np.ones(3)}, r"names of state differ: 'p0' has \['m'\], 'p1' has \['v'\]"),
        ({"m": 1.0}, r"roles of state 'm' differ: 'p0' has 'elementwise', 'p1' has 'scalar'"),
        ({"m": np.ones(3, np.float32)}, r"dtypes of state 'm' differ: .*float64.*float32"),
    ],
)
def test_R37_parameters_of_a_flat_one_keep_state_of_one_kind(other, said):
    layout = FlatLayout(specs([(4,), (3,)]), 2, False)
    with pytest.raises(StateDictError, match=said):
        flatten_state(layout, {"p0": {"m": np.ones(4)}, "p1": other}, 0, unit="u")


def test_R37_steps_that_differ_inside_a_flat_parameter_are_refused():
    layout = FlatLayout(specs([(4,), (3,)]), 2, False)
    with pytest.raises(StateDictError, match=r"values of state 'step' differ: 'p0' has 1, 'p1' has 2"):
        flatten_state(layout, {"p0": {"step": 1}, "p1": {"step": 2}}, 1)


def test_R37_states_of_another_number_of_ranks_or_of_no_mapping_are_refused():
    layout = FlatLayout(specs([(4,)]), 2, True)
    for convert in (gather_state, unflatten_state):
        for wrong in ([{}], [{}, {}, {}], {}, None):
            with pytest.raises(MeshError, match="2 ranks"):
                convert(layout, wrong)  # type: ignore[operator]
        with pytest.raises(StateDictError, match="by name"):
            convert(layout, [{}, [1]])
    with pytest.raises(StateDictError, match="'q'"):
        gather_state(layout, [{"q": {}}, {}])
    for convert in (shard_state, flatten_state):
        with pytest.raises(MeshError, match="rank"):
            convert(layout, {}, 2)


def test_R37_a_parameter_without_dims_is_refused_since_its_state_cannot_be_told_from_a_scalar():
    layout = FlatLayout(specs([(), (3,)]), 2, True)
    state = {"p0": {"m": np.array(1.0)}}
    for convert in (
        lambda: shard_state(layout, state, 0),
        lambda: flatten_state(layout, state, 0),
        lambda: gather_state(layout, [state, {}]),
        lambda: unflatten_state(layout, [{"m": np.ones(layout.padded_shard_numel)}] * 2),
    ):
        with pytest.raises(StateDictError, match=r"'p0' has no dims"):
            convert()
