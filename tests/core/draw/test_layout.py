# ruff: noqa: RUF001 (the multiplication sign is what padding is written with)
"""Drawings of layouts: to scale, complete, every padding visible, and readable."""

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.draw import layout_svg, layout_text
from crossframe.draw import svg as svg_module
from crossframe.draw.amounts import bytes_text, bytes_ticks, count_ticks, seconds_ticks
from crossframe.draw.shards import alike_ranks
from crossframe.draw.svg import MONOSPACE, SANS
from crossframe.errors import LayoutError, MeshError
from crossframe.layout import FlatLayout, PerParamLayout, RaggedLayout, Sharding
from crossframe.mesh import MAX_WORLD_SIZE, MeshSpec
from crossframe.params import ParamSpec
from tests.core.helpers.drawings import SVG, boxes, frames, parse, texts
from tests.core.helpers.random_layouts import ALL_LAYOUTS, QUICK, specs

TWO = (ParamSpec("w", (3, 2)), ParamSpec("b", (2,)))


def amounts(layout, rank):
    """What a rank holds, as amounts alone."""
    return [(piece.name, piece.numel) for piece in layout.pieces(rank)], [
        (run.kind, run.stop - run.start) for run in layout.padding(rank)
    ]


@given(ALL_LAYOUTS)
@QUICK
def test_R06_every_piece_and_every_padding_is_drawn_once_and_to_scale(layout):
    drawing = layout_svg(layout)
    bars = frames(drawing)
    numel = layout.padded_shard_numel
    if numel == 0:
        assert not bars and not boxes(drawing, "fill|hatch")
        return
    groups = alike_ranks(layout)
    assert len(bars) == len(groups)
    expected, index = [], {param.name: i for i, param in enumerate(layout.params)}
    for bar, group in zip(bars, groups, strict=True):
        runs = [(f"fill{index[p.name]}", p.shard_start, p.shard_stop, p.name) for p in layout.pieces(group[0])]
        runs += [(f"hatch-{p.kind}", p.start, p.stop, f"filled with {p.fill} ") for p in layout.padding(group[0])]
        expected += [(bar, *run) for run in runs]
    drawn = boxes(drawing, "fill|hatch")
    assert len(drawn) == len(expected)
    for bar, kind, start, stop, said in expected:
        scale = bar.width / numel
        (box,) = [b for b in drawn if b.y == bar.y and b.kind == kind and abs(b.x - bar.x - start * scale) < 1e-3]
        assert box.width == pytest.approx((stop - start) * scale, abs=1e-3)
        assert said in box.about and f"{start:,}:{stop:,} of the shard" in box.about


@given(ALL_LAYOUTS, st.integers(9, 400))
@QUICK
def test_R04_ranks_that_are_drawn_as_one_hold_the_same_amounts(layout, world_size):
    layout = (
        layout.over(world_size)
        if not isinstance(layout, PerParamLayout)
        else replace(layout, world_size=world_size, dims=None)
    )
    groups = alike_ranks(layout)
    assert [rank for group in groups for rank in group] == list(range(world_size))
    assert len(groups) <= 4 * len(layout.params) + 3
    for group in groups:
        assert len({str(amounts(layout, rank)) for rank in group}) == 1


@pytest.mark.parametrize("kind", ["flat", "per_param", "ragged"])
def test_R10_the_work_does_not_grow_with_the_world(kind):
    params = specs([(3000, 7), (11,), (5000, 3)])
    layout = {
        "flat": FlatLayout(params, MAX_WORLD_SIZE, True),
        "per_param": PerParamLayout(params, MAX_WORLD_SIZE),
        "ragged": RaggedLayout(params, MAX_WORLD_SIZE),
    }[kind]
    # Anything that went through the ranks would not come to an end.
    assert len(layout_text(layout).splitlines()) < 40
    assert len(layout_svg(layout)) < 40_000


def test_R02_R03_text_of_a_flat_layout_with_both_paddings():
    lines = layout_text(FlatLayout(TWO, 4, True)).splitlines()
    assert lines[1] == "a shard of 3 elements (12 B) a rank; of 12 in all, 4 of padding (33.3 %)"
    assert [re.split(r"  +", line.strip()) for line in lines[3:]] == [
        ["parameter", "shape", "offset", "rank 0", "rank 1", "rank 2", "rank 3"],
        ["w", "(3, 2)", "0", "0:3", "3:6", "·", "·"],
        ["alignment padding", "·", "·", "2 × 42", "·"],
        ["b", "(2,)", "8", "·", "·", "0:1", "1:2"],
        ["divisibility padding", "·", "·", "·", "2 × 42"],
    ]


