"""`crossframe compare A B C ...`: groups of runs, or of checkpoints, that agree."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from rich.console import Console

from crossframe.bisect import Grouping, group_by_agreement
from crossframe.cli.exit_status import AGREE, exit_status
from crossframe.param_map import ParamMap
from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare, overall

T = TypeVar("T")


class _Said(Protocol):
    """The verdict on a pair."""

    @property
    def verdict(self) -> Verdict: ...
    @property
    def reason(self) -> str: ...


def compare_many(
    paths: Sequence[Path], *, steps: int | None, param_map: ParamMap | None, as_json: bool, console: Console
) -> int:
    """Print the groups of recordings that agree; returns 0 if there is one, else the gravest exit status between two groups.

    Args:
        steps: number of steps that are compared; None: all.
        param_map: as of `crossframe.verdict.compare`, of each pair.

    Raises:
        RecordingError: a recording that cannot be read.
        MappingError: the map does not fit the recordings.
    """
    opened = [Recording.open(path) for path in paths]
    runs = opened if steps is None else [recording.first(steps) for recording in opened]

    def compared(a: Recording, b: Recording) -> _Said:
        return compare(a, b, param_map=param_map, bitwise=False)

    return print_groups(runs, list(map(str, paths)), compared, as_json=as_json, console=console)


def print_groups(
    runs: Sequence[T], names: Sequence[str], compared: Callable[[T, T], _Said], *, as_json: bool, console: Console
) -> int:
    """Print the groups of runs that agree; returns the exit status of `compare_many`."""
    found = group_by_agreement(runs, compared, lambda said: said.verdict.agrees)
    if as_json:
        print(json.dumps(_to_json(found, names), indent=1))
    else:
        _print(found, names, console)
    between = [found.compared[pair].verdict for pair in found.between()]
    return exit_status(overall(between)) if between else AGREE


def _print(found: Grouping[_Said], names: Sequence[str], console: Console) -> None:
    num = len(found.groups)
    what = "all agree" if num == 1 else f"in {num} groups by agreement"
    console.print(f"{len(names)} runs, {what}", style="bold green" if num == 1 else "bold")
    for number, (first, *others) in enumerate(found.groups, start=1):
        console.print(f"group {number}: {names[first]}")
        for run in others:
            verdict = found.compared[first, run].verdict
            console.print(f"  {names[run]}: {'equal' if verdict is Verdict.EQUAL else 'agrees up to rounding'}")
    for a, b in found.between():
        said = found.compared[a, b]
        console.print(f"{names[a]} and {names[b]}: {said.verdict.value}: {said.reason}")
    for run, near in found.ambiguous:
        others = " and with ".join(names[first] for first in near)
        console.print(
            f"note: {names[run]} agrees with {others}, which do not agree with each other: rounding adds up, and agreement is "
            "not transitive here; perturbed runs measure how far it goes",
            style="yellow",
        )
    if any(len(group) > 2 for group in found.groups):
        console.print(
            "note: runs were compared with the first run of each group, and not with the others of their group"
        )


def _to_json(found: Grouping[_Said], names: Sequence[str]) -> dict:
    return {
        "groups": [[names[run] for run in group] for group in found.groups],
        "compared": [
            {"a": names[a], "b": names[b], "verdict": said.verdict.value, "reason": said.reason}
            for (a, b), said in sorted(found.compared.items())
        ],
        "ambiguous": [
            {"run": names[run], "agrees_with": [names[first] for first in near]} for run, near in found.ambiguous
        ],
    }
