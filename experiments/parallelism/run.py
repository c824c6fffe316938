"""`python -m experiments parallelism`: records parallel programs and one device, compares them, and judges the answers."""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console

from crossframe.errors import UsageError
from crossframe.recording import Recording
from crossframe.verdict import compare
from experiments.parallelism.cases import Fault
from experiments.untouched import forked
from experiments.untouched.run import place_of

RESULTS = Path(__file__).with_name("results")
TIMEOUT = 120
RIGHT = ("equal", "rounding")


@dataclass(frozen=True)
class Answer:
    """What a comparison with one device said of a case.

    Attributes:
        verdict: "failed" where a run did not end or could not be compared; `reason` then says why.
        case: a run, or a `Fault`.
        place: the first difference, as "phase/event name".
        axis: the mesh axis that the reason names. ranks: those that differ along it.
    """

    case: Any
    verdict: str
    reason: str
    place: str = ""
    step: int | None = None
    axis: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def found(self) -> bool:
        """Whether the verdict is right."""
        return self.verdict in (self.case.verdicts if isinstance(self.case, Fault) else RIGHT)

    @property
    def located(self) -> bool:
        """Whether a fault is found at its step, in one of its places."""
        assert isinstance(self.case, Fault)
        there = any(fnmatchcase(self.place, pattern) for pattern in self.case.places)
        return self.found and there and self.step == self.case.step

    @property
    def axis_named(self) -> bool:
        """Whether the answer names the axis and the ranks that differ along it, and none where ranks agree."""
        assert isinstance(self.case, Fault)
        return self.found and (self.axis, self.ranks if self.axis else ()) == (self.case.axis, self.case.ranks)


def run_parallelism(
    cases: Sequence[str],
    *,
    name: str,
    clean: Sequence[Any],
    faults: Sequence[Fault],
    output: Path | None,
    keep: Path | None,
    console: Console,
) -> int:
    """Run cases, and print and write what became of them; 0 if no answer is wrong.

    Args:
        cases: faults and forms. None: all.
        name: of the set of cases, and of the file of its results. clean, faults: the set.
        output: a Markdown file. None: that of the results, if all cases run.
        keep: a folder in which recordings stay.

    Raises:
        UsageError: an unknown case.
    """
    known = {fault.name for fault in faults} | {run.form for run in clean}
    if unknown := sorted(set(cases) - known):
        raise UsageError(f"parallelism: expected among {', '.join(sorted(known))}, got {', '.join(unknown)}")
    chosen: list[Any] = [run for run in clean if not cases or run.form in cases]
    chosen += [fault for fault in faults if not cases or fault.name in cases]
    target = output or (None if cases else RESULTS / f"{name}.md")
    forked.import_frameworks()
    answers: list[Answer] = []
    with tempfile.TemporaryDirectory(prefix="crossframe-parallelism-") as temporary:
        recordings = _Recordings((keep or Path(temporary)).resolve())
        for case in chosen:
            answers.append(answer := _answer(case, recordings))
            console.print(_line(answer), markup=False, highlight=False, soft_wrap=True)
            if target is not None:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(_table(answers))
    console.print(_summary(answers), markup=False, highlight=False, soft_wrap=True)
    return int(not all(answer.found for answer in answers))


