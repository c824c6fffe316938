"""The flat layout beside a flat parameter that is built element by element (R02-R06)."""

import itertools

import pytest
from hypothesis import given

from crossframe.errors import LayoutError, MeshError, ParamError
from crossframe.layout import FlatLayout, layout_from_json
from crossframe.params import ParamSpec
from tests.core.helpers.random_layouts import QUICK, Elements, elements, flat_layouts, specs

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


def flat_line(layout: FlatLayout) -> Elements:
    """The unsharded flat parameter as a list of (name, index) and paddings."""
    line: Elements = []
    itemsize = ITEMSIZE[layout.compute_dtype or layout.params[0].dtype]
    for param in layout.params:
        while layout.keep_original and len(line) * itemsize % 16:
            line.append("alignment")
        line += [(param.name, i) for i in range(param.numel)]
    while layout.keep_original and len(line) % layout.world_size:
        line.append("divisibility")
    return line


def cut(line: Elements, world_size: int) -> list[Elements]:
    """The line cut into chunks of the least size of which world_size chunks suffice; trailing ranks may get none."""
    size = 0
    while size * world_size < len(line):
        size += 1
    return [line[rank * size : (rank + 1) * size] for rank in range(world_size)]


@QUICK
@given(flat_layouts())
def test_R02_R03_R04_R06_pieces_and_padding_are_the_shards_of_the_flat_parameter(layout):
    line = flat_line(layout)
    shards = cut(line, layout.world_size)
    assert layout.flat_numel == len(line)
    assert layout.padded_shard_numel == len(shards[0])
    assert layout.gathered_numel == layout.unsharded_numel == len(shards[0]) * layout.world_size
    for rank, shard in enumerate(shards):
        start, stop = layout.shard_range(rank)
        assert line[start:stop] == shard and stop - start == len(shard)
        assert elements(layout, rank) == shard + ["shard"] * (len(shards[0]) - len(shard))


@QUICK
@given(flat_layouts())
def test_R02_offsets_say_where_each_parameter_begins_the_empty_ones_too(layout):
    line = flat_line(layout)
    for param, offset in zip(layout.params, layout.offsets, strict=True):
        assert line[offset : offset + param.numel] == [(param.name, i) for i in range(param.numel)]
        if layout.keep_original:
            assert offset * ITEMSIZE[layout.compute_dtype or layout.dtype] % 16 == 0
    assert list(layout.offsets) == sorted(layout.offsets)


@QUICK
@given(flat_layouts())
def test_R06_pieces_come_in_order_and_paddings_do_not_touch_one_of_their_kind(layout):
    order = {param.name: i for i, param in enumerate(layout.params)}
    for rank in range(layout.world_size):
        pieces = layout.pieces(rank)
        assert [order[piece.name] for piece in pieces] == sorted({order[piece.name] for piece in pieces})
        runs = layout.padding(rank)
        assert all(a.stop <= b.start for a, b in itertools.pairwise(runs))
        assert not [a for a, b in itertools.pairwise(runs) if a.stop == b.start and a.kind == b.kind]


