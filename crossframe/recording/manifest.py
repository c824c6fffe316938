"""The manifest of a recording: the run, its mesh, and the layout of its parameters."""

import hashlib
import json
import math
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from crossframe.dtypes import numpy_dtype
from crossframe.errors import CrossframeError, RecordingError
from crossframe.files import FileError, parse_json, read_bytes
from crossframe.layout import Layout, layout_from_json
from crossframe.mesh import MeshSpec
from crossframe.param_map import ParamMap
from crossframe.params import ParamSpec, check_unique_names
from crossframe.plan import Strategy
from crossframe.quoting import quote, quote_error, quote_path
from crossframe.recording.event_format import INPUT
from crossframe.recording.known_settings import check_settings
from crossframe.recording.module_calls import called_module
from crossframe.recording.program import PROGRAM, products_in
from crossframe.recording.recorded_steps import Schedule
from crossframe.recording.sketch import SKETCHES, SKETCHES_BY_NAME, WHOLE
from crossframe.unit_assignment import enclosing_unit

FORMAT = 8
FORMATS = (3, 4, 5, 6, 7, FORMAT)
"""The formats that can be read. Format 3 does not state the rules of layouts and sketches, which are those of format 4, nor the
order of dims. In format 4 every step repeats the lines of its structure (`crossframe.recording.event_format`). Up to format 5 the
map of parameters has axes instead of patterns (`crossframe.param_map`). Up to format 6 sketches depend on names, and parameters
have no samples (`crossframe.recording.sample`). Up to format 7 there are no buffers."""
_BY_NAME = 6
"""The last format whose sketches depend on names."""
MANIFEST_NAME = "manifest.json"
FULL, SKETCH = "full", "sketch"
MOST_RANKS = 1 << 17
_TOKEN = re.compile(r"([0-9a-f]{16})?")
LARGEST = 1 << 26
"""Maximum bytes of a manifest. That of a model with 100,000 parameters has a tenth of this."""
LARGEST_INT = 1 << 63
LONGEST_NAME = 1024
"""Maximum characters of a name in a manifest: that of the model, a unit, a parameter, a path."""


