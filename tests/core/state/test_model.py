"""Names of state dicts, the layout of each kind, and whether a state dict fits a model (R36)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.errors import StateDictError, UnsupportedError
from crossframe.layout import FlatLayout, PerParamLayout, RaggedLayout
from crossframe.state import StateKind, canonical_name, local_key, target_of, unfit
from tests.core.helpers.random_layouts import QUICK, flat_layouts, per_param_layouts, ragged_layouts, specs

FULL, SHARDED, LOCAL = StateKind.FULL, StateKind.SHARDED, StateKind.LOCAL


def elements(layout, rank):
    """The elements of each parameter that a rank holds, in the order of its shard."""
    found = {spec.name: [] for spec in layout.params}
    for piece in layout.pieces(rank):
        for run in piece.runs():
            found[piece.name] += range(run.param_start, run.param_start + run.numel)
    return found


@QUICK
@given(st.one_of(flat_layouts(), per_param_layouts(), ragged_layouts()))
def test_R36_full_is_every_element_once_without_padding(layout):
    target = target_of(layout, FULL)
    assert (target.world_size, target.params) == (1, layout.params)
    assert elements(target, 0) == {spec.name: list(range(spec.numel)) for spec in layout.params}
    assert target.padded_shard_numel == sum(spec.numel for spec in layout.params)


@QUICK
@given(st.one_of(flat_layouts(), per_param_layouts(), ragged_layouts()))
def test_R36_sharded_is_chunks_that_tile_each_parameter(layout):
    target = target_of(layout, SHARDED)
    assert isinstance(target, PerParamLayout) and target.world_size == layout.world_size
    dims = layout.shard_dims if isinstance(layout, PerParamLayout) else (0,) * len(layout.params)
    for i, (spec, dim) in enumerate(zip(layout.params, dims, strict=True)):
        whole = np.atleast_1d(np.arange(spec.numel).reshape(spec.shape))
        chunk = -(-whole.shape[dim] // layout.world_size)
        for rank in range(layout.world_size):
            rows = np.arange(whole.shape[dim])[rank * chunk : (rank + 1) * chunk]
            expected = np.take(whole, rows, axis=dim)
            assert elements(target, rank)[spec.name] == expected.reshape(-1).tolist()
            assert target.shard_shape(i, rank) == expected.shape


def test_R36_local_is_the_shards_of_flat_parameters():
    params = specs([(4,)])
    flat = FlatLayout(params, 2, True)
    assert target_of(flat, LOCAL) is flat
    for other in (PerParamLayout(params, 2), RaggedLayout(params, 2)):
        with pytest.raises(UnsupportedError, match=rf"'u' has the {other.kind} layout.*SHARDED"):
            target_of(other, LOCAL, "u")
    with pytest.raises(StateDictError, match="StateKind"):
        target_of(flat, "full")  # type: ignore[arg-type]


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


EXPECTED = {"b": (2, 3), "a": (2, 3), "z": (2, 3), "y": (2, 3), "s": (), "n": (2, 3), "t": ()}
FOUND = {"q": (2, 3), "p": (1,), "z": (3, 2), "y": (6,), "s": (1,), "n": "float", "t": (2,)}


def test_R36_all_that_does_not_fit_is_listed():
    assert unfit(EXPECTED, FOUND) == [
        "missing 'b', 'a'",
        "unexpected 'q', 'p'",
        "'z' has shape (3, 2), expected (2, 3)",
        "'y' has shape (6,), expected (2, 3)",
        "'n' is a float and no tensor",
        "'t' has shape (2,), expected ()",
    ]
    assert unfit(EXPECTED, EXPECTED) == []


def test_R36_keys_may_differ_without_strict():
    assert unfit(EXPECTED, FOUND, strict=False) == unfit(EXPECTED, FOUND)[2:]
    assert unfit({"a": (2,), "b": (2,)}, {"a": (2,)}, optional={"b"}) == []
