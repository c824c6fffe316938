"""`python -m experiments watching`: records healthy and faulty runs with a monitor, and counts its alarms."""

import json
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from crossframe.errors import UsageError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results"
SETS = {"first": "cases.toml", "second": "second.toml"}
"""The files of the sets of cases."""
UNTOUCHED = HERE.parent / "untouched" / "scripts"
RECORDS_ITSELF = ("linen_sets", "equinox_heat")
EVERY, PERTURBED = 20, 8
_TIMEOUT = 600


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        script: a script of this folder, or untouched/NAME.
        arguments: of the script.
        world: number of ranks.
        fault, start, prefix: of scripts/inject.py; without a fault, `start` is the first faulty step.
        kinds: of alarms that are right. Empty: the run is healthy.
        baseline: arguments of the run of which a golden is made; None: no baseline.
    """

    name: str
    script: str
    arguments: list[str]
    world: int = 1
    fault: str = ""
    start: int = 0
    prefix: str = ""
    kinds: list[str] = field(default_factory=list)
    baseline: list[str] | None = None

    @property
    def path(self) -> Path:
        folder, _, name = self.script.rpartition("/")
        return (UNTOUCHED if folder else HERE / "scripts") / f"{name}.py"

    @property
    def command(self) -> list[str]:
        """The script that is recorded, and its arguments."""
        if not self.fault:
            return [str(self.path), *self.arguments]
        script = str(HERE / "scripts" / "inject.py")
        return [script, self.fault, str(self.start), self.prefix, str(self.path), *self.arguments]


def cases(of: str) -> list[Case]:
    """All cases of a set, healthy ones first.

    Raises:
        UsageError: no such set.
    """
    if of not in SETS:
        raise UsageError(f"watching: --set: expected one of {', '.join(SETS)}, got {of}")
    table = tomllib.loads((HERE / SETS[of]).read_text())
    found = [Case(**row) for kind in ("healthy", "faulty") for row in table[kind]]
    if any(not case.path.is_file() for case in found) or len({case.name for case in found}) < len(found):
        raise UsageError("watching: expected cases of scripts that exist, with unique names")
    return found


def run_watching(of: str, only: Sequence[str], output: Path | None, console: Console) -> int:
    """Run the cases of a set once, and write the results; returns the exit status."""
    path, results = output or RESULTS / f"{of}.json", []
    for case in cases(of):
        if only and not any(part in case.name for part in only):
            continue
        with tempfile.TemporaryDirectory(prefix="crossframe-watching-") as folder:
            results.append(_result(case, Path(folder)))
        console.print(f"{results[-1]['answer']}: {case.name}: {results[-1]['alarms']}", soft_wrap=True, highlight=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"cases": results, **_counted(results)}, indent=1) + "\n")
    console.print(json.dumps(_counted(results)), soft_wrap=True, highlight=False)
    return 0


def _counted(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: {answer: sum(r["answer"] == answer and r["faulty"] is faulty for r in results) for answer in answers}
        for name, faulty, answers in (
            ("healthy", False, ("quiet", "false alarm", "not run")),
            ("faulty", True, ("found", "other alarm", "too early", "missed", "not run")),
        )
    }


def _result(case: Case, folder: Path) -> dict[str, Any]:
    run, golden = folder / "run", folder / "baseline.golden"
    if case.baseline is not None:
        command = ["baseline", "record", "--golden", str(golden), "--perturbed-runs", str(PERTURBED), "--"]
        _crossframe([*command, str(case.path), *case.baseline])
    extra = ["--baseline", str(golden)] if case.baseline is not None else []
    if case.path.stem in RECORDS_ITSELF:
        said = _call([sys.executable, *case.command, "--record", str(run), "--dense", "2"])
    else:
        options = ["--output", str(run), "--every", str(EVERY), "--watch", *extra]
        options += ["--nproc-per-node", str(case.world)] if case.world > 1 else []
        said = _crossframe(["record", case.command[0], *options, "--", *case.command[1:]])
    watched = _crossframe(["watch", str(run), "--once", "--json", *extra])
    found: dict[str, Any] = {
        "name": case.name,
        "faulty": bool(case.kinds),
        "command": shlex.join(map(_from_root, case.command[1:])),
    }
    try:
        seen = json.loads(watched.stdout)
    except ValueError:
        return found | {"answer": "not run", "alarms": [], "reason": (said.stderr + watched.stderr)[-1500:]}
    alarms = [(alarm["kind"], alarm["step"]) for alarm in seen["alarms"]]
    return found | {
        "answer": _answer(case, alarms),
        "alarms": alarms,
        "texts": [alarm["text"] for alarm in seen["alarms"]],
        "notes": seen["notes"],
        "steps": seen["steps"],
        "ended": seen["ended"],
        "logged": sum(line.startswith(tuple(f"{kind}: " for kind, _ in alarms)) for line in said.stderr.splitlines())
        if alarms
        else 0,
    }


def _answer(case: Case, alarms: Sequence[tuple[str, int]]) -> str:
    if not case.kinds:
        return "false alarm" if alarms else "quiet"
    if not alarms:
        return "missed"
    if any(step < case.start for _, step in alarms):
        return "too early"
    return "found" if any(kind in case.kinds for kind, _ in alarms) else "other alarm"


def _crossframe(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return _call([sys.executable, "-m", "crossframe", *arguments])


def _call(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)


def _from_root(word: str) -> str:
    """A word of a command, of which a path of the repository starts at its root."""
    path = Path(word)
    return path.relative_to(ROOT).as_posix() if path.is_absolute() and path.is_relative_to(ROOT) else word
