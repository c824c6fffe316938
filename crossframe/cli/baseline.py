"""`crossframe baseline`: records a golden of a training run, checks later runs against it, and updates it."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import typer
from rich.console import Console

from crossframe.baseline import condense
from crossframe.cli.compare import answer
from crossframe.cli.exit_status import AGREE, SKIP, git_bisect_status
from crossframe.cli.machine_output import MachineOutput
from crossframe.cli.option_values import check_perturbed_runs, check_size
from crossframe.cli.record import record_script
from crossframe.cli.training_command import TrainingCommand
from crossframe.errors import FailedRunError, UsageError
from crossframe.quoting import quote_path
from crossframe.recording import Recording, Schedule
from crossframe.recording.golden_file import SUFFIX, Golden
from crossframe.recording.known_settings import FORWARD_ONLY
from crossframe.recording.manifest import FULL, SKETCH
from crossframe.report.build import report_of
from crossframe.report.terminal import print_report
from crossframe.verdict.one_naming import in_one_naming

FOLDER = Path("baselines")
"""Where goldens lie if no path is given."""
CHECKS = Path("runs", "baseline")
"""Where checks leave their recordings and reports."""
PERTURBED_RUNS = 8
"""The number of perturbed runs of a golden: with so many, any quantity beyond its limit is a bug, and none is undecided."""
MAX_KB = 200
_MOST_KB = 1 << 16
_THIS_RUN = "this_run"


@dataclass(frozen=True)
class Options:
    """How a run is recorded, for a golden and for its checks alike.

    Attributes:
        framework: "torch" or "jax"; None: JAX if the script imports JAX and not torch.
        forward: record calls of the model instead of training.
    """

    schedule: Schedule
    framework: str | None = None
    forward: bool = False

    @classmethod
    def of(cls, golden: Recording, framework: str | None = None) -> "Options":
        """Those of the run that became a golden. Its framework is used unless another one is given."""
        manifest = golden.manifest
        return cls(manifest.schedule, framework or manifest.framework, bool(manifest.settings.get(FORWARD_ONLY)))

    def record(
        self, command: TrainingCommand, folder: Path, perturbed_runs: int, console: Console, *, detail: str = SKETCH
    ) -> Recording:
        """Run the command and record it. What the script prints goes to standard error.

        Args:
            detail: "sketch" or "full".
        """
        record_script(
            command,
            output=folder,
            framework=self.framework,
            perturbed_runs=perturbed_runs,
            every=self.schedule.every,
            dense=self.schedule.dense,
            windows=self.schedule.windows,
            forward=self.forward,
            detail=detail,
            overwrite=True,
            prints_to_stderr=True,
            console=console,
        )
        return Recording.open(folder)


def golden_path(given: Path | None, words: Sequence[str]) -> Path:
    """The path of a golden: the given one, or that of the script's name.

    Raises:
        UsageError: neither a path nor a command.
    """
    if given is not None:
        return given
    if not words:
        raise UsageError("baseline: expected --golden FILE, or a training command after --, such as -- python train.py")
    command = _parsed(words)
    return FOLDER / f"{command.name}{SUFFIX}"


def record_golden(
    words: Sequence[str],
    *,
    golden: Path | None,
    recording: Path | None,
    options: Options,
    perturbed_runs: int,
    max_kb: int,
    overwrite: bool,
    console: Console,
    errors: Console,
) -> None:
    """Record a golden of a command, or make one of a recording that has perturbed runs.

    Raises:
        UsageError: there is a golden already; a command and a recording, or neither; it does not fit.
    """
    if (recording is None) == (not words):
        raise UsageError("baseline record: expected a training command after --, or --recording DIRECTORY, one of both")
    if recording is not None and golden is None:
        golden = FOLDER / f"{recording.resolve().name}{SUFFIX}"
    path = golden_path(golden, words)
    if path.exists() and not overwrite:
        raise UsageError(
            f"{quote_path(path)}: exists already; see what would change with crossframe baseline update, or pass --overwrite"
        )
    check_limits(perturbed_runs, max_kb)
    if recording is not None:
        source = Recording.open(recording)
        made = condense(source, source.perturbed_runs(), most_bytes=1000 * max_kb)
    else:
        command = _parsed(words)
        with tempfile.TemporaryDirectory() as temporary:
            made = _recorded(command, options, perturbed_runs, max_kb, Path(temporary, path.stem), errors)[0]
    _write(path, made, console)


def check_golden(
    words: Sequence[str],
    *,
    golden: Path | None,
    output: Path | None,
    bitwise: bool,
    git_bisect: bool = False,
    machine: MachineOutput,
    console: Console,
    errors: Console,
) -> int:
    """Run a command and compare it with its golden; returns the exit status of the verdict.

    Args:
        words: the command; empty: that of the golden.
        output: folder for the recording and the report. None: one in `CHECKS`.
        bitwise: see `crossframe.verdict.compare`.
        git_bisect: return a status for `git bisect run`: 0, 1, or 125 if the command fails or the verdict is undecided.
    """
    path = golden_path(golden, words)
    opened = Recording.open(path)
    command = _command(words, opened)
    folder = output or CHECKS / path.stem
    options, at = Options.of(opened), folder / _THIS_RUN
    try:
        run = run_to_compare(opened, lambda detail: options.record(command, at, 0, errors, detail=detail))
    except FailedRunError as error:
        if not git_bisect:
            raise
        errors.print(f"skipped: {error}")
        return SKIP
    has_pages = find_spec("jinja2") is not None and find_spec("matplotlib") is not None
    status = answer(
        [(opened, run)],
        folder if has_pages else None,
        bitwise=bitwise,
        machine=machine,
        file=path,
        console=console,
    )
    return git_bisect_status(status) if git_bisect else status


def run_to_compare(golden: Recording, record: Callable[[str], Recording]) -> Recording:
    """A recording in sketches, or in full if it has other parameters than the golden and sketches do not tell which is which.

    Args:
        record: runs and records with a detail, "sketch" or "full".
    """
    run = record(SKETCH)
    return record(FULL) if in_one_naming(golden, run).problem else run


def update_golden(
    words: Sequence[str],
    *,
    golden: Path | None,
    perturbed_runs: int | None,
    max_kb: int,
    yes: bool,
    console: Console,
    errors: Console,
) -> int:
    """Record a golden again, show what changes and why, and write it after a confirmation.

    Args:
        words: the command; empty: that of the golden.
        perturbed_runs: None: as many as the golden has.
        yes: write without a question.
    """
    path = golden_path(golden, words)
    before = Recording.open(path)
    assert before.golden is not None
    command = _command(words, before)
    number = perturbed_runs or (before.golden.spread.num_runs if before.golden.spread else PERTURBED_RUNS)
    check_limits(number, max_kb)
    with tempfile.TemporaryDirectory() as temporary:
        made, run = _recorded(command, Options.of(before), number, max_kb, Path(temporary, _THIS_RUN), errors)
        report, series = report_of([(before, run)])
        print_report(console, report, series)
    for name, old, new in series[0].run:
        if old != new:
            console.print(f"changes: {name}: {old} -> {new}")
    content = made.to_bytes()
    if content == path.read_bytes():
        console.print(f"{path} stays as it is")
        return AGREE
    console.print(f"size: {path.stat().st_size / 1000:.0f} kB -> {len(content) / 1000:.0f} kB")
    if not yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise UsageError(f"{quote_path(path)}: not written, since nobody can confirm it here: pass --yes")
        if not typer.confirm(f"write {path}?", err=True):
            console.print(f"{path} stays as it is")
            return AGREE
    _write(path, made, console)
    return AGREE


def _recorded(
    command: TrainingCommand, options: Options, perturbed_runs: int, max_kb: int, folder: Path, errors: Console
) -> tuple[Golden, Recording]:
    run = options.record(command, folder, perturbed_runs, errors)
    return condense(run, run.perturbed_runs(), most_bytes=1000 * max_kb, command=command.words()), run


def _parsed(words: Sequence[str]) -> TrainingCommand:
    return TrainingCommand.parse(words, command="baseline")


def _command(words: Sequence[str], golden: Recording) -> TrainingCommand:
    """The given command, or that of the golden."""
    if golden.golden is None:
        raise UsageError(f"{quote_path(golden.directory)}: expected a golden, got a recording; use crossframe compare")
    if not (words or golden.golden.command):
        raise UsageError(
            f"{quote_path(golden.directory)}: made of a recording, so its command is not known: pass the command after --, or "
            "record the run and use crossframe compare"
        )
    return _parsed(words or golden.golden.command)


def check_limits(perturbed_runs: int, max_kb: int) -> None:
    """Raise UsageError if the number of perturbed runs or the size of a golden is out of range."""
    check_perturbed_runs(perturbed_runs)
    check_size("perturbed-runs", perturbed_runs, 2, perturbed_runs)
    check_size("max-kb", max_kb, 1, _MOST_KB)


def _write(path: Path, golden: Golden, console: Console) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    golden.write(path)
    assert golden.spread is not None
    size = path.stat().st_size / 1000
    console.print(
        f"golden: {path}, {size:.0f} kB: {len(golden.rows):,} sketches of {golden.num_sums} sums, and the spread of "
        f"{golden.spread.values.size:,} quantities in {golden.spread.num_runs} perturbed runs"
    )
