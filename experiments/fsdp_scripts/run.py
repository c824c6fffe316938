"""`python -m experiments fsdp-scripts`: runs scripts with torch's FSDP and with torch_backend's, and compares what they write.

The answer of a case's first run is kept: later runs, with corrected code, add theirs next to it.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from safetensors import safe_open

from experiments.environments import CODE, OURS_ALONE, install_packages, run, without_places
from experiments.fsdp_scripts.cases import HERE, Script, scripts_of
from experiments.results import Results

RESULTS = HERE / "results" / "fsdp_scripts.json"
_LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
_TRIES = 3
"""A thread of gloo may abort a process at its end ([Note: threads of gloo] in `torch_backend/recorder/_script_processes.py`)."""
_TORCH, _OURS = "torch", "torch_backend"
_EQUAL, _FAILED, _DIFFERENT, _TORCH_ERRS = "equal", "failed", "different", "torch errs"


def run_scripts(only: Sequence[str], *, cache: Path, output: Path | None, console: Console) -> int:
    """Run scripts and write their results; returns the exit status, 0 unless an answer is not as expected.

    Args:
        only: names of scripts. Empty: all.
        cache: folder of packages, which are installed where they are missing.
        output: JSON of results, and beside it Markdown. Results of other scripts that it has are kept.
    """
    scripts = scripts_of(only)
    results = Results(output or RESULTS, "script", lambda rows: f"{summary_of(rows)}\n{table_of(rows)}")
    for script in scripts:
        with TemporaryDirectory(prefix="fsdp-scripts-", ignore_cleanup_errors=True) as folder:
            results.add(run_one(script, cache, Path(folder), console))
    rows = results.of(script.name for script in scripts)
    console.print(table_of(rows), markup=False)
    return int(not all(case["right"] for row in rows for case in row["cases"]))


def run_one(script: Script, cache: Path, folder: Path, console: Console) -> dict[str, Any]:
    """Run all cases of a script under both implementations, and compare."""
    environment = {}
    if script.requirements is not None:
        packages = install_packages(script.name, script.requirements, cache, console)
        environment["PYTHONPATH"] = f"{CODE}:{packages}"
    cases = []

    def trained(fsdp: str, options: str, ranks: int) -> tuple[Path, str]:
        """(the folder that the script wrote to, why it failed or "")."""
        replaced = [str(OURS_ALONE)] if fsdp == _OURS else []
        for _ in range(_TRIES):
            out = folder / str(len(list(folder.iterdir())))
            out.mkdir()
            words = [str(script.folder / "train.py"), str(out), *options.split()]
            status, text = run([sys.executable, *_LAUNCH, str(ranks), *replaced, *words], environment, out, most=6000)
            if not status or "exitcode  : -6" not in text:
                break
        return out, (text or f"exit status {status}") if status else ""

    def judge(case: str, a: tuple[Path, str], b: tuple[Path, str]) -> None:
        said = compared(a, b)
        cases.append({"case": case, "said": said, "right": said["verdict"] in (_EQUAL, _TORCH_ERRS)})
        console.print(f"{script.name}: {case}: {_answer(cases[-1])}", markup=False)

    for each in script.runs:
        name = f"`{each.options}` on {each.ranks}"
        results = [trained(fsdp, each.options, each.ranks) for fsdp in (_TORCH, _OURS)]
        judge(name, *results)
    for each in script.resumes:
        saved = {fsdp: trained(fsdp, each.first, each.ranks) for fsdp in (_TORCH, _OURS)}
        ends = {}
        for begins, goes_on in ((_TORCH, _TORCH), (_OURS, _OURS), (_TORCH, _OURS), (_OURS, _TORCH)):
            at, failed = saved[begins]
            options = each.second.replace("{first}", str(at))
            ends[begins, goes_on] = (at, failed) if failed else trained(goes_on, options, each.ranks)
            if (begins, goes_on) != (_TORCH, _TORCH):
                name = f"`{each.second}` on {each.ranks}: saved by {begins}, resumed by {goes_on}"
                judge(name, ends[_TORCH, _TORCH], ends[begins, goes_on])
    stated = {"what": script.what, "release": script.release, "api": script.api}
    return {"script": script.name, "set": script.set, **stated, "cases": cases}


def compared(a: tuple[Path, str], b: tuple[Path, str]) -> dict[str, Any]:
    """The verdict on two runs, (folder, why it failed), and how many values were compared.

    `_EQUAL`: all figures and tensors are, in every bit, with their names, dtypes and shapes. `_TORCH_ERRS`: but for optimizer
    state that torch has overwritten. `_DIFFERENT` states the largest difference.
    """
    if a[1] or b[1]:
        where = "under torch's FSDP too: " * bool(a[1])
        return {"verdict": _FAILED, "reason": where + without_places(a[1] or b[1]), "values": 0}
    left, right = (dict(_values_in(each)) for each, _ in (a, b))
    if not left:
        return {"verdict": _FAILED, "reason": "the script has written nothing to compare", "values": 0}
    lacking = sorted(left.keys() ^ right.keys())
    if lacking:
        which = "torch_backend" if lacking[0] in right else "torch"
        return {"verdict": _DIFFERENT, "reason": f"{lacking[0]} is written under {which} alone", "values": len(left)}
    gaps = {name: gap for name in left if (gap := _gap(left[name], right[name])) is not None}
    if not gaps:
        return {"verdict": _EQUAL, "reason": "", "values": len(left)}
    if gaps.keys() <= (wrong := _overwritten(left)):
        reason = f"{len(gaps)} values read as another state of their parameter under torch's FSDP"
        return {"verdict": _TORCH_ERRS, "reason": reason, "values": len(left)}
    gaps = {name: gap for name, gap in gaps.items() if name not in wrong}
    largest = max(gaps, key=gaps.__getitem__)
    reason = (
        f"{len(gaps)} of {len(left)} values differ, {largest} most: {_shown(left[largest])}, {_shown(right[largest])}"
    )
    return {"verdict": _DIFFERENT, "reason": reason, "values": len(left), "largest": min(gaps[largest], 1e9)}


def _overwritten(values: Mapping[str, Any]) -> set[str]:
    """The states of parameters that have the bits of another of their states. On a CPU, torch 2.13 writes all states of a
    parameter into one memory if full state of FSDP1 is to be offloaded (`tests/on_torch/programs/departures_state.py`)."""
    states: dict[str, list[str]] = {}
    for name in values:
        file, _, key = name.partition(" ")
        if file == "optimizer.safetensors" and "/" in key:
            states.setdefault(key.partition("/")[2], []).append(name)
    return {
        name
        for names in states.values()
        for name in names
        if any(other != name and _gap(values[name], values[other]) is None for other in names)
    }


def _values_in(folder: Path) -> Iterator[tuple[str, Any]]:
    """All figures and tensors that a script has written, with names."""
    for path in sorted(folder.glob("*.json")):
        yield from _leaves(path.name, json.loads(path.read_text()))
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # which is no dict
                yield f"{path.name} {name}", file.get_tensor(name)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in pairs:
            yield from _leaves(f"{name} {key}", each)
    else:
        yield name, value


def _gap(a: Any, b: Any) -> float | None:
    """The difference of two figures or tensors as a share of the first one. None: equal bits; infinite: of another kind."""
    import torch

    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return math.inf
        if torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)):
            return None
        return float((a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-300))
    if type(a) is float and type(b) is float:
        if np.float64(a).tobytes() == np.float64(b).tobytes():
            return None
        return abs(a - b) / max(abs(a), 1e-300) if math.isfinite(a) and math.isfinite(b) else math.inf
    return None if type(a) is type(b) and a == b else math.inf


def _shown(value: Any) -> str:
    if hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return str(value)[:60]


def summary_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """A row for each script: its cases, and how many are equal in every bit, at first and now."""
    lines = [
        "| set | script | API | cases | equal, first | equal | torch errs | other |",
        "|---|---|---|---|---|---|---|---|",
    ]
    totals = [0] * 5
    for row in sorted(rows, key=lambda row: (row["set"], row["script"])):
        verdicts = [case["said"]["verdict"] for case in row["cases"]]
        first = sum(case["first"]["said"]["verdict"] == _EQUAL for case in row["cases"])
        equal, errs = (verdicts.count(each) for each in (_EQUAL, _TORCH_ERRS))
        counts = [len(verdicts), first, equal, errs, len(verdicts) - equal - errs]
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        lines.append(
            f"| {row['set']} | {row['script']}: {row['release']} | {row['api']} | {' | '.join(map(str, counts))} |"
        )
    lines.append(f"| all | | | {' | '.join(map(str, totals))} |")
    return "\n".join(lines) + "\n"


def table_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """A row for each case, and the reasons of answers that are not as expected."""
    lines = ["| script | case | first answer | answer |", "|---|---|---|---|"]
    notes = []
    for row in rows:
        for case in row["cases"]:
            cells = [row["script"], case["case"], _text(case["first"]["said"]), _text(case["said"])]
            lines.append("| " + " | ".join(each.replace("|", "/") for each in cells) + " |")
            if not case["right"]:
                notes.append(f"- {row['script']}, {case['case']}: {' '.join(case['said']['reason'].split())}")
    return "\n".join([*lines, "", *notes]) + "\n"


def _answer(case: Mapping[str, Any]) -> str:
    return _text(case["said"]) if case["right"] else f"{_text(case['said'])}: {case['said']['reason'][-600:]}"


def _text(said: Mapping[str, Any]) -> str:
    if said["verdict"] == _EQUAL:
        return f"equal, {said['values']:,} values"
    return f"{said['verdict']}, by {said['largest']:.1e}" if "largest" in said else said["verdict"]
