"""The rules by number, read from `docs/rules.md`: what each is about, and its section."""

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from crossframe.errors import UsageError

DOCUMENT = Path(__file__).parents[2] / "docs" / "rules.md"


def _read_sections() -> dict[str, str]:
    sections = re.split(r"^## ", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {section[:3]: f"## {section.rstrip()}\n" for section in sections}


SECTIONS = _read_sections()
"""The section of each rule, as Markdown."""

TITLES = {rule: section.partition("\n")[0].partition(": ")[2] for rule, section in SECTIONS.items()}
"""What each rule is about."""


def known_rules(rules: Sequence[str]) -> tuple[str, ...]:
    """The numbers of rules as the document has them, given in any case.

    Raises:
        UsageError: a rule that does not exist.
    """
    if unknown := [rule for rule in rules if rule.upper() not in TITLES]:
        raise UsageError(
            f"rule: expected numbers from {min(TITLES)} to {max(TITLES)}, got {', '.join(map(repr, unknown))}"
        )
    return tuple(rule.upper() for rule in rules)


def print_rules(rules: Sequence[str], console: Console) -> None:
    """Print the sections of these rules as Markdown, each once, in the order given.

    Raises:
        UsageError: a rule that does not exist. Nothing is printed then.
    """
    sections = [SECTIONS[rule] for rule in dict.fromkeys(known_rules(rules))]
    console.print("\n".join(sections), end="", markup=False, highlight=False)
