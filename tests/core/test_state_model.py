"""Names of state dicts, who gives and who has what in each kind, and whether one fits (R36)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.errors import LayoutError, MeshError, StateDictError, UnsupportedError
from crossframe.layout import FlatLayout, PerParamLayout, RaggedLayout, Sharding
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.state import (
    StateKind,
    TensorSpec,
    canonical_name,
    check_load,
    check_local_load,
    expected_tensors,
    local_key,
    state_entries,
)
from tests.core.random_layouts import QUICK, SIZES, specs

FULL, SHARDED, LOCAL = StateKind.FULL, StateKind.SHARDED, StateKind.LOCAL


@st.composite
def shardings(draw, kinds=("flat", "kept", "per_param", "ragged")):
    """Models of one to three units of any layout, some parameters tied, on any mesh."""
    mesh = MeshSpec(shard=draw(st.integers(1, 5)), replicate=draw(st.integers(1, 3)))
    units = []
    for i in range(draw(st.integers(1, 3))):
        shapes = draw(st.lists(st.lists(SIZES, min_size=1, max_size=2).map(tuple), min_size=1, max_size=3))
        owned = tuple(
            ParamSpec(f"u{i}.p{j}", shape, aliases=(f"tied.u{i}.p{j}",) if draw(st.booleans()) else ())
            for j, shape in enumerate(shapes)
        )
        kind = draw(st.sampled_from(kinds))
        if kind == "per_param":
            dims = [
                draw(st.sampled_from([d for d, size in enumerate(shape) if d == 0 or size % mesh.shard == 0]))
                for shape in shapes
            ]
            layout = PerParamLayout(owned, mesh.shard, tuple(dims))
        elif kind == "ragged":
            layout = RaggedLayout(owned, mesh.shard)
        else:
            layout = FlatLayout(owned, mesh.shard, kind == "kept")
        units.append((f"u{i}", layout))
    return Sharding(tuple(units), mesh)


def elements(pieces):
    """Elements of the parameter that these pieces cover, in order."""
    return [i for piece in pieces for run in piece.runs() for i in range(run.param_start, run.param_start + run.numel)]


def keys_and_shapes(sharding):
    return {key: param.shape for param in sharding.params for key in (param.name, *param.aliases)}


@QUICK
@given(shardings(), st.booleans())
def test_R36_full_keys_are_the_unwrapped_models_and_every_rank_that_has_them_has_all(sharding, rank0_only):
    given_by_all = {}
    for rank in range(sharding.mesh.world_size):
        entries = state_entries(sharding, FULL, rank, rank0_only=rank0_only)
        assert {entry.key: entry.tensor.shape for entry in entries} == keys_and_shapes(sharding)
        for entry in entries:
            numel = int(np.prod(entry.tensor.shape))
            if rank0_only and sharding.mesh.group_rank(rank):
                assert entry.has is None
            else:
                assert entry.has is not None
                assert elements(entry.has) == list(range(numel))
                assert len(entry.has) == (1 if numel else 0)
                assert all(piece.rank == rank and piece.shard_start == 0 for piece in entry.has)
            if rank < sharding.mesh.shard:  # one replica gives every element once
                given_by_all.setdefault(entry.key, []).extend(elements(entry.gives))
            assert all(piece.rank == rank for piece in entry.gives)
            assert all((entry.bucket, piece) in list(sharding.pieces(rank)) for piece in entry.gives)
    for key, shape in keys_and_shapes(sharding).items():
        assert sorted(given_by_all[key]) == list(range(int(np.prod(shape))))


@QUICK
@given(shardings())
def test_R36_sharded_entries_are_chunks_that_tile_each_parameter_over_a_shard_group(sharding):
    for replica in range(sharding.mesh.replicate):
        parts = {}
        for shard_rank in range(sharding.mesh.shard):
            rank = replica * sharding.mesh.shard + shard_rank
            for entry in state_entries(sharding, SHARDED, rank):
                layout = sharding.units[entry.bucket][1]
                assert entry.has is not None
                assert all(piece.rank == rank and piece.name == entry.key for piece in entry.has)
                here = elements(entry.has)
                parts.setdefault(entry.key, []).extend(here)
                names = [param.name for param in layout.params if entry.key in (param.name, *param.aliases)]
                index = [param.name for param in layout.params].index(names[0])
                dim = layout.shard_dims[index] if isinstance(layout, PerParamLayout) else 0
                shape = entry.tensor.shape
                chunk = -(-shape[dim] // sharding.mesh.shard)
                rows = np.arange(shape[dim])[shard_rank * chunk : (shard_rank + 1) * chunk]
                whole = np.arange(int(np.prod(shape))).reshape(shape)
                assert here == np.take(whole, rows, axis=dim).reshape(-1).tolist()
                assert not here or (entry.has[0].shard_start, entry.has[0].shard_stop) == (0, len(here))
                if isinstance(layout, PerParamLayout):  # nothing has to move
                    assert elements(entry.gives) == here
        assert {key: sorted(part) for key, part in parts.items()} == {
            key: list(range(int(np.prod(shape)))) for key, shape in keys_and_shapes(sharding).items()
        }


@QUICK
@given(shardings(kinds=("flat", "kept")))
def test_R36_local_entries_are_the_shards_of_flat_parameters(sharding):
    for rank in range(sharding.mesh.world_size):
        entries = state_entries(sharding, LOCAL, rank)
        assert [entry.key for entry in entries] == [f"{unit}._flat_param" for unit, _ in sharding.units]
        for entry, (_, layout) in zip(entries, sharding.units, strict=True):
            assert isinstance(layout, FlatLayout)
            start, stop = layout.shard_range(sharding.mesh.coordinate(rank)[1])
            assert entry.tensor == TensorSpec((layout.flat_numel,), layout.dtype)
            assert entry.gives == entry.has
            assert elements(entry.gives) == list(range(start, stop))
            assert len(entry.gives) == (1 if start < stop else 0)


def test_R36_kinds_that_a_layout_or_an_option_does_not_fit_are_refused():
    sharding = Sharding((("u", PerParamLayout(specs([(4,)]), 2)),), MeshSpec(2))
    with pytest.raises(UnsupportedError, match=r"'u' has the per_param layout.*SHARDED"):
        state_entries(sharding, LOCAL, 0)
    for kind in (SHARDED, LOCAL):
        with pytest.raises(StateDictError, match="rank0_only"):
            state_entries(sharding, kind, 0, rank0_only=True)
    with pytest.raises(MeshError, match="rank"):
        state_entries(sharding, FULL, 2)
    with pytest.raises(StateDictError, match="StateKind"):
        state_entries(sharding, "full", 0)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="Sharding"):
        state_entries(None, FULL, 0)  # type: ignore[arg-type]
    scalar = Sharding((("", FlatLayout(specs([()]), 2, True)),), MeshSpec(2))
    with pytest.raises(LayoutError, match="'p0' has no dims"):
        state_entries(scalar, SHARDED, 0)
    assert len(state_entries(scalar, FULL, 0)) == 1


def test_R36_expected_tensors_are_the_same_on_every_rank_and_world_size():
    owned = (ParamSpec("a", (5, 2), "bfloat16", aliases=("b",)), ParamSpec("c", (3,), "bfloat16"))
    expected = {
        "a": TensorSpec((5, 2), "bfloat16"),
        "b": TensorSpec((5, 2), "bfloat16"),
        "c": TensorSpec((3,), "bfloat16"),
    }
    for world_size in (1, 2, 7):
        sharding = Sharding((("", FlatLayout(owned, world_size, True)),), MeshSpec(world_size))
        assert expected_tensors(sharding, FULL) == expected_tensors(sharding, SHARDED) == expected


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("weight", "weight"),
        ("_fsdp_wrapped_module.a._fsdp_wrapped_module.weight", "a.weight"),
        ("_orig_mod.a._checkpoint_wrapped_module.b", "a.b"),
        ("a._checkpoint_wrapped_module._fsdp_wrapped_module._orig_mod.b", "a.b"),
        ("_fsdp_wrapped_module._flat_param", "_flat_param"),
        ("my_orig_mod.not_fsdp_wrapped_module_x", "my_orig_mod.not_fsdp_wrapped_module_x"),
        ("_orig_mod", ""),
        ("", ""),
    ],
)
def test_R36_names_lose_what_wrapping_put_into_them_and_nothing_else(name, canonical):
    assert canonical_name(name) == canonical
    assert canonical_name(canonical) == canonical


def test_R36_local_keys_of_the_root_and_of_a_unit():
    assert (local_key(""), local_key("a.b")) == ("_flat_param", "a.b._flat_param")
    with pytest.raises(StateDictError, match="string"):
        canonical_name(3)  # type: ignore[arg-type]


W = TensorSpec((2, 3), "float32")
EXPECTED = {"b": W, "a": W, "z": W, "y": W, "m": W, "n": W}
FOUND = {
    "q": W, "p": W, "z": TensorSpec((3, 2), "float32"), "y": TensorSpec((6,), "float32"),
    "n": TensorSpec((2, 3), "float16"), "m": TensorSpec((2, 3), "bfloat16"),
}  # fmt: skip


def test_R36_one_error_lists_all_that_does_not_fit_sorted():
    with pytest.raises(StateDictError) as caught:
        check_load(EXPECTED, FOUND)
    assert str(caught.value) == (
        "the state dict does not fit the model, and nothing was loaded. missing: a, b; unexpected: p, q; "
        "of another shape: y (expected (2, 3), got (6,)), z (expected (2, 3), got (3, 2)); "
        "of another dtype: m (expected float32, got bfloat16), n (expected float32, got float16)"
    )


def test_R36_what_is_not_strict_about_keys_is_still_strict_about_shapes():
    with pytest.raises(StateDictError) as caught:
        check_load(EXPECTED, FOUND, strict=False, cast=True)
    assert "missing" not in str(caught.value) and "dtype" not in str(caught.value) and "shape: y" in str(caught.value)
    keys = check_load({"a": W, "b": W}, {"b": TensorSpec((2, 3), "float64"), "c": W}, strict=False, cast=True)
    assert (keys.missing, keys.unexpected) == (("a",), ("c",))
    assert check_load(EXPECTED, EXPECTED).missing == ()


@pytest.mark.parametrize("wrong", [None, ["a"], {"a": (2, 3)}, {1: W}, {1: W, "a": W}])
def test_R36_what_is_no_state_dict_is_refused(wrong):
    for sides in ((wrong, {}), ({}, wrong)):
        with pytest.raises(StateDictError, match="TensorSpec"):
            check_load(*sides)


@pytest.mark.parametrize(
    "fields", [([2], "float32"), ((2.0,), "float32"), ((-1,), "float32"), ((True,), "f"), ((2,), None)]
)
def test_R36_entries_have_shapes_and_dtypes(fields):
    with pytest.raises(StateDictError, match="expected"):
        TensorSpec(*fields)


def test_R36_local_state_loads_at_its_own_world_size_alone():
    check_local_load(4, 4)
    with pytest.raises(StateDictError, match=r"of 4 shards .* has 2"):
        check_local_load(4, 2)
    with pytest.raises(MeshError):
        check_local_load("4", 4)  # type: ignore[arg-type]
