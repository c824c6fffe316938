"""Writes `report.json` and `report.html`, a page without external references."""

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from crossframe.errors import UsageError
from crossframe.files import folder_lock
from crossframe.quoting import quote_path
from crossframe.report import sentences
from crossframe.report.build import PairSeries, world_text
from crossframe.report.charts import drawn_of, strip_of
from crossframe.report.line_chart import GLYPHS
from crossframe.trace import COLLECTIVES


def write_report(directory: str | Path, report: dict[str, Any], series: Sequence[PairSeries]) -> Path:
    """Write both files to a directory, which is created if necessary; returns the path of the page.

    Args:
        report, series: what `report_of` returned; one series a pair.

    Raises:
        UsageError: another process writes a report there.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    with folder_lock(path) as held:
        if not held:
            raise UsageError(f"{quote_path(path)}: another process writes a report there; pass another directory")
        _write(path / "report.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
        _write(path / "report.html", page(report, series))
    return path / "report.html"


def page(report: dict[str, Any], series: Sequence[PairSeries]) -> str:
    """The page as text. All text of recordings is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": sentences.number,
        "used": sentences.used_text,
        "bytes": sentences.num_bytes,
        "name": sentences.display,
        "unit": sentences.unit_name,
        "short": sentences.short,
        "isolated": sentences.isolated,
        "world": world_text,
    }
    style = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    at = sentences.decisive(report)
    columns = [key for key in report["trace"] or () if key != "equal"]
    others = [
        (pair, sentences.limits(one.bounds), sentences.first_place(pair, one.parted))
        for i, (pair, one) in enumerate(zip(report["pairs"], series, strict=True))
        if i != at
    ]
    return environment.get_template("report.html.j2").render(
        report=report,
        style=style,
        headline=sentences.headline(report, series[at].parted if at is not None else ""),
        kind=sentences.KINDS[report["verdict"]],
        kinds=sentences.KINDS,
        pair=report["pairs"][at] if at is not None else None,
        one=series[at] if at is not None else None,
        drawn=drawn_of(series[at]) if at is not None else None,
        limit=sentences.limits(series[at].bounds) if at is not None else None,
        strip=strip_of(series[at]) if at is not None else None,
        phases=sentences.PHASES,
        elements=sentences.elements,
        power=sentences.power_text,
        glyphs=GLYPHS,
        looks_like=sentences.looks_like(report["pairs"][at], series[at].sketched) if at is not None else None,
        measured=sentences.measured_by(series[at].bounds, series[at].perturbed_runs) if at is not None else "",
        others=others,
        zero_gradient=sorted({name for pair in report["pairs"] for name in pair["zero_gradient_parameters"]}),
        columns=columns,
        collectives=[(kind, [report["trace"][column][kind] for column in columns]) for kind in COLLECTIVES if columns],
    )


def _write(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
