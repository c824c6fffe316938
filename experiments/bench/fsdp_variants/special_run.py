"""`python -m experiments bench fsdp-variants --special`: record the special cases and compare each with one device."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from crossframe.recording import Recording
from crossframe.verdict import compare
from experiments.bench.command import command_line, torch_machine, torch_machine_line
from experiments.bench.fsdp_variants.judge import FINE
from experiments.bench.fsdp_variants.special import CASES, STEPS, WORLD_SIZE, Case, record_cases
from experiments.bench.ranks import GLOO, on_ranks

FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        verdict: of the comparison with one device; FAILED where the run did not come to its end.
        why: the verdict's reason, or the error.
        signature: what the first divergence looks like.
        expected: as in `Case`.
    """

    name: str
    contestant: str
    verdict: str
    why: str
    signature: str | None
    expected: str

    @property
    def surprises(self) -> bool:
        """Whether it parts though nothing is known of that, or does not though it should."""
        return (self.verdict in FINE) == bool(self.expected)

    def line(self) -> str:
        """A line of the table."""
        verdict = self.verdict if self.verdict in FINE else f"**{self.verdict}**"
        said = "" if self.verdict in FINE else self.why + (f" (looks like {self.signature})" if self.signature else "")
        return "| " + " | ".join([self.name, self.contestant, verdict, said, self.expected]) + " |"


def run_special(console: Console, *, output: Path | None = None, keep: Path | None = None) -> int:
    """Record and compare all special cases; 0 if each came to what is known of it, 1 if one did not.

    Args:
        output: a Markdown file for the table, and beside it JSON.
        keep: a folder in which recordings stay; None: nothing stays.

    Raises:
        UsageError: a rank that did not end.
    """
    where = torch_machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if keep is None else keep
        outcomes = record_and_judge(CASES, folder)
    for each in outcomes:
        console.print(each.line(), markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(_markdown(outcomes, where))
        report = {"command": command_line(), **where, "cases": [asdict(each) for each in outcomes]}
        output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    return int(any(each.surprises for each in outcomes))


def record_and_judge(cases: Sequence[Case], folder: Path) -> list[Outcome]:
    """Record cases by one device and by ranks, and compare each case's two recordings."""
    said = [list(zip(*on_ranks(n, GLOO, record_cases, cases, str(folder)), strict=True)) for n in (1, WORLD_SIZE)]
    return [_outcome(case, folder, [*a, *b]) for case, a, b in zip(cases, *said, strict=True)]


def _outcome(case: Case, folder: Path, errors: Sequence[str | None]) -> Outcome:
    if failed := [error for error in errors if error is not None]:
        return Outcome(case.name, case.contestant, FAILED, failed[0], None, case.expected)
    said = compare(*(Recording.open(folder / case.folder / which) for which in ("alone", "ranks")))
    signature = said.diagnosis.signature if said.diagnosis else None
    return Outcome(case.name, case.contestant, said.verdict.value, said.reason, signature, case.expected)


def _markdown(outcomes: Sequence[Outcome], where: dict[str, Any]) -> str:
    fine = sum(each.verdict in FINE for each in outcomes)
    surprises = [f"{each.name}, {each.contestant}" for each in outcomes if each.surprises]
    lines = [
        "# torch's own, off the beaten track",
        "",
        f"`{command_line()}`: {torch_machine_line(where)}.",
        "",
        f"{len(outcomes)} small trainings of {STEPS} steps in float64 by {WORLD_SIZE} ranks, each compared with one device that "
        f"was fed the same samples: {fine} agree, {len(outcomes) - fine} do not. "
        + (
            f"Nothing was known of: {'; '.join(surprises)}." if surprises else "Of each that does not, it is known why."
        ),
        "",
        "| case | by | verdict | why | what is known |",
        "| --- | --- | --- | --- | --- |",
        *(each.line() for each in outcomes),
    ]
    return "\n".join(lines) + "\n"
