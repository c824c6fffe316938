"""`python -m experiments jax-scripts`: records scripts of JAX and compares pairs, and writes expected and found answers.

The first answer to each case is kept: later runs, with corrected code, add theirs next to it.
"""

import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console

from crossframe.errors import CrossframeError, UsageError
from crossframe.recording.event_format import FORWARD, OUTPUT, REDUCE, UPDATE
from crossframe.recording.reader import Recording
from experiments.environments import CODE, ENVIRONMENT, TIMEOUT, run
from experiments.results import Results
from experiments.untouched.cases import UNNAMED, Fault
from experiments.untouched.run import judge_fault, place_of, said_in

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
RESULTS = HERE / "results" / "jax_scripts.json"
RIGHT = ("equal", "rounding", "different computation")
"""Verdicts that are no alarm on a pair of correct runs."""
NEAR = 1e-6
"""The largest relative difference of a float32 loss, a mean of less than a hundred terms, that two programs compute."""
_LOSS = re.compile(r"\bloss[\s=:]+(-?[\d.]+(?:e[-+]?\d+)?)")


@dataclass(frozen=True)
class Case:
    """A script and the expected answer of `crossframe record`; the fields are those of `cases.toml`."""

    script: str
    answer: str = "recorded"
    options: str = ""
    processes: int = 1
    forward: bool = False
    steps: int = 0
    losses: str = ""
    factor: float = 1.0
    mean_of: int = 1
    modules: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    most: int | None = None

    @property
    def name(self) -> str:
        return self.script

    @property
    def expected(self) -> str:
        if self.answer == "recorded":
            return f"recorded, {self.steps} {'calls' if self.forward else 'steps'}"
        return "refused" if self.most is None else f"refused in the first {self.most} steps"


@dataclass(frozen=True)
class Edit:
    """A script whose run is compared with that of an edited script, or with other options.

    Attributes:
        replace: pairs of old and new text.
        step, places: of the first difference, of a mistake; without places both runs are correct.
    """

    script: str
    what: str
    options: str = ""
    replace: tuple[tuple[str, str], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    step: int = 0
    places: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.script}: {self.what}"

    @property
    def expected(self) -> str:
        return f"step {self.step}, {' or '.join(self.places)}" if self.places else "no alarm"


def cases_of(path: Path = HERE / "cases.toml") -> list[Case | Edit]:
    """All cases: scripts first, then pairs and mistakes.

    Raises:
        UsageError: a replaced text is not in its script once or more.
    """
    table = tomllib.loads(path.read_text())
    edits = [Edit(**each) for kind in ("pairs", "mistakes") for each in table[kind]]
    for edit in edits:
        edited(edit)
    return [*(Case(**each) for each in table["cases"]), *edits]


def edited(edit: Edit) -> str:
    """The text of the script with all replacements."""
    text = (SCRIPTS / f"{edit.script}.py").read_text()
    for old, new in edit.replace:
        if old not in text:
            raise UsageError(f"{edit.name}: expected a text of {edit.script}.py to replace, got {old!r}")
        text = text.replace(old, new)
    return text


def run_jax_scripts(only: Sequence[str], *, output: Path | None, console: Console) -> int:
    """Run cases and write their results; returns the exit status, 0 if all answers are right.

    Args:
        only: names of scripts. Empty: all.
        output: JSON of results, and beside it Markdown. Results of other scripts that it has are kept.
    """
    cases = cases_of()
    if unknown := set(only) - {each.script for each in cases}:
        raise UsageError(f"jax-scripts: expected names of scripts, got {sorted(unknown)}")
    results = Results(output or RESULTS, "case", table_of, [each.name for each in cases])
    chosen = [each for each in cases if not only or each.script in only]
    for case in chosen:
        with TemporaryDirectory(prefix="jax-scripts-", ignore_cleanup_errors=True) as folder:
            found = record_case(case, Path(folder)) if isinstance(case, Case) else compare_case(case, Path(folder))
        results.add({"case": case.name, "expected": case.expected, **found})
        console.print(
            f"{case.name}: {found['answer']}, {'right' if found['right'] else 'not as expected'}", markup=False
        )
    return int(not all(row["right"] for row in results.of(case.name for case in chosen)))


def record_case(case: Case, folder: Path) -> dict[str, Any]:
    """Run a script as it is and under `crossframe record`: the answer, and what of it is not as expected."""
    script = [str(SCRIPTS / f"{case.script}.py")]
    plain_status, plain, _ = _run_processes(case, script, folder)
    recorder = [*("-m", "crossframe", "record"), *script, "--output", str(folder / "recording"), "--every", "1"]
    status, printed, errors = _run_processes(case, [*recorder, *["--forward"] * case.forward, "--"], folder)
    own, plain_lines = _lines(printed), _lines(plain)
    wrong = [] if plain_status == 0 else [f"the script itself ends with {plain_status}"]
    if status == 0:
        answer = "recorded"
        if own != plain_lines:
            wrong.append("the script prints other values than without recording")
        try:
            wrong += _wrong_recording(case, Recording.open(folder / "recording"), plain)
        except CrossframeError as error:
            wrong.append(f"the recording cannot be read: {error}")
    else:
        answer = "refused" if "crossframe: not recorded" in errors else "crashed"
        if case.answer == "refused":
            wrong += [f"the message has no {word!r}" for word in case.words if word not in errors]
            if "Recorder" not in errors:
                wrong.append("the message shows no lines to add")
            if case.most is not None and len(own) > case.most:
                wrong.append(f"refused after {len(own)} lines")
    if answer != case.answer:
        wrong.insert(0, f"{answer} instead of {case.answer}")
    return {"answer": answer, "right": not wrong, "wrong": wrong, "message": _one_line(errors) if status else ""}