@dataclass(frozen=True)
class Manifest:
    """The description of a run. Names are canonical, which means torch's, in every framework. Unknown values are None.

    Attributes:
        framework: "torch", "jax" or another that records.
        model: name of the model.
        dtype: dtype in which the run computes, which determines the bounds of a verdict.
        mesh: replicate x shard.
        steps: number of optimizer steps of the whole run.
        learning_rate: learning rate of the optimizer.
        seed: seed of weights and batches.
        terms: number of terms in the sum of one gradient element: tokens or samples in a microbatch of one rank.
        schedule: the steps whose tensors are recorded.
        detail: "full", or "sketch" if tensors of more than `WHOLE` elements are recorded as `crossframe.recording.sketch`.
        param_map: canonical names and the framework's names.
        units: (name, layout) in the order of forward, the root first; one for each bucket of a unit.
        strategy: value of `crossframe.plan.Strategy`.
        versions: versions of the packages.
        settings: further information as JSON. "command" is the command line that repeats the recording, without its
            destination (--output).
        states_no_order: whether the recording has format 3, whose activations do not state their order of dims.
        sketches_by_name: whether the recording has a format up to 6, whose sketches depend on names.
        token: identifies the job that records, so that it recognizes its own recording. Random by default; all processes of a
            job have the same token. Older recordings have "".

    Raises:
        RecordingError: a field is invalid; the message names it.
    """

    framework: str
    model: str
    dtype: str
    mesh: MeshSpec
    steps: int | None
    learning_rate: float | None
    seed: int | None
    terms: int | None
    schedule: Schedule
    param_map: ParamMap
    units: tuple[tuple[str, Layout], ...]
    strategy: str = Strategy.FULL_SHARD.value
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    detail: str = FULL
    token: str = field(default_factory=lambda: secrets.token_hex(8), compare=False)
    # Set when the manifest is read from a file. Without annotations they are not fields of the dataclass.
    states_no_order = False
    sketches_by_name = False
    _file_sha256 = ""

    def __post_init__(self) -> None:
        for name in ("framework", "model"):
            _expect(bool(getattr(self, name)), name, "a non-empty string", getattr(self, name))
            _expect_names(name, [getattr(self, name)])
        for name in ("steps", "terms"):
            value = getattr(self, name)
            _expect(value is None or 1 <= value < LARGEST_INT, name, "an int of at least 1, or none", value)
        rate = self.learning_rate
        positive = rate is None or (math.isfinite(rate) and rate >= 0)
        _expect(positive, "learning_rate", "a finite number of at least 0, or none", rate)
        _expect(self.detail in (FULL, SKETCH), "detail", f"{FULL!r} or {SKETCH!r}", self.detail)
        _expect(
            isinstance(self.token, str) and bool(_TOKEN.fullmatch(self.token)),
            "token",
            "16 hex digits, or none",
            self.token,
        )
        strategies = [strategy.value for strategy in Strategy]
        _expect(self.strategy in strategies, "strategy", f"one of {strategies}", self.strategy)
        _expect(bool(self.units), "units", "at least one unit", self.units)
        for name, layout in self.units:
            what = f"the layout of unit {name!r} over {self.mesh.shard} ranks, as 'mesh.shard' says"
            _expect(layout.world_size == self.mesh.shard, "units", what, f"{layout.world_size} ranks")
        with _naming("dtype"):
            numpy_dtype(self.dtype)
        with _naming("units"):
            check_unique_names(param for _, layout in self.units for param in layout.params)
        _expect_names("units", (unit for unit, _ in self.units))
        specs = self.params.values()
        _expect_names("units", (each for spec in specs for each in (spec.name, *spec.aliases)))
        _expect_names("param_map", (path for entry in self.param_map.entries for path in entry.paths))
        check_settings(self.settings)
        unmapped = [name for name in self.params if name not in self.param_map.by_name]
        _expect(not unmapped, "param_map", "an entry for every parameter", f"none for {unmapped[:4]}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.mesh.world_size

    @cached_property
    def params(self) -> dict[str, ParamSpec]:
        """Every parameter by canonical name, units in order."""
        return {param.name: param for _, layout in self.units for param in layout.params}

    @cached_property
    def products_in(self) -> str:
        """The format to which factors of products are rounded (`crossframe.recording.program.products_in`)."""
        program = self.settings.get(PROGRAM) or {}
        return products_in(self.dtype, program, (param.shape for param in self.params.values()))

    @cached_property
    def unit_of(self) -> dict[str, str]:
        """The unit of every parameter."""
        return {param.name: unit for unit, layout in self.units for param in layout.params}

    def layout_of(self, name: str) -> Layout:
        """The layout that has a parameter."""
        return next(layout for _, layout in self.units if any(param.name == name for param in layout.params))

    @cached_property
    def most_in_full(self) -> float:
        """The largest number of elements of a tensor that is recorded in full instead of as a sketch. A rank with a part of a
        tensor counts the whole tensor, so that all ranks decide alike."""
        return WHOLE if self.detail == SKETCH else math.inf

    def maker(self, module: str, use: str) -> str:
        """The unit whose code computed an activation: the module's own unit for an output, the enclosing one for an input."""
        module = called_module(module)
        return enclosing_unit(module.rpartition(".")[0] if use == INPUT else module, self.unit_names)

    @cached_property
    def unit_names(self) -> frozenset[str]:
        """All units, the root among them."""
        return frozenset({"", *(unit for unit, _ in self.units)})

    def to_json(self) -> dict:
        """The manifest as a JSON object."""
        return {
            "format": FORMAT,
            "token": self.token,
            "framework": self.framework,
            "model": self.model,
            "dtype": self.dtype,
            "world_size": self.world_size,
            "mesh": {"replicate": self.mesh.replicate, "shard": self.mesh.shard},
            "steps": self.steps,
            "learning_rate": None if self.learning_rate is None else float(self.learning_rate),
            "seed": self.seed,
            "terms": self.terms,
            "schedule": {
                "dense": self.schedule.dense,
                "every": self.schedule.every,
                "windows": [list(window) for window in self.schedule.windows],
            },
            "detail": self.detail,
            "sketches": SKETCHES,
            "param_map": self.param_map.to_json(),
            "units": [_unit_to_json(name, layout) for name, layout in self.units],
            "strategy": self.strategy,
            "versions": dict(self.versions),
            "settings": dict(self.settings),
        }

    @classmethod
    def from_json(cls, fields: Any) -> "Manifest":
        """The manifest that `to_json` wrote; RecordingError names a field that is missing or invalid."""
        _expect(isinstance(fields, dict), "(all)", "a JSON object", fields)
        form = fields.get("format")
        _expect(type(form) is int and form in FORMATS, "format", f"{FORMAT}, the format read here", form)
        if form > 3:
            known = SKETCHES if form > _BY_NAME else SKETCHES_BY_NAME
            _expect(
                fields.get("sketches") == known,
                "sketches",
                f"{known}, as format {form} has them",
                fields.get("sketches"),
            )
        sizes = _get(fields, "mesh", dict)
        with _naming("mesh"):
            mesh = MeshSpec(replicate=_get(sizes, "replicate", int), shard=_get(sizes, "shard", int))
        world_size = _get(fields, "world_size", int)
        _expect(world_size <= MOST_RANKS, "world_size", f"at most {MOST_RANKS} ranks", world_size)
        _expect(world_size == mesh.world_size, "world_size", f"{mesh.world_size}, as 'mesh' says", world_size)
        schedule = _get(fields, "schedule", dict)
        windows: Any = tuple(tuple(x) if isinstance(x, list) else (x,) for x in _get(schedule, "windows", list))
        rate = _get(fields, "learning_rate", (int, float, type(None)))
        with _naming("param_map"):
            param_map = ParamMap.from_json(_get(fields, "param_map", list))
        return cls(
            framework=_get(fields, "framework", str),
            model=_get(fields, "model", str),
            dtype=_get(fields, "dtype", str),
            mesh=mesh,
            steps=_get(fields, "steps", (int, type(None))),
            learning_rate=None if rate is None else float(rate),
            seed=_get(fields, "seed", (int, type(None))),
            terms=_get(fields, "terms", (int, type(None))),
            schedule=Schedule(_get(schedule, "dense", int), _get(schedule, "every", int), windows),
            param_map=param_map,
            units=tuple(_unit_from_json(unit) for unit in _get(fields, "units", list)),
            strategy=_get(fields, "strategy", str),
            versions=_get(fields, "versions", dict),
            settings=_get(fields, "settings", dict),
            detail=_get(fields, "detail", str),
            token=_get({"token": ""} | fields, "token", str),
        )

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return (json.dumps(self.to_json(), indent=1) + "\n").encode()

    @property
    def sha256(self) -> str:
        """The sha256 of the file in hex. Every rank records it, so that a changed manifest is detected."""
        return self._file_sha256 or hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """The manifest of the recording in a directory; RecordingError if it is missing or cannot be read."""
        path = directory / MANIFEST_NAME
        try:
            content = read_bytes(path, LARGEST)
        except FileError as error:
            if error.missing:
                raise RecordingError(
                    f"{quote_path(directory)}: expected a recording, but it has no {MANIFEST_NAME}; check the path"
                ) from None
            raise RecordingError(f"{error}; check the path, or record the run again") from None
        return cls.from_bytes(content, quote_path(path))

    @classmethod
    def from_bytes(cls, content: bytes, at: str) -> "Manifest":
        """The manifest from the content of its file; RecordingError if it is invalid.

        Args:
            at: the path, for messages.
        """
        try:
            fields = parse_json(content)
            manifest = cls.from_json(fields)
            object.__setattr__(manifest, "states_no_order", fields["format"] == 3)
            object.__setattr__(manifest, "sketches_by_name", fields["format"] <= _BY_NAME)
            # That of the file, not of the content that this version would write.
            object.__setattr__(manifest, "_file_sha256", hashlib.sha256(content).hexdigest())
            return manifest
        except RecordingError as error:
            raise RecordingError(f"{at}: {error}; record the run again with this version") from None
        except ValueError as error:
            raise RecordingError(f"{at}: expected JSON, but {quote_error(error)}; record the run again") from None


def _unit_to_json(name: str, layout: Layout) -> dict:
    params = [
        {
            "name": param.name,
            "shape": list(param.shape),
            "dtype": param.dtype,
            "aliases": list(param.aliases),
            "requires_grad": param.requires_grad,
        }
        for param in layout.params
    ]
    return {"name": name, "layout": layout.to_json(), "params": params}


def _unit_from_json(unit: Any) -> tuple[str, Layout]:
    _expect(isinstance(unit, dict), "units", "a list of objects", unit)
    name = _get(unit, "name", str)
    with _naming("units"):
        params = tuple(
            ParamSpec(
                _get(param, "name", str),
                tuple(_get(param, "shape", list)),
                _get(param, "dtype", str),
                tuple(_get(param, "aliases", list)),
                _get(param, "requires_grad", bool),
            )
            for param in _get(unit, "params", list)
        )
        return name, layout_from_json(_get(unit, "layout", dict), params)


def _get(fields: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    """A field of one of these exact types: unlike in Python, True is not an int."""
    value = fields.get(name) if isinstance(fields, dict) else None
    kinds: Sequence[type] = kind if isinstance(kind, tuple) else (kind,)
    _expect(type(value) in kinds, name, " or ".join(k.__name__ for k in kinds), value)
    return value


def _expect_names(field: str, names: Iterable[str]) -> None:
    for name in names:
        _expect(len(name) <= LONGEST_NAME, field, f"names of at most {LONGEST_NAME} characters", name)


def _expect(holds: bool, name: str, expected: str, came: Any) -> None:
    if not holds:
        raise RecordingError(f"manifest field {name!r}: expected {expected}, got {quote(came)}")


class _naming:
    """Converts errors of the core into a RecordingError that names the field."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RecordingError):
            return
        if isinstance(error, (CrossframeError, KeyError, TypeError, ValueError)):
            raise RecordingError(f"manifest field {self.name!r}: {quote_error(error)}") from None
