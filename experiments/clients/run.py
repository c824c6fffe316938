"""`python -m experiments clients`: records and compares runs of other people's trainers, and writes expected and found answers.

The answer of a case's first comparison is kept: later runs, with corrected code, add theirs next to it.
"""

import hashlib
import re
import shutil
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from crossframe.cli.script_imports import is_of_jax
from crossframe.errors import UsageError
from experiments.environments import CODE, OURS_ALONE, install_packages, run, without_places
from experiments.results import Results
from experiments.untouched.cases import UNNAMED, Fault
from experiments.untouched.run import DENSE, judge_fault, place_of, said_in

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "clients.json"
_COMPARED = re.compile(r"compared: ([\d,]+) quantities")


@dataclass(frozen=True)
class Run:
    """One run of a client's script.

    Attributes:
        options: the script's command line; `{out}` stands for a folder that it writes to.
        ranks: processes of torchrun, or CPU devices of JAX.
        fsdp: "torch_backend" replaces torch's FSDP, as `python -m torch_backend` does.
        edits: (text of the script, that which replaces it). A run with edits is one of an edited copy.
    """

    options: str
    ranks: int
    fsdp: str = "torch"
    edits: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Pair:
    """Two correct runs.

    Attributes:
        a, b: the runs; `a` has the perturbed runs.
        expected: any of these verdicts is right; "bug" where the client itself computes something else in one of them.
    """

    a: Run
    b: Run
    expected: tuple[str, ...]


@dataclass(frozen=True)
class Client:
    """A trainer that this project did not write, and a script that uses it.

    Attributes:
        script: beside it is `requirements.txt`, if it needs packages next to those of the development environment.
        perturbed: perturbed runs of the first run of a pair, and of the right run of the fault.
        right, wrong: runs of the fault.
    """

    name: str
    script: Path
    what: str
    release: str
    perturbed: int
    pairs: tuple[Pair, ...]
    fault: Fault
    right: Run
    wrong: Run

    @property
    def requirements(self) -> Path | None:
        found = self.script.with_name("requirements.txt")
        return found if found.is_file() else None


def clients_of(only: Sequence[str] = (), folder: Path = HERE) -> list[Client]:
    """All clients, or those of these names.

    Raises:
        UsageError: no client has a name.
    """
    found = {path.parent.name: path for path in sorted(folder.glob("*/client.toml"))}
    if unknown := set(only) - found.keys():
        raise UsageError(f"clients: expected names of {sorted(found)}, got {sorted(unknown)}")
    return [_client(found[name].parent, tomllib.loads(found[name].read_text())) for name in only or found]


def _client(folder: Path, table: Mapping[str, Any]) -> Client:
    ranks, perturbed, stated = table["ranks"], table["perturbed"], dict(table["fault"])
    script = (folder / table.get("script", "train.py")).resolve()
    right, wrong = Run(stated["right"], ranks), Run(stated["wrong"], ranks, edits=_edits(stated.pop("edits", ())))
    kinds = {"script": "train", "dtypes": [], "world": ranks, "source": "", "diagnosis": UNNAMED}
    fault = Fault(**{"name": folder.name, "perturbed": perturbed, **kinds, **stated})
    pairs = tuple(_pair(each, ranks) for each in table["pairs"])
    return Client(folder.name, script, table["what"], table["release"], perturbed, pairs, fault, right, wrong)


def _pair(table: Mapping[str, Any], ranks: int) -> Pair:
    """Edits are those of `b`."""
    (of_a, of_b), (fsdp_a, fsdp_b) = table.get("ranks", (ranks, ranks)), table.get("fsdp", ("torch", "torch"))
    b = Run(table["b"], of_b, fsdp_b, _edits(table.get("edits", ())))
    return Pair(Run(table["a"], of_a, fsdp_a), b, tuple(table["expected"]))


