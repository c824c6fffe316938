"""Configuration files, key by key: JSON, TOML, INI, and YAML if its parser is installed."""

import configparser
import hashlib
import io
import json
import re
import tomllib
from datetime import date, time
from pathlib import Path
from typing import Any

from crossframe.environment.facts import Fact, flattened
from crossframe.errors import UsageError
from crossframe.files import FileError, parse_json, read_bytes
from crossframe.quoting import quote_error, quote_path

SUFFIXES = (".json", ".toml", ".ini", ".cfg", ".yaml", ".yml")
_LARGEST = 1 << 22
# Keys whose values are recorded as a digest.
_SECRET = re.compile(r"(^|[._-])(secret|password|passwd|api[_-]?key|token|credentials?)$", re.IGNORECASE)


def read_configuration(path: Path) -> dict[str, Fact]:
    """The values of a configuration file by dotted key. Values of secret keys are digests.

    Raises:
        UsageError: a file that cannot be read, that is of another format than its suffix states, or YAML without a parser.
    """
    return {key: hidden(key, value) for key, value in flattened(parse_configuration(path))}


def parse_configuration(path: Path) -> Any:
    """The content of a configuration file.

    Raises:
        UsageError: as of `read_configuration`.
    """
    try:
        content = read_bytes(path, _LARGEST)
    except FileError as error:
        raise UsageError(f"{error}; expected a configuration file") from None
    try:
        return _parsed(content.decode(), path.suffix.lower())
    except UsageError as error:
        raise UsageError(f"{quote_path(path)}: {error}") from None
    except Exception as error:  # each parser has errors of its own
        raise UsageError(
            f"{quote_path(path)}: expected {path.suffix.lstrip('.')}, cannot parse it: {quote_error(error)}"
        ) from None


def format_configuration(values: dict[str, Any], suffix: str) -> str:
    """A configuration file with these values.

    Args:
        suffix: one of SUFFIXES.

    Raises:
        UsageError: a value that the format cannot state.

    >>> print(format_configuration({"seed": 1, "optimizer": {"lr": 0.1, "name": "adamw"}}, ".toml"))
    "seed" = 1
    "optimizer" = {"lr" = 0.1, "name" = "adamw"}
    <BLANKLINE>
    """
    if suffix == ".json":
        return json.dumps(values, indent=1) + "\n"
    if suffix == ".toml":
        return "".join(f"{json.dumps(key)} = {_toml(value)}\n" for key, value in values.items())
    if suffix in (".ini", ".cfg"):
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_dict(values)
        text = io.StringIO()
        parser.write(text)
        return text.getvalue()
    from yaml import safe_dump  # it has parsed the files

    return safe_dump(values, sort_keys=False)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | str):
        return json.dumps(value)
    if isinstance(value, int | float):
        return str(value)  # also inf and nan
    if isinstance(value, date | time):
        return value.isoformat()
    raise UsageError(f"a TOML file cannot state {value!r}")


def hidden(key: str, value: Fact) -> Fact:
    """A value, or its digest if its key is that of a secret.

    >>> hidden("optimizer.lr", 0.1), hidden("hub.token", None), str(hidden("hub.token", "abc"))[:7]
    (0.1, None, 'sha256 ')
    """
    if isinstance(value, str) and _SECRET.search(key):
        return f"sha256 {hashlib.sha256(value.encode(errors='surrogateescape')).hexdigest()[:16]}"
    return value


def _parsed(text: str, suffix: str) -> Any:
    if suffix == ".json":
        return parse_json(text)
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix in (".ini", ".cfg"):
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(text)
        return {section: dict(parser[section]) for section in parser.sections()}
    if suffix not in SUFFIXES:
        raise UsageError(f"expected a configuration file with one of the suffixes {', '.join(SUFFIXES)}")
    try:
        from yaml import safe_load
    except ImportError:
        raise UsageError("needs PyYAML: pip install pyyaml, or pass the configuration as JSON or TOML") from None
    return safe_load(text)
