"""Drawings that point at some elements of a parameter."""

# pyright: reportArgumentType=false

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.draw import Mark, layout_svg
from crossframe.draw.bars import LEAST_OUTLINE
from crossframe.draw.shards import EACH_BY_ITSELF
from crossframe.draw.svg import FONT, MONOSPACE
from crossframe.errors import LayoutError, MeshError
from crossframe.layout import FlatLayout, PerParamLayout, Sharding
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from tests.core.helpers.drawings import SVG, frames, parse, texts
from tests.core.helpers.random_layouts import ALL_LAYOUTS, QUICK

TWO = (ParamSpec("w", (3, 2)), ParamSpec("b", (2,)))


def outlines(drawing):
    """(x, y, width) of each mark."""
    found = [each for each in parse(drawing).iter(f"{SVG}rect") if each.get("class") == "outline"]
    return [tuple(float(each.get(name)) for name in ("x", "y", "width")) for each in found]


@given(ALL_LAYOUTS, st.randoms())
@QUICK
def test_R06_a_mark_in_a_shard_is_where_the_runs_of_its_pieces_put_it(layout, rng: random.Random):
    for param in layout.params:
        if not param.numel:
            continue
        start = rng.randrange(param.numel)
        mark = Mark(param.name, start, rng.randrange(start, param.numel) + 1)
        for rank in range(layout.world_size):
            for piece in layout.pieces(rank):
                held = [
                    run.shard_start + k
                    for run in piece.runs()
                    for k in range(run.numel)
                    if piece.name == param.name and mark.start <= run.param_start + k < mark.stop
                ]
                assert mark.within(piece) == ((held[0], held[-1] + 1) if held else None)
                assert held == list(range(held[0], held[-1] + 1)) if held else True


@given(ALL_LAYOUTS, st.randoms())
@QUICK
def test_R06_what_is_marked_is_framed_to_scale_on_every_rank_that_holds_it(layout, rng: random.Random):
    params = [param for param in layout.params if param.numel]
    if not params or layout.world_size > EACH_BY_ITSELF:
        return
    param = rng.choice(params)
    i, start = [p.name for p in layout.params].index(param.name), rng.randrange(param.numel)
    stop = rng.randrange(start, param.numel) + 1
    expected: dict[int, list[int]] = {}
    for piece in layout.find(i, start, stop):
        expected.setdefault(piece.rank, []).extend((piece.shard_start, piece.shard_stop))
    drawing = layout_svg(layout, mark=Mark(param.name, start, stop), width=20_000)
    bars = frames(drawing)
    assert len(bars) == layout.world_size
    drawn = outlines(drawing)
    assert len(drawn) == len(expected)
    for (rank, ends), (x, y, width) in zip(sorted(expected.items()), drawn, strict=True):
        scale = bars[rank].width / layout.padded_shard_numel
        wide = (max(ends) - min(ends)) * scale
        assert y == bars[rank].y
        if wide >= LEAST_OUTLINE:
            assert (x, width) == pytest.approx((bars[rank].x + min(ends) * scale, wide), abs=1e-2)


def test_R06_one_rank_alone_may_be_meant():
    layout = PerParamLayout((ParamSpec("w", (4, 6)),), 3, (1,))
    drawing = layout_svg(layout, mark=Mark("w", 3, 9, rank=1))
    # Rank 1 has columns 2:4, elements 2, 3, 8, 9, 14 and so on: of 3:9 elements 3 and 8, its second one and its third.
    bar = frames(drawing)[1]
    ((x, y, width),) = outlines(drawing)
    assert (x, y, width) == pytest.approx((bar.x + bar.width / 8, bar.y, bar.width / 4))
    assert outlines(layout_svg(layout, mark=Mark("w", 3, 10, rank=1)))[0][2] == pytest.approx(bar.width * 3 / 8)
    assert "3:9 of w" in texts(drawing)


@pytest.mark.parametrize(("start", "kind"), [(10, "name alarm"), (88, "name alarm end")], ids=["right", "left"])
def test_the_range_stands_beside_a_triangle_at_the_mark(start, kind):
    name = "a" * 200
    drawing = layout_svg(FlatLayout((ParamSpec(name, (100,)),), 1, True), mark=Mark(name, start, start + 2))
    ((x, _, width),), (bar,) = outlines(drawing), frames(drawing)
    middle = x + width / 2
    (triangle,) = (each for each in parse(drawing).iter(f"{SVG}path") if each.get("class") == "alarm")
    assert triangle.get("d", "").startswith(f"M{middle - 5:g} ")
    (label,) = (each for each in parse(drawing).iter(f"{SVG}text") if each.get("class") == kind)
    room = bar.x + bar.width - middle - 9 if kind == "name alarm" else middle - 9 - bar.x
    assert float(label.get("x")) == pytest.approx(middle + 9 if kind == "name alarm" else middle - 9)
    assert bar.y - FONT < float(label.get("y")) < bar.y
    said = str(label.text)
    assert said.startswith(f"{start}:{start + 2} of …aaa")
    # As much of the name as there is room for, with a margin of less than two letters.
    assert room - 2 * MONOSPACE * FONT < len(said) * MONOSPACE * FONT <= room


