"""The environment of a process: facts by section and name, and their file in a recording."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossframe.errors import RecordingError
from crossframe.files import FileError, parse_json, read_bytes
from crossframe.quoting import quote, quote_error, quote_path
from crossframe.recording.event_format import ENVIRONMENT_NAME, rank_folder

Fact = str | int | float | bool | None

MACHINE, PACKAGES, VARIABLES, FRAMEWORK = "machine", "packages", "variables", "framework"
SOURCE, COMMAND, CONFIGURATION, RANDOM, MODULES = "source", "command", "configuration", "random", "modules"
RUN, OPTIMIZER, PARAMETERS, VALUES = "run", "optimizer", "parameters", "values"
SECTIONS = (
    *(PARAMETERS, MODULES, VALUES, OPTIMIZER, RUN, FRAMEWORK, COMMAND, CONFIGURATION, SOURCE),
    *(RANDOM, PACKAGES, VARIABLES, MACHINE),
)
HOST = "host"
"""The name of the machine, in the section MACHINE."""
_LARGEST_FILE = 1 << 25
LONGEST = 4096
"""Maximum characters of a name and of a text."""


@dataclass(frozen=True)
class Environment:
    """What a process runs in and with.

    Attributes:
        sections: facts by section and name.
        is_complete: whether a fact that is missing is absent in the process, such as a variable that is not set. False if only
            some facts are known.

    Raises:
        RecordingError: an unknown section, or a fact that is not a string, a number, a flag or None.
    """

    sections: Mapping[str, Mapping[str, Fact]]
    is_complete: bool = True

    def __post_init__(self) -> None:
        for section, facts in self.sections.items():
            if section not in SECTIONS:
                raise RecordingError(f"environment: expected sections of {', '.join(SECTIONS)}, got {quote(section)}")
            if not isinstance(facts, Mapping):
                raise RecordingError(f"environment section {section!r}: expected an object, got {quote(facts)}")
            for name, fact in facts.items():
                short = not isinstance(fact, str) or len(fact) <= LONGEST
                if not isinstance(fact, Fact) or not short or len(name) > LONGEST:
                    raise RecordingError(
                        f"environment section {section!r}: expected for {quote(name)} a number, a flag, or a text of at most "
                        f"{LONGEST} characters, got {quote(fact)}"
                    )

    def __getitem__(self, section: str) -> Mapping[str, Fact]:
        """The facts of a section; none if it is not stated."""
        return self.sections.get(section, {})

    @property
    def host(self) -> str:
        """The name of the machine; "" if it is not known."""
        return str(self[MACHINE].get(HOST) or "")

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return (json.dumps(self.sections, indent=1, allow_nan=False) + "\n").encode()


def environment_path(directory: Path, rank: int) -> Path:
    """The file with the environment of a rank."""
    return directory / rank_folder(rank) / ENVIRONMENT_NAME


def read_environment(directory: Path, rank: int) -> Environment | None:
    """The environment that a rank stated in a recording; None if it stated none, as in older recordings.

    Raises:
        RecordingError: a damaged file.
    """
    path = environment_path(directory, rank)
    try:
        fields: Any = parse_json(read_bytes(path, _LARGEST_FILE))
        if not isinstance(fields, dict):
            raise RecordingError(f"environment: expected an object, got {quote(fields)}")
        return Environment(fields)
    except FileError as error:
        if error.missing:
            return None
        raise RecordingError(f"{error}; record the run again") from None
    except RecordingError as error:
        raise RecordingError(f"{quote_path(path)}: {error}; record the run again") from None
    except ValueError as error:
        raise RecordingError(
            f"{quote_path(path)}: expected JSON, but {quote_error(error)}; record the run again"
        ) from None


def flattened(value: Any, prefix: str = "") -> Iterator[tuple[str, Fact]]:
    """The leaves of nested mappings and lists, by dotted key. A list of numbers and texts is one leaf.

    >>> dict(flattened({"optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}, "layers": [{"width": 4}]}))
    {'optimizer.lr': 0.1, 'optimizer.betas': '[0.9, 0.95]', 'layers.0.width': 4}
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flattened(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(each, Mapping | list | tuple) for each in value):
        for i, inner in enumerate(value):
            yield from flattened(inner, f"{prefix}.{i}" if prefix else str(i))
    elif value is None or (isinstance(value, bool | int | float) and value == value and abs(value) != float("inf")):
        yield prefix, value
    else:
        yield prefix, str(list(value) if isinstance(value, tuple) else value)[:LONGEST]
