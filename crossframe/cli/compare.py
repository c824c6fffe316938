"""`crossframe compare`: a verdict on pairs of recordings, without reading them if their checksums already answer."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from crossframe.cli.console import command_line
from crossframe.cli.exit_status import exit_status
from crossframe.cli.machine_output import TEXT_ONLY, MachineOutput
from crossframe.param_map import ParamMap
from crossframe.recording import Recording
from crossframe.recording.equal_digests import Stated, exceeds
from crossframe.report.build import report_of
from crossframe.report.terminal import print_report
from crossframe.verdict import Verdict

READ_ANYWAY = 64 << 20
"""Recordings of fewer bytes are read and verified in any case, which takes about a second."""


def equal_as_stated(a: Path, b: Path, *, read_anyway: int = READ_ANYWAY) -> str | None:
    """The answer for two recordings that state the same content; None if they may differ, or if they are small.

    A rank's last line has the sha256 of all its lines, made when they were written, and its lines have that of every tensor file.
    Equal ones mean that both runs saw the same in every bit. Whether the files are still as they were written is not verified.

    Raises:
        RecordingError: no or a wrong manifest.
    """
    if a.is_file() or b.is_file():  # goldens
        return None
    stated = [Stated.read(path) for path in (a, b)]
    first, second = stated
    if first is None or second is None or not first.equals(second):
        return None
    if not any(exceeds(path, read_anyway) for path in (a, b)):
        return None
    return (
        f"equal: every bit that both runs recorded is equal, {first.num_steps} steps on {first.manifest.world_size} ranks\n"
        "told by the sha256 of all lines and tensor files, as both recordings state them; the files themselves were not read: "
        "--verify reads and verifies them"
    )


def answer(
    pairs: Sequence[tuple[Recording, Recording]],
    output: Path | None,
    *,
    repeats: Sequence[Recording] = (),
    param_map: ParamMap | None = None,
    bitwise: bool | None = None,
    machine: MachineOutput = TEXT_ONLY,
    file: Path | None = None,
    console: Console,
) -> int:
    """Print the verdict and write the report; returns the exit status of the verdict.

    Args:
        output: folder for report.json and report.html; None: neither is written.
        repeats, param_map, bitwise: as of `crossframe.verdict.compare`.
        machine: output for machines.
        file: the file that an annotation is shown at.
    """
    report, series = report_of(pairs, command=command_line(), repeats=repeats, param_map=param_map, bitwise=bitwise)
    if output is not None:
        from crossframe.report.page import write_report  # needs the extra "report"

        page = write_report(output, report, series)
    if not machine.as_json:
        print_report(console, report, series)
        if output is not None:
            console.print(f"report: {page}")
    subject = "crossframe compare" if file is None else f"crossframe baseline check {file.name}"
    machine.write(report, series, subject, file)
    return exit_status(Verdict(report["verdict"]))
