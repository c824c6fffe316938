"""Drawings of plans: bars are the cost's spans to scale, waiting is what is exposed, memory is what is held."""

import re
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.cost import Cost, Hardware, step_cost
from crossframe.draw import events_text, plan_svg, plan_text
from crossframe.draw import lanes as lanes_module
from crossframe.draw.amounts import bytes_text, seconds_text
from crossframe.draw.lanes import BAR, LEFT, MARGIN, THINNEST
from crossframe.draw.steps import Bar, lanes, phases, sampled
from crossframe.draw.svg import MONOSPACE, SANS
from crossframe.draw.timeline import _sparkline
from crossframe.errors import PlanError
from crossframe.layout import FlatLayout
from crossframe.params import ParamSpec
from crossframe.plan import Strategy, plan_units, step_plan
from crossframe.trace import ALL_GATHER, ALL_REDUCE, COLLECTIVES, COMPUTE, FREE, REDUCE_SCATTER, STEP
from tests.core.helpers.costs import CASES, cost_of
from tests.core.helpers.drawings import SVG, boxes, parse, texts
from tests.core.helpers.random_layouts import QUICK

WIDTH = 860


every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def kind_of(box):
    fills = {"fill0": "forward", "fill1": "backward", "fill2": ALL_GATHER, "fill3": REDUCE_SCATTER, "fill5": ALL_REDUCE}
    return fills.get(box.kind.split()[0], box.kind)


@every_case
def test_bars_are_the_spans_to_scale(case):
    cost = cost_of(**case)
    total = max(span.stop_seconds for span in cost.spans)
    scale = (WIDTH - MARGIN - LEFT) / total
    spans = [
        (span.event.phase if span.event.kind == COMPUTE else span.event.kind, span)
        for span in cost.spans
        if span.event.kind in (COMPUTE, *COLLECTIVES)
    ]
    drawn = boxes(plan_svg(cost), "fill")
    assert len(drawn) == len(spans)
    for kind, span in spans:
        x, width = LEFT + span.start_seconds * scale, max(THINNEST, (span.stop_seconds - span.start_seconds) * scale)
        found = [
            box
            for box in drawn
            if kind_of(box) == kind and abs(box.x - x) < 1e-3 and abs(box.width - width) < 1e-3
            and f" of {span.event.unit or '(root)'}, microbatch {span.event.microbatch}\n" in box.about
        ]  # fmt: skip
        assert len(found) == 1, (kind, span)
        if kind in COLLECTIVES:
            assert bytes_text(span.event.num_bytes) in found[0].about and span.event.dtype in found[0].about
            assert f" in {span.event.phase}, " in found[0].about
        assert f"{seconds_text(span.stop_seconds - span.start_seconds)}, from" in found[0].about


@every_case
def test_what_waits_is_what_is_exposed(case):
    cost = cost_of(**case)
    bars = lanes(cost)["compute"]
    assert sum(bar.stop - bar.start for bar in bars if bar.kind == "waiting") == pytest.approx(cost.exposed_seconds)
    assert sum(bar.stop - bar.start for bar in bars if bar.kind != "waiting") == pytest.approx(cost.compute_seconds)
    # One behind the other, without a gap, from the first to the last.
    for before, after in pairwise(bars):
        assert after.start == before.stop
    hatched = boxes(plan_svg(cost), "hatch-waiting")
    waits = [bar for bar in bars if bar.kind == "waiting"]
    scale = (WIDTH - MARGIN - LEFT) / cost.seconds
    assert [box.width for box in hatched] == pytest.approx(
        [max(THINNEST, (b.stop - b.start) * scale) for b in waits], abs=2e-3
    )


def test_R08_R10_collectives_lie_in_the_lane_of_their_ranks():
    def kinds(case):
        return {name: {bar.kind for bar in bars} for name, bars in lanes(cost_of(**CASES[case])).items()}

    assert kinds("full_shard") == {
        "compute": {"forward", "backward", "waiting"},
        "shard group": {ALL_GATHER, REDUCE_SCATTER},
    }
    assert kinds("hybrid")["replicas"] == {ALL_REDUCE}
    assert kinds("no_shard") == {"compute": {"forward", "backward", "waiting"}, "replicas": {ALL_REDUCE}}
    assert kinds("reshard group")["reshard group"] == {ALL_GATHER}
    assert kinds("reshard group")["shard group"] == {ALL_GATHER, REDUCE_SCATTER}
    bars = lanes(cost_of(**CASES["reshard group"]))["reshard group"]
    assert all("backward, among ranks 0, 1\n" in bar.about for bar in bars)
    assert list(kinds("one rank")) == ["compute"]
    drawn = texts(plan_svg(cost_of(**CASES["hybrid"])))
    assert {"compute", "shard group", "replicas"} <= set(drawn) and "reshard group" not in drawn


