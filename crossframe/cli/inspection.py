"""`crossframe inspect RUN`: prints the findings in one recording."""

from rich.console import Console

from crossframe.inspection import Inspection

_MOST = 6


def print_inspection(console: Console, found: Inspection) -> None:
    """Print the findings, most severe first, at most six lines of each kind."""
    style = "bold red" if found.is_faulty else "green"
    verdict = "FAULTY" if found.is_faulty else "nothing wrong"
    console.print(
        f"{verdict}: {found.num_values:,} values of {found.num_steps} steps in {found.directory}",
        style=style,
        soft_wrap=True,
        highlight=False,
    )
    for title, sentences in (
        ("not finite", [each.describe() for each in found.not_finite]),
        ("ranks disagree", [each.describe() for each in found.disagreements]),
        ("optimizer", [each.describe() for each in found.departures]),
        ("grows", [each.describe() for each in found.growing]),
        ("note", list(found.notes)),
    ):
        for sentence in sentences[:_MOST]:
            console.print(f"{title}: {sentence}", soft_wrap=True, highlight=False, markup=False)
        if len(sentences) > _MOST:
            console.print(f"{title}: and {len(sentences) - _MOST} more; --json prints all", highlight=False)
