"""Writes the tables of the answers that are committed, one for each set of changes."""

import json
from pathlib import Path
from typing import Any

from experiments.goldens.history.changes import Change, read_changes
from experiments.goldens.history.run import RESULTS, Answer

_TITLES = {
    "changes": "Answers to twenty changes of a small repository",
    "renames": "Answers to changes that rename, fuse and split parameters",
}


def write_table(of: str) -> Path:
    """Write the table of a set of changes; returns its path."""
    path = RESULTS / of / "table.md"
    path.write_text(_text(of))
    return path


def _text(of: str) -> str:
    every = read_changes(of)
    paths = (RESULTS / of / name for name in ("first.json", "corrected.json"))
    first, corrected = (_read(path) if path.exists() else None for path in paths)
    assert first is not None
    changes = tuple(change for change in every if change.name in first["answers"])
    missing = [change.name for change in every if change not in changes]
    lines = [
        f"# {_TITLES[of]}",
        "",
        f"Made by `python -m experiments history --set {of} --table` of the answers of the command without `--table`; "
        "[README](../../README.md) says how they are judged.",
        "The first run is of the changes as they were frozen; nothing was corrected before it."
        + (" The corrected run repeats it after corrections of crossframe." if corrected else ""),
        "",
        *_summary("First run", changes, first),
        *(_summary("Corrected run", changes, corrected) if corrected else []),
        *([f"- Not run yet: {', '.join(missing)}."] if missing else []),
        "",
        "Statuses: 0 equal or rounding, 1 a bug, 2 failed, 3 undecided, 4 other settings, batches or initial values.",
        "",
        "| change | kind | should pass | status | right | names the place | pytest | seconds |"
        + (" corrected: status | right | names | pytest |" if corrected else ""),
        "|---|---|---|---|---|---|---|---|" + ("---|---|---|---|" if corrected else ""),
    ]
    for change in changes:
        own = first["answers"][change.name]
        cells = [change.name, change.kind, _yes(change.passes), str(own.status), _yes(own.right), _yes(own.names_place)]
        cells += [_yes(own.test_is_right, "right", "wrong"), f"{own.seconds:.0f}"]
        if corrected:
            after = corrected["answers"][change.name]
            cells += [str(after.status), _yes(after.right), _yes(after.names_place)]
            cells += [_yes(after.test_is_right, "right", "wrong")]
        lines.append(f"| {' | '.join(cells)} |")
    for title, answers in (("First run", first), ("Corrected run", corrected)):
        if answers:
            lines += ["", f"## {title}: what a person reads first", ""]
            lines += [f"- **{change.name}**: {answers['answers'][change.name].line}" for change in changes]
    return "\n".join(lines) + "\n"


def _summary(title: str, changes: tuple[Change, ...], measured: dict[str, Any]) -> list[str]:
    answers: list[Answer] = [measured["answers"][change.name] for change in changes]
    harmless, mistakes = ([each for each in answers if each.passes is passes] for passes in (True, False))
    seconds = sorted(each.seconds for each in answers)
    first, second = measured["golden_kb"]
    return [
        f"- {title}: {sum(e.right for e in harmless)} of {len(harmless)} harmless changes pass, "
        f"{sum(e.right for e in mistakes)} of {len(mistakes)} mistakes do not; "
        f"{sum(bool(e.names_place) for e in mistakes)} of {len(mistakes)} first lines name the place; "
        f"pytest is right {sum(e.test_is_right for e in answers)} of {len(answers)} times. "
        f"A check took {seconds[len(seconds) // 2]:.0f} s in the median and {seconds[-1]:.0f} s at most; "
        f"the goldens have {first:.0f} and {second:.0f} kB.",
    ]


def _read(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    return content | {"answers": {each["name"]: Answer(**each) for each in content["answers"]}}


def _yes(value: bool | None, yes: str = "yes", no: str = "no") -> str:
    return "" if value is None else yes if value else no