def moments_of(cost):
    return [(span.issue_seconds, span) for span in cost.spans]


@every_case
def test_memory_changes_when_events_are_issued(case):
    cost = cost_of(**case)
    moments = moments_of(cost)
    times = [at for at, _ in moments]
    assert times == sorted(times)
    for at, span in moments:
        assert at <= span.start_seconds
        if span.event.kind not in COLLECTIVES:
            assert at == span.start_seconds
    # Issued behind the last computation, and a reduce-scatter behind the reduction before it.
    for i, (at, span) in enumerate(moments):
        done = max((s.stop_seconds for s in cost.spans[:i] if s.event.kind == COMPUTE), default=0.0)
        reduced = max(
            (s.stop_seconds for s in cost.spans[:i] if s.event.kind in (REDUCE_SCATTER, ALL_REDUCE)), default=0.0
        )
        assert at >= done
        if span.event.kind == REDUCE_SCATTER:
            assert at >= reduced


@every_case
def test_memory_areas_stack_up_to_the_peak(case):
    cost = cost_of(**case)
    drawing = plan_svg(cost)
    areas = [each for each in parse(drawing).iter(f"{SVG}path") if each.get("class", "").endswith(" area")]
    held = {purpose for span in cost.spans for purpose, most in span.memory.items() if most}
    about = {str(each.findtext(f"{SVG}title")).partition(":")[0]: each for each in areas}
    assert set(about) == held and len(areas) == len(held)
    for purpose, each in about.items():
        most = max(span.memory[purpose] for span in cost.spans)
        assert f"at most {bytes_text(most)}" in str(each.findtext(f"{SVG}title"))
    points = [tuple(map(float, pair.split())) for pair in areas[-1].get("d", "").strip("MZ").split("L")]
    below = [tuple(map(float, pair.split())) for pair in areas[0].get("d", "").strip("MZ").split("L")]
    top = points[: len(points) // 2]
    floor = max(y for _, y in below)
    assert top[0][0] == LEFT and top[-1][0] == pytest.approx(WIDTH - MARGIN)
    # The outline's heights are the memory of events, in the order of issue; the highest is the peak.
    highest = min(y for _, y in top)
    heights = [(floor - y) / (floor - highest) * cost.peak_bytes for _, y in top[::2]]
    assert all(any(abs(h - span.memory_bytes) < 0.002 * cost.peak_bytes for span in cost.spans) for h in heights)
    total = max(span.stop_seconds for span in cost.spans)
    # Where memory stays as it is for some pixels, the outline has it.
    moments = [
        (LEFT + at / total * (WIDTH - MARGIN - LEFT), span.memory_bytes)
        for at, span in ((span.issue_seconds, span) for span in cost.spans)
    ]
    for (x, held), (until, _) in pairwise([*moments, (WIDTH - MARGIN, 0)]):
        if until - x > 3:
            middle = (x + until) / 2
            drawn = [
                h for h, left, right in zip(heights, top[::2], top[1::2], strict=True) if left[0] <= middle < right[0]
            ]
            assert drawn == [pytest.approx(held, abs=0.002 * cost.peak_bytes)]
    (marker,) = [each for each in parse(drawing).iter(f"{SVG}path") if each.get("class") == "alarm"]
    x, y = map(float, marker.get("d", "")[1:].split("h")[0].split())
    at = cost.peak.issue_seconds
    assert x + 4 == pytest.approx(LEFT + at / total * (WIDTH - MARGIN - LEFT), abs=1e-3)
    assert y + 7 == pytest.approx(highest, abs=1e-3)
    assert f"peak {bytes_text(cost.peak_bytes)}" in str(marker.findtext(f"{SVG}title"))


@every_case
def test_text_says_what_the_cost_says(case):
    cost = cost_of(**case)
    said = " ".join(plan_text(cost, width=200).split())
    assert f"time {seconds_text(cost.seconds)}: {seconds_text(cost.compute_seconds)} computing" in said
    assert f"{seconds_text(cost.exposed_seconds)} waiting for communication" in said
    for kind, word in ((ALL_GATHER, "all-gather"), (REDUCE_SCATTER, "reduce-scatter"), (ALL_REDUCE, "all-reduce")):
        entry = cost.collectives[kind]
        line = f"{entry['count']} \u00d7 {word}, {bytes_text(entry['num_bytes'])}"
        assert (line in said) == bool(entry["count"])
    assert f"peak memory {bytes_text(cost.peak_bytes)} without activations, at " in said
    for purpose, held in cost.peak.memory.items():
        assert (f"{purpose} {bytes_text(held)}" in said) == bool(held)
    for line in plan_text(cost, width=70).splitlines():
        assert len(line) <= 70


@every_case
def test_every_event_is_a_row(case):
    cost = cost_of(**case)
    lines = events_text(cost).splitlines()
    assert len(lines) == len(cost.spans) + 1
    for line, span in zip(lines[1:], cost.spans, strict=True):
        cells = re.split(r"  +", line)
        assert cells[:2] == [str(span.event.microbatch), span.event.phase]
        assert cells[3] == (span.event.unit or "(root)") and cells[-4] == bytes_text(span.event.num_bytes)
        assert cells[-3:] == [
            seconds_text(span.start_seconds),
            seconds_text(span.stop_seconds - span.start_seconds),
            bytes_text(span.memory_bytes),
        ]


def test_phases_follow_one_another():
    cost = cost_of(**CASES["no_sync"])
    found = phases(cost)
    assert [(p.microbatch, p.name) for p in found] == [(m, name) for m in range(3) for name in ("forward", "backward")]
    assert found[0].start == 0 and found[-1].stop == pytest.approx(cost.seconds)
    assert all(a.stop == b.start for a, b in pairwise(found))
    assert {"forward 0", "backward 2"} <= set(texts(plan_svg(cost)))
    assert "|forward 0" in plan_text(cost) and "|backward 2" in plan_text(cost)


def test_the_timeline_in_text_lies_where_the_bars_do():
    cost = cost_of()
    lines = plan_text(cost, width=115).splitlines()
    row = next(line[15:].ljust(100) for line in lines if line.startswith("compute"))
    for bar in lanes(cost)["compute"]:
        first, last = bar.start / cost.seconds * 100, bar.stop / cost.seconds * 100
        inside = row[int(first) + 1 : int(last)]
        assert set(inside) <= {{"forward": "F", "backward": "B", "waiting": "."}[bar.kind]}
    memory = next(line[15:] for line in lines if line.startswith("memory"))
    assert len(memory) == 100 and "█" in memory


@every_case
def test_memory_in_text_is_the_most_that_each_stretch_holds(case):
    cost, num_cells = cost_of(**case), 60
    line = next(line[15:] for line in plan_text(cost, width=15 + num_cells).splitlines() if line.startswith("memory"))
    total = max(span.stop_seconds for span in cost.spans)
    moments = [
        (at / total * num_cells, span.memory_bytes) for at, span in ((span.issue_seconds, span) for span in cost.spans)
    ]
    moments.append((float(num_cells), 0))
    for cell, drawn in enumerate(line):
        held = [
            before for (start, before), (stop, _) in pairwise(moments)
            if min(num_cells - 1, int(start)) == cell or start < cell < stop
        ]  # fmt: skip
        eighths = -(-8 * max(held) // cost.peak_bytes)
        assert drawn == "▁▂▃▄▅▆▇█"[max(1, eighths) - 1], cell


def test_memory_in_text_shows_peaks_that_take_no_time():
    moments = [(0.0, 8), (0.0, 2), (1.0, 8), (1.0, 2), (4.0, 4)]
    spans = [SimpleNamespace(issue_seconds=at, memory_bytes=held) for at, held in moments]
    cost: Any = SimpleNamespace(spans=spans, peak_bytes=8)
    assert _sparkline(cost, total=4.0, width=4) == "██▂▄"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.01, 3)), min_size=1, max_size=300), st.integers(1, 120))