class _Recordings:
    """Recordings of runs in a folder, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Any, Path] = {}

    def of(self, run: Any) -> Recording:
        """A run's recording, which is made in new processes.

        Raises:
            UsageError: the run failed or took too long.
        """
        if run not in self._made:
            path = self._folder / f"{len(self._made):02d}-{run.form}{run.fault and '-'}{run.fault}"
            path.parent.mkdir(parents=True, exist_ok=True)
            log = path.with_suffix(".log")
            status, text = forked.call(run.targets(path, log), log, TIMEOUT)
            if status:
                raise UsageError(f"not recorded: exit status {status}: {text.strip().splitlines()[-1:]}")
            self._made[run] = path
        return Recording.open(self._made[run])


def _answer(case: Any, recordings: _Recordings) -> Answer:
    run = case.run if isinstance(case, Fault) else case
    try:
        found: dict[str, Any] = compare(recordings.of(run.on_one_device), recordings.of(run)).to_json()
    except Exception as error:  # one that fails is no reason not to go on with the others
        return Answer(case, "failed", f"{type(error).__name__}: {error}")
    where, reason = found.get("first_divergence") or {}, found["reason"]
    axis = re.search(r"mesh axis '(\w+)', ranks? ([\d, ]+) differ", reason)
    return Answer(
        case,
        found["verdict"],
        reason,
        place_of(found),
        where.get("step"),
        axis[1] if axis else "",
        tuple(map(int, axis[2].split(","))) if axis else (),
    )


def _name(run: Any) -> str:
    """A run in words."""
    return f"{run.form} {run.dtype} {run.options}"


def _axis(axis: str, ranks: Sequence[int]) -> str:
    return f"{axis}, ranks {' '.join(map(str, ranks))}" if axis else "-"


def _line(answer: Answer) -> str:
    if not isinstance(answer.case, Fault):
        return f"{_name(answer.case):32} {answer.verdict} {'' if answer.found else answer.reason}"
    marks = " ".join(
        f"{name} {'yes' if is_so else 'NO'}"
        for name, is_so in (("found", answer.found), ("located", answer.located), ("axis", answer.axis_named))
    )
    return f"{answer.case.name:20} {answer.verdict:12} {marks} step {answer.step} {answer.place}: {answer.reason}"


def _summary(answers: Sequence[Answer]) -> str:
    clean = [each for each in answers if not isinstance(each.case, Fault)]
    faults = [each for each in answers if isinstance(each.case, Fault)]
    on_axis = [each for each in faults if isinstance(each.case, Fault) and each.case.axis]
    return (
        f"{len(clean)} clean pairs: {sum(each.found for each in clean)} equal or rounding, "
        f"{sum(each.verdict == 'bug' for each in clean)} false alarms. {len(faults)} faults: "
        f"{sum(each.found for each in faults)} found, {sum(each.located for each in faults)} located; the axis and its ranks are "
        f"named for {sum(each.axis_named for each in on_axis)} of {len(on_axis)} where ranks differ that must agree, and for "
        f"{sum(bool(each.axis) for each in faults if each not in on_axis)} of {len(faults) - len(on_axis)} others."
    )


def _table(answers: Sequence[Answer]) -> str:
    """The tables of clean pairs and of faults, and every fault's answer in words."""
    marks = {True: "yes", False: "**no**"}
    lines = ["# Parallel training compared with one device", "", _summary(answers), ""]
    lines += ["| clean pair | ranks | verdict | |", "|---|---|---|---|"]
    said = []
    for each in answers:
        case = each.case
        if not isinstance(case, Fault):
            why = "" if each.found else f"{each.place}: {each.reason}"
            lines.append(f"| {_name(case)} | {case.num_ranks} | {each.verdict} | {_cell(why)} |")
            continue
        if not said:
            lines += ["", "| fault | program | expected | answer | found | located | axis |", "|---|" + "---|" * 6]
        expected = [" or ".join(case.verdicts), f"step {case.step}", " or ".join(case.places)]
        answer = [each.verdict, f"step {each.step}", each.place, _axis(each.axis, each.ranks)]
        cells = (
            *(f"`{case.name}`", _name(case.run), "; ".join([*expected, _axis(case.axis, case.ranks)])),
            *("; ".join(answer), marks[each.found], marks[each.located], marks[each.axis_named]),
        )
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
        said.append(f"- `{case.name}`: {case.what} Answer: {each.reason}")
    return "\n".join([*lines, *(["", "## What they are", "", *said] if said else [])]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "/")
