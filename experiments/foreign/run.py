"""`python -m experiments foreign`: records foreign pairs, aligns and compares them, and writes expected and found answers."""

import hashlib
import json
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from safetensors.numpy import load_file, save_file

from crossframe.errors import MappingError, UsageError
from crossframe.param_map import ParamMap
from experiments.environments import checked, make_virtual_environment, run
from experiments.untouched.cases import UNNAMED, Fault
from experiments.untouched.run import DENSE, judge_fault, place_of, said_in

HERE = Path(__file__).parent
NAMES = ("foreign", "second", "third", "fourth")
RESULTS = {number: HERE / "results" / f"{name}.json" for number, name in enumerate(NAMES, 1)}
"""Results by set of pairs."""
TORCH = ("torch", "torch_second", "torch_third", "torch_fourth", "timm")
PERTURBED = {"float64": 0, "float32": 4}
"""Perturbed runs of side a, by dtype."""


@dataclass(frozen=True)
class Pair:
    """Two implementations, and a fault that one of them has with `--fault`.

    Attributes:
        environments: of side a and side b, files in `environments/`.
        number: the set that the pair belongs to: pairs of one set are frozen, run and reported together.
        side: the side that has the fault.
    """

    name: str
    what: str
    environments: tuple[str, str]
    dtype: str
    side: str
    fault: Fault
    number: int

    def environment(self, side: str) -> str:
        """The environment of a side."""
        return self.environments["ab".index(side)]

    def script(self, side: str) -> Path:
        """The script of a side."""
        return HERE / self.name / f"{side}.py"


def pairs_of(only: Sequence[str] = (), number: int = 1) -> list[Pair]:
    """All pairs of a set, or those of these names.

    Raises:
        UsageError: no pair has a name.
    """
    paths = sorted(HERE.glob("*/pair.toml"))
    found = {path.parent.name: _pair(path.parent.name, tomllib.loads(path.read_text())) for path in paths}
    found = {name: pair for name, pair in found.items() if pair.number == number}
    if unknown := set(only) - found.keys():
        raise UsageError(f"foreign: expected names of set {number}, {sorted(found)}, got {sorted(unknown)}")
    return [found[name] for name in only or found]


def _pair(name: str, table: Mapping[str, Any]) -> Pair:
    stated, dtype = dict(table["fault"]), table["dtype"]
    side = stated.pop("side")
    kinds = {
        "script": name,
        "right": "",
        "wrong": "",
        "dtypes": [dtype],
        "world": 1,
        "source": "",
        "diagnosis": UNNAMED,
    }
    fault = Fault(name=name, perturbed=PERTURBED[dtype], **kinds, **stated)
    return Pair(name, table["what"], tuple(table["environments"]), dtype, side, fault, table.get("set", 1))


