"""Writes a report for machines: JUnit XML, annotations of GitHub Actions, and a summary of a step in Markdown."""

from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from crossframe.report import sentences
from crossframe.report.build import PairSeries, world_text

_UNDECIDED = ("inconclusive", "incomparable")
_AGREES = ("equal", "rounding")
_NOT_XML = {code: f"\\x{code:02x}" for code in range(0x20) if chr(code) not in "\t\n\r"} | {0xFFFE: "", 0xFFFF: ""}


def junit_xml(report: dict[str, Any], series: Sequence[PairSeries], subject: str) -> str:
    """The report as JUnit XML: one test case for each pair.

    A bug and a different computation are failures. A pair that cannot be decided or compared is an error.

    Args:
        subject: what was compared, the name of the test suite.
    """
    verdicts = [pair["verdict"] for pair in report["pairs"]]
    counts = {
        "tests": len(verdicts),
        "failures": sum(verdict not in (*_UNDECIDED, *_AGREES) for verdict in verdicts),
        "errors": sum(verdict in _UNDECIDED for verdict in verdicts),
    }
    numbers = {name: str(count) for name, count in counts.items()}
    root = ElementTree.Element("testsuites", numbers)
    suite = ElementTree.SubElement(root, "testsuite", {"name": _xml(subject)} | numbers)
    for pair, one in zip(report["pairs"], series, strict=True):
        name = f"{pair['a']} and {pair['b']}, {pair['dtype']}, {world_text(pair['world_size'])}"
        case = ElementTree.SubElement(suite, "testcase", {"classname": "crossframe", "name": _xml(name)})
        if pair["verdict"] in _AGREES:
            ElementTree.SubElement(case, "system-out").text = _xml(pair["reason"])
            continue
        kind = "error" if pair["verdict"] in _UNDECIDED else "failure"
        message = _xml(sentences.headline({"verdict": pair["verdict"], "pairs": [pair]}, one.parted))
        found = ElementTree.SubElement(case, kind, {"type": pair["verdict"], "message": message})
        found.text = _xml("\n".join(_details(pair)))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def annotation(report: dict[str, Any], series: Sequence[PairSeries], file: str | None) -> str:
    """The report as a workflow command of GitHub Actions, which shows it with the changed files.

    Args:
        file: the file that it is shown at, relative to the root of the repository; None: none.

    >>> annotation({"verdict": "inconclusive", "pairs": []}, [], "a,b.golden")
    '::warning file=a%2Cb.golden,title=crossframe%3A Inconclusive::Nothing was compared.'
    """
    verdict = report["verdict"]
    level = "error" if verdict == "bug" else "notice" if verdict in _AGREES else "warning"
    where = f"file={_property(file)}," if file else ""
    title = _property(f"crossframe: {sentences.KINDS[verdict]}")
    at = sentences.decisive(report)
    lines = [_headline(report, series), *(_details(report["pairs"][at])[1:] if at is not None else [])]
    return f"::{level} {where}title={title}::{_escaped(chr(10).join(lines))}"


def step_summary(report: dict[str, Any], series: Sequence[PairSeries], subject: str) -> str:
    """The report in Markdown."""
    lines = [
        f"### {_markdown(subject)}: {sentences.KINDS[report['verdict']]}",
        "",
        _markdown(_headline(report, series)),
    ]
    columns = ("runs", "dtype", "ranks", "steps", "verdict", "loss diff.", "param. diff.")
    lines += ["", f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    for pair in report["pairs"]:
        cells = (
            _markdown(f"{pair['a']} and {pair['b']}"),
            pair["dtype"],
            world_text(pair["world_size"]),
            str(pair["steps"]),
            pair["verdict"],
            sentences.number(pair["max_relative_loss_difference"]),
            sentences.number(pair["max_relative_parameter_difference"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    for pair in report["pairs"]:
        lines += ["", *(f"- {_markdown(text)}" for text in _details(pair))]
    return "\n".join(lines) + "\n\n"


def _headline(report: dict[str, Any], series: Sequence[PairSeries]) -> str:
    at = sentences.decisive(report)
    return sentences.headline(report, series[at].parted if at is not None else "")


def _details(pair: dict[str, Any]) -> list[str]:
    """The reason of a verdict, its place, and the settings that differ."""
    found = [pair["reason"]]
    if (where := pair["first_divergence"]) is not None:
        place = (
            f"step {where['step']}",
            sentences.PHASES[where["phase"]],
            f"unit {sentences.unit_name(where['unit'])}",
        )
        found.append(f"where: {', '.join(place)}, event {where['event']}")
    if pair["diagnosis"] is not None:
        found.append(f"it looks like {sentences.SIGNATURES[pair['diagnosis']['signature']]}")
    return found + [f"settings that differ: {text}" for text in pair["settings"]] + list(pair["notes"])


def _xml(text: str) -> str:
    return text.translate(_NOT_XML).encode("utf-8", "backslashreplace").decode()


def _markdown(text: str) -> str:
    """Text without the meaning that its characters have in Markdown and HTML."""
    for char in "\\`*_[]<>|#":
        text = text.replace(char, f"\\{char}")
    return " ".join(text.split())


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