@QUICK
def test_samples_are_in_proportion_to_time(pieces, num_cells):
    bars, at = [], 0.0
    for kind, seconds in pieces:
        if kind != "c":
            bars.append(Bar(at, at + seconds, kind, "", ""))
        at += seconds
    found = sampled(bars, at, num_cells)
    assert len(found) == num_cells
    for cell, kind in enumerate(found):
        low, high = cell * at / num_cells - 1e-9, (cell + 1) * at / num_cells + 1e-9
        assert not kind or any(bar.kind == kind and bar.start < high and bar.stop > low for bar in bars)


def test_what_is_thinner_than_a_cell_is_seen_in_its_share():
    bars = [Bar(i, i + 0.25, "forward", "", "") for i in range(1000)]
    bars += [Bar(i + 0.25, i + 1, "waiting", "", "") for i in range(1000)]
    found = sampled(bars, 1000, 80)
    assert abs(found.count("forward") - 20) <= 1 and abs(found.count("waiting") - 60) <= 1


def test_very_many_events_make_no_very_large_drawing():
    cost = cost_of(num_units=30, microbatches=40)
    assert len(cost.spans) > 6000
    drawing = plan_svg(cost)
    assert len(boxes(drawing, "fill|hatch")) < 2 * WIDTH and len(drawing) < 1_500_000
    assert "too many to tell apart" in drawing
    assert f"peak {bytes_text(cost.peak_bytes)}" in drawing


def test_a_step_in_which_no_time_passes_is_drawn():
    units = plan_units([("", FlatLayout((ParamSpec("w", (0,)),), 1, True))])
    cost = step_cost(step_plan(units, Strategy.NO_SHARD.mesh(1)), units, Hardware(latency_seconds=0))
    assert "no time passes" in plan_text(cost)
    parse(plan_svg(cost))


