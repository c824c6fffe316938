"""The ragged layout (R09): no block is split, and a shard is about as small as it can be."""

import math
import random

import pytest
from hypothesis import given

from crossframe.errors import LayoutError, MeshError
from crossframe.layout import Padding, PerParamLayout, RaggedLayout, layout_from_json
from crossframe.params import ParamSpec
from crossframe.quoting import quote
from tests.core.helpers.random_layouts import QUICK, Elements, elements, ragged_layouts, specs


def gathered(layout: RaggedLayout) -> Elements:
    """The gathered buffer, element by element."""
    return [element for rank in range(layout.world_size) for element in elements(layout, rank)]


def smallest(line: list[tuple[int, int]], world_size: int) -> int:
    """The smallest shard size for which a placement exists, by trying every size and every start, one after the other."""
    size = -(-sum(numel for numel, _ in line) // world_size)
    while not fits(line, world_size, size):
        size += 1
    return size


def fits(line: list[tuple[int, int]], world_size: int, size: int) -> bool:
    start = 0
    for numel, block in line:
        while any(
            (cut - start) % block for cut in range(0, world_size * size, max(1, size)) if start < cut < start + numel
        ):
            start += 1
        start += numel
    return start <= world_size * size


@QUICK
@given(ragged_layouts())
def test_R09_no_boundary_between_shards_splits_a_block(layout):
    for i, param in enumerate(layout.params):
        block, row = layout.block_numels[i], max(1, math.prod(param.shape[1:]))
        assert block == (layout.blocks[i] if layout.blocks else row)
        for first in range(0, param.numel, block):
            assert len(list(layout.find(i, first, first + block))) == 1
    for rank in range(layout.world_size):
        assert all(piece.param_start % layout.block_numels[int(piece.name[1:])] == 0 for piece in layout.pieces(rank))


@QUICK
@given(ragged_layouts())
def test_R09_each_parameter_is_one_run_of_the_gathered_buffer_and_all_else_is_padding(layout):
    line = gathered(layout)
    assert len(line) == layout.gathered_numel == layout.unsharded_numel == layout.flat_numel
    assert layout.contiguous and layout.kind == "ragged"
    for param, offset in zip(layout.params, layout.offsets, strict=True):
        assert line[offset : offset + param.numel] == [(param.name, i) for i in range(param.numel)]
    assert list(layout.offsets) == sorted(layout.offsets)
    assert layout.padding_numel == line.count("block") == len(line) - layout.numel
    assert {run.fill for rank in range(layout.world_size) for run in layout.padding(rank)} <= {0}


@QUICK
@given(ragged_layouts())
def test_R09_padding_stays_within_its_bound(layout):
    line = [
        (param.numel, block) for param, block in zip(layout.params, layout.block_numels, strict=True) if param.numel
    ]
    sizes, blocks = [numel for numel, _ in line], [block for _, block in line]
    steps = sum(blocks) - len(blocks) - (blocks[0] - 1 if blocks else 0)
    common = math.lcm(*blocks)
    aligned = math.ceil(math.ceil((sum(sizes) + steps) / layout.world_size) / common) * common
    whole = max([*sizes, math.ceil(2 * sum(sizes) / layout.world_size)])
    assert layout.padding_bound == layout.world_size * min(aligned, whole) - sum(sizes)
    assert 0 <= layout.padding_numel <= layout.padding_bound
    assert layout.wasteful == (layout.padding_numel > sum(sizes))


def test_R09_the_shard_is_nearly_always_the_smallest_there_is():
    seed = 20
    rng = random.Random(seed)
    num_worlds, num_smallest, worst = 2000, 0, 1.0
    for _ in range(num_worlds):
        world_size = rng.randint(1, 6)
        line = [
            (rng.randint(1, 8) * block, block) for block in rng.choices([1, 2, 3, 4, 5, 7, 8, 16], k=rng.randint(1, 4))
        ]
        layout = RaggedLayout(specs([(numel // block, block) for numel, block in line]), world_size)
        least = smallest(line, world_size)
        num_smallest += layout.padded_shard_numel == least
        assert layout.padded_shard_numel >= least, (seed, line, world_size)
        worst = max(worst, layout.padded_shard_numel / least)
    # Measured over 60,000 worlds: 99.98 % of them, at worst 1.033 times the least.
    assert num_smallest >= 0.998 * num_worlds and worst <= 1.1, (seed, num_smallest, worst)


@pytest.mark.parametrize(
    ("line", "world_size", "least", "found"),
    [
        # Found as a multiple of one block alone.
        ([(64, 64), (5, 1), (120, 30)], 7, 64, 64),
        # Far from 143, where the search begins, and a multiple of no block: leaps come near the least.
        ([(200, 100), (80, 16), (5, 1)], 2, 185, 189),
        # Leaps would skip it: steps.
        ([(8, 4), (24, 8), (49, 7)], 3, 29, 29),
    ],
)
def test_R09_each_part_of_the_search_finds_what_the_others_do_not(line, world_size, least, found):
    assert smallest(line, world_size) == least
    blocks = tuple(block for _, block in line)
    assert RaggedLayout(specs([(numel,) for numel, _ in line]), world_size, blocks).padded_shard_numel == found


def test_R09_rows_of_five_on_two_ranks():
    layout = RaggedLayout(specs([(5, 3), (5,)]), 2)
    assert layout.block_numels == (3, 1)
    # 10 would cut the fourth row, and 11 cuts between two rows only if the first begins at 2.
    assert (layout.padded_shard_numel, layout.offsets) == (11, (2, 17))
    assert (layout.padding_numel, layout.padding_bound, layout.wasteful) == (2, 4, False)
    assert layout.padding(0) == (Padding("block", 0, 2),) and layout.padding(1) == ()
    single = RaggedLayout(specs([(5, 3), (5,)]), 2, (1, 1))
    assert (single.padded_shard_numel, single.padding_numel) == (10, 0)


def test_R09_a_whole_parameter_as_its_block_is_never_cut():
    layout = RaggedLayout(specs([(3,), (4,), (2,)]), 3, (3, 4, 2))
    assert layout.padded_shard_numel == 4
    assert [[piece.name for piece in layout.pieces(rank)] for rank in range(3)] == [["p0"], ["p1"], ["p2"]]
    assert layout.padding(0) == (Padding("block", 3, 4),)


def test_R09_blocks_that_hardly_divide_are_wasteful_and_say_so():
    layout = RaggedLayout(specs([(1, 64)]), 4)
    assert (layout.padded_shard_numel, layout.padding_numel, layout.wasteful) == (64, 192, True)
    assert not RaggedLayout(specs([(4, 16)]), 4).wasteful
    # As much padding as there are parameters is not yet more.
    assert RaggedLayout(specs([(1, 64)]), 2).padding_numel == 64 and not RaggedLayout(specs([(1, 64)]), 2).wasteful


@pytest.mark.parametrize("world_size", [1, 3, 50])
def test_R09_empty_parameters_and_more_ranks_than_elements(world_size):
    layout = RaggedLayout(specs([(0,), (2, 0), (5,), (0, 3), ()]), world_size)
    assert layout.padded_shard_numel == -(-6 // world_size)
    assert layout.offsets == (0, 0, 0, 5, 5)
    nothing = RaggedLayout(specs([(0,), (3, 0)]), world_size)
    assert (nothing.padded_shard_numel, nothing.padding_numel, nothing.padding_bound) == (0, 0, 0)
    assert nothing.pieces(world_size - 1) == nothing.padding(0) == () and not nothing.wasteful


def test_R09_a_large_model_over_many_ranks_has_little_padding_and_no_row_split():
    hidden, params = 8192, []
    for name, rows, width in (("qkv", 10240, 8192), ("out", 8192, 8192), ("up", 28672, 8192), ("down", 8192, 28672)):
        params += [
            ParamSpec(f"{name}.weight", (rows, width), "bfloat16"),
            ParamSpec(f"{name}.norm", (hidden,), "bfloat16"),
        ]
    for world_size, at_most in ((8, 1e-3), (64, 1e-2), (1024, 0.1)):
        layout = RaggedLayout(tuple(params), world_size)
        assert layout.padding_numel <= at_most * layout.numel
        for rank in (0, 1, world_size // 2, world_size - 1):
            for piece in layout.pieces(rank):
                block = layout.block_numels[[p.name for p in params].index(piece.name)]
                assert piece.param_start % block == 0 == piece.param_stop % block


@QUICK
@given(ragged_layouts())
def test_a_layout_and_its_json_are_the_same(layout):
    assert layout_from_json(layout.to_json(), layout.params) == layout
    rows = tuple(max(1, math.prod(param.shape[1:])) for param in layout.params)
    assert RaggedLayout(layout.params, layout.world_size, rows) == RaggedLayout(layout.params, layout.world_size)


@pytest.mark.parametrize("block", [0, -1, 4, 12, True, 2.0, None, "2", 10**5000], ids=quote)
def test_a_block_that_is_none_is_refused_by_name(block):
    with pytest.raises(
        LayoutError, match=r"'p1' of shape \(2, 3\): expected a block of at least 1 element that divides its 6"
    ):
        RaggedLayout(specs([(2,), (2, 3)]), 2, (1, block))
    with pytest.raises(LayoutError, match="tuple of 1 blocks"):
        RaggedLayout(specs([(2,)]), 2, (1, block))


def test_wrong_arguments_are_refused():
    with pytest.raises(LayoutError, match="ragged layout needs at least one parameter"):
        RaggedLayout((), 2)
    with pytest.raises(LayoutError, match=r"'a' is float32, 'b' is float64"):
        RaggedLayout((ParamSpec("a", (2,)), ParamSpec("b", (2,), "float64")), 2)
    with pytest.raises(MeshError, match="world size"):
        RaggedLayout(specs([(2,)]), 0)
    with pytest.raises(LayoutError, match="tuple of 1 blocks"):
        RaggedLayout(specs([(2,)]), 2, [1])  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="use its offsets"):
        _ = RaggedLayout(specs([(2,)]), 2).columns
    with pytest.raises(MeshError, match="from 0 to 1"):
        RaggedLayout(specs([(2,)]), 2).pieces(2)
    assert RaggedLayout(specs([()]), 2).block_numels == (1,)
    assert PerParamLayout(specs([(2,)]), 2) != RaggedLayout(specs([(2,)]), 2)
