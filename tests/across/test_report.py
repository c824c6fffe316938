"""What people are told of a comparison: the JSON, the page and the terminal."""

import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from crossframe.errors import RecordingError
from crossframe.recording import Recording
from crossframe.recording.lines import twin_folder
from crossframe.trace import collectives, summary
from experiments.report import print_report, report_of, write_report
from experiments.report.plots import Limit, Line, line_chart
from experiments.report.traces import planned
from tests.core import synthetic


def doubled(phase, step, rank, name, array):
    return 2 * array if (phase, name) == ("reduce", "block.w") else array


def rounded(phase, step, rank, name, array):
    return array if phase == "parameters" else array * (1 + 1e-15)


def pair(path, tamper=None, *, a=None, b=None):
    made = (a or synthetic.manifest(), b or synthetic.manifest(framework="jax"))
    return synthetic.record(path / "a", made[0]), synthetic.record(path / "b", made[1], tamper=tamper)


def printed(report, series, width=80):
    console = Console(file=io.StringIO(), width=width)
    print_report(console, report, series)
    return console.file.getvalue()


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
    report, series = report_of(pairs, command="crossframe parity")
    assert report["verdict"] == "rounding"
    assert [one["verdict"] for one in report["pairs"]] == ["rounding", "equal"]
    page = write_report(tmp_path / "out", report, series).read_text()
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert "torch and JAX agree: the differences are rounding." in page
    assert "crossframe parity" in page
    assert "block.k_bias" in page
    assert "Where they first part" not in page
    assert page.count("<svg") == 4
    assert "bound on losses" in page


def test_a_report_of_a_bug_says_where(tmp_path):
    report, series = report_of([pair(tmp_path, doubled)])
    assert report["verdict"] == "bug"
    page = write_report(tmp_path, report, series).read_text()
    assert "There is a bug: at step 0 the reduced gradient of &#39;block.w&#39;" in page
    assert "Where they first part" in page
    text = " ".join(printed(report, series).split())
    assert "There is a bug: at step 0 the reduced gradient of 'block.w'" in text


def test_the_page_is_whole_and_needs_no_network(tmp_path):
    report, series = report_of([pair(tmp_path, doubled)])
    text = write_report(tmp_path, report, series).read_text()
    tags = Tags(text)
    assert tags.open == []
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags.found}
    assert not [attrs for _, attrs in tags.found if {"src", "href", "onload"} & set(attrs)]
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_charts_of_one_page_share_no_ids_and_bring_no_colours(tmp_path):
    report, series = report_of([pair(tmp_path / "1", rounded), pair(tmp_path / "2", rounded)])
    text = write_report(tmp_path, report, series).read_text()
    found = Tags(text).found
    ids = [attrs["id"] for _, attrs in found if "id" in attrs]
    used = {attrs["xlink:href"] for _, attrs in found if "xlink:href" in attrs}
    assert len(ids) == len(set(ids)) == 8  # a marker for each curve
    assert used == {f"#{name}" for name in ids}
    charts = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert set(re.findall(r"(?:fill|stroke): ([^;\"]+)", charts)) == {
        *("none", "var(--first)", "var(--second)", "var(--soft)", "var(--line)")
    }
    again = write_report(tmp_path / "again", report, series).read_text()
    assert again == text


def test_the_command_line_starts_without_what_draws():
    code = "import sys, experiments.cli; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_comes_from_a_recording_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    made = synthetic.manifest(framework=evil, versions={evil: evil})
    report, series = report_of([pair(tmp_path, rounded, b=made)], command=evil)
    text = write_report(tmp_path, report, series).read_text()
    assert "alert(1)" in text
    assert "<script" not in text


def test_the_trace_is_held_against_the_plan(tmp_path):
    a, b = pair(tmp_path)
    report, _ = report_of([(a, b)])
    assert report["trace"] == {
        "plan": summary(planned(a)),
        "torch": summary(a.collectives(0, 0)),
        "jax": summary(b.collectives(0, 0)),
        "equal": True,
    }
    # Three all-gathers: the root stays full into the backward, the block is gathered again. Float64: 10 + 10 elements of
    # padded shards of the block, 8 + 8 of the root.
    assert report["trace"]["plan"]["all_gather"] == {"count": 3, "num_bytes": 8 * (20 + 20 + 16)}
    assert len(collectives(planned(a))) == 5


def drop_collective(directory, kind):
    path = directory / "rank00000" / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    gone = next(line for line in lines if f'"kind": "{kind}"' in line)
    path.write_text("".join(line for line in lines if line is not gone))