def _edits(stated: Iterable[Sequence[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((old, new) for old, new in stated)


def run_clients(only: Sequence[str], *, cache: Path, output: Path | None, console: Console) -> int:
    """Run clients and write their results; returns the exit status, 0 unless something could not be run.

    Args:
        only: names of clients. Empty: all.
        cache: folder of packages, which are installed where they are missing.
        output: JSON of results, and beside it Markdown. Results of other clients that it has are kept.
    """
    clients = clients_of(only)
    results = Results(output or RESULTS, "client", lambda rows: f"{summary_of(rows)}\n{table_of(rows)}")
    for client in clients:
        with TemporaryDirectory(prefix="clients-", ignore_cleanup_errors=True) as folder:
            results.add(run_client(client, cache, Path(folder), console))
    rows = results.of(client.name for client in clients)
    console.print(table_of(rows), markup=False)
    return int(any(case["said"]["verdict"] == "failed" for row in rows for case in row["cases"]))


def run_client(client: Client, cache: Path, folder: Path, console: Console) -> dict[str, Any]:
    """Record the runs of a client, each once, compare and judge."""
    environment = {}
    if client.requirements is not None:
        packages = install_packages(client.name, client.requirements, cache, console)
        environment["PYTHONPATH"] = f"{CODE}:{packages}"
    with_perturbed = {client.right, *(pair.a for pair in client.pairs)}
    recorded: dict[tuple[Run, int], tuple[Path, str]] = {}

    def recording(each: Run, copy: int) -> tuple[Path, str]:
        """(path, why it failed or ""); a run that is compared with itself is recorded twice."""
        if (each, copy) not in recorded:
            path = folder / _file_name(each, copy)
            perturbed = client.perturbed if each in with_perturbed and not copy else 0
            script = _edited(client.script, each.edits, folder / "scripts" / path.name)
            recorded[each, copy] = path, record(script, each, path, perturbed, environment)
        return recorded[each, copy]

    def answer(a: Run, b: Run) -> dict[str, Any]:
        said = _compare(recording(a, 0), recording(b, int(a == b)), folder / "report")
        console.print(f"{client.name}: {_text(a)}, {_text(b)}: {said['verdict']}", markup=False)
        return said

    cases = [_judged_pair(pair, answer(pair.a, pair.b)) for pair in client.pairs]
    cases.append(_judged_fault(client, answer(client.right, client.wrong)))
    return {
        "client": client.name,
        "what": client.what,
        "release": client.release,
        "cases": cases,
    }


def _edited(script: Path, edits: Iterable[tuple[str, str]], folder: Path) -> Path:
    """The script, or a copy of it and of the files beside it, with these edits.

    Raises:
        UsageError: a text to replace is not in the script exactly once.
    """
    if not edits:
        return script
    text = script.read_text()
    for old, new in edits:
        if (found := text.count(old)) != 1:
            raise UsageError(f"clients: {script} has {old!r} {found} times; an edit replaces a text that is there once")
        text = text.replace(old, new)
    shutil.copytree(script.parent, folder)
    copy = folder / script.name
    copy.write_text(text)
    return copy


def record(script: Path, of: Run, path: Path, perturbed: int, environment: Mapping[str, str]) -> str:
    """Record a run of a script and so many perturbed runs; returns why that failed, or ""."""
    given = ["--output", str(path), "--every", "1", "--dense", str(DENSE), "--perturbed-runs", str(perturbed)]
    if is_of_jax(script):
        environment = {**environment, "JAX_NUM_CPU_DEVICES": str(of.ranks)}
    else:
        given += ["--nproc-per-node", str(of.ranks)]
    (out := path.with_name(f"{path.name}_out")).mkdir()
    options = [word.replace("{out}", str(out)) for word in of.options.split()]
    recorded, options = (OURS_ALONE, [str(script), *options]) if of.fsdp == "torch_backend" else (script, options)
    command = [sys.executable, "-m", "crossframe", "record", str(recorded), *given, "--", *options]
    status, text = run(command, environment)
    return (text or f"exit status {status}") if status else ""


def _compare(a: tuple[Path, str], b: tuple[Path, str], report: Path) -> dict[str, Any]:
    """What `crossframe compare` says of two recordings, as `said_in`, with the number of compared quantities if it is printed."""
    if a[1] or b[1]:
        return {"verdict": "failed", "reason": a[1] or b[1], "exit_status": None}
    given = ["compare", str(a[0]), str(b[0]), "--output", str(report)]
    status, text = run([sys.executable, "-m", "crossframe", *given])
    said = said_in(report, status, text, report.parent)
    shutil.rmtree(report, ignore_errors=True)
    compared = _COMPARED.search(" ".join(text.split()))
    return said | {"quantities": int(compared[1].replace(",", "")) if compared else None}


def _judged_pair(pair: Pair, said: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "case": f"{_text(pair.a)}, {_text(pair.b)}",
        "expected": " or ".join(pair.expected),
        "said": _said(said),
        "right": said["verdict"] in pair.expected,
        "false_alarm": "bug" not in pair.expected and (said["verdict"] == "bug" or said["exit_status"] == 1),
    }


def _judged_fault(client: Client, said: dict[str, Any]) -> dict[str, Any]:
    judged = judge_fault(client.fault, "", said)
    places = " or ".join(place or "no place" for place in client.fault.places)
    wanted = [" or ".join(client.fault.verdicts), f"step {client.fault.step}", places, *client.fault.settings]
    return {
        "case": client.fault.what,
        "expected": ", ".join(wanted),
        "said": _said(said) | {"step": judged["said"]["step"], "diagnosis": judged["said"]["diagnosis"]},
        "right": judged["found"] and judged["located"],
        "found": judged["found"],
        "located": judged["located"],
        "named": judged["named"],
    }


def _said(said: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of an answer, with paths of tracebacks from the repository, the packages or the client's environment on."""
    figures = ("max_relative_loss_difference", "max_relative_parameter_difference", "quantities")
    of_report = {name: said.get(name) for name in figures}
    verdict, reason = said["verdict"], without_places(said.get("reason", ""))
    return {"verdict": verdict, "place": place_of(dict(said)), "reason": reason} | of_report


def _text(of: Run) -> str:
    words = [f"`{options}`" for options in [_options(of)] if options]
    words += ["crossframe"] * (of.fsdp == "torch_backend")
    words += [f"edited to `{_first_line(new)}`" for _, new in of.edits[:1]]
    return " ".join([*words, *["on"] * bool(words), str(of.ranks)])


def _options(of: Run) -> str:
    return of.options.replace("{out}", "").strip()


def _first_line(text: str) -> str:
    """The beginning of the first line that says something, without what would end a cell of a table."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
    return line.replace("`", "'")[:60]


def _file_name(of: Run, copy: int) -> str:
    """Verdicts call a recording by it."""
    edited = f"edited {hashlib.sha256(repr(of.edits).encode()).hexdigest()[:4]}" * bool(of.edits)
    words = [_options(of), "crossframe" * (of.fsdp == "torch_backend"), edited, f"{of.ranks} ranks", "again" * copy]
    return re.sub(r"\W+", "_", " ".join(words)).strip("_")


def summary_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """A row for each client: its correct pairs, those with torch_backend's FSDP on one side, and its mistake."""
    lines = [
        "| client | correct pairs | right | equal in every bit | of those with `crossframe` | called a bug | mistake |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        pairs = [case for case in row["cases"] if "located" not in case]
        ours = [case for case in pairs if "crossframe" in case["case"]]
        cells = [
            _name(row),
            str(len(pairs)),
            str(sum(case["right"] for case in pairs)),
            _num_equal(pairs),
            f"{_num_equal(ours)} of {len(ours)}" if ours else "",
            str(sum(case["false_alarm"] for case in pairs)),
            ", ".join(_found(case) for case in row["cases"] if "located" in case),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _name(row: Mapping[str, Any]) -> str:
    """Several clients may be scripts for one release."""
    return f"{row['client']}: {row['release']}"


def _num_equal(cases: Iterable[Mapping[str, Any]]) -> str:
    return str(sum(case["said"]["verdict"] == "equal" for case in cases))


def _found(case: Mapping[str, Any]) -> str:
    return " and ".join(what for what in ("found", "located") if case[what]) or "not found"


def table_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """A row for each case, and the reasons of answers that are not as expected and of those to faults."""
    lines = ["| client | case | expected | first answer | answer | right |", "|---|---|---|---|---|---|"]
    notes = []
    for row in rows:
        for case in row["cases"]:
            first, right = case["first"], "yes" if case["right"] else "no"
            expected = case["expected"]
            if first["expected"] != expected:
                expected += f" (was {first['expected']})"
            cells = [_name(row), case["case"], expected, _answer(first), _answer(case)]
            lines.append("| " + " | ".join(each.replace("|", "/") for each in [*cells, right]) + " |")
            if "located" in case or not case["right"]:
                notes.append(f"- {row['client']}, {case['case']}: {_one_line(case['said']['reason'])}")
    return "\n".join([*lines, "", *notes]) + "\n"


def _answer(case: Mapping[str, Any]) -> str:
    """A verdict, with how much was compared or where the difference is."""
    said = case["said"]
    parts = [said["verdict"]]
    if said["verdict"] == "equal" and said["quantities"]:
        parts.append(f"{said['quantities']:,} quantities")
    elif said["verdict"] == "rounding":
        parts.append(f"parameters differ by {said['max_relative_parameter_difference']:.0e}")
    elif said["place"]:
        parts.append(said["place"])
    if "located" in case and said.get("diagnosis"):
        parts.append(said["diagnosis"])
    return ", ".join(parts)


def _one_line(text: str) -> str:
    return " ".join(text.split())
