"""The per-parameter layout beside rows dealt out one by one (R07), and `views` of either layout."""

import math

import numpy as np
import pytest
from hypothesis import given

from crossframe.errors import LayoutError, MeshError, ParamError
from crossframe.layout import FlatLayout, Padding, PerParamLayout, layout_from_json, views
from crossframe.params import ParamSpec
from tests.core.random_layouts import LAYOUTS, QUICK, Elements, elements, per_param_layouts, specs


def chunk_sizes(rows: int, num_chunks: int) -> list[int]:
    """How torch.chunk cuts rows: chunks of ceil(rows / num_chunks) for as long as rows last, then none."""
    size, sizes = math.ceil(rows / num_chunks), []
    while len(sizes) < num_chunks:
        sizes.append(min(size, rows - sum(sizes)))
    return sizes


def shard_elements(layout: PerParamLayout, rank: int) -> Elements:
    """A rank's buffer: of each parameter its rows, padded to the elements of the first chunk."""
    found: Elements = []
    for param in layout.params:
        sizes = chunk_sizes(param.shape[0], layout.world_size)
        index = np.arange(param.numel).reshape(param.shape)
        first = sum(sizes[:rank])
        own = index[first : first + sizes[rank]]
        found += [(param.name, int(i)) for i in own.reshape(-1)]
        found += ["shard"] * (index[: sizes[0]].size - own.size)
    return found


@QUICK
@given(per_param_layouts())
def test_R07_pieces_and_padding_are_the_chunks_of_rows(layout):
    for rank in range(layout.world_size):
        assert elements(layout, rank) == shard_elements(layout, rank)
        for i, param in enumerate(layout.params):
            rows = chunk_sizes(param.shape[0], layout.world_size)[rank]
            assert layout.shard_shape(i, rank) == (rows, *param.shape[1:])
    assert layout.padded_shard_numel == len(shard_elements(layout, 0))
    assert layout.gathered_numel == layout.padded_shard_numel * layout.world_size


def test_R07_chunks_are_those_of_torch():
    torch = pytest.importorskip("torch")
    for rows in range(14):
        for world_size in range(1, 10):
            layout = PerParamLayout(specs([(rows, 2)]), world_size)
            chunks = [tuple(chunk.shape) for chunk in torch.empty(rows, 2).chunk(world_size)]
            ours = [layout.shard_shape(0, rank) for rank in range(world_size)]
            assert ours == chunks + [(0, 2)] * (world_size - len(chunks))
            assert layout.chunk_rows(0) == chunks[0][0]


def test_R07_five_rows_on_four_ranks():
    layout = PerParamLayout(specs([(5, 3)]), 4)
    assert [layout.shard_shape(0, rank) for rank in range(4)] == [(2, 3), (2, 3), (1, 3), (0, 3)]
    assert layout.padded_shard_numel == 6
    assert layout.padding(1) == ()
    assert layout.padding(2) == (Padding("shard", 3, 6),) and layout.padding(3) == (Padding("shard", 0, 6),)
    assert layout.padding(3)[0].fill == 0
    assert layout.pieces(3) == ()


@QUICK
@given(per_param_layouts())
def test_columns_of_the_gathered_buffer_read_row_by_row_begin_with_the_parameter(layout):
    gathered = [element for rank in range(layout.world_size) for element in shard_elements(layout, rank)]
    for param, column in zip(layout.params, layout.columns, strict=True):
        read = [
            gathered[rank * layout.padded_shard_numel + at]
            for rank in range(layout.world_size)
            for at in range(column.start, column.start + column.width)
        ]
        assert read[: param.numel] == [(param.name, i) for i in range(param.numel)]
        assert set(read[param.numel :]) <= {"shard"}
        assert column.numel == param.numel


@QUICK
@given(per_param_layouts())
def test_the_unsharded_buffer_has_aligned_room_for_every_column_and_no_more(layout):
    itemsize = {"float64": 8, "float32": 4, "bfloat16": 2}[layout.dtype]
    bounds = [*layout.offsets, layout.unsharded_numel]
    assert bounds[0] == 0
    for i, column in enumerate(layout.columns):
        room = bounds[i + 1] - bounds[i]
        assert bounds[i] * itemsize % 64 == 0
        assert 0 <= room - column.width * layout.world_size < 64 // itemsize


@QUICK
@given(LAYOUTS)
def test_R05_views_show_each_parameter_in_its_shape_and_no_padding(layout):
    gathered = np.full(layout.gathered_numel, -1)
    for rank in range(layout.world_size):
        for piece in layout.pieces(rank):
            start = rank * layout.padded_shard_numel
            values = np.arange(piece.param_start, piece.param_stop)
            gathered[start + piece.shard_start : start + piece.shard_stop] = values
    shown = views(layout, gathered)
    assert list(shown) == [param.name for param in layout.params]
    for param in layout.params:
        assert np.array_equal(shown[param.name], np.arange(param.numel).reshape(param.shape))
        if layout.contiguous and param.numel:
            assert np.shares_memory(shown[param.name], gathered)


@QUICK
@given(per_param_layouts())
def test_a_layout_and_its_json_are_the_same(layout):
    assert layout_from_json(layout.to_json(), layout.params) == layout
    assert not layout.contiguous and layout.kind == "per_param"


def test_R07_a_parameter_without_dims_is_refused_by_name():
    with pytest.raises(LayoutError, match=r"'p1' has no dims"):
        PerParamLayout(specs([(2,), ()]), 2)


def test_R11_a_bucket_of_mixed_dtypes_is_refused_by_both_names():
    with pytest.raises(LayoutError, match=r"'a' is float32, 'b' is float64"):
        PerParamLayout((ParamSpec("a", (2,)), ParamSpec("b", (2,), "float64")), 2)


def test_wrong_arguments_are_refused():
    one = specs([(2,)])
    with pytest.raises(LayoutError, match="at least one parameter"):
        PerParamLayout((), 2)
    with pytest.raises(ParamError, match="'p0' belongs to two parameters"):
        PerParamLayout(one + one, 2)
    with pytest.raises(MeshError, match="world size"):
        PerParamLayout(one, -1)
    layout = PerParamLayout(one, 2)
    for question in (layout.pieces, layout.padding, lambda rank: layout.shard_shape(0, rank)):
        for rank in (-1, 2, True):
            with pytest.raises(MeshError, match="from 0 to 1"):
                question(rank)


def test_json_that_describes_no_layout_is_refused():
    one = specs([(2,)])
    flat = FlatLayout(one, 2, keep_original=True).to_json()
    assert layout_from_json(flat, one) == FlatLayout(one, 2, keep_original=True)
    with pytest.raises(LayoutError, match="unknown layout kind 'rugged'"):
        layout_from_json(flat | {"kind": "rugged"}, one)
    for field in flat:
        with pytest.raises(LayoutError, match=f"needs the field '{field}'"):
            layout_from_json({name: value for name, value in flat.items() if name != field}, one)
    with pytest.raises(LayoutError, match="mapping"):
        layout_from_json(None, one)  # type: ignore[arg-type]
