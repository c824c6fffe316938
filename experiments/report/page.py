"""`report.json` and `report.html`: one file that needs no network."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from crossframe.trace import COLLECTIVES
from experiments.report import words
from experiments.report.build import PairSeries, world_text
from experiments.report.plots import Limit, Line, line_chart


def write_report(directory: str | Path, report: dict[str, Any], series: Sequence[PairSeries]) -> Path:
    """Write both files into a directory, which is made if need be, and return the path of the page.

    Args:
        report, series: what `report_of` returned; one series a pair.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    _write(path / "report.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    _write(path / "report.html", page(report, series))
    return path / "report.html"


def page(report: dict[str, Any], series: Sequence[PairSeries]) -> str:
    """The page as text. Everything that comes from a recording is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": words.number,
        "bytes": words.num_bytes,
        "name": words.display,
        "world": world_text,
    }
    style = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    decisive = words.decisive_pair(report)
    parted = [pair for pair in [decisive, *report["pairs"]] if pair is not None and pair["first_divergence"]]
    columns = [key for key in report["trace"] or () if key != "equal"]
    return environment.get_template("report.html.j2").render(
        report=report,
        style=style,
        headline=words.headline(report),
        kind=words.KINDS[report["verdict"]],
        kinds=words.KINDS,
        reason=decisive["reason"] if decisive else "",
        where=parted[0] if parted else None,
        limits=[words.limits(one.bounds) for one in series],
        sections=[(one, _loss_chart(one, i), _difference_chart(one, i)) for i, one in enumerate(series)],
        zero_gradient=sorted({name for pair in report["pairs"] for name in pair["zero_gradient_parameters"]}),
        columns=columns,
        collectives=[(kind, [report["trace"][column][kind] for column in columns]) for kind in COLLECTIVES if columns],
    )


def _loss_chart(one: PairSeries, number: int) -> str:
    lines = [
        Line(words.display(one.a), tuple(enumerate(one.losses_a)), "first"),
        Line(words.display(one.b), tuple(enumerate(one.losses_b)), "second", dashed=True),
    ]
    return line_chart(lines, name=f"losses {number}", y_label="mean loss over ranks")


def _difference_chart(one: PairSeries, number: int) -> str | None:
    if not one.loss_differences:
        return None
    lines = [
        Line("losses", tuple(enumerate(one.loss_differences)), "first"),
        Line("parameters", one.parameter_differences, "second"),
    ]
    limits = []
    if one.bounds is not None and one.bounds.decisive:
        limits = [
            Limit("bound on losses", one.bounds.loss, "first", above=False),
            Limit("bound on parameters", one.bounds.parameter, "second", above=True),
        ]
    return line_chart(lines, name=f"differences {number}", y_label="relative difference", limits=limits, log=True)


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