def run_foreign(
    only: Sequence[str], *, number: int, cache: Path, output: Path | None, freezes: bool, console: Console
) -> int:
    """Run pairs and write their results; returns the exit status, 0 unless something could not be run.

    Args:
        only: names of pairs. Empty: all of the set.
        number: the set of pairs.
        cache: folder of environments, which are made where they are missing.
        output: JSON of results, and beside it Markdown. Results of other pairs that it has are kept.
        freezes: record nothing and compare nothing: write `expected.json` of the pairs.
    """
    pairs, target = pairs_of(only, number), output or RESULTS[number]
    pythons = {
        name: make_virtual_environment(name, HERE / "environments" / f"{name}.txt", cache, console)
        for name in sorted({name for each in pairs for name in each.environments})
    }
    known = {each["pair"]: each for each in json.loads(target.read_text())} if target.is_file() else {}
    failed = False
    for pair in pairs:
        folder = Path(tempfile.mkdtemp(prefix="foreign-"))
        try:
            if freezes:
                _write(HERE / pair.name / "expected.json", expected_of(pair, pythons, folder)[0])
                continue
            known[pair.name] = found = run_pair(pair, pythons, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        failed |= "failed" in (found["clean"]["verdict"], found["fault"]["said"]["verdict"])
        rows = [known[name] for name in sorted(known)]
        _write(target, rows)
        target.with_suffix(".md").write_text(table_of(rows))
        console.print(f"{pair.name}: {found['clean']['verdict']}, {found['fault']['said']['verdict']}", markup=False)
    if not freezes:
        console.print(table_of([known[pair.name] for pair in pairs]), markup=False)
    return int(failed)


def run_pair(pair: Pair, pythons: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Record the sides of a pair with and without its fault, align, compare and judge."""
    expected, b_of = expected_of(pair, pythons, folder)
    assert expected == json.loads((HERE / pair.name / "expected.json").read_text()), f"{pair.name}: another conversion"
    right = {side: record(pair, side, False, pythons, folder) for side in "ab"}
    wrong = right | {pair.side: record(pair, pair.side, True, pythons, folder)}
    aligned = judge_map(find_map(right, folder), load_file(folder / "numbers.safetensors"), b_of)
    clean = compare(right, folder / "clean")
    return {
        "pair": pair.name,
        "what": pair.what,
        "dtype": pair.dtype,
        "map": aligned,
        "clean": {"verdict": clean["verdict"], "place": place_of(clean), "reason": clean.get("reason", "")},
        "fault": judge_fault(pair.fault, pair.dtype, compare(wrong, folder / "fault")) | {"what": pair.fault.what},
    }


def expected_of(pair: Pair, pythons: Mapping[str, str], folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What `expected.json` has, and for each parameter of b the numbers of its elements.

    Leaves in the folder the initial values of side a, and `numbers.safetensors`: side a with a number of its own in each element.
    """
    checked(_command(pair, "a", pythons, folder))
    values, numbers, start = load_file(folder / "a.safetensors"), {}, 1
    for name, value in values.items():
        numbers[name] = value
        if value.dtype.kind == "f":
            numbers[name] = np.arange(start, start + value.size, dtype=np.float64).reshape(value.shape)
            start += value.size
    save_file(numbers, folder / "numbers.safetensors")
    checked([*_command(pair, "b", pythons, folder), "--convert", str(folder / "numbers.safetensors")])
    converted = {path: array for path, array in load_file(folder / "b.safetensors").items() if array.dtype.kind == "f"}
    digest, parts = hashlib.sha256(), {}
    for path, array in sorted(converted.items()):
        digest.update(f"{path} {array.shape} ".encode() + array.astype("<i8").tobytes())
        parts[path] = [name for name, held in numbers.items() if held.dtype.kind == "f" and np.isin(held, array).any()]
    return {"parameters": parts, "elements": digest.hexdigest()}, converted


def record(pair: Pair, side: str, fault: bool, pythons: Mapping[str, str], folder: Path) -> Path:
    """Record one side; side a with perturbed runs, if its dtype needs them."""
    target = folder / f"{side}{'_fault' if fault else ''}"
    # Perturbed runs of side a would replace its initial values by their own.
    values = folder / "values" if side == "a" else folder
    command, options = _command(pair, side, pythons, values), ["--fault"] if fault else []
    if pair.environment(side) in TORCH:
        python, script, *given = command
        perturbed = PERTURBED[pair.dtype] if side == "a" else 0
        recorded = ["--output", str(target), "--every", "1", "--dense", str(DENSE), "--perturbed-runs", str(perturbed)]
        command = [python, "-m", "crossframe", "record", script, *recorded, "--", *given]
    else:
        options += ["--record", str(target)]
    checked([*command, *options])
    return target


def find_map(runs: Mapping[str, Path], folder: Path) -> Path:
    """The file that `crossframe map` wrote; it does not exist if nothing was found."""
    target = folder / "map.json"
    run([sys.executable, "-m", "crossframe", "map", str(runs["a"]), str(runs["b"]), "--output", str(target)])
    return target


def judge_map(
    found: Path, numbers: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> dict[str, list[str]]:
    """The parameters of b that a map has rightly, does not have, and has wrongly.

    Args:
        found: the file of the map.
        numbers, expected: for each parameter of side a, and of side b, the numbers of its elements.
    """
    arrays: Mapping[str, np.ndarray] = {}
    if found.is_file():
        try:
            param_map = ParamMap.load(found)
            if param_map.by_name.keys() <= expected.keys():  # the names are those of side b
                arrays = {
                    name: entry.to_canonical(*(numbers[path] for path in entry.paths))
                    for name, entry in param_map.by_name.items()
                }
            else:
                arrays = param_map.from_canonical(numbers)
        except MappingError:  # of shapes or names that the models do not have
            arrays = dict.fromkeys(expected, np.zeros(0))
    right = [path for path, array in expected.items() if path in arrays and np.array_equal(arrays[path], array)]
    undecided = [path for path in expected if path not in arrays]
    wrong = [path for path in {**expected, **arrays} if path not in right and path not in undecided]
    return {"matched": right, "undecided": undecided, "wrong": wrong}


def compare(runs: Mapping[str, Path], report: Path) -> dict[str, Any]:
    """What `crossframe compare` reports."""
    given = ["compare", str(runs["a"]), str(runs["b"]), "--output", str(report)]
    status, text = run([sys.executable, "-m", "crossframe", *given])
    return said_in(report, status, text, report.parent)


def table_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """A row for each pair, and what was said of those that are not as expected."""
    lines = [
        "| pair | dtype | parameters | matched | undecided | wrong | clean | with fault | found | located |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for row in rows:
        counts = [len(row["map"][kind]) for kind in ("matched", "undecided", "wrong")]
        fault, clean = row["fault"], row["clean"]
        cells = [row["pair"], row["dtype"], sum(counts), *counts, clean["verdict"], fault["said"]["verdict"]]
        cells += ["yes" if fault[what] else "no" for what in ("found", "located")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
        if clean["verdict"] not in ("equal", "rounding"):
            notes.append(f"- {row['pair']}, clean: {clean['place']}: {clean['reason']}")
        notes.append(f"- {row['pair']}, {fault['what']} {fault['said']['place']}: {fault['said']['reason']}")
    return "\n".join([*lines, "", *notes]) + "\n"


def _command(pair: Pair, side: str, pythons: Mapping[str, str], folder: Path) -> list[str]:
    return [pythons[pair.environment(side)], str(pair.script(side)), "--values", str(folder)]


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
