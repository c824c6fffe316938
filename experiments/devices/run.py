"""`python -m experiments devices`: records the runs, compares the pairs, and writes expected and found answers.

A recording that several cases need is made once. Without a CUDA device, cases of runs that need one are left out.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from crossframe.errors import UsageError
from experiments.untouched.run import place_of, said_in

HERE = Path(__file__).parent
RESULTS = Path("runs/devices.json")
HARMLESS = ("equal", "rounding")
PERTURBED, DENSE = 4, 2
_TIMEOUT = 400


@dataclass(frozen=True)
class Case:
    """Two runs, of which the second may have a mistake.

    Attributes:
        a, b: names of runs.
        verdicts: the right ones.
        old, new: what is replaced in the script of `b`; empty: nothing.
        step, places, names: where the mistake shows first; a pattern of its place, or a word in the reason.
    """

    a: str
    b: str
    name: str = ""
    verdicts: list[str] = field(default_factory=lambda: ["bug"])
    old: str = ""
    new: str = ""
    step: int = 0
    places: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def called(self) -> str:
        return self.name or f"{self.a} and {self.b}"


@dataclass(frozen=True)
class Run:
    """A script's arguments, and a mistake that it may have."""

    name: str
    script: str
    arguments: tuple[str, ...]
    old: str = ""
    new: str = ""

    @property
    def needs_gpu(self) -> bool:
        return "cpu" not in self.arguments

    def written(self, folder: Path) -> Path:
        """The script, with the mistake.

        Raises:
            UsageError: what is to be replaced is not there once.
        """
        text = (HERE / "scripts" / f"{self.script}.py").read_text()
        if self.old and text.count(self.old) != 1:
            raise UsageError(f"devices: expected {self.old!r} once in {self.script}.py, found {text.count(self.old)}")
        folder.mkdir(parents=True)
        path = folder / f"{self.script}.py"
        path.write_text(text.replace(self.old, self.new) if self.old else text)
        return path


def cases() -> list[tuple[Case, Run, Run]]:
    """All cases with their runs, harmless ones first."""
    table = tomllib.loads((HERE / "cases.toml").read_text())
    runs = {name: Run(name, script, tuple(arguments)) for name, (script, *arguments) in table["runs"].items()}
    found = [Case(**row, verdicts=list(HARMLESS)) for row in table["harmless"]]
    found += [Case(**row) for row in table["mistake"]]
    pairs = []
    for case in found:
        b = runs[case.b]
        faulty = Run(f"{b.name}: {case.name}", b.script, b.arguments, case.old, case.new) if case.old else b
        pairs.append((case, runs[case.a], faulty))
    return pairs


def run_devices(only: Sequence[str], jobs: int, output: Path | None, keep: Path | None, console: Console) -> int:
    """Record the runs, `jobs` side by side, and compare each pair once it is recorded; returns the exit status.

    Args:
        only: parts of names of cases. Empty: all.
        output: JSON file of the results, rewritten after each case.
        keep: a new folder, in which recordings stay.

    Raises:
        UsageError: no case of these names can be run here; a folder that exists; a mistake that its script has no place for.
    """
    if keep is not None and keep.exists():
        raise UsageError(f"--keep: expected a new folder, {keep} exists; choose another one, or remove it")
    chosen = [each for each in cases() if not only or any(part in each[0].called for part in only)]
    if not torch.cuda.is_available():
        chosen = [(case, a, b) for case, a, b in chosen if not (a.needs_gpu or b.needs_gpu)]
    if not chosen:
        raise UsageError("devices: no case of these names that this machine can run; most need a CUDA device")
    folder = keep or Path(tempfile.mkdtemp(prefix="crossframe-devices-"))
    try:
        firsts = {a for _, a, _ in chosen}
        runs = list(dict.fromkeys(run for _, a, b in chosen for run in (a, b)))
        paths = {run: folder / f"run-{i}" for i, run in enumerate(runs)}
        results = {}
        with ThreadPoolExecutor(jobs) as recorders, ThreadPoolExecutor(jobs) as judges:
            why = {run: recorders.submit(_recorded, run, paths[run], run in firsts) for run in runs}
            found = {judges.submit(_result, each, paths, why): each[0].called for each in chosen}
            for future in as_completed(found):
                results[found[future]] = result = future.result()
                console.print(_line(result), highlight=False, soft_wrap=True, markup=False)
                done = [results[case.called] for case, _, _ in chosen if case.called in results]
                _write(output or RESULTS, done)
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    console.print(summary(done), highlight=False)
    return int(any(each["verdict"] == "failed" for each in done))


