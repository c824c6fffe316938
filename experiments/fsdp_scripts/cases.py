"""The cases: a script with its runs, and pairs of runs of which the second one continues from a checkpoint of the first one."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crossframe.errors import UsageError

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    """A run of a script.

    Attributes:
        options: the script's command line, after the folder that it writes to.
    """

    options: str
    ranks: int


@dataclass(frozen=True)
class Resume:
    """Two runs of a script.

    Attributes:
        first: options of the run that saves a checkpoint.
        second: options of the run that goes on; "{first}" stands for the folder of the first one.
    """

    first: str
    second: str
    ranks: int


@dataclass(frozen=True)
class Script:
    """A script with torch's FSDP.

    Attributes:
        folder: has `train.py`, and `requirements.txt` if it needs packages next to those of the development environment.
        what: which library and loop.
        release: of the library.
        api: "FSDP1" or "FSDP2".
    """

    folder: Path
    what: str
    release: str
    api: str
    runs: tuple[Run, ...]
    resumes: tuple[Resume, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def set(self) -> str:
        """The scripts that were frozen, and ran first, together."""
        return self.folder.parent.name

    @property
    def requirements(self) -> Path | None:
        found = self.folder / "requirements.txt"
        return found if found.is_file() else None


def scripts_of(only: Sequence[str] = (), folder: Path = HERE) -> list[Script]:
    """All scripts, or those of these names.

    Raises:
        UsageError: there is no script of a name.
    """
    found = {path.parent.name: path for path in sorted(folder.glob("*/*/case.toml"))}
    if unknown := set(only) - found.keys():
        raise UsageError(f"fsdp-scripts: expected names of {sorted(found)}, got {sorted(unknown)}")
    return [_script(found[name]) for name in only or found]


def _script(path: Path) -> Script:
    table = tomllib.loads(path.read_text())
    runs = tuple(Run(**each) for each in table["runs"])
    resumes = tuple(Resume(**each) for each in table.get("resumes", ()))
    return Script(path.parent, table["what"], table["release"], table["api"], runs, resumes)
