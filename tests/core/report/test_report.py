"""What people are told of a comparison: the JSON, the page and the terminal."""

# pyright: reportAttributeAccessIssue=false
import io
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import crossframe.report
from crossframe.errors import RecordingError
from crossframe.layout import FlatLayout, Sharding
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.plan import step_plan
from crossframe.recording.event_format import perturbed_run_folder
from crossframe.report import sentences
from crossframe.report.build import PairSeries, report_of
from crossframe.report.line_chart import STYLES, Limit, Line, line_chart
from crossframe.report.page import page, write_report
from crossframe.report.tables_and_curves import Worst, curves, heat_map, level, phases
from crossframe.report.terminal import print_report
from crossframe.report.traces import followed_plan, plans
from crossframe.strategy import Sync
from crossframe.trace import Event, collectives, summary
from crossframe.verdict import Divergence, PairVerdict, Verdict
from crossframe.verdict.diagnosis import Diagnosis
from crossframe.verdict.diagnosis.fit import SIGNATURES
from crossframe.verdict.measure.causal_order import ALL
from crossframe.verdict.result import Judged
from tests.core.helpers import synthetic


def doubled(phase, step, rank, name, array):
    return 2 * array if (phase, name) == ("reduce", "block.w") else array


def rounded(phase, step, rank, name, array):
    return array if phase in ("parameters", "unsharded") else array * (1 + 1e-15)


def pair(path, tamper=None, *, a=None, b=None):
    made = (a or synthetic.manifest(), b or synthetic.manifest(framework="jax"))
    return synthetic.record(path / "a", made[0]), synthetic.record(path / "b", made[1], tamper=tamper)


def incomparable(path):
    normalised = synthetic.manifest(settings={"per_rank_statistics": ["bn"]})
    return pair(path, a=normalised, b=synthetic.manifest(1, framework="jax"))


def printed(report, series, width=80):
    text = io.StringIO()
    print_report(Console(file=text, width=width, force_terminal=True, color_system=None), report, series)
    return text.getvalue()


FOLDER = Path(crossframe.report.__file__).parent
EVIL = "<script>alert(1)</script>"


def headings(page):
    return re.findall("<h2>(.*?)</h2>", page)


def charts(page):
    return re.findall(r'<svg class="(?:chart|heat)"[^>]*aria-labelledby="(\w+)-title', page)


