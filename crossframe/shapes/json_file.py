"""Files that describe the shapes of a model as JSON."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from crossframe.errors import CrossframeError, ParamError, UsageError
from crossframe.files import FileError, read_bytes
from crossframe.params import ParamSpec
from crossframe.quoting import quote
from crossframe.shapes.model_shapes import ModelShapes

# What a file says of a parameter, and what JSON has for it. The first two are needed.
FIELDS = {"name": str, "shape": list, "dtype": str, "aliases": list, "requires_grad": bool}
NEEDED = ("name", "shape")
# Bounds of a file of shapes: the largest models have some ten thousand parameters.
MAX_FILE_BYTES = 2**24
MAX_PARAMS, MAX_UNITS, MAX_DIMS = 2**15, 2**11, 64


def from_json(path: Path, dtype: str) -> ModelShapes:
    """The shapes that a JSON file describes, as `model_shapes` documents it.

    Raises:
        UsageError: the file cannot be read, is not JSON, or is not such a mapping.
        ParamError: an invalid parameter, or a name that two parameters have.
        UnitError: a unit without parameters, or one that is listed twice.
    """
    top = _read(path)
    if not isinstance(top, dict):
        raise UsageError(
            f'{path}: expected a mapping of names to shapes, or of "params" and "units", got {_kind(top)} at the top'
        )
    units: Any = []
    if "params" in top:
        if unknown := sorted(set(top) - {"params", "units"}):
            raise UsageError(f'{path}: expected "params" and "units" alone, got {quote(unknown)} besides')
        entries, units = top["params"], top.get("units", [])
        if not isinstance(entries, list):
            raise UsageError(f'{path}: "params": expected a list of parameters, got {_kind(entries)}')
        if not isinstance(units, list):
            raise UsageError(f'{path}: "units": expected a list of names, got {_kind(units)}')
        params = [_spec(entry, f"{path}: params[{i}]", dtype) for i, entry in enumerate(entries)]
    else:
        params = [_spec({"name": name, "shape": shape}, str(path), dtype) for name, shape in top.items()]
    if not params:
        raise UsageError(f"{path}: expected at least one parameter, got none")
    for what, num, most in (("parameters", len(params), MAX_PARAMS), ("units", len(units), MAX_UNITS)):
        if num > most:
            raise UsageError(f"{path}: expected at most {most} {what}, got {num}")
    if strange := next((param for param in params if len(param.shape) > MAX_DIMS), None):
        raise ParamError(
            f"{path}: parameter {quote(strange.name)}: expected at most {MAX_DIMS} dims, got {len(strange.shape)}"
        )
    try:
        return ModelShapes(path.stem, tuple(params), tuple(units))
    except CrossframeError as error:
        raise type(error)(f"{path}: {error}") from None


def _read(path: Path) -> Any:
    try:
        content = read_bytes(path, MAX_FILE_BYTES)
    except FileError as error:
        raise UsageError(
            f"{path}: expected a file with the shapes of a model, cannot read it: {error.reason}"
        ) from None
    try:
        return json.loads(content, object_pairs_hook=_without_doubles, parse_constant=_no_constant)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except RecursionError:
        raise UsageError(f"{path}: expected the shapes of a model as JSON, got brackets nested too deep") from None
    except ValueError as error:  # bytes that are no text, a number of too many digits, and what is no JSON
        raise UsageError(f"{path}: expected the shapes of a model as JSON, cannot parse it: {error}") from None


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        double = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise UsageError(f"the key {quote(double)} stands twice in one mapping; name each once")
    return found


def _no_constant(text: str) -> None:
    raise UsageError(f"expected the shapes of a model as JSON, got the number {text}, which JSON has not")


def _spec(entry: Any, where: str, dtype: str) -> ParamSpec:
    """The parameter of one entry."""
    if not isinstance(entry, dict):
        raise ParamError(f'{where}: expected a parameter as a mapping with "name" and "shape", got {_kind(entry)}')
    if isinstance(entry.get("name"), str):
        where = f"{where}, parameter {quote(entry['name'])}"
    if missing := [field for field in NEEDED if field not in entry]:
        raise ParamError(f"{where}: a parameter needs {' and '.join(map(repr, missing))}, got {quote(sorted(entry))}")
    if unknown := sorted(set(entry) - set(FIELDS)):
        raise ParamError(f"{where}: unknown fields {quote(unknown)}, expected among {', '.join(FIELDS)}")
    for field, kind in FIELDS.items():
        if field in entry and not isinstance(entry[field], kind):
            raise ParamError(f"{where}: {field!r}: expected {KINDS[kind]}, got {_kind(entry[field])}")
    try:
        return ParamSpec(
            entry["name"],
            tuple(entry["shape"]),
            entry.get("dtype", dtype),
            tuple(entry.get("aliases", ())),
            entry.get("requires_grad", True),
        )
    except ParamError as error:
        raise ParamError(f"{where}: {error}") from None


KINDS = {str: "a string", list: "a list", bool: "true or false", dict: "a mapping", type(None): "null"}


def _kind(value: Any) -> str:
    """The JSON type of a value, or the number itself."""
    return KINDS.get(type(value)) or quote(value)