def test_R05_R07_text_of_rows_with_shard_padding_that_is_zero():
    lines = layout_text(PerParamLayout(specs([(5, 3)]), 4)).splitlines()
    assert [re.split(r"  +", line.strip()) for line in lines[4:]] == [
        ["p0", "(5, 3)", "0", "rows 0:2", "rows 2:4", "rows 4:5", "·"],
        ["shard padding", "·", "·", "3 × 0", "6 × 0"],
    ]


def test_R07_a_cut_on_another_dim_shows_its_columns():
    text = layout_text(PerParamLayout(specs([(3, 4), (2, 2, 6)]), 2, (1, 2)))
    assert "[:, 0:2]  [:, 2:4]" in re.sub("   +", "  ", text) and "[:, :, 3:6]" in text


@given(ALL_LAYOUTS)
@QUICK
def test_R06_text_has_each_range_of_each_rank(layout):
    rows = layout_text(layout, width=10_000).splitlines()[4:]
    cells = [re.split(r"  +", row.strip()) for row in rows]
    held = Counter(cell for row in cells for cell in row[-layout.world_size :] if cell != "·")
    expected = Counter(
        f"{run.stop - run.start:,} × {run.fill}" for rank in range(layout.world_size) for run in layout.padding(rank)
    )
    if layout.world_size > 8:
        return
    for rank in range(layout.world_size):
        for piece in layout.pieces(rank):
            i = [param.name for param in layout.params].index(piece.name)
            shape, dim = layout.params[i].shape, layout.shard_dims[i] if isinstance(layout, PerParamLayout) else 0
            start, stop, row = piece.param_start, piece.param_stop, piece.numel
            row = layout.params[i].numel // shape[0] if shape else 1
            if dim:
                chunk = shape[dim] // layout.world_size
                expected[f"[{':, ' * dim}{rank * chunk:,}:{(rank + 1) * chunk:,}]"] += 1
            elif len(shape) > 1 and not isinstance(layout, FlatLayout) and not (start % row or stop % row):
                expected[f"rows {start // row:,}:{stop // row:,}"] += 1
            else:
                expected[f"{start:,}:{stop:,}"] += 1
    assert held == expected


def test_many_ranks_are_rows_and_those_alike_are_one():
    layout = PerParamLayout(specs([(1000, 4)]), 512)
    rows = [re.split(r"  +", line.strip()) for line in layout_text(layout).splitlines()[4:]]
    assert rows == [
        ["p0", "(1000, 4)", "0", "0 … 499", "2 rows each"],
        ["shard padding", "500 … 511", "8 × 0 each"],
    ]


def test_few_ranks_in_a_narrow_terminal_keep_their_ranges():
    text = layout_text(FlatLayout(TWO, 4, True), width=40)
    for held in ("0:3", "3:6", "0:1", "1:2"):
        assert f" {held}" in text


def test_a_layout_by_itself_has_no_title():
    assert layout_text(FlatLayout(TWO, 4, True)).startswith("flat, aligned to 4, float32\n")
    assert layout_text(Sharding((("", FlatLayout(TWO, 4, True)),), MeshSpec(4))).startswith("(root): flat, aligned")
    assert "(root)" not in texts(layout_svg(FlatLayout(TWO, 4, True)))


@pytest.mark.parametrize("width", [300, 480, 760, 1200])
def test_nothing_is_drawn_outside_the_drawing(width):
    sharding = Sharding(
        (("", PerParamLayout((*specs([(50, 3), (7,)]), ParamSpec("a" * 200, (9,))), 2)),), MeshSpec(2, 2)
    )
    root = parse(layout_svg(sharding, width=width))
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width + 1e-3 and y + h <= float(root.get("height", 0))
    for line in root.iter(f"{SVG}text"):
        about = len(line.text or "") * 12 * (MONOSPACE if "name" in line.get("class", "") else SANS)
        x, end, middle = float(line.get("x", 0)), "end" in line.get("class", ""), "middle" in line.get("class", "")
        left = x - about if end else x - about / 2 if middle else x
        assert left >= -2 and left + about <= width + 10 and 0 < float(line.get("y", 0)) < float(root.get("height", 0))


