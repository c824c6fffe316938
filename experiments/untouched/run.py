"""`crossframe untouched`: records the untouched cases, compares them with `crossframe compare`, and writes expected and found."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Lock
from typing import Any

from rich.console import Console

from crossframe.errors import UsageError
from crossframe.processes import module_command
from experiments.untouched.cases import HERE, UNNAMED, CleanPair, Fault, Run, check, clean_pairs, faults, runs

RESULTS = HERE / "results" / "untouched.json"
DIFFERENT = "different computation"
DENSE = 6
TIMEOUT = 900


def crossframe(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run the command as users do; returns its exit status and output."""
    return _run(module_command("experiments.entry:main", list(arguments)), environment)


def _run(command: Sequence[str], environment: dict[str, str]) -> tuple[int, str]:
    known = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    # A session of its own, so that ranks end with the command.
    with subprocess.Popen(
        list(command),
        env=known,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return 124, f"it took longer than {TIMEOUT} seconds"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, text


class Recordings:
    """Recordings by run, each made once; the first case that needs perturbed runs of it makes those too."""

    def __init__(self, folder: Path, perturbed: dict[Run, int]) -> None:
        self._folder, self._perturbed = folder, perturbed
        self._locks: dict[tuple[Run, int], Lock] = {}
        self._made: dict[tuple[Run, int], tuple[Path, str]] = {}
        self._lock = Lock()

    def of(self, run: Run, copy: int = 0) -> tuple[Path, str]:
        """(folder, why it failed or "")."""
        key = (run, copy)
        with self._lock:
            lock = self._locks.setdefault(key, Lock())
        with lock:
            if key not in self._made:
                with self._lock:
                    path = self._folder / f"run-{len(self._made)}-{abs(hash(key))}"
                self._made[key] = path, _record(run, path, 0 if copy else self._perturbed.get(run, 0))
            return self._made[key]


def _record(run: Run, path: Path, perturbed: int) -> str:
    if run.is_jax:
        command = [sys.executable, str(run.path), *run.options, "--record", str(path), "--dense", str(DENSE)]
        command += [] if run.script == "nnx_transformer" else ["--devices", str(run.world)]
        for number in range(perturbed + 1):
            status, text = _run(command, {"CROSSFRAME_TWIN": str(number)})
            if status:
                return text[-2000:]
        return ""
    options = ["--output", str(path), "--every", "1", "--dense", str(DENSE), "--twins", str(perturbed)]
    options += ["--nproc-per-node", str(run.world)] if run.world > 1 else []
    status, text = crossframe("record", str(run.path), *options, "--", *run.options)
    return text[-2000:] if status else ""


def _compare(recordings: Recordings, a: Run, b: Run, report: Path) -> dict[str, Any]:
    """What `crossframe compare` says, with its exit status; the verdict is "failed" where there is none."""
    first, second = recordings.of(a), recordings.of(b, copy=int(a == b))
    if first[1] or second[1]:
        return {"verdict": "failed", "reason": first[1] or second[1], "exit_status": None}
    status, text = crossframe("compare", str(first[0]), str(second[0]), "--output", str(report))
    found = report / "report.json"
    if not found.is_file():
        return {"verdict": "failed", "reason": text[-2000:], "exit_status": status}
    return json.loads(found.read_text())["pairs"][0] | {"exit_status": status}


def place_of(said: dict[str, Any]) -> str:
    """The first difference as "phase/event name"; "" where there is none."""
    where = said.get("first_divergence")
    if not where:
        return ""
    name = where.get("module") or where.get("parameter") or _module_in(said.get("reason", ""))
    return f"{where['phase']}/{where['event']} {name}".strip()


def _module_in(reason: str) -> str:
    """The module that a reason names, as in "the output of module 'a.b' (...)" or "of unit 'a'"."""
    for mark in ("put of module '", "put of unit '"):
        if mark in reason:
            return reason.split(mark, 1)[1].split("'", 1)[0]
    return ""


def judge_fault(fault: Fault, dtype: str, said: dict[str, Any]) -> dict[str, Any]:
    """Expected and found of one fault in one dtype."""
    where, place, reason = said.get("first_divergence") or {}, place_of(said), said.get("reason", "")
    name = (said.get("diagnosis") or {}).get("signature")
    is_other = said["verdict"] == DIFFERENT and "bug" in fault.verdicts
    found = said["verdict"] in fault.verdicts or is_other or (said["exit_status"] == 1 and "bug" in fault.verdicts)
    is_there = any(fnmatchcase(place, pattern) for pattern in fault.places)
    is_there &= not where or where["step"] == fault.step
    is_there &= fault.rank is None or where.get("rank") == fault.rank
    return {
        "case": fault.name,
        "dtype": dtype,
        "expected": {
            "verdicts": fault.verdicts,
            "step": fault.step,
            "places": fault.places,
            "rank": fault.rank,
            "settings": fault.settings,
            "diagnosis": fault.diagnosis,
        },
        "said": {
            "verdict": said["verdict"],
            "place": place,
            "step": where.get("step"),
            "diagnosis": name,
            "reason": reason,
        },
        "found": found,
        "located": found and (is_there or any(setting in reason for setting in fault.settings)),
        "named": None if fault.diagnosis == UNNAMED else found and name == fault.diagnosis,
    }


def judge_pair(pair: CleanPair, said: dict[str, Any]) -> dict[str, Any]:
    """Expected and found of one clean pair."""
    return {
        "case": pair.name,
        "dtype": pair.a.dtype,
        "expected": {"verdicts": list(pair.expected)},
        "said": {"verdict": said["verdict"], "place": place_of(said), "reason": said.get("reason", "")},
        "right": said["verdict"] in pair.expected,
        "false_alarm": said["verdict"] == "bug" or said["exit_status"] == 1,
    }


def run_untouched(only: Sequence[str], *, jobs: int, output: Path | None, checks: bool, console: Console) -> int:
    """Run the cases; returns the exit status, 0 unless something could not be run.

    Args:
        only: names of faults, or of clean pairs or their axes. Empty: all.
        checks: only load and expand the cases, and run each script's variants once without recording.

    Raises:
        UsageError: cases that are not whole; a name that is none.
    """
    check()
    wanted = [fault for fault in faults() if not only or fault.name in only]
    pairs = [pair for pair in clean_pairs() if not only or {pair.name, pair.name.partition("/")[0]} & set(only)]
    if not wanted and not pairs:
        raise UsageError(f"untouched: no case is called {', '.join(only)}")
    if checks:
        return _smoke(runs(), jobs, console)
    perturbed: dict[Run, int] = {}
    for run, number in [
        *((fault.runs(dtype)[0], fault.perturbed) for fault in wanted for dtype in fault.dtypes),
        *((pair.a, pair.perturbed) for pair in pairs),
    ]:
        perturbed[run] = max(number, perturbed.get(run, 0))
    folder = Path(tempfile.mkdtemp(prefix="untouched-"))
    recordings = Recordings(folder, perturbed)

    def one_fault(case: tuple[int, Fault, str]) -> dict[str, Any]:
        number, fault, dtype = case
        result = judge_fault(fault, dtype, _compare(recordings, *fault.runs(dtype), folder / f"fault-{number}"))
        console.print(f"{fault.name} {dtype}: {result['said']['verdict']}")
        return result

    def one_pair(case: tuple[int, CleanPair]) -> dict[str, Any]:
        number, pair = case
        result = judge_pair(pair, _compare(recordings, pair.a, pair.b, folder / f"pair-{number}"))
        console.print(f"{pair.name}: {result['said']['verdict']}")
        return result

    cases = [(fault, dtype) for fault in wanted for dtype in fault.dtypes]
    try:
        with ThreadPoolExecutor(jobs) as pool:
            of_faults = list(pool.map(one_fault, [(i, *case) for i, case in enumerate(cases)]))
            of_pairs = list(pool.map(one_pair, list(enumerate(pairs))))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    target = output or RESULTS
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"faults": of_faults, "clean": of_pairs}, indent=1) + "\n")
    target.with_suffix(".md").write_text(_table(of_faults, of_pairs))
    console.print(_table(of_faults, of_pairs))
    return int(any(each["said"]["verdict"] == "failed" for each in [*of_faults, *of_pairs]))


