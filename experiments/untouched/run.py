"""`python -m experiments untouched`: records and compares the untouched cases, and writes expected and found answers.

Cases run one after another, faults first and then clean pairs of all axes in turn. Results are written after each case, so that
those of a run that was stopped hold for the cases that it came to, and the same command goes on with the others.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import zip_longest
from multiprocessing import connection
from pathlib import Path
from typing import Any

from rich.console import Console

from crossframe.errors import UsageError
from experiments.untouched import forked
from experiments.untouched.cases import DTYPES, HERE, UNNAMED, CleanPair, Fault, Run, check, clean_pairs, faults, runs

RESULTS = HERE / "results" / "untouched.json"
DIFFERENT = "different computation"
DENSE = 6
TIMEOUT = 600
_CODE = HERE.parents[1]
Command = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class Case:
    """A fault in one dtype, or a clean pair.

    Attributes:
        a, b: the runs; `a` has the perturbed runs.
    """

    of: Fault | CleanPair
    a: Run
    b: Run

    @property
    def key(self) -> tuple[str, str]:
        """What results are found by."""
        return self.of.name, self.a.dtype

    @property
    def recordings(self) -> tuple[tuple[Run, int], tuple[Run, int]]:
        """(run, copy) of both: a run that is compared with itself is recorded twice."""
        return (self.a, 0), (self.b, int(self.a == self.b))


def cases_of(only: Sequence[str] = ()) -> list[Case]:
    """All cases, or those of faults, pairs and axes of these names, in the order in which they run."""
    found = [Case(fault, *fault.runs(dtype)) for fault in faults() for dtype in fault.dtypes]
    axes: dict[str, list[Case]] = {}
    for pair in clean_pairs():
        axes.setdefault(_axis(pair), []).append(Case(pair, pair.a, pair.b))
    found += [case for row in zip_longest(*axes.values()) for case in row if case is not None]
    return [case for case in found if not only or {case.of.name, _axis(case.of)} & set(only)]


def _axis(case: Fault | CleanPair) -> str:
    return case.name.partition("/")[0]


class Recordings:
    """Recordings in a folder that processes share, each made once, with the perturbed runs that any case needs of it.

    Attributes:
        folder: where they are.
        command: runs the command `crossframe` with arguments; returns its exit status.
    """

    def __init__(self, folder: Path, perturbed: dict[Run, int], command: Command) -> None:
        self.folder, self._perturbed, self.command = folder, perturbed, command

    def of(self, run: Run, copy: int = 0) -> tuple[Path, str]:
        """(folder, why it failed or "")."""
        path = self._path(run, copy)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            why = path.with_suffix(".json")
            if not why.exists():
                perturbed = 0 if copy else self._perturbed.get(run, 0)
                said = record(self.command, run, path, perturbed, path.with_suffix(".log"))
                _write(why, json.dumps(said))
            return path, json.loads(why.read_text())

    def remove(self, run: Run, copy: int) -> None:
        """No case needs it any more."""
        shutil.rmtree(self._path(run, copy), ignore_errors=True)

    def _path(self, run: Run, copy: int) -> Path:
        return self.folder / hashlib.sha256(repr((run, copy)).encode()).hexdigest()[:16]


def record(command: Command, run: Run, path: Path, perturbed: int, log: Path) -> str:
    """Record a run and so many perturbed runs; returns why that failed, or ""."""
    if run.is_jax:
        options = [*run.options, "--record", str(path), "--dense", str(DENSE), *_devices(run)]
        for number in range(perturbed + 1):
            environment = {"CROSSFRAME_PERTURBED_RUN": str(number)}
            status, text = forked.call([(forked.new_process, str(run.path), options, environment)], log, TIMEOUT)
            if status:
                return text
        return ""
    options = ["--output", str(path), "--every", "1", "--dense", str(DENSE), "--perturbed-runs", str(perturbed)]
    options += ["--nproc-per-node", str(run.world)] if run.world > 1 else []
    given = ["record", str(run.path), *options, "--", *run.options]
    status, text = forked.call([(forked.command, command, given, log, TIMEOUT)], log, TIMEOUT * (perturbed + 1))
    return text or f"exit status {status}" if status else ""


def _devices(run: Run) -> list[str]:
    return [] if run.script == "linen_sets" else ["--devices", str(run.world)]


def _compare(recordings: Recordings, case: Case, report: Path) -> dict[str, Any]:
    """What `crossframe compare` says, with its exit status; the verdict is "failed" where there is none."""
    first, second = (recordings.of(*each) for each in case.recordings)
    if first[1] or second[1]:
        return {"verdict": "failed", "reason": first[1] or second[1], "exit_status": None}
    log = report.with_suffix(".log")
    given = ["compare", str(first[0]), str(second[0]), "--output", str(report)]
    status, text = forked.call([(forked.command, recordings.command, given, log, TIMEOUT)], log, TIMEOUT)
    return said_in(report, status, text, first[0].parent)


def said_in(report: Path, status: int, text: str, folder: Path) -> dict[str, Any]:
    """The verdict in the folder of a report, with the command's exit status; "failed" where there is none.

    Args:
        text: what the command printed.
        folder: that of the recordings. The commands that a reason quotes have no path of this machine.
    """
    found = report / "report.json"
    if not found.is_file():
        return {"verdict": "failed", "reason": text, "exit_status": status}
    report_text = found.read_text()
    for each in (_CODE, folder):
        report_text = report_text.replace(f"{each}/", "")
    return json.loads(report_text)["pairs"][0] | {"exit_status": status}


def _run_case(recordings: Recordings, case: Case, report: Path) -> dict[str, Any]:
    said = _compare(recordings, case, report)
    shutil.rmtree(report, ignore_errors=True)
    return _judged(case, said)


def _judged(case: Case, said: dict[str, Any]) -> dict[str, Any]:
    return judge_fault(case.of, case.a.dtype, said) if isinstance(case.of, Fault) else judge_pair(case.of, said)


def place_of(said: dict[str, Any]) -> str:
    """The first difference as "phase/event name"; "" where there is none."""
    where = said.get("first_divergence")
    if not where:
        return ""
    if where.get("buffer"):
        return f"{where['phase']}/{where['buffer']}"
    name = where.get("module") or where.get("parameter") or _module_in(said.get("reason", ""))
    return f"{where['phase']}/{where['event']} {name}".strip()


def _names(reason: str, setting: str) -> bool:
    """Whether a reason names a setting, as a word: "eps" is not in "steps"."""
    return re.search(rf"(?<!\w){re.escape(setting)}(?!\w)", reason) is not None


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
        "located": found and (is_there or any(_names(reason, setting) for setting in fault.settings)),
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


def run_untouched(
    only: Sequence[str], *, command: Command, jobs: int, output: Path | None, checks: bool, console: Console
) -> int:
    """Run the cases that have no result yet; returns the exit status, 0 unless something could not be run.

    Args:
        only: names of faults, or of clean pairs or their axes. Empty: all.
        command: runs the command `crossframe` with arguments; returns its exit status.
        output: JSON of results. Cases that it has are not run again, but for those that could not be run.
        checks: only load and expand the cases, and run each script's variants once without recording.

    Raises:
        UsageError: incomplete cases; an unknown name; results of other cases or of other code.
    """
    check()
    target = output or RESULTS
    known = {} if checks else _known(target)
    cases = cases_of(only)
    if not cases:
        raise UsageError(f"untouched: no case is called {', '.join(only)}")
    forked.import_frameworks()
    folder = Path(tempfile.mkdtemp(prefix="untouched-"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "programs"))  # perturbed runs are one program
    try:
        if checks:
            return _smoke(folder, jobs, console)
        left = [case for case in cases if case.key not in known]
        _run_cases(left, known, target, Recordings(folder, _perturbed(left), command), jobs, console)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = [known[case.key] for case in cases]
    console.print(_table(found), markup=False)
    return int(any(each["said"]["verdict"] == "failed" for each in found))


def _known(target: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Results that a file has, by `Case.key`."""
    if not target.is_file():
        return {}
    results = json.loads(target.read_text())
    if results["sources"] != sources_digest():
        raise UsageError(
            f"{target}: expected results of these cases and this code, got those of others; choose another file with --output"
        )
    found = [*results["faults"], *results["clean"]]
    return {(each["case"], each["dtype"]): each for each in found if each["said"]["verdict"] != "failed"}