def _wrong_recording(case: Case, recording: Recording, printed: str) -> list[str]:
    """What of a recording is not as expected."""
    wrong = []
    steps = recording.num_steps
    if steps != case.steps:
        wrong.append(f"{steps} steps instead of {case.steps}")
    names = list(recording.manifest.params)
    for phase in () if case.forward else (REDUCE, UPDATE):
        if missing := [name for name in names if not recording.has(phase, 0, name)]:
            wrong.append(f"{phase} of {missing} is not recorded")
    outputs = {module for _, module, use in recording.activations(0) if use == OUTPUT}
    if missing := set(case.modules) - outputs:
        wrong.append(f"no {FORWARD} of {sorted(missing)}, but of {sorted(outputs)}")
    if case.losses != "none" and steps == case.steps:
        wrong += _wrong_losses(case, recording.losses().mean(axis=1), printed)
    return wrong


def _wrong_losses(case: Case, recorded: np.ndarray, printed: str) -> list[str]:
    shown = np.array([float(each) for each in _LOSS.findall(printed)])
    if len(shown) != case.steps * case.mean_of:
        return [f"the script prints {len(shown)} losses of {case.steps} steps"]
    expected = shown.reshape(case.steps, case.mean_of).mean(axis=1) * case.factor
    is_near = np.abs(recorded - expected) <= (NEAR * np.abs(expected) if case.losses == "near" else 0)
    return [] if is_near.all() else [f"losses {recorded.tolist()} instead of {expected.tolist()}"]


def _run_processes(case: Case, command: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """(worst exit status, what the first process printed, errors of all) of a command in so many processes."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    running = []
    for process in range(case.processes):
        options = case.options.format(port=port, process=process).split()
        out, err = (folder / f"{process}.{kind}" for kind in ("out", "err"))
        with out.open("w") as stdout, err.open("w") as stderr:
            given = [sys.executable, *command, *options]
            running.append(subprocess.Popen(given, env=os.environ | ENVIRONMENT, stdout=stdout, stderr=stderr))
    try:
        statuses = [each.wait(TIMEOUT) for each in running]
    finally:
        for each in running:
            each.kill()
    errors = "".join((folder / f"{process}.err").read_text() for process in range(case.processes))
    return max(map(abs, statuses)), (folder / "0.out").read_text(), errors


def compare_case(edit: Edit, folder: Path) -> dict[str, Any]:
    """Record a script and its edit, and compare: the verdict, and whether it is right."""
    text = edited(edit)
    for name, script, options in (("a", edited(Edit(edit.script, "")), ""), ("b", text, edit.options)):
        (folder / name).mkdir()
        path = folder / name / f"{edit.script}.py"
        path.write_text(script)
        given = [*("record", str(path), "--output", str(folder / f"runs_{name}"), "--every", "1"), "--dense", "2"]
        environment = edit.environment if name == "b" else {}
        status, said = run([sys.executable, "-m", "crossframe", *given, "--", *options.split()], environment)
        if status:
            return {
                "answer": "not recorded",
                "right": False,
                "wrong": [f"{name} is not recorded"],
                "message": _one_line(said),
            }
    compared = ["compare", *(str(folder / f"runs_{name}") for name in "ab"), "--output", str(folder / "report")]
    status, said = run([sys.executable, "-m", "crossframe", *compared])
    found = said_in(folder / "report", status, said, folder)
    answer = ", ".join(filter(None, [found["verdict"], place_of(found)]))
    return {"answer": answer, "message": _one_line(found.get("reason", "")), **_judged(edit, found)}


def _judged(edit: Edit, found: dict[str, Any]) -> dict[str, Any]:
    if not edit.places:
        right = found["verdict"] in RIGHT
        return {"right": right, "wrong": [] if right else [f"{found['verdict']} instead of {' or '.join(RIGHT)}"]}
    kinds = {"script": edit.script, "dtypes": [], "world": 1, "source": "", "diagnosis": UNNAMED, "perturbed": 0}
    stated = {"verdicts": ["bug"], "step": edit.step, "places": list(edit.places), "right": "", "wrong": ""}
    judged = judge_fault(Fault(name=edit.name, what=edit.what, **kinds, **stated), "", found)
    wrong = [] if judged["found"] else ["not found"]
    if judged["found"] and not judged["located"]:
        wrong.append(f"located at step {judged['said']['step']}, {judged['said']['place']}")
    return {"right": not wrong, "wrong": wrong}


def table_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """A row for each case: expected, first answer, answer (without one, it was run once); and what is not as expected."""
    lines = ["| case | expected | first answer | answer |", "|---|---|---|---|"]
    notes = []
    for row in rows:
        cells = [row["case"], row["expected"], _cell(row["first"]), _cell(row) if "answer" in row else ""]
        lines.append("| " + " | ".join(each.replace("|", "/") for each in cells) + " |")
        for when, each in (("first answer", row["first"]), ("answer", row)):
            if not each.get("right", True):
                notes.append(f"- {row['case']}, {when}: {'; '.join(each['wrong'])}. {each['message']}".rstrip())
    return "\n".join([*lines, "", *notes]) + "\n"


def _cell(found: Mapping[str, Any]) -> str:
    return f"{found['answer']} ({'right' if found['right'] else 'wrong'})"


def _one_line(text: str) -> str:
    return " ".join(text.replace(f"{CODE}/", "").split())[-1500:]


def _lines(printed: str) -> list[str]:
    """What a script prints, without what the command and the collectives of processes print."""
    return [line for line in printed.splitlines() if not line.startswith(("recorded in ", "[Gloo]"))]
