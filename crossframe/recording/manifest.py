"""What a recording says of itself: which run it is of, on which mesh, and how its parameters lie on the ranks."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crossframe.dtypes import itemsize
from crossframe.errors import CrossframeError, RecordingError
from crossframe.layout import Layout, layout_from_json
from crossframe.mesh import MeshSpec
from crossframe.names import ParamMap
from crossframe.params import ParamSpec, check_unique_names
from crossframe.plan import Strategy

FORMAT = 2
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True)
class Schedule:
    """At which steps tensors are recorded: the first `dense` steps, every `every`-th, and the last."""

    dense: int
    every: int

    def __post_init__(self) -> None:
        if type(self.dense) is not int or self.dense < 0:
            raise RecordingError(f"manifest field 'schedule.dense': expected an int of at least 0, got {self.dense!r}")
        if type(self.every) is not int or self.every < 1:
            raise RecordingError(f"manifest field 'schedule.every': expected an int of at least 1, got {self.every!r}")

    def records(self, step: int, steps: int) -> bool:
        """Whether tensors of this step are recorded in a run of `steps` steps.

        >>> [step for step in range(10) if Schedule(dense=2, every=4).records(step, 10)]
        [0, 1, 4, 8, 9]
        """
        return step < self.dense or step % self.every == 0 or step == steps - 1

    def is_dense(self, step: int) -> bool:
        """Whether what is a rank's own is recorded too, outputs of units and unreduced gradients: the largest part by far."""
        return step < self.dense


