"""The per-parameter layout beside slices that numpy takes of each parameter (R07), and `views` of any layout."""

import json
import math

import numpy as np
import pytest
from hypothesis import given

from crossframe.errors import LayoutError, MeshError, ParamError
from crossframe.layout import FlatLayout, Padding, PerParamLayout, Piece, layout_from_json, views
from crossframe.params import ParamSpec
from crossframe.quoting import quote
from crossframe.unshard import shard_is_full
from tests.core.helpers.random_layouts import ALL_LAYOUTS, QUICK, Elements, elements, per_param_layouts, specs


def chunk_sizes(rows: int, num_chunks: int) -> list[int]:
    """How torch.chunk cuts rows: chunks of ceil(rows / num_chunks) for as long as rows last, then none."""
    size, sizes = math.ceil(rows / num_chunks), []
    while len(sizes) < num_chunks:
        sizes.append(min(size, rows - sum(sizes)))
    return sizes


def dim_of(layout: PerParamLayout, i: int) -> int:
    """The dim on which parameter i is cut."""
    return layout.dims[i] if layout.dims else 0


def shard_elements(layout: PerParamLayout, rank: int) -> Elements:
    """A rank's buffer: of each parameter its slice along the dim, padded to the elements of the first."""
    found: Elements = []
    for i, param in enumerate(layout.params):
        dim = dim_of(layout, i)
        index = np.atleast_1d(np.arange(param.numel).reshape(param.shape))
        sizes = chunk_sizes(index.shape[dim], layout.world_size)
        first = sum(sizes[:rank])
        own = index.take(range(first, first + sizes[rank]), axis=dim)
        found += [(param.name, int(i)) for i in own.reshape(-1)]
        found += ["shard"] * (index.take(range(sizes[0]), axis=dim).size - own.size)
    return found


@QUICK
@given(per_param_layouts())
def test_R07_pieces_and_padding_are_the_chunks_along_the_dim(layout):
    for rank in range(layout.world_size):
        assert elements(layout, rank) == shard_elements(layout, rank)
        for i, param in enumerate(layout.params):
            shape = list(param.shape or (1,))
            shape[dim_of(layout, i)] = chunk_sizes(shape[dim_of(layout, i)], layout.world_size)[rank]
            assert layout.shard_shape(i, rank) == tuple(shape)
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
def test_R07_columns_of_the_gathered_buffer_are_the_chunks_of_each_rank(layout):
    gathered = [element for rank in range(layout.world_size) for element in shard_elements(layout, rank)]
    for i, (param, column) in enumerate(zip(layout.params, layout.columns, strict=True)):
        rows = [
            gathered[start + column.start : start + column.start + column.width]
            for start in range(0, len(gathered), max(1, layout.padded_shard_numel))
        ]
        assert (column.numel, column.dim) == (param.numel, dim_of(layout, i))
        if column.dim:  # each row a chunk, and side by side along the dim they are the parameter
            shape = layout.shard_shape(i, 0)
            chunks = [np.array([e[1] for e in row]).reshape(shape) for row in rows] or [np.zeros(shape)]
            joined = np.concatenate(chunks, axis=column.dim)
            assert np.array_equal(joined, np.arange(param.numel).reshape(param.shape)) or not param.numel
        else:
            read = [element for row in rows for element in row]
            assert read[: param.numel] == [(param.name, i) for i in range(param.numel)]
            assert set(read[param.numel :]) <= {"shard"}


@QUICK
@given(per_param_layouts())
def test_the_unsharded_buffer_has_aligned_room_for_every_column_and_no_more(layout):
    alignment = 64 // {"float64": 8, "float32": 4, "bfloat16": 2}[layout.dtype]
    bounds = [*layout.offsets, layout.unsharded_numel]
    assert bounds[0] == 0
    for i, column in enumerate(layout.columns):
        room = bounds[i + 1] - bounds[i]
        assert bounds[i] % alignment == 0
        assert 0 <= room - column.width * layout.world_size < alignment


@QUICK
@given(ALL_LAYOUTS)
def test_R14_over_one_rank_a_line_is_its_own_unsharded_buffer(layout):
    alone = layout.over(1)
    starts = {piece.name: piece.shard_start for piece in alone.pieces(0)}
    is_shard = alone.unsharded_numel == alone.padded_shard_numel and starts == {
        p.name: at for p, at in zip(alone.params, alone.offsets, strict=True) if p.numel
    }
    assert is_shard or not shard_is_full(alone)
    assert is_shard or isinstance(alone, PerParamLayout)


@QUICK
@given(ALL_LAYOUTS)
def test_R05_views_show_each_parameter_in_its_shape_and_no_padding(layout):
    gathered = np.full(layout.gathered_numel, -1)
    for rank in range(layout.world_size):
        for run in [run for piece in layout.pieces(rank) for run in piece.runs()]:
            start = rank * layout.padded_shard_numel + run.shard_start
            gathered[start : start + run.numel] = np.arange(run.param_start, run.param_start + run.numel)
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


