"""The changes in changes.toml and renames.toml, and their application to the files of the repository."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SETS = ("changes", "renames")
"""The sets of changes: a file for each."""
REPOSITORY = HERE / "repository"


@dataclass(frozen=True)
class Edit:
    """One replacement in a file.

    Attributes:
        file: its path in the repository.
        old: text that occurs once.
        new: what replaces it.
    """

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Change:
    """A change of the repository, and what the gate should answer. changes.toml says what each attribute means."""

    name: str
    kind: str
    message: str
    after: str
    passes: bool
    statuses: tuple[int, ...]
    names: str
    edits: tuple[Edit, ...]

    def apply(self, root: Path) -> None:
        """Edit the files below a folder.

        Raises:
            ValueError: a text that does not occur once.
        """
        for edit in self.edits:
            path = root / edit.file
            text = path.read_text()
            if text.count(edit.old) != 1:
                raise ValueError(f"{self.name}: {edit.file} has {text.count(edit.old)} times:\n{edit.old}")
            path.write_text(text.replace(edit.old, edit.new))


def read_changes(of: str) -> tuple[Change, ...]:
    """All changes of a set, in their order."""
    stated = tomllib.loads((HERE / f"{of}.toml").read_text())["change"]
    return tuple(
        Change(
            each["name"],
            each["kind"],
            each["message"],
            each["after"],
            each["passes"],
            tuple(each["statuses"]),
            each.get("names", ""),
            tuple(Edit(**edit) for edit in each["edit"]),
        )
        for each in stated
    )