def test_a_trace_that_is_not_as_planned_is_shown_first(tmp_path):
    good = pair(tmp_path / "good")
    pair(tmp_path / "bad")
    drop_collective(tmp_path / "bad" / "b", "reduce_scatter")
    bad = tuple(Recording.open(tmp_path / "bad" / name) for name in "ab")
    report, series = report_of([good, bad])
    assert report["trace"]["equal"] is False
    assert report["trace"]["jax"]["reduce_scatter"]["count"] == 1
    page = write_report(tmp_path, report, series).read_text()
    assert "Not every run did what the plan says" in page
    assert page.count("class=off") == 1
    assert "collectives NOT as planned" in printed(report, series)


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
    report, series = report_of([pair(tmp_path, b=synthetic.manifest(seed=1, framework="jax"))])
    page = write_report(tmp_path, report, series).read_text()
    assert "These are not recordings of the same run: seed differs: 0 in torch, 1 in jax." in page
    assert page.count("<svg") == 1
    assert "seed differs" in printed(report, series)


def test_other_world_sizes_and_a_loss_that_is_not_finite(tmp_path):
    def spoilt(phase, step, rank, name, array):
        return array * np.nan if phase == "forward" and step == 1 else array

    report, series = report_of([pair(tmp_path, spoilt, b=synthetic.manifest(3, framework="jax"))])
    assert report["pairs"][0]["world_size"] == [2, 3]
    assert report["pairs"][0]["max_relative_loss_difference"] is None
    page = write_report(tmp_path, report, series).read_text()
    assert "2 and 3 ranks" in page
    assert "nan" not in "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert "mean over all" in page


def test_no_pairs_at_all(tmp_path):
    report, series = report_of([])
    assert report == {"verdict": "inconclusive", "pairs": [], "trace": None}
    assert "Nothing was compared." in write_report(tmp_path, report, series).read_text()


def test_of_a_pair_with_twins_no_bound_is_shown_that_was_not_used(tmp_path):
    made = synthetic.manifest(dtype="float32")
    a = synthetic.record(tmp_path / "a", made)
    for i in (1, 2):
        synthetic.record(a.directory / twin_folder(i), made)
    report, series = report_of([(a, synthetic.record(tmp_path / "b", made))])
    page = write_report(tmp_path / "report", report, series).read_text()
    assert "by twins" in page and "bound 5.4e-04" not in page and "bound on losses" not in page
    assert "by twins" in printed(report, series) and "5.4e-04" not in printed(report, series)


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_gets_twelve_lines_at_most(tmp_path, width):
    report, series = report_of([pair(tmp_path, doubled)])
    report["pairs"] = report["pairs"] * 9
    lines = printed(report, series * 9, width).splitlines()
    assert len(lines) <= 12
    assert all(len(line) <= width for line in lines)
    assert any("and 5 more pairs" in line for line in lines)


def test_a_damaged_recording_is_no_report(tmp_path):
    a, b = pair(tmp_path)
    (tmp_path / "b" / "rank00001" / "step00002.safetensors").write_bytes(b"")
    with pytest.raises(RecordingError, match=r"step00002\.safetensors: cut off or damaged"):
        report_of([(a, b)])


def path_of(chart, *style):
    """The points of the one path that is drawn so, and how often it begins anew."""
    paths = re.findall(r'<path d="([^"]*)"[^>]*style="fill: none;([^"]*)"', chart)
    (path,) = [path for path, seen in paths if all(part in seen for part in style)]
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)], path.count("M")


def test_a_logarithmic_chart_holds_its_limit_and_its_zeros():
    chart = line_chart(
        [Line("x", ((0, 0.0), (1, 1e-15), (2, float("inf")), (3, 1e-14), (4, 1e-13)), "first")],
        name="chart",
        y_label="y",
        limits=[Limit("bound", 1e-3, "second", above=True)],
        log=True,
    )
    curve, begun = path_of(chart, "var(--first)")
    assert begun == 2  # interrupted where it is not finite
    heights = [y for _, y in curve]
    assert heights == sorted(heights, reverse=True)
    decades = -np.diff(heights[1:])
    assert decades == pytest.approx(np.full(2, decades[0]), rel=1e-4)  # a decade is a decade; six places are written
    assert decades[0] > 5
    (_, limit), _ = path_of(chart, "var(--second)", "dasharray")[0]
    assert 0 < limit < heights[-1]
    grid = [float(y) for y in re.findall(r"L \S+ (\S+) \n\"[^>]*var\(--line\)", chart)]
    assert heights[0] == max(grid)  # zero: on the lower edge
    labels = re.findall(r">([^<>]+)</text>", chart)
    assert {"0", "1e-15", "bound", "step"} <= set(labels)


@pytest.mark.parametrize("values", [(), (1.0,), (2.0, 2.0, 2.0), (0.0, 0.0), (float("nan"), float("inf"))])
def test_a_chart_of_what_does_not_change(values):
    points = tuple(enumerate(values))
    for log in (False, True):
        chart = line_chart([Line("x", points, "first")], name="chart", y_label="y", log=log)
        assert "nan" not in chart
        assert "inf" not in chart