def test_a_step_without_memory_is_drawn():
    units = plan_units([("", FlatLayout((ParamSpec("w", (0,)),), 2, True))])
    cost = step_cost(step_plan(units, Strategy.FULL_SHARD.mesh(2)), units, Hardware())
    amounts, timeline = plan_text(cost, width=100).split("\n\n")[:2]
    assert amounts.splitlines()[-1].strip() == "nothing"
    assert next(line for line in timeline.splitlines() if line.startswith("memory")).endswith(" " + 85 * "▁")


def test_names_are_escaped():
    cost = cost_of(names=("<&>", "u<&>{}"))
    drawing = plan_svg(cost, title='a<b>&"c"')
    assert 'A step of rank 1: a<b>&"c"' in texts(drawing)
    assert any("forward of u<&>1, " in box.about for box in boxes(drawing, "fill"))
    assert drawing.count("http") == 1


def test_names_stand_on_bars_that_have_room():
    names = texts(plan_svg(cost_of(num_units=2)))
    assert "u1" in names and "(root)" in names
    assert "u1" not in texts(plan_svg(cost_of(num_units=200)))
    short = texts(plan_svg(cost_of(num_units=9, names=("", "some.long.list.of.blocks.{}"))))
    assert "5" in short and "some.long.list.of.blocks.5" not in short


@every_case
def test_nothing_is_drawn_outside_the_drawing(case):
    root = parse(plan_svg(cost_of(**case)))
    height = float(root.get("height", 0))
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= WIDTH + THINNEST and y + h <= height
    for line in root.iter(f"{SVG}text"):
        about = len(line.text or "") * 12 * (MONOSPACE if "name" in line.get("class", "") else SANS)
        x, end, middle = float(line.get("x", 0)), "end" in line.get("class", ""), "middle" in line.get("class", "")
        left = x - about if end else x - about / 2 if middle else x
        assert left >= -2 and left + about <= WIDTH + 10 and 0 < float(line.get("y", 0)) < height


def test_the_rank_and_the_step_are_named():
    assert "A step of rank 1" in texts(plan_svg(cost_of()))
    assert {span.event.kind for span in cost_of().spans} >= {FREE, STEP}


@pytest.mark.parametrize("draw", [plan_text, plan_svg, events_text])
def test_wrong_use_is_refused(draw):
    for wrong in (None, [], "cost"):
        with pytest.raises(PlanError, match="expected the cost of a plan"):
            draw(wrong)
    with pytest.raises(PlanError, match="without events"):
        draw(Cost((), {}, 0.0, 0.0, 0.0))


def test_a_lane_is_drawn_bar_by_bar_up_to_so_many(monkeypatch):
    cost = cost_of(num_units=9)
    most = max(len(bars) for bars in lanes(cost).values())
    monkeypatch.setattr(lanes_module, "MOST_BARS", most)
    assert "too many to tell apart" not in plan_svg(cost)
    monkeypatch.setattr(lanes_module, "MOST_BARS", most - 1)
    assert f"one of {most} bars, which are too many to tell apart" in plan_svg(cost)


def test_bars_of_less_than_three_pixels_have_no_outline_that_would_cover_them():
    drawn = [box for num_units in (40, 60, 80) for box in boxes(plan_svg(cost_of(num_units=num_units)), "fill")]
    assert any(2 <= box.width < 3 for box in drawn) and any(3 <= box.width < 4 for box in drawn)
    for box in drawn:
        assert box.kind.endswith(" thin") == (box.width < 3)


def test_bars_too_many_to_tell_apart_lie_where_the_samples_do(monkeypatch):
    cost = cost_of(num_units=9)
    monkeypatch.setattr(lanes_module, "MOST_BARS", 0)
    right, expected = WIDTH - MARGIN, []
    for bars in lanes(cost).values():
        kinds = sampled(bars, max(span.stop_seconds for span in cost.spans), right - LEFT)
        starts = [at for at in range(len(kinds)) if not at or kinds[at - 1] != kinds[at]]
        runs = zip(starts, [*starts[1:], len(kinds)], strict=True)
        expected += [(kinds[at], LEFT + at, until - at) for at, until in runs if kinds[at]]
    drawn = [box for box in boxes(plan_svg(cost), "fill|hatch") if "too many" in box.about]
    assert [(kind_of(box).removeprefix("hatch-"), box.x, box.width) for box in drawn] == expected  # type: ignore[union-attr]
    assert {(box.height, box.kind.endswith(" thin")) for box in drawn} == {(BAR, True), (BAR, False)}
    assert all(box.kind.endswith(" thin") == box.kind.startswith("fill") for box in drawn)