@dataclass(frozen=True)
class Manifest:
    """The description of a run. Names are canonical (torch's), whoever wrote it.

    Attributes:
        framework: "torch", "jax" or another that records.
        model: name of the model.
        dtype: dtype in which the run computes; it sets the bounds of a verdict.
        mesh: replicate x shard.
        steps: optimizer steps of the whole run.
        learning_rate: of the optimizer.
        seed: from which weights and batches come.
        terms: how many terms the sum behind one gradient element has: tokens or samples in a microbatch of one rank.
        schedule: at which steps tensors are recorded.
        param_map: canonical names and the framework's own.
        units: (name, layout) in the order of forward, the root first. A unit of several buckets stands once a bucket.
        strategy: value of `crossframe.plan.Strategy`.
        versions: of the packages that ran.
        settings: whatever else is worth knowing; JSON.

    Raises:
        RecordingError: a field that cannot be so; the message names it.
    """

    framework: str
    model: str
    dtype: str
    mesh: MeshSpec
    steps: int
    learning_rate: float
    seed: int
    terms: int
    schedule: Schedule
    param_map: ParamMap
    units: tuple[tuple[str, Layout], ...]
    strategy: str = Strategy.FULL_SHARD.value
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("framework", "model"):
            _expect(bool(getattr(self, name)), name, "a non-empty string", getattr(self, name))
        for name in ("steps", "terms"):
            _expect(getattr(self, name) >= 1, name, "an int of at least 1", getattr(self, name))
        positive = math.isfinite(self.learning_rate) and self.learning_rate >= 0
        _expect(positive, "learning_rate", "a finite number of at least 0", self.learning_rate)
        strategies = [strategy.value for strategy in Strategy]
        _expect(self.strategy in strategies, "strategy", f"one of {strategies}", self.strategy)
        _expect(bool(self.units), "units", "at least one unit", self.units)
        for name, layout in self.units:
            what = f"the layout of unit {name!r} over {self.mesh.shard} ranks, as 'mesh.shard' says"
            _expect(layout.world_size == self.mesh.shard, "units", what, f"{layout.world_size} ranks")
        with _naming("dtype"):
            itemsize(self.dtype)
        with _naming("units"):
            check_unique_names(param for _, layout in self.units for param in layout.params)
        unmapped = sorted(set(self.params) - set(self.param_map.by_name))
        _expect(not unmapped, "param_map", "an entry for every parameter", f"none for {unmapped[:4]}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.mesh.world_size

    @property
    def params(self) -> dict[str, ParamSpec]:
        """Every parameter by canonical name, units in order."""
        return {param.name: param for _, layout in self.units for param in layout.params}

    @property
    def unit_of(self) -> dict[str, str]:
        """The unit of every parameter."""
        return {param.name: unit for unit, layout in self.units for param in layout.params}

    def to_json(self) -> dict:
        """The manifest as a JSON object."""
        return {
            "format": FORMAT,
            "framework": self.framework,
            "model": self.model,
            "dtype": self.dtype,
            "world_size": self.world_size,
            "mesh": {"replicate": self.mesh.replicate, "shard": self.mesh.shard},
            "steps": self.steps,
            "learning_rate": self.learning_rate,
            "seed": self.seed,
            "terms": self.terms,
            "schedule": {"dense": self.schedule.dense, "every": self.schedule.every},
            "param_map": self.param_map.to_json(),
            "units": [_unit_to_json(name, layout) for name, layout in self.units],
            "strategy": self.strategy,
            "versions": dict(self.versions),
            "settings": dict(self.settings),
        }

    @classmethod
    def from_json(cls, fields: Any) -> "Manifest":
        """The manifest that `to_json` wrote; RecordingError names the field that is missing or wrong."""
        _expect(isinstance(fields, dict), "(all)", "a JSON object", fields)
        _expect(fields.get("format") == FORMAT, "format", f"{FORMAT}, the format read here", fields.get("format"))
        sizes = _get(fields, "mesh", dict)
        with _naming("mesh"):
            mesh = MeshSpec(replicate=_get(sizes, "replicate", int), shard=_get(sizes, "shard", int))
        world_size = _get(fields, "world_size", int)
        _expect(world_size == mesh.world_size, "world_size", f"{mesh.world_size}, as 'mesh' says", world_size)
        schedule = _get(fields, "schedule", dict)
        with _naming("param_map"):
            param_map = ParamMap.from_json(_get(fields, "param_map", list))
        return cls(
            framework=_get(fields, "framework", str),
            model=_get(fields, "model", str),
            dtype=_get(fields, "dtype", str),
            mesh=mesh,
            steps=_get(fields, "steps", int),
            learning_rate=float(_get(fields, "learning_rate", (int, float))),
            seed=_get(fields, "seed", int),
            terms=_get(fields, "terms", int),
            schedule=Schedule(_get(schedule, "dense", int), _get(schedule, "every", int)),
            param_map=param_map,
            units=tuple(_unit_from_json(unit) for unit in _get(fields, "units", list)),
            strategy=_get(fields, "strategy", str),
            versions=_get(fields, "versions", dict),
            settings=_get(fields, "settings", dict),
        )

    def write(self, directory: Path) -> None:
        """Write `manifest.json` so that it is there as a whole or not at all."""
        part = directory / (MANIFEST_NAME + ".part")
        part.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        os.replace(part, directory / MANIFEST_NAME)

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """The manifest of the recording in a directory; RecordingError where there is none that can be read."""
        path = directory / MANIFEST_NAME
        if not path.is_file():
            raise RecordingError(f"{directory}: expected a recording, but it has no {MANIFEST_NAME}; check the path")
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except RecordingError as error:
            raise RecordingError(f"{path}: {error}; record the run again with this version") from None
        except ValueError as error:
            raise RecordingError(f"{path}: expected JSON, but {error}; record the run again") from None


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
    """A field of the right type. True is not an int here, though Python says that it is."""
    value = fields.get(name) if isinstance(fields, dict) else None
    kinds: Sequence[type] = kind if isinstance(kind, tuple) else (kind,)
    _expect(type(value) in kinds, name, " or ".join(k.__name__ for k in kinds), value)
    return value


def _expect(holds: bool, name: str, expected: str, came: Any) -> None:
    if not holds:
        raise RecordingError(f"manifest field {name!r}: expected {expected}, got {came!r}")


class _naming:
    """Turns what the core says of a bad value into a RecordingError that names the field."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RecordingError):
            return
        if isinstance(error, (CrossframeError, KeyError, TypeError, ValueError)):
            raise RecordingError(f"manifest field {self.name!r}: {error}") from None