def _table(of_faults: list[dict[str, Any]], of_pairs: list[dict[str, Any]]) -> str:
    """A summary by dtype, and every case with what was expected and what was found."""
    lines = [
        f"| dtype | faults | found | of these as {DIFFERENT} | located | named | clean pairs | right | {DIFFERENT} |"
        " false alarms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for dtype in ("float64", "float32", "bfloat16"):
        some = [each for each in of_faults if each["dtype"] == dtype]
        clean = [each for each in of_pairs if each["dtype"] == dtype]
        named = [each for each in some if each["named"] is not None]
        counts = (
            len(some),
            sum(each["found"] for each in some),
            sum(each["found"] and each["said"]["verdict"] == DIFFERENT for each in some),
            sum(each["located"] for each in some),
            f"{sum(each['named'] for each in named)} of {len(named)}",
            len(clean),
            sum(each["right"] for each in clean),
            sum(each["said"]["verdict"] == DIFFERENT for each in clean),
            sum(each["false_alarm"] for each in clean),
        )
        lines.append(f"| {dtype} | " + " | ".join(map(str, counts)) + " |")
    lines += ["", "| case | dtype | expected | found |", "|---|---|---|---|"]
    for each in [*of_faults, *of_pairs]:
        expected, said = each["expected"], each["said"]
        wanted = [" or ".join(expected["verdicts"])]
        if "step" in expected:
            wanted += [f"step {expected['step']}", " or ".join(expected["places"]), expected["diagnosis"]]
        got = [said["verdict"], f"step {said.get('step')}", said["place"], str(said.get("diagnosis"))]
        cells = (each["case"], each["dtype"], "; ".join(wanted), "; ".join(got))
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _smoke(wanted: Sequence[Run], jobs: int, console: Console) -> int:
    """Run each script and variant once in float32, without recording."""

    failed: list[str] = []

    def one(run: Run) -> None:
        command = [sys.executable, str(run.path), *run.options]
        if run.is_jax and run.script != "nnx_transformer":
            command += ["--devices", str(run.world)]
        elif run.world > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.world)]
            command = [sys.executable, *torchrun, str(run.path), *run.options]
        status, text = _run(command, {})
        name = f"{run.script} {run.arguments} on {run.world}"
        console.print(f"{name}: {'ended' if not status else text[-500:]}", markup=False)
        if status:
            failed.append(name)

    first = {(run.script, run.arguments, run.world): run for run in wanted if run.dtype == "float32"}
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, first.values()))
    console.print(
        f"{len(first) - len(failed)} of {len(first)} ended",
        *(f"failed: {name}" for name in failed),
        sep="\n",
        markup=False,
    )
    return int(bool(failed))