def sources_digest() -> str:
    """A digest of the cases and of the code that records and compares: results of different digests are not of one run."""
    found = hashlib.sha256()
    for name in ("crossframe", "torch_backend", "jax_backend", "experiments"):
        for path in sorted((_CODE / name).rglob("*")):
            if path.suffix in (".py", ".toml"):
                found.update(f"{path.relative_to(_CODE)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    return found.hexdigest()[:16]


def _perturbed(cases: Sequence[Case]) -> dict[Run, int]:
    """How many perturbed runs the cases need of each run."""
    found: dict[Run, int] = {}
    for case in cases:
        found[case.a] = max(case.of.perturbed, found.get(case.a, 0))
    return found


def _run_cases(
    cases: Sequence[Case],
    known: dict[tuple[str, str], dict[str, Any]],
    target: Path,
    recordings: Recordings,
    jobs: int,
    console: Console,
) -> None:
    """Run cases, `jobs` side by side; adds their results to `known`, and writes all of `known` after each."""
    needed = Counter(each for case in cases for each in case.recordings)
    sources = sources_digest()
    order = [case.key for case in cases_of()]
    for case, result in _side_by_side(partial(_run_case, recordings), cases, jobs, recordings.folder):
        known[case.key] = result or _judged(case, {"verdict": "failed", "reason": "", "exit_status": None})
        for each in case.recordings:
            needed[each] -= 1
            if not needed[each]:
                recordings.remove(*each)
        results = [known[key] for key in order if key in known]
        kinds = {
            "faults": [each for each in results if "named" in each],
            "clean": [each for each in results if "named" not in each],
        }
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(target, json.dumps({"sources": sources, **kinds}, indent=1) + "\n")
        _write(target.with_suffix(".md"), _table(results))
        console.print(
            f"{len(known)} of {len(order)}: {' '.join(case.key)}: {known[case.key]['said']['verdict']}", markup=False
        )


def _side_by_side(
    work: Callable[[Any, Path], Any], items: Sequence[Any], jobs: int, folder: Path
) -> Iterator[tuple[Any, Any]]:
    """Yield each item and `work(item, path)`, done in a fork, where the path is the item's own; None where the fork failed."""
    waiting, running = list(enumerate(items)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            number, item = waiting.pop(0)
            path = folder / f"item-{number}"
            process = forked.start(_to_json, path.with_suffix(".json"), work, item, path)
            running[process.sentinel] = process, item, path.with_suffix(".json")
        for ended in connection.wait(list(running)):
            process, item, target = running.pop(ended)  # type: ignore[index]
            process.join()
            yield item, json.loads(target.read_text()) if target.is_file() else None


def _to_json(target: Path, work: Callable[..., Any], *args: Any) -> None:
    _write(target, json.dumps(work(*args)))


def _write(path: Path, text: str) -> None:
    """Replace a file at once, so that whoever stops this leaves a whole one."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def _table(results: Sequence[dict[str, Any]]) -> str:
    """A summary by dtype, and every case with what was expected and what was found."""
    of_faults = [each for each in results if "named" in each]
    of_pairs = [each for each in results if "named" not in each]
    lines = [
        f"| dtype | faults | found | of these as {DIFFERENT} | located | named | clean pairs | right | of these as {DIFFERENT} |"
        f" other {DIFFERENT} | no answer | false alarms |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for dtype in DTYPES:
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
            sum(each["right"] and each["said"]["verdict"] == DIFFERENT for each in clean),
            sum(not each["right"] and each["said"]["verdict"] == DIFFERENT for each in clean),
            sum(
                not each["right"] and not each["false_alarm"] and each["said"]["verdict"] != DIFFERENT for each in clean
            ),
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


def _smoke(folder: Path, jobs: int, console: Console) -> int:
    """Run each script and variant once, without recording."""
    failed: list[str] = []
    first = list({(run.script, run.variant, run.world): run for run in reversed(runs())}.values())
    for run, result in _side_by_side(_unrecorded, first, jobs, folder):
        status, text = result or (1, "")
        name = f"{run.script} {run.variant} {run.dtype} on {run.world}"
        console.print(f"{name}: {text if status else 'ended'}", markup=False)
        failed += [name] if status else []
    console.print(
        f"{len(first) - len(failed)} of {len(first)} ended",
        *(f"failed: {name}" for name in failed),
        sep="\n",
        markup=False,
    )
    return int(bool(failed))


def _unrecorded(run: Run, path: Path) -> tuple[int, str]:
    function = forked.new_process if run.is_jax else forked.script
    options = [*run.options, *_devices(run)] if run.is_jax else run.options
    environments = [{}] if run.is_jax else forked.ranks(run.world)
    return forked.call(
        [(function, str(run.path), options, each) for each in environments], path.with_suffix(".log"), TIMEOUT
    )