def test_R04_five_elements_on_four_ranks():
    layout = FlatLayout(specs([(5,)]), 4, keep_original=False)
    assert [layout.shard_range(rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert layout.padded_shard_numel == 2
    assert [elements(layout, rank) for rank in range(4)] == [
        [("p0", 0), ("p0", 1)],
        [("p0", 2), ("p0", 3)],
        [("p0", 4), "shard"],
        ["shard", "shard"],
    ]


def test_R04_chunks_are_those_of_torch():
    torch = pytest.importorskip("torch")
    for numel in range(24):
        for world_size in range(1, 10):
            layout = FlatLayout(specs([(numel,)]), world_size, keep_original=False)
            chunks = [chunk.tolist() for chunk in torch.arange(numel).chunk(world_size)] if numel else []
            ours = [list(range(*layout.shard_range(rank))) for rank in range(world_size)]
            assert ours == chunks + [[]] * (world_size - len(chunks))


@pytest.mark.parametrize(
    ("stored", "computed", "numel"),
    [
        ("float64", None, 2),
        ("float32", None, 4),
        ("float32", "bfloat16", 8),
        ("bfloat16", None, 8),
        ("bfloat16", "float32", 4),
        ("float16", "float64", 2),
        ("float32", "float8_e4m3fn", 16),
    ],
)
def test_R02_alignment_is_sixteen_bytes_of_the_compute_dtype(stored, computed, numel):
    pair = specs([(1,), (1,)], stored)
    assert FlatLayout(pair, 1, True, computed).offsets == (0, numel)
    assert FlatLayout(pair, 1, True, computed).alignment_numel == numel
    assert FlatLayout(pair, 1, False, computed).offsets == (0, 1)
    assert FlatLayout(pair, 1, False, computed).alignment_numel == 1


def test_R03_tail_padding_is_in_the_flat_parameter_or_in_the_last_shards():
    kept, not_kept = (FlatLayout(specs([(5,), (2,)]), 4, keep_original=keep) for keep in (True, False))
    assert (kept.flat_numel, kept.padded_shard_numel) == (12, 3)  # 5, 3 of alignment, 2, 2 of divisibility
    assert elements(kept, 3) == [("p1", 1), "divisibility", "divisibility"]
    assert (not_kept.flat_numel, not_kept.padded_shard_numel) == (7, 2)
    assert elements(not_kept, 3) == [("p1", 1), "shard"]


def test_R05_torch_fills_42_inside_the_flat_parameter_and_0_at_the_end_of_a_shard():
    kept = FlatLayout(specs([(5,), (2,)]), 4, keep_original=True)
    fills = {run.kind: run.fill for rank in range(4) for run in kept.padding(rank)}
    assert fills == {"alignment": 42, "divisibility": 42}
    (run,) = FlatLayout(specs([(5,)]), 4, keep_original=False).padding(2)
    assert (run.kind, run.start, run.stop, run.fill) == ("shard", 1, 2, 0)


@QUICK
@given(flat_layouts())
def test_a_layout_and_its_json_are_the_same(layout):
    assert layout_from_json(layout.to_json(), layout.params) == layout
    assert layout.contiguous and layout.kind == "flat"


def test_R11_mixed_dtypes_are_refused_by_both_names():
    mixed = (ParamSpec("a", (2,)), ParamSpec("b", (2,)), ParamSpec("c", (2,), "bfloat16"))
    with pytest.raises(LayoutError, match=r"'a' is float32, 'c' is bfloat16"):
        FlatLayout(mixed, 2, keep_original=True)


def test_R11_mixed_requires_grad_is_refused_by_both_names_unless_originals_are_kept():
    mixed = (ParamSpec("a", (2,)), ParamSpec("b", (2,), requires_grad=False))
    with pytest.raises(LayoutError, match=r"'a' has requires_grad=True, 'b' has False.*use_orig_params=True"):
        FlatLayout(mixed, 2, keep_original=False)
    assert FlatLayout(mixed, 2, keep_original=True).params == mixed
    frozen = (ParamSpec("a", (2,), requires_grad=False), ParamSpec("b", (2,), requires_grad=False))
    assert FlatLayout(frozen, 2, keep_original=False).params == frozen


def test_wrong_arguments_are_refused():
    one = specs([(2,)])
    with pytest.raises(LayoutError, match="at least one parameter"):
        FlatLayout((), 2, keep_original=True)
    with pytest.raises(ParamError, match="'p0' belongs to two parameters"):
        FlatLayout(one + one, 2, keep_original=True)
    with pytest.raises(ParamError, match="unknown dtype 'int8'"):
        FlatLayout(one, 2, True, "int8")
    with pytest.raises(ParamError, match="tuple of ParamSpec"):
        FlatLayout(list(one), 2, True)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="keep_original"):
        FlatLayout(one, 2, "no")  # type: ignore[arg-type]
    with pytest.raises(MeshError, match="world size"):
        FlatLayout(one, 0, True)
    with pytest.raises(LayoutError, match="offsets"):
        _ = FlatLayout(one, 2, True).columns


@pytest.mark.parametrize("rank", [-1, 2, True, 0.0, None])
def test_a_rank_that_is_none_is_refused(rank):
    layout = FlatLayout(specs([(2,)]), 2, keep_original=True)
    for question in (layout.shard_range, layout.pieces, layout.padding):
        with pytest.raises(MeshError, match="from 0 to 1"):
            question(rank)
