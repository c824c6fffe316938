"""ParamMap: the names and axis orders of one model in two frameworks.

Canonical are torch's names and torch's axis order. A recording, a shard and a checkpoint speak canonically, whoever wrote them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from crossframe.errors import MappingError
from crossframe.shown import shown


@dataclass(frozen=True)
class MapEntry:
    """One parameter in both frameworks.

    Attributes:
        name: canonical (torch) name.
        path: flax path, its parts joined by ".".
        axes: how to transpose the flax array into torch's axis order, as `numpy.transpose` takes it; None keeps the order.
    """

    name: str
    path: str
    axes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for field in ("name", "path"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise MappingError(f"an entry needs a {field}: expected a non-empty string, got {shown(value)}")
        if self.axes is not None and not _is_permutation(self.axes):
            raise MappingError(f"parameter {self.name!r}: expected a permutation as axes, got {shown(self.axes)}")

    @property
    def inverse_axes(self) -> tuple[int, ...] | None:
        """How to transpose torch's array into flax's axis order."""
        return None if self.axes is None else tuple(self.axes.index(i) for i in range(len(self.axes)))

    def to_canonical(self, array: Any) -> Any:
        """A flax array (numpy or JAX) in torch's axis order."""
        return array if self.axes is None else array.transpose(self.axes)

    def from_canonical(self, array: Any) -> Any:
        """A torch-ordered array (numpy or JAX) in flax's axis order."""
        return array if self.axes is None else array.transpose(self.inverse_axes)

    def canonical_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The torch shape of a flax array of this shape."""
        if self.axes is not None and len(self.axes) != len(shape):
            raise MappingError(f"parameter {self.name!r}: axes {self.axes} do not fit shape {shape} of {self.path!r}")
        return shape if self.axes is None else tuple(shape[i] for i in self.axes)


def _is_permutation(axes: Any) -> bool:
    return isinstance(axes, tuple) and all(type(i) is int for i in axes) and sorted(axes) == list(range(len(axes)))


@dataclass(frozen=True)
class ParamMap:
    """One to one between canonical names and flax paths, in canonical order.

    >>> pmap = ParamMap((MapEntry("fc.weight", "fc.kernel", (1, 0)), MapEntry("fc.bias", "fc.bias")))
    >>> pmap.by_path["fc.kernel"].name
    'fc.weight'
    """

    entries: tuple[MapEntry, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.entries, tuple) or not all(isinstance(entry, MapEntry) for entry in self.entries):
            raise MappingError(f"expected a tuple of MapEntry, got {shown(self.entries)}")
        for field in ("name", "path"):
            values = [getattr(entry, field) for entry in self.entries]
            if twice := sorted({value for value in values if values.count(value) > 1}):
                raise MappingError(f"a map is one to one, but these stand twice as {field}: {twice}")

    @cached_property
    def by_name(self) -> Mapping[str, MapEntry]:
        """Entries by canonical name."""
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def by_path(self) -> Mapping[str, MapEntry]:
        """Entries by flax path."""
        return {entry.path: entry for entry in self.entries}

    def check(self, names: Iterable[str], paths: Iterable[str]) -> None:
        """Raise MappingError, listing them, if names or paths are missing from the map or are in it for nothing."""
        problems = []
        for what, have, mapped in (("name", set(names), set(self.by_name)), ("path", set(paths), set(self.by_path))):
            if missing := sorted(have - mapped):
                problems.append(f"not in the map, by {what}: {missing}")
            if extra := sorted(mapped - have):
                problems.append(f"in the map but not in the model, by {what}: {extra}")
        if problems:
            raise MappingError("the map does not fit the models; " + "; ".join(problems))

    def to_json(self) -> list:
        """The map as JSON."""
        return [[e.name, e.path, list(e.axes) if e.axes is not None else None] for e in self.entries]

    @classmethod
    def from_json(cls, rows: list) -> "ParamMap":
        """The map that `to_json` wrote; MappingError if it is none."""
        entries = []
        for row in rows if isinstance(rows, list) else [rows]:
            if not isinstance(row, list) or len(row) != 3:
                raise MappingError(f"expected a list of [name, path, axes], got {shown(row)}")
            name, path, axes = row
            entries.append(MapEntry(name, path, tuple(axes) if isinstance(axes, list) else axes))
        return cls(tuple(entries))


def identity_map(names: Iterable[str]) -> ParamMap:
    """The map of a model whose paths and axis orders are torch's already."""
    return ParamMap(tuple(MapEntry(name, name) for name in names))
