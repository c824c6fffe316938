"""What became of faults, as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.faults.catalogue import FAULTS
from experiments.faults.judging import Found

HEAD = (
    "fault",
    "lies in",
    "dtype",
    "verdict",
    "detected",
    "localised",
    "diagnosed",
    "said",
    "by sketches",
    "by allclose",
    "by losses",
)
MARKS = {True: "yes", False: "**no**", None: "-"}


@dataclass(frozen=True)
class Table:
    """The whole text, and its totals alone."""

    markdown: str
    totals: str


def table(done: Sequence[Found], seconds: float) -> Table:
    """The table of all that was judged."""
    totals = "\n".join(_totals([each for each in done if each.dtype == dtype]) for dtype in _dtypes(done))
    lines = ["# Faults put in on purpose", "", f"{len(done)} runs in {seconds / 60:.0f} minutes.", "", totals, ""]
    lines += ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    lines += [_line(each) for each in done]
    lines += ["", "## What they are", ""]
    for name in dict.fromkeys(each.fault for each in done):
        fault = FAULTS[name]
        source = f" ({fault.source})" if fault.source else ""
        lines.append(f"- `{name}`: {fault.description}{source}")
    return Table("\n".join(lines) + "\n", totals)


def _dtypes(done: Sequence[Found]) -> list[str]:
    return list(dict.fromkeys(each.dtype for each in done))


def _line(each: Found) -> str:
    cells = [
        f"`{each.fault}`",
        f"{each.family}, {each.framework}",
        each.dtype,
        each.verdict,
        MARKS[each.detected],
        MARKS[each.localised],
        MARKS[each.diagnosed],
        ": ".join(filter(None, (each.place, each.signature))),
        each.sketched if each.sketched == each.verdict else f"**{each.sketched}**",
        "yes" if each.by_allclose else "no",
        "yes" if each.by_loss else "no",
    ]
    return "| " + " | ".join(cells) + " |"


def _totals(done: Sequence[Found]) -> str:
    """One sentence on the faults of one dtype."""
    described = [each for each in done if each.diagnosed is not None]
    named = sum(each.signature is not None for each in done if each.diagnosed is None)
    count = len(done)

    def share(part: int, whole: int) -> str:
        return f"{part} of {whole}" + (f" ({100 * part / whole:.0f} %)" if whole else "")

    return (
        f"- {done[0].dtype}: {share(sum(each.detected for each in done), count)} detected, "
        f"{share(sum(each.localised for each in done), count)} localised exactly, "
        f"{share(sum(bool(each.diagnosed) for each in described), len(described))} of those with a signature diagnosed "
        f"({named} others were given one all the same); sketches said the same of "
        f"{share(sum(each.sketched == each.verdict for each in done), count)}. By allclose on final parameters "
        f"{share(sum(each.by_allclose for each in done), count)} would have been seen, by losses "
        f"{share(sum(each.by_loss for each in done), count)}."
    )