def test_units_that_are_alike_are_shown_once_and_others_by_themselves():
    def unit(name, rows=3):
        return name, FlatLayout((ParamSpec(f"{name}.w", (rows, 2)),), 2, True)

    sharding = Sharding((unit("a"), unit("b"), unit("c", 4), unit("d")), MeshSpec(2))
    text = layout_text(sharding)
    assert re.findall(r"^(.*): flat", text, re.M) == ["a … b (2 alike)", "c", "d"]
    assert "in all: 4 units, 4 parameters of 26 elements, 0 of padding" in text.replace("2 of padding", "0 of padding")
    assert [t for t in texts(layout_svg(sharding)) if t in ("a … b (2 alike)", "c", "d")] == [
        "a … b (2 alike)",
        "c",
        "d",
    ]
    assert layout_text(sharding, unit="b").startswith("b: flat")


def test_alike_units_count_in_the_total():
    units = tuple((f"u{i}", PerParamLayout((ParamSpec(f"u{i}.w", (3,)),), 2)) for i in range(5))
    total = layout_text(Sharding(units, MeshSpec(2))).splitlines()[-1]
    assert total == "in all: 5 units, 5 parameters of 15 elements, 5 of padding (25.0 %); 40 B a rank"


def test_two_buckets_of_a_unit_are_both_shown():
    buckets = tuple(("a", PerParamLayout((ParamSpec(f"a.{d}", (4,), d),), 2)) for d in ("float32", "bfloat16"))
    assert layout_text(Sharding(buckets, MeshSpec(2))).count("a: per_param") == 2


def test_R10_replicas_hold_the_same_shard():
    sharding = Sharding((("", FlatLayout(TWO, 2, False)),), MeshSpec(2, 2))
    assert "4 ranks are 2 replicas of 2 shards: rank r holds shard r mod 2" in layout_text(sharding)
    assert "ranks 0, 2  ranks 1, 3" in layout_text(sharding)
    assert {"ranks 0, 2", "ranks 1, 3"} <= set(texts(layout_svg(sharding)))
    only = layout_text(sharding, rank=3)
    assert "rank 3" in only and "4:6" in only and "0:4" not in only
    assert len(frames(layout_svg(sharding, rank=3))) == 1
    many = layout_text(Sharding((("", FlatLayout(specs([(4096,)]), 1024, False)),), MeshSpec(1024, 4)))
    assert re.search(r"shards\s+hold", many) and re.search(r"0 … 1,023 +4 each", many)


def test_names_are_escaped_and_what_no_XML_holds_is_replaced():
    params = (ParamSpec("a<&>\"'", (8,)), ParamSpec("n\n\x00\ud800", (8,)), ParamSpec("名", (8,)))
    sharding = Sharding((("u<&>", FlatLayout(params, 2, True)),), MeshSpec(2))
    drawing = layout_svg(sharding)
    shown = " ".join(texts(drawing))
    assert "a<&>\"'" in shown and "n\ufffd\ufffd\ufffd" in shown and "名" in shown and "u<&>" in shown
    drawing.encode(), layout_text(sharding).encode()


def test_a_drawing_needs_nothing_from_outside_it():
    drawing = layout_svg(FlatLayout(TWO, 4, True))
    assert drawing.count("http") == drawing.count('xmlns="http://www.w3.org/2000/svg"') == 1
    assert set(re.findall(r"url\((.*?)\)", drawing)) <= {
        f"#crossframe-{kind}" for kind in ("alignment", "divisibility")
    }
    assert "@media(prefers-color-scheme:dark)" in drawing
    ids = {each.get("id") for each in parse(drawing).iter() if each.get("id")}
    assert {"crossframe-alignment", "crossframe-divisibility", "crossframe-shard", "crossframe-block"} <= ids


def test_padding_is_labelled_and_explained():
    words = texts(layout_svg(FlatLayout(TWO, 4, True)))
    assert words.count("2 × 42") == 2
    assert {"alignment padding, filled with 42", "divisibility padding, filled with 42", "w (3, 2)", "b (2,)"} <= set(
        words
    )
    assert "shard padding, filled with 0" in texts(layout_svg(PerParamLayout(specs([(5,)]), 4)))


def test_a_parameter_has_one_colour_on_all_ranks_and_others_have_others():
    drawing = layout_svg(FlatLayout(specs([(7,)] * 25), 4, False))
    colours = {}
    for box in boxes(drawing, "fill"):
        colours.setdefault(box.about.split()[0], set()).add(box.kind)
    assert len(colours) == 25 and all(len(kinds) == 1 for kinds in colours.values())
    assert len({kind for kinds in colours.values() for kind in kinds}) == 25


