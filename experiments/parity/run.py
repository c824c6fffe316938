"""`python -m experiments parity`: recordings in both frameworks, made by processes of their own, and the pairs to compare."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from crossframe.cli.option_values import check_perturbed_runs
from crossframe.errors import UsageError
from crossframe.processes import module_command, run
from crossframe.recording import Recording
from experiments.parity.progress import bars, watch
from experiments.parity.settings import DTYPES, RunSettings

FRAMEWORKS = ("torch", "jax")
REPORTS = ("report.json", "report.html")


def run_parity(
    model: str,
    common: dict[str, Any],
    folder: Path,
    *,
    dtypes: Sequence[str],
    perturbed_runs: int,
    fault: str,
    fault_in: str,
    console: Console,
) -> list[tuple[Recording, Recording]]:
    """Record the model in both frameworks and some dtypes below `folder`.

    Args:
        perturbed_runs: how many perturbed runs each records, but in float64, where bounds are known beforehand.

    Returns:
        (torch, JAX) for each dtype.

    Raises:
        UsageError: settings out of range, or a recording that failed, with what it printed.
    """
    check_perturbed_runs(perturbed_runs)
    runs = {
        (framework, dtype): RunSettings(model, dtype, **common, fault=fault if framework == fault_in else "")
        for dtype in dict.fromkeys(dtypes)
        for framework in FRAMEWORKS
    }
    _clear_report(folder)
    recordings = {}
    for (framework, dtype), settings in runs.items():
        path = folder / f"{framework}-{dtype}"
        beside = perturbed_runs if dtype != "float64" else 0
        with watch(console, bars(f"{framework:5} {dtype}", settings, path, beside), settings):
            _record(framework, settings, path, beside)
        recordings[framework, dtype] = path
    return [tuple(Recording.open(recordings[f, dtype]) for f in FRAMEWORKS) for dtype in dict.fromkeys(dtypes)]  # type: ignore[misc]


def _clear_report(folder: Path) -> None:
    """A run that fails must not leave the report of an earlier one behind; but what no run wrote is not deleted."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"output: expected a folder, or none yet, but {folder} is a file")
    reports = [folder / name for name in REPORTS if (folder / name).exists()]
    recorded = any((folder / f"{framework}-{dtype}").is_dir() for framework in FRAMEWORKS for dtype in DTYPES)
    if reports and not recorded:
        raise UsageError(
            f"output: {reports[0]} was not written by a parity run; choose another folder, nothing was deleted"
        )
    for report in reports:
        report.unlink()


def _record(framework: str, settings: RunSettings, path: Path, perturbed_runs: int) -> None:
    arguments = [
        *settings.arguments(framework),
        "--output",
        str(path),
        "--overwrite",
        "--perturbed-runs",
        str(perturbed_runs),
    ]
    status, printed = run(module_command("experiments.__main__:main", arguments), captured=True)
    if status:
        said = printed.strip().splitlines()
        own = [line.removeprefix("crossframe: ") for line in said if line.startswith("crossframe: ")]
        reason = own[-1] if own else "\n".join(said[-30:])
        raise UsageError(f"recording in {framework} ({settings.dtype}) failed: {reason}")
