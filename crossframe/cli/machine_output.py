"""Where a command writes its result for machines, besides its text."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossframe.report.build import PairSeries
from crossframe.report.machine import annotation, junit_xml, step_summary

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
"""The environment variable with the file to which GitHub Actions lets a step append its summary."""


@dataclass(frozen=True)
class MachineOutput:
    """The options of a command.

    Attributes:
        as_json: print what report.json contains instead of a text.
        junit: file for JUnit XML; None: none.
        github: print an annotation of GitHub Actions, and append to the summary of the step.
    """

    as_json: bool = False
    junit: Path | None = None
    github: bool = False

    def write(
        self, report: dict[str, Any], series: Sequence[PairSeries], subject: str, file: Path | None = None
    ) -> None:
        """Write all of it. The annotation follows the text on standard output, and with `as_json` it is on standard error.

        Args:
            subject: what was compared.
            file: the file that the annotation is shown at.
        """
        if self.as_json:
            print(json.dumps(report, indent=1))
        if self.junit is not None:
            self.junit.parent.mkdir(parents=True, exist_ok=True)
            self.junit.write_text(junit_xml(report, series, subject), encoding="utf-8")
        if self.github:
            text = annotation(report, series, None if file is None else os.path.relpath(file))
            if self.as_json:
                os.write(2, f"{text}\n".encode())
            else:
                print(text)
            if summary := os.environ.get(SUMMARY_VARIABLE):
                with open(summary, "a", encoding="utf-8") as appended:
                    appended.write(step_summary(report, series, subject))


TEXT_ONLY = MachineOutput()
"""No output for machines."""