def _luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("at", [0, 1], ids=["light", "dark"])
def test_ink_is_readable_on_every_fill(at):
    ink, fills = svg_module._PAGE["ink"][at], (svg_module._LIGHT, svg_module._DARK)[at]
    assert len(set(fills)) == len(svg_module._LIGHT) == len(svg_module._DARK)
    for fill in (*fills, svg_module._PAGE["paper"][at], svg_module._PAGE["panel"][at]):
        high, low = sorted((_luminance(ink), _luminance(fill)), reverse=True)
        # The least contrast of WCAG 2.1, level AA, for text of this size.
        assert (high + 0.05) / (low + 0.05) >= 4.5, fill


def test_too_many_bars_are_left_out_and_it_says_so():
    layout = FlatLayout(specs([(10,)] * 60), 200, False)
    drawing = layout_svg(layout)
    assert len(frames(drawing)) == 24
    (said,) = [words for words in texts(drawing) if "not drawn" in words]
    first, last = (int(number.replace(",", "")) for number in re.findall(r"\d+", said))
    groups = alike_ranks(layout)
    assert (first, last) == (groups[18].start, groups[-7].stop - 1)


@given(st.floats(1e-12, 1e15), st.integers(1, 12))
@QUICK
def test_ticks_are_few_rising_and_inside(largest, at_most):
    for ticks in (
        bytes_ticks(largest, at_most),
        seconds_ticks(largest, at_most),
        count_ticks(int(largest) + 1, at_most),
    ):
        values = [value for value, _ in ticks]
        assert values == sorted(set(values)) and values[0] == 0
        assert len(values) <= at_most + 1 and values[-1] <= (largest + 1) * (1 + 1e-8)
        assert len({label for _, label in ticks}) == len(ticks)
        assert len(ticks) >= (at_most + 1) // 4 or largest < 2


@pytest.mark.parametrize("draw", [layout_text, layout_svg])
def test_wrong_use_is_refused(draw):
    layout = FlatLayout(TWO, 4, True)
    for wrong in (None, 3, "flat", [layout]):
        with pytest.raises(LayoutError, match="expected a layout or a Sharding"):
            draw(wrong)
    with pytest.raises(LayoutError, match=r"no unit is named 'x': expected one of \[''\]"):
        draw(layout, unit="x")
    for rank in (4, -1, "0", True):
        with pytest.raises(MeshError, match="expected a rank from 0 to 3"):
            draw(layout, rank=rank)


def test_lines_of_text_do_not_lie_on_one_another():
    # A title, a line about the layout that is too long for one, and one about amounts.
    sharding = Sharding(
        (("unit", FlatLayout(TWO, 2, True)), ("other", PerParamLayout(specs([(5,)]), 2))), MeshSpec(2, 8)
    )
    for width in (300, 760):
        lines = parse(layout_svg(sharding, width=width)).iter(f"{SVG}text")
        heights = [float(each.get("y", 0)) for each in lines if each.get("x") == "14"]
        assert len(heights) >= 6 and all(below - above >= 12 for above, below in pairwise(heights))


def test_a_rank_s_label_stands_at_the_middle_of_its_bar():
    drawing = layout_svg(FlatLayout(TWO, 4, True))
    labels = [each for each in parse(drawing).iter(f"{SVG}text") if str(each.text).startswith("rank ")]
    middles = [bar.y + bar.height / 2 for bar in frames(drawing)]
    # Capitals and digits are about two thirds of the font's size high.
    assert [float(each.get("y", 0)) for each in labels] == [middle + svg_module.FONT / 3 for middle in middles]


def test_a_legend_goes_on_in_another_line_only_where_it_must():
    entries = [("fill0", "a" * 9), ("fill1", "b" * 5)]
    # Swatches, words, and what lies between the two entries: nothing behind the last.
    width = 2 * 18 + 14 * MONOSPACE * svg_module.FONT + 18
    height, elements = svg_module.legend(5, 7, width + 1e-6, entries)
    assert height == 18 and len(list(elements)) == 4
    assert svg_module.legend(5, 7, width - 1e-6, entries)[0] == 36
    assert svg_module.legend(5, 7, width / 2, entries[:1])[0] == 18


def test_units_of_bytes_begin_where_they_do():
    assert [bytes_text(size) for size in (1023, 1024, 900 * 2**50)] == ["1,023 B", "1.00 KiB", "900 PiB"]
