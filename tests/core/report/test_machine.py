"""Reports for machines: JUnit XML, annotations of GitHub Actions, summaries in Markdown, and JSON."""

import json
from xml.etree import ElementTree

import pytest

from tests.commands import status_of
from tests.core.helpers import synthetic


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    wrong = {"b_bug": ("reduce", 1.5), "c_bug<&>": ("reduce", float("nan"))}
    synthetic.record(folder / "a")
    synthetic.record(folder / "same")
    synthetic.record(folder / "other", synthetic.manifest(seed=1, model="another"), tamper=_times("parameters", -3.0))
    for name, (phase, factor) in wrong.items():
        synthetic.record(folder / name, tamper=_times(phase, factor))
    return folder


def _times(phase, factor):
    return lambda at, step, rank, what, array: array * array.dtype.type(factor) if at == phase else array


@pytest.mark.parametrize(
    ("other", "kind", "status"), [("same", None, 0), ("b_bug", "failure", 1), ("c_bug<&>", "failure", 1)]
)
def test_junit_has_one_case_for_a_pair(runs, tmp_path, other, kind, status):
    path = tmp_path / "new" / "junit.xml"
    assert status_of("compare", runs / "a", runs / other, "--junit", path) == status
    root = ElementTree.parse(path).getroot()
    cases = list(root.iter("testcase"))
    assert root.get("tests") == "1" and root.get("failures") == str(status) and root.get("errors") == "0"
    assert [case.get("name") for case in cases] == [f"a and {other}, float64, 2 ranks"]
    if kind is not None:
        (found,) = (case.find(kind) for case in cases)
        assert found.get("type") == "bug" and "reduced gradient" in found.get("message") + found.text
        assert "where: step 0, reduced gradients, unit block" in found.text


def test_runs_that_cannot_be_compared_are_errors_in_junit(runs, tmp_path):
    assert status_of("compare", runs / "a", runs / "other", "--junit", tmp_path / "junit.xml") == 4
    root = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert (root.get("failures"), root.get("errors")) == ("0", "1")


def test_github_gets_an_annotation_and_a_summary(runs, tmp_path, monkeypatch, capsys):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert status_of("compare", runs / "a", runs / "b_bug", "--github") == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("::"))
    assert line.startswith("::error title=crossframe%3A Bug::There is a bug: at step 0 ") and "%0Awhere: step 0" in line
    text = summary.read_text()
    assert (
        text.startswith("before\n### crossframe compare: Bug\n")
        and "| a and b\\_bug | float64 | 2 ranks | 3 | bug |" in text
    )


def test_json_stays_json_with_an_annotation(runs, capfd):
    assert status_of("compare", runs / "a", runs / "b_bug", "--json", "--github") == 1
    printed = capfd.readouterr()
    assert json.loads(printed.out)["verdict"] == "bug" and "::error" in printed.err