class Tags(HTMLParser):
    """Every tag with its attributes, and whether they close as they open."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_report_of_rounding(tmp_path):
    pairs = [pair(tmp_path / "1", rounded), pair(tmp_path / "2")]
    report, series = report_of(pairs, command="python -m experiments parity")
    assert report["verdict"] == "rounding"
    assert [one["verdict"] for one in report["pairs"]] == ["rounding", "equal"]
    page = write_report(tmp_path / "out", report, series).read_text()
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert "torch and JAX agree: the differences are rounding." in page
    assert "python -m experiments parity" in page
    assert "block.k_bias" in page
    assert headings(page) == ["Evidence", "All quantities", "The other pairs"]
    assert charts(page) == ["excess", "heat", "losses", "differences"]
    assert "bound on losses" in page


def test_the_headline_states_the_cause_without_its_fit(tmp_path):
    report, (one,) = report_of([pair(tmp_path, doubled)])
    assert " leaves " in report["pairs"][0]["diagnosis"]["evidence"]
    assert " leaves " not in sentences.headline(report, one.parted)


def test_a_report_of_a_bug_says_where(tmp_path):
    report, series = report_of([pair(tmp_path, doubled)])
    assert report["verdict"] == "bug"
    page = write_report(tmp_path, report, series).read_text()
    said = "There is a bug: at step 0 the reduced gradient of block.w (ranks 0 and 1, largest on rank 0, elements 0:10) differs"
    said += ": jax has 2 times the values of torch"
    assert f"<h1>{said}" in page
    assert said in " ".join(printed(report, series).split())
    assert headings(page) == ["Place and diagnosis", "Evidence", "All quantities"]
    where = report["pairs"][0]["first_divergence"]
    assert where == {
        "step": 0,
        "phase": "reduce",
        "rank": 0,
        "unit": "block",
        "parameter": "block.w",
        "start": 0,
        "stop": 10,
        "event": "reduce_scatter",
        "ranks": [0, 1],
        "module": None,
        "buffer": None,
    }
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert {name: re.sub("<.*?>", "", said) for name, said in facts.items()}.items() >= {
        *(
            ("step", "0"),
            ("phase", "reduced gradients"),
            ("event", "reduce-scatter"),
            ("rank", "0"),
            ("unit", "block"),
        ),
        *(("elements", "0:10"), ("parameter", "block.w")),
    }
    assert report["pairs"][0]["diagnosis"]["signature"] == "constant_factor"
    assert "It looks like a constant factor: jax has 2 times the values of torch (the world size)" in page
    assert "more than the bound of" in page  # the reason, beside the diagnosis


def test_a_report_names_a_buffer(tmp_path):
    def buffers(factor):
        return lambda step, rank: {"block.mean": np.arange(1.0, 4.0) * (1 if step < 1 else factor)}

    pairs = [[synthetic.record(tmp_path / name, buffers=buffers(factor)) for name, factor in (("a", 2.0), ("b", 3.0))]]
    report, series = report_of(pairs)
    page = write_report(tmp_path, report, series).read_text()
    said = "at step 1 the buffer block.mean (ranks 0 and 1, largest on rank 0, elements 0:3) differs"
    assert said in page and said in " ".join(printed(report, series).split())
    assert '<dt>buffer</dt><dd><code><bdi dir="ltr">block.mean</bdi>' in page
    assert "buffers, first difference" in " ".join(re.sub("<.*?>", " ", page).split())


def test_the_page_is_whole_and_needs_no_network(tmp_path):
    report, series = report_of([pair(tmp_path, doubled)])
    text = write_report(tmp_path, report, series).read_text()
    tags = Tags(text)
    assert tags.open == []
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags.found}
    assert not [attrs for _, attrs in tags.found if {"src", "href", "onload"} & set(attrs)]
    assert not re.findall(r"url\((?!#)", text)
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_a_page_names_nothing_twice_and_its_charts_bring_no_colours(tmp_path):
    pairs = [pair(tmp_path / "1", doubled), pair(tmp_path / "2", rounded)]
    text = write_report(tmp_path, *report_of(pairs)).read_text()
    found = Tags(text).found
    ids = [attrs["id"] for _, attrs in found if "id" in attrs]
    assert len(ids) == len(set(ids))
    used = {attrs["xlink:href"] for _, attrs in found if "xlink:href" in attrs}
    used |= {f"#{name}" for name in re.findall(r"url\(#(.*?)\)", text)}
    used |= {f"#{name}" for _, attrs in found for name in (attrs.get("aria-labelledby") or "").split()}
    assert used <= {f"#{name}" for name in ids}
    assert {"#wide-alignment", "#narrow-alignment", "#excess-title", "#heat-desc"} <= used
    charts = "".join(re.findall(r'<svg class="chart".*?</svg>', text, re.DOTALL))
    variables = set(re.findall(r"--(\w+):", (FOLDER / "report.css").read_text()))
    colours = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", charts))
    assert (
        {"var(--first)", "var(--soft)", "var(--bad)"} <= colours <= {"none", *(f"var(--{name})" for name in variables)}
    )
    again = write_report(tmp_path / "again", *report_of(pairs)).read_text()
    assert again == text


def test_the_command_line_starts_without_what_draws():
    code = "import sys, crossframe.cli.commands; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_comes_from_a_recording_is_escaped(tmp_path):
    made = synthetic.manifest(framework=EVIL, versions={EVIL: EVIL})
    report, series = report_of([pair(tmp_path, rounded, b=made)], command=EVIL)
    text = write_report(tmp_path, report, series).read_text()
    assert "alert(1)" in text
    assert "<script" not in text


def test_the_trace_is_held_against_the_plan(tmp_path):
    a, b = pair(tmp_path)
    report, _ = report_of([(a, b)])
    assert report["trace"] == {
        "plan": summary(plans(a)[0]),
        "torch": summary(a.collectives(0, 0)),
        "jax": summary(b.collectives(0, 0)),
        "equal": True,
    }
    # Three all-gathers: the root stays full into the backward, the block is gathered again. Float64: 10 + 10 elements of
    # padded shards of the block, 8 + 8 of the root.
    assert report["trace"]["plan"]["all_gather"] == {"count": 3, "num_bytes": 8 * (20 + 20 + 16)}
    assert len(collectives(plans(a)[0])) == 5


def test_a_trace_that_is_not_as_planned_is_shown_first(tmp_path, monkeypatch):
    good = pair(tmp_path / "good")
    a = synthetic.record(tmp_path / "a")

    def one_less(*args):
        events = step_plan(*args)
        gone = next(event for event in events if event.kind == "reduce_scatter")
        return [event for event in events if event is not gone]

    monkeypatch.setattr(synthetic, "step_plan", one_less)
    b = synthetic.record(tmp_path / "b", synthetic.manifest(framework="jax"))
    report, series = report_of([good, (a, b)])
    assert report["trace"]["equal"] is False
    assert report["trace"]["jax"]["reduce_scatter"]["count"] == 1
    page = write_report(tmp_path, report, series).read_text()
    assert "A run deviates from the planned collectives" in page
    assert page.count("class=off") == 1
    assert "collectives NOT as planned" in printed(report, series)


@pytest.mark.parametrize(
    ("framework", "num_bytes", "is_planned"),
    [
        pytest.param("jax", 8 * 10, True, id="without biases, which backward does not need"),
        pytest.param("jax", None, True, id="none, since backward needs nothing of it"),
        pytest.param("jax", 8 * 21, False, id="more than planned"),
        pytest.param("torch", 8 * 10, False, id="torch, which gathers units as a whole"),
    ],
)
def test_jax_may_gather_less_in_backward(tmp_path, monkeypatch, framework, num_bytes, is_planned):
    def changed(*args):
        events = list(step_plan(*args))
        (i,) = [i for i, each in enumerate(events) if (each.kind, each.phase) == ("all_gather", "backward")]
        events[i : i + 1] = [] if num_bytes is None else [replace(events[i], num_bytes=num_bytes)]
        return [*events, Event("all_reduce", "<loss_fn>", "forward", "float64", 8, (0, 1))]  # the loss function's own

    monkeypatch.setattr(synthetic, "step_plan", changed)
    found = synthetic.record(tmp_path / "a", synthetic.manifest(framework=framework))
    assert (followed_plan(found) is not None) is is_planned


@pytest.mark.parametrize("sync", [Sync.EACH, Sync.LAST])
def test_microbatches_are_planned_whenever_they_reduce(tmp_path, monkeypatch, sync):
    monkeypatch.setattr(synthetic, "step_plan", partial(step_plan, microbatches=2, sync=sync))
    made = [synthetic.manifest(framework=name, settings={"accumulate": 2}) for name in ("torch", "jax")]
    report, _ = report_of([pair(tmp_path, a=made[0], b=made[1])])
    assert report["trace"]["equal"] and report["trace"]["plan"] == report["trace"]["torch"]


def test_two_recordings_of_one_framework_go_by_their_directories(tmp_path):
    report, _ = report_of([pair(tmp_path, b=synthetic.manifest())])
    assert set(report["trace"]) == {"plan", "a", "b", "equal"}
    assert (report["pairs"][0]["a"], report["pairs"][0]["b"]) == ("a", "b")


def test_a_pair_without_collectives_has_no_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "step_plan", lambda *args: [])
    report, series = report_of([pair(tmp_path)])
    assert report["trace"] is None
    assert "Collectives" not in write_report(tmp_path, report, series).read_text()
    assert "planned" not in printed(report, series)


def test_an_incomparable_pair_is_reported_too(tmp_path):
    report, series = report_of([incomparable(tmp_path)])
    page = write_report(tmp_path, report, series).read_text()
    assert "in torch [&#39;bn&#39;] normalises over the samples of its own rank" in page
    assert charts(page) == ["losses"]
    assert headings(page) == ["The two runs"]
    assert "compare at equal world sizes" in " ".join(printed(report, series).split())


def test_settings_that_differ_are_shown(tmp_path):
    stated = synthetic.manifest(framework="jax", settings={"betas": [0.9, 0.99]})
    first = synthetic.manifest(settings={"betas": [0.9, 0.999]})
    report, series = report_of(
        [pair(tmp_path, lambda phase, *_: 2 * _[-1] if phase == "state" else _[-1], a=first, b=stated)]
    )
    said = "betas differs: [0.9, 0.999] in torch, [0.9, 0.99] in jax"
    assert report["verdict"] == "incomparable" and report["pairs"][0]["settings"] == [said]
    text = page(report, series)
    assert said in text and "Place" in headings(text)
    marked = re.findall(r'<tr class="differs"><th scope="row">(.*?)</th>', text)
    assert {"framework", "betas"} <= {re.sub(r"<.*?>|differs", "", each).strip() for each in marked}
    assert len(marked) == text.count('<span class="mark">differs</span>')
    assert f"settings that differ: {said}" in " ".join(printed(report, series, 400).split())
    report, series = report_of([pair(tmp_path / "equal", a=first, b=stated)])
    assert report["verdict"] == "equal" and said in page(report, series)


def test_reordered_samples_are_no_differing_setting(tmp_path):
    a, b = (synthetic.record(tmp_path / name, synthetic.manifest(framework=name)) for name in ("torch", "jax"))
    fed = '"sample_ids": [0, 2, 4]'
    synthetic.edit_events(b.directory, fed, '"sample_ids": [2, 0, 4]')
    report, series = report_of([(a, type(b).open(b.directory))])
    (note,) = report["pairs"][0]["notes"]
    assert "same samples in a different order" in note and not report["pairs"][0]["settings"]
    assert note in page(report, series)
    text = " ".join(printed(report, series, 400).split())
    assert note in text and "settings that differ" not in text


def test_other_batches_are_named(tmp_path):
    a = synthetic.record(tmp_path / "a")
    digest = synthetic.digest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "digest", lambda text: digest(f"other {text}"))
        made = synthetic.manifest(framework="jax")
        b = synthetic.record(tmp_path / "b", made, tamper=synthetic.only("forward", "", lambda loss: 2 * loss))
    report, series = report_of([(a, b)])
    assert report["verdict"] == "incomparable" and report["pairs"][0]["first_divergence"] is None
    text = page(report, series)
    assert "It looks like different batches: from step 0 on" in text
    assert "It looks like different batches: from step 0 on" in printed(report, series)


def test_other_world_sizes_and_a_loss_that_is_not_finite(tmp_path):
    def spoilt(phase, step, rank, name, array):
        return array * np.nan if phase == "forward" and step == 1 else array

    report, series = report_of([pair(tmp_path, spoilt, b=synthetic.manifest(3, framework="jax"))])
    assert report["pairs"][0]["world_size"] == [2, 3]
    assert report["pairs"][0]["max_relative_loss_difference"] is None
    page = write_report(tmp_path, report, series).read_text()
    assert "2 and 3 ranks" in page
    assert "nan" not in "".join(re.findall(r'<svg class="chart".*?</svg>', page, re.DOTALL))
    assert "several" in page
    assert "There is a bug: at step 1 the mean loss over ranks is not finite" in page
    assert ">∞</text>" in page


def test_no_pairs_at_all(tmp_path):
    report, series = report_of([])
    assert report == {"verdict": "inconclusive", "pairs": [], "trace": None}
    assert "Nothing was compared." in write_report(tmp_path, report, series).read_text()


def test_of_a_pair_with_perturbed_runs_no_bound_is_shown_that_was_not_used(tmp_path):
    made = synthetic.manifest(dtype="float32")
    a = synthetic.record(tmp_path / "a", made)
    for i in (1, 2):
        synthetic.record(a.directory / perturbed_run_folder(i), made)
    report, series = report_of([(a, synthetic.record(tmp_path / "b", made))])
    page = write_report(tmp_path / "report", report, series).read_text()
    assert "measured" in page and "bound 5.4e-04" not in page and "bound on losses" not in page
    assert "measured" in printed(report, series) and "5.4e-04" not in printed(report, series)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_the_terminal_gets_ten_lines_at_most(tmp_path, width, count):
    report, series = report_of([pair(tmp_path, doubled)])
    report["pairs"], series = report["pairs"] * count, series * count
    for evidence in ("short", "a very long story " * 40):
        for one in report["pairs"]:
            one["diagnosis"]["evidence"] = evidence
        lines = printed(report, series, width).splitlines()
        if evidence == "short":
            assert len(lines) <= 9  # the tenth is the path of the page
        assert " ".join(lines).count("story") == (40 if "story" in evidence else 0)  # nothing is cut off
        assert all(len(line) <= width for line in lines)
        assert lines[0].startswith("There is a bug: at step 0 the reduced gradient of block.w")
        assert any(
            line.startswith("where: step 0, reduced gradients, unit block, event reduce-scatter") for line in lines
        )
        assert any(line.startswith("collectives as planned") for line in lines)
        shown = sum(line.startswith("float64") for line in lines)
        more = [line for line in lines if ", in report.json: " in line]
        assert [f"{count - shown} bug" in line for line in more] == [True] * (shown < count)


def test_a_long_name_is_shortened_and_the_number_of_its_elements_is_not(tmp_path):
    report, series = report_of([pair(tmp_path, doubled)])
    report["pairs"][0]["zero_gradient_parameters"] = ["model.layers.17.attention.key.bias (64 of 192 elements)"]
    text = " ".join(printed(report, series).split())
    assert (
        "not counted, since their gradient is zero: 1, for instance model.layers…on.key.bias (64 of 192 elements)"
        in text
    )


def test_a_damaged_recording_is_no_report(tmp_path):
    a, b = pair(tmp_path)
    (tmp_path / "b" / "rank00001" / "step00002.safetensors").write_bytes(b"")
    with pytest.raises(RecordingError, match=r"step00002\.safetensors"):
        report_of([(a, b)])


def path_of(chart, *style):
    """The points of the one path that is drawn so, and how often it begins anew."""
    paths = re.findall(r'<path d="([^"]*)"[^>]*style="fill: none;([^"]*)"', chart)
    (path,) = [path for path, seen in paths if all(part in seen for part in style)]
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)], path.count("M")


def test_a_logarithmic_chart_holds_its_limit_its_zeros_and_its_infinities():
    chart = line_chart(
        [Line("x", ((0, 0.0), (1, 1e-15), (2, math.nan), (3, 1e-14), (4, 1e-13), (5, math.inf)), "first")],
        name="chart",
        about="",
        y_label="y",
        limits=[Limit("bound", 1e-3, "second", above=True)],
        log=True,
    )
    curve, begun = path_of(chart, "var(--first)")
    assert begun == 2  # interrupted where there is no number
    heights = [y for _, y in curve]
    assert heights == sorted(heights, reverse=True)
    decades = -np.diff(heights[1:-1])
    assert decades == pytest.approx(np.full(2, decades[0]), rel=1e-4)  # a decade is a decade; six places are written
    assert decades[0] > 5
    (_, limit), _ = path_of(chart, "var(--second)", "dasharray")[0]
    assert heights[-1] < limit < heights[-2]
    grid = [float(y) for y in re.findall(r"L \S+ (\S+) \n\"[^>]*var\(--line\)", chart)]
    assert heights[0] == max(grid)  # zero: on the lower edge
    assert heights[-1] == min(grid)  # an infinity: on the upper one
    labels = re.findall(r">([^<>]+)</text>", chart)
    assert {"0", "1e-15", "∞", "bound", "step"} <= set(labels)


@pytest.mark.parametrize(
    "values", [(), (1.0,), (2.0, 2.0, 2.0), (0.0, 0.0), (math.nan, math.inf), (math.inf,), (5e-324, 1.7e308)]
)
def test_a_chart_of_what_does_not_change(values):
    points = tuple(enumerate(values))
    for log in (False, True):
        chart = line_chart([Line("x", points, "first")], name="chart", about="", y_label="y", log=log)
        assert "nan" not in chart
        assert "inf" not in chart
        xml.etree.ElementTree.fromstring(chart.replace("xlink:", ""))


def judged(step, unit, used, *, phase="reduce", event="reduce_scatter", name="w", beyond=None, equal=False):
    outside = used is not None and used > 1 if beyond is None else beyond
    return Judged(step, phase, event, unit, name, 1e-9, used, outside, equal)


def test_curves_are_the_worst_of_each_phase_at_each_step():
    some = [
        judged(0, "", 0.0, phase="parameters", equal=True),
        judged(0, "a", 0.2),
        judged(0, "b", 0.3),
        judged(0, "b", None),
        judged(0, "", 0.1, phase="update"),
        judged(4, "a", math.inf),
        judged(4, "", 0.0, phase="update"),
        judged(4, "", None, phase="state"),
    ]
    # Parameters only move, and did; of the state no bound is known.
    assert curves(some) == {"reduce": ((0, 0.3), (4, math.inf)), "update": ((0, 0.1), (4, 0.0))}
    found = phases(some)
    assert list(found) == ["parameters", "reduce", "update", "state"]
    assert found["reduce"] == Worst(4, 0, 1, math.inf, "w")
    assert found["state"] == Worst(1, 0, 0, None, "w")


def test_a_heat_map_has_units_in_the_order_of_forward_and_the_worst_of_each():
    some = [
        judged(0, "b", 0.5, name="b.w"),
        judged(0, "b", 7.0, name="b.v"),
        judged(0, "", 0.1),
        judged(1, "", 0.9, phase="forward", event="loss", name=""),
        judged(2, "a", 20.0, name="a.w"),
        judged(3, "", 3.0, phase="forward", event="loss", name=""),
    ]
    heat = heat_map(some, ["", "a", "b", "b"])
    assert heat.rows == (("",), ("a",), ("b",))
    assert heat.columns == ((0,), (2,), (3,))  # at step 1 there is nothing but a loss that is inside
    assert heat.cells[2, 0] == Worst(2, 0, 1, 7.0, "b.v")
    assert heat.first == (2, 0)  # the first in the order of causes, not the worst
    assert {at: level(worst) for at, worst in heat.cells.items()} == {
        (0, 0): "in2", (2, 0): "out1", (1, 1): "out2", (0, 2): "out1",
    }  # fmt: skip
    assert heat_map([some[3]], [""]).columns == ((1,),)
    assert heat_map(some[:1], [""]).first is None
    assert heat_map(some, ["", "a", "b"], some[3]).first == (0, 1)  # inside its bound, as in a different computation


@pytest.mark.parametrize("num_units, num_steps", [(300, 100), (41, 61), (40, 60), (1, 1000)])
def test_a_heat_map_of_very_much_puts_neighbours_together_and_loses_nothing(num_units, num_steps):
    units = ["", *(f"h.{i}" for i in range(num_units - 1))]
    some = [judged(step, unit, 0.01) for step in range(num_steps) for unit in units]
    some[-1] = judged(num_steps - 1, units[-1], 50.0)
    heat = heat_map(some, units)
    assert len(heat.rows) <= 40 and len(heat.columns) <= 60
    assert [unit for row in heat.rows for unit in row] == units
    assert [step for column in heat.columns for step in column] == list(range(num_steps))
    assert sum(worst.num for worst in heat.cells.values()) == len(some)
    assert heat.first == (len(heat.rows) - 1, len(heat.columns) - 1)
    assert [at for at, worst in heat.cells.items() if worst.num_beyond] == [heat.first]


@pytest.mark.parametrize(
    "used, equal, cell",
    [
        *((0.0, True, "in0"), (0.0, False, "in1"), (0.01, False, "in1"), (0.05, False, "in2"), (0.1, False, "in2")),
        *((1.0, False, "in3"), (1.5, False, "out1"), (10.5, False, "out2"), (2e3, False, "out3"), (2e6, False, "out4")),
        *((math.inf, False, "out4"), (None, False, "free"), (None, True, "in0")),
    ],
)
def test_a_cell_has_the_colour_of_what_is_used(used, equal, cell):
    assert level(Worst.of([judged(0, "", used, equal=equal)])) == cell
    assert f"rect.{cell} {{" in (FOLDER / "report.css").read_text()


def made_up(names, units, *, steps=2, where=None, diagnosis=None, phase="reduce", some=None):
    """What a report draws of a pair with such units, each of these parameters."""
    layouts = [
        (unit, FlatLayout(tuple(ParamSpec(f"{unit}.{name}" if unit else name, (5, 2)) for name in names), 4, True))
        for unit in units
    ]
    every = some or [
        judged(step, unit, 0.5, phase=phase, name=layout.params[0].name)
        for step in range(steps)
        for unit, layout in layouts
    ]
    verdict = PairVerdict(
        *("torch", "jax", "float32", 4, steps, Verdict.BUG, f"at step 0 {names[0]!r} differs"),
        first_divergence=where,
        diagnosis=diagnosis,
        loss_differences=(1e-7,) * steps,
        judged=tuple(every),
        parted=next((each for each in every if each.beyond), None),
        judged_share=0.5,
        limit_used=0.5,
    )
    one = PairSeries(
        *(
            verdict,
            (1.0,) * steps,
            (1.0,) * steps,
            None,
            (("torch", 4),),
            Sharding(tuple(layouts), MeshSpec(4)),
            None,
            False,
        ),
        *((("setting", names[0], names[0]),), None),
    )
    return {"verdict": "bug", "pairs": [verdict.to_json()], "trace": None}, [one]


@pytest.mark.parametrize(
    "name",
    [
        EVIL,
        "\"><img src=x onerror='alert(1)'>",
        "w" * 3000,
        "\u05d0\u05d1\u05d2.weight",
        "a\u202eb\u2066",
        "{{ 7 * 7 }}",
        "-->&lt;",
    ],
)
def test_names_of_all_kinds_do_no_harm(tmp_path, name):
    unit = f"unit of {name}"
    parameter = f"{unit}.{name}"
    where = Divergence(0, "reduce", 1, unit, parameter, 4, 7, "reduce_scatter")
    diagnosis = Diagnosis("mixed_parameters", f"jax has what belongs to {name!r}.")
    some = [judged(0, unit, 5.0, name=parameter)]
    report, series = made_up([name], [unit, "b"], where=where, diagnosis=diagnosis, some=some)
    text = write_report(tmp_path, report, series).read_text()
    tags = Tags(text)
    assert tags.open == []
    assert not {"script", "img"} & {tag for tag, _ in tags.found}
    assert not [key for _, attrs in tags.found for key in attrs if key.startswith("on")]
    assert "\u202e" not in text and "49" not in re.findall("<h1>.*</h1>", text)[0]
    assert "<h1>There is a bug: at step 0 the reduced gradient of " in text
    assert max(len(line) for line in re.findall("<h1>.*</h1>|<p class=.looks.>.*", text)) < 700
    headline = re.findall("<h1>(.*)</h1>", text)[0]
    assert "(rank 1, elements 4:7) differs: jax has what belongs to" in headline.replace("\u2066", "").replace(
        "\u2069", ""
    )
    assert headline.count("\u2066") == headline.count("\u2069") == (2 if "\u05d0" in name else 0)
    for width in (80, 120):
        lines = printed(report, series, width).splitlines()
        assert all(len(line) <= width for line in lines if " " in line.strip())
    assert json.loads((tmp_path / "report.json").read_text())["pairs"][0]["first_divergence"]["parameter"] == parameter


def test_three_hundred_units_with_long_names_are_one_page(tmp_path):
    units = ["", *(f"transformer.encoder.layers.{i}.block" for i in range(300))]
    report, series = made_up(["w"], units, steps=100)
    text = write_report(tmp_path, report, series).read_text()
    assert len(text) < 1_000_000
    assert 'names begin with <bdi dir="ltr">transformer.encoder.layers.</bdi>' in text
    rows = re.findall(r'<div title="([^"]*)"><bdi dir="ltr">(.*?)</bdi>', text)
    assert len(rows) <= 40
    assert rows[0][1] == "(root) … 6.block" and rows[-1][0].endswith("transformer.encoder.layers.299.block")


def drawings(text):
    return [re.findall(r'class="outline"', each) for each in re.findall("<svg xmlns.*?</svg>", text, re.DOTALL)]


@pytest.mark.parametrize(
    "where, drawn, said",
    [
        (Divergence(0, "reduce", 1, "b", "b.w", 4, 7, "reduce_scatter"), 1, "in the shards of their unit"),
        (Divergence(0, "backward", 1, "b", "b.w", 0, 10, "backward"), 4, "to which shards they belong"),
        (Divergence(0, "forward", 1, "b", None, 0, 10, "output"), None, "output of b.attention"),
        (Divergence(0, "forward", None, "", None, None, None, "loss"), None, "the mean loss over ranks differs"),
        (
            Divergence(0, "norm", 0, "", None, None, None, "grad_norm"),
            None,
            "the norm of all gradients of rank 0 differs",
        ),
        (
            Divergence(0, "state", None, "b", "b.w", None, None, "state"),
            None,
            "the optimizer state step of b.w differs",
        ),
    ],
)
def test_the_elements_that_are_off_are_drawn_on_the_layout(tmp_path, where, drawn, said):
    names = {"output": "output of b.attention", "state": "step of b.w", "loss": "", "grad_norm": ""}
    some = [judged(0, where.unit, 4.0, phase=where.phase, event=where.event, name=names.get(where.event, "b.w"))]
    report, series = made_up(["w"], ["", "b"], where=where, diagnosis=Diagnosis("dropout", "..."), some=some)
    text = write_report(tmp_path, report, series).read_text()
    assert said in text
    assert [len(outlines) for outlines in drawings(text)] == ([drawn] * 2 if drawn else [])


def test_the_elements_of_an_activation_are_drawn_too(tmp_path):
    def off(phase, step, rank, name, array):
        if (phase, rank, name) == ("output", 1, "block"):
            array.reshape(-1)[4:7] += 1.0
        return array + 1e-3 if phase == "forward" else array

    report, series = report_of([pair(tmp_path, off)])
    text = write_report(tmp_path, report, series).read_text()
    assert "<dd>4:7</dd>" in text and "in the output of block of rank 1" in text
    assert "elements 4:7 of 12, of shape (3, 4)" in text
    assert 'style="left:33.333%;width:25.0%"' in text
    assert drawings(text) == []


def test_an_activation_at_two_world_sizes_has_no_rank(tmp_path):
    def off(phase, step, rank, name, array):
        return array + 1.0 if (phase, name) == ("output", "block") else array

    other = synthetic.both(off, synthetic.OTHER_LOSS)
    report, series = report_of([pair(tmp_path, other, b=synthetic.manifest(3, framework="jax"))])
    where = report["pairs"][0]["first_divergence"]
    assert (where["event"], where["unit"], where["rank"]) == ("output", "block", None)
    text = page(report, series)
    assert "several" in text and "of shape" not in text
    assert "output of block" in text


def test_what_cannot_be_told_from_sketches_is_said(tmp_path):
    where = Divergence(0, "reduce", None, "b", "b.w", 0, 10, "reduce_scatter")
    report, (one,) = made_up(["w"], ["b"], where=where, some=[judged(0, "b", 5.0)])
    assert "No known fault explains it." in page(report, [one])
    assert "Sketches do not allow a diagnosis" in page(report, [replace(one, sketched=True)])


def test_an_inconclusive_pair_says_where_and_accuses_nobody(tmp_path):
    made = synthetic.manifest(dtype="bfloat16")
    a, b = synthetic.record(tmp_path / "a", made), synthetic.record(tmp_path / "b", made, tamper=doubled)
    report, series = report_of([(a, b)])
    assert report["verdict"] == "inconclusive"
    report["pairs"][0]["diagnosis"] = None
    text = page(report, series)
    assert headings(text) == ["Place", "Evidence", "All quantities"]
    assert "common faults" not in text and "too coarse for a bound" in text


def test_words_for_all_phases_and_all_signatures():
    assert tuple(sentences.PHASES) == ALL
    assert set(sentences.SIGNATURES) == set(SIGNATURES)


def test_report_json_has_these_fields_and_no_others(tmp_path):
    report, _ = report_of([pair(tmp_path, doubled)])
    assert list(report) == ["verdict", "pairs", "trace"]
    assert set(report["pairs"][0]) == {
        *(
            "a",
            "b",
            "dtype",
            "world_size",
            "steps",
            "environment",
            "verdict",
            "max_relative_loss_difference",
            "reason",
            "diagnosis",
            "settings",
            "unrecorded",
            "bits",
            "power",
            "notes",
        ),
        *("max_relative_parameter_difference", "zero_gradient_parameters", "first_divergence"),
    }
    assert set(report["pairs"][0]["diagnosis"]) == {"signature", "evidence"}


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))  # WCAG 2.2, relative luminance


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_texts_and_curves_are_readable_in_light_and_in_dark():
    blocks = re.findall(r":root \{(.*?)\}", (FOLDER / "report.css").read_text(), re.DOTALL)
    assert len(blocks) == 2
    for colours in (dict(re.findall(r"--(\w+): (#\w{6});", block)) for block in blocks):
        for name in ("ink", "soft", "good", "bad", "unsure", *STYLES):
            assert min(contrast(colours[name], colours[ground]) for ground in ("paper", "panel")) >= 4.5, name
        scale = [contrast(colours[name], colours["paper"]) for name in ("in0", "in1", "in2", "in3")]
        assert scale == sorted(scale) and scale[-1] > 3
        scale = [contrast(colours[name], colours["paper"]) for name in ("out1", "out2", "out3", "out4")]
        assert scale == sorted(scale) and scale[-1] > 7


def test_advice_is_wrapped_and_never_cut(tmp_path):
    report, series = report_of([incomparable(tmp_path)])
    advice = (
        "record both under one name, as in Recorder(path, model=model, name='toy'), and compare them " + "again " * 40
    )
    advice = report["pairs"][0]["reason"] = advice.strip()
    narrow = printed(report, series, 40).splitlines()
    assert advice in " ".join(narrow)
    assert all(len(line) <= 40 for line in narrow if " " in line.strip() and "float64" not in line)
    text = io.StringIO()
    print_report(Console(file=text, width=40), report, series)  # a file: a program may read its lines
    assert advice in text.getvalue()