@pytest.mark.parametrize("replicas", [2, 3])
def test_R10_a_rank_of_another_replica_is_named(replicas):
    sharding = Sharding((("", FlatLayout(TWO, 2, True)),), MeshSpec(2, replicas))
    drawing = layout_svg(sharding, mark=Mark("w", 4, 6, rank=3))
    assert "rank 3, 4:6 of w" in texts(drawing)
    assert len(outlines(drawing)) == 1
    assert "4:6 of w" in texts(layout_svg(sharding, mark=Mark("w", 4, 6)))


def test_one_rank_of_very_many_has_a_bar_of_its_own_and_is_seen():
    params = (ParamSpec("w", (1 << 20, 8)), *(ParamSpec(f"p{i}", (4096, 64)) for i in range(40)))
    layout = FlatLayout(params, 4096, True)
    drawing = layout_svg(
        layout, mark=Mark("w", 8_000_000, 8_000_001, rank=next(layout.find(0, 8_000_000, 8_000_001)).rank)
    )
    (outline,) = outlines(drawing)
    assert outline[2] == LEAST_OUTLINE
    assert len(frames(drawing)) <= 25
    everyone = layout_svg(layout, mark=Mark("w", 0, 8_000_001))
    assert len(outlines(everyone)) >= 3  # the first rank, the last, and all in between as one


def test_what_is_marked_is_drawn_where_others_are_left_out():
    layout = FlatLayout(tuple(ParamSpec(f"p{i}", (1000,)) for i in range(40)), 400, True)
    plain, drawing = layout_svg(layout), layout_svg(layout, mark=Mark("p20", 500, 501))
    assert len(frames(plain)) == 24 and len(outlines(drawing)) == 1
    assert len([text for text in texts(drawing) if "are not drawn" in text]) == 2


def test_what_is_not_marked_is_pale_and_little_of_it_is_named():
    params = tuple(ParamSpec(f"p{i}", (4,)) for i in range(12))
    drawing = layout_svg(FlatLayout(params, 2, True), mark=Mark("p3", 1, 2))
    filled = [
        each.get("class") for each in parse(drawing).iter(f"{SVG}rect") if each.get("class", "").startswith("fill")
    ]
    assert "fill3" in filled and "fill4 pale" in filled and "fill3 pale" not in filled
    assert "p3 (4,)" in texts(drawing) and "the unit's 11 other parameters" in texts(drawing)
    assert "p4 (4,)" not in texts(drawing)


def test_without_a_mark_nothing_is_drawn_otherwise():
    layout = FlatLayout(TWO, 4, True)
    assert "outline" not in layout_svg(layout) and "pale" not in layout_svg(layout)
    alike = Sharding(
        tuple((f"h.{i}", FlatLayout((ParamSpec(f"h.{i}.w", (7,)),), 2, True)) for i in range(5)), MeshSpec(2)
    )
    assert "(5 alike)" in layout_svg(alike)
    drawing = layout_svg(alike, mark=Mark("h.2.w", 0, 3))
    assert [text for text in texts(drawing) if "h." in text] == ["h.0 … h.1 (2 alike)", "h.2", "h.3 … h.4 (2 alike)"]


def test_a_mark_that_is_nowhere_is_refused():
    layout = FlatLayout(TWO, 4, True)
    for wrong in ((3, 3), (-1, 2), (4, 2)):
        with pytest.raises(LayoutError, match="expected a range of elements"):
            Mark("w", *wrong)
    with pytest.raises(LayoutError, match="no parameter that is drawn is named 'v'"):
        layout_svg(layout, mark=Mark("v", 0, 1))
    with pytest.raises(LayoutError, match="'w' has 6 elements, got 0:7"):
        layout_svg(layout, mark=Mark("w", 0, 7))
    with pytest.raises(MeshError):
        layout_svg(layout, mark=Mark("w", 0, 1, rank=4))