def test_R07_dims_above_0_are_cut_as_torch_cuts_them():
    torch = pytest.importorskip("torch")
    for shape, dim in [((3, 4), 1), ((3, 4), -1), ((2, 3, 8), 2), ((2, 4, 3), 1), ((4, 2), -2), ((0, 4), 1)]:
        for world_size in (1, 2, 4):
            layout = PerParamLayout(specs([shape]), world_size, (dim,))
            full = torch.arange(float(np.prod(shape))).reshape(shape)
            chunks = full.chunk(world_size, dim)
            gathered = torch.cat([chunk.reshape(-1) for chunk in chunks])
            assert [layout.shard_shape(0, rank) for rank in range(world_size)] == [tuple(c.shape) for c in chunks]
            assert layout.padding(world_size - 1) == ()
            assert np.array_equal(views(layout, gathered.numpy())["p0"], full.numpy())
            for rank, chunk in enumerate(chunks):
                held = [i for p in layout.pieces(rank) for r in p.runs() for i in range(r[1], r[1] + r[2])]
                assert held == chunk.reshape(-1).tolist()


def test_R07_views_of_dims_above_0_in_jax():
    jnp = pytest.importorskip("jax.numpy")
    layout = PerParamLayout(specs([(3, 4), (5, 2), (2, 3, 2)]), 2, (1, 0, 2))
    shards = [[e[1] if isinstance(e, tuple) else -1 for e in elements(layout, rank)] for rank in range(2)]
    shown = views(layout, jnp.array(shards).reshape(-1))
    for param in layout.params:
        assert np.array_equal(np.asarray(shown[param.name]), np.arange(param.numel).reshape(param.shape))


def test_R07_a_column_of_a_matrix_is_runs_of_one_stride():
    layout = PerParamLayout(specs([(3, 4), (2,)]), 2, (1, 0))
    (piece, bias) = layout.pieces(1)
    assert piece == Piece("p0", 1, 0, 6, 2, 12, num_runs=3, stride=4)
    assert (piece.numel, piece.run_numel) == (6, 2)
    assert list(piece.runs()) == [(0, 2, 2), (2, 6, 2), (4, 10, 2)]
    assert bias == Piece("p1", 1, 6, 7, 1, 2) and list(bias.runs()) == [(6, 1, 1)]
    # One run where the rows are whole, or where there is one row: stride 0.
    assert layout.over(1).pieces(0)[0] == Piece("p0", 0, 0, 12, 0, 12)
    assert PerParamLayout(specs([(1, 4)]), 2, (1,)).pieces(1) == (Piece("p0", 1, 0, 2, 2, 4),)


def test_R07_dims_say_what_they_mean_however_they_are_written():
    pair = specs([(2, 4), (4,)])
    assert PerParamLayout(pair, 2, (0, 0)) == PerParamLayout(pair, 2) == PerParamLayout(pair, 2, (-2, -1))
    assert PerParamLayout(pair, 2, (-1, 0)).dims == (1, 0) and PerParamLayout(pair, 2, (0, 0)).dims is None
    old = {"kind": "per_param", "world_size": 2}  # as recordings had it before layouts had dims
    assert layout_from_json(old, pair) == PerParamLayout(pair, 2)
    on_columns = PerParamLayout(pair, 2, (1, 0))
    assert json.loads(json.dumps(on_columns.to_json())) == on_columns.to_json()


def test_R07_a_dim_above_0_that_the_ranks_do_not_divide_is_refused_by_name():
    with pytest.raises(
        LayoutError, match=r"'p1' of shape \(2, 6\): dim 1 has size 6.*multiple of the world size 4.*dim 0"
    ):
        PerParamLayout(specs([(8,), (2, 6)]), 4, (0, 1))
    with pytest.raises(LayoutError, match=r"dim 1 has size 6.*world size 4"):
        PerParamLayout(specs([(2, 6)]), 3, (-1,)).over(4)


@pytest.mark.parametrize("dim", [2, -3, True, 1.0, None, "1", 10**5000], ids=quote)
def test_R07_a_dim_that_is_none_is_refused_by_name(dim):
    with pytest.raises(LayoutError, match=r"'p0' of shape \(2, 4\): expected a dim from 0 to 1, or from -2 to -1"):
        PerParamLayout(specs([(2, 4)]), 2, (dim,))
    with pytest.raises(LayoutError, match="tuple of 1 dims"):
        PerParamLayout(specs([(2, 4)]), 2, (0, dim))
    with pytest.raises(LayoutError, match="tuple of 1 dims"):
        PerParamLayout(specs([(2, 4)]), 2, [0])  # type: ignore[arg-type]


def test_R07_a_parameter_without_dims_is_cut_as_one_row():
    layout = PerParamLayout(specs([(2,), ()]), 2)
    assert [layout.shard_shape(1, rank) for rank in range(2)] == [(1,), (0,)]
    assert [piece.name for piece in layout.pieces(0)] == ["p0", "p1"]
    assert layout.padding(1) == (Padding("shard", 1, 2),)


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
    for field in flat.keys() - {"places"}:
        with pytest.raises(LayoutError, match=f"needs the field '{field}'"):
            layout_from_json({name: value for name, value in flat.items() if name != field}, one)
    for places in (None, {}, {"offsets": [0], "padded_shard_numel": 1.0}, {"offsets": [4], "padded_shard_numel": 1}):
        with pytest.raises(
            LayoutError, match=r"other places than .*'(offsets|padded_shard_numel)', here .*: read|version"
        ):
            layout_from_json(flat | {"places": places}, one)
    with pytest.raises(LayoutError, match="mapping"):
        layout_from_json(None, one)  # type: ignore[arg-type]