def _recorded(run: Run, path: Path, perturbed: bool) -> str:
    """Record a run; returns why that failed, or ""."""
    script = run.written(path)
    options = ["--output", str(path / "recording"), "--every", "1", "--dense", str(DENSE)]
    options += ["--perturbed-runs", str(PERTURBED)] if perturbed else []
    said = _crossframe(["record", str(script), *options, "--", *run.arguments])
    return "" if said.returncode == 0 else f"exit status {said.returncode}: {(said.stdout + said.stderr)[-1500:]}"


def _result(chosen: tuple[Case, Run, Run], paths: dict[Run, Path], why: dict[Run, Future[str]]) -> dict[str, Any]:
    """The answer on a case, once both of its runs are recorded."""
    case, a, b = chosen
    expected = {"verdicts": case.verdicts, "step": case.step, "places": case.places, "names": case.names}
    about = {"case": case.called, "a": " ".join(a.arguments), "b": " ".join(b.arguments), "mistake": bool(case.old)}
    if failed := why[a].result() or why[b].result():
        return {**about, "expected": expected, "verdict": "failed", "right": False, "located": False, "reason": failed}
    report = paths[b].parent / f"report-{paths[a].name}-{paths[b].name}"
    both = [str(paths[run] / "recording") for run in (a, b)]
    said = _crossframe(["compare", *both, "--output", str(report)])
    found = said_in(report, said.returncode, said.stdout + said.stderr, paths[b].parent)
    where, place, reason = found.get("first_divergence") or {}, place_of(found), found.get("reason", "")
    there = any(fnmatchcase(place, pattern) for pattern in case.places) or any(name in reason for name in case.names)
    return {
        **about,
        "expected": expected,
        "verdict": found["verdict"],
        "right": found["verdict"] in case.verdicts,
        "place": place,
        "step": where.get("step"),
        "located": there and where.get("step", case.step) == case.step,
        "reason": reason,
    }


def _crossframe(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "crossframe", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"longer than {_TIMEOUT} seconds")


def _line(result: dict[str, Any]) -> str:
    mark = "right" if result["right"] else "WRONG"
    where = f" {'there' if result['located'] else 'elsewhere'}: {result['place']}" if result.get("place") else ""
    return f"{mark} {result['verdict']:12} {result['case']}{where}"


def summary(results: Sequence[dict[str, Any]]) -> str:
    """How many were right, of the harmless and of the mistakes; how many false alarms there were."""
    harmless = [each for each in results if not each["mistake"]]
    mistakes = [each for each in results if each["mistake"]]
    alarms = sum(each["verdict"] == "bug" for each in harmless)
    return (
        f"harmless: {sum(each['right'] for each in harmless)} of {len(harmless)} right, {alarms} false alarms\n"
        f"mistakes: {sum(each['right'] for each in mistakes)} of {len(mistakes)} found, "
        f"{sum(each['right'] and each['located'] for each in mistakes)} there"
    )


def _write(path: Path, results: Sequence[dict[str, Any]]) -> None:
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    versions = {name: version(name) for name in ("torch", "transformers", "jax", "flax", "numpy")}
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"device": gpu, "versions": versions, "summary": summary(results), "cases": list(results)}
    path.write_text(json.dumps(found, indent=1) + "\n")
