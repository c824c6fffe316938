"""Maps the names and axis orders of a model between two frameworks (`ParamMap`).

The names and the axis order of torch are canonical: recordings, shards and checkpoints of every framework use them.

In most cases a parameter of torch is one array of flax with its axes in another order. Attention differs in two ways: flax keeps
heads separate, with (width, num_heads, head_width) instead of torch's (width, width); and torch may store query, key and value in
one parameter of (3 * width, width), where flax has three arrays. An entry can therefore also split a canonical dim and join
several arrays. Nothing is computed, so a round trip gives the same bits.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from crossframe.errors import MappingError
from crossframe.quoting import quote


@dataclass(frozen=True)
class MapEntry:
    """One parameter in both frameworks.

    Attributes:
        name: canonical (torch) name.
        path: flax path, with parts joined by "."; or a tuple of paths whose arrays are concatenated along canonical dim 0.
        axes: the argument of `numpy.transpose` that converts a flax array to torch's axis order; None: the same order.
        split: None, or (dim, size): this dim of the canonical array is two dims in flax, the inner of which has this size.
        rows: for several paths, the number of canonical rows of each; None: the same number.

    Raises:
        MappingError: a field is invalid.

    >>> query = MapEntry("query.weight", "query.kernel", axes=(1, 2, 0), split=(0, 4))
    >>> query.canonical_shape((12, 3, 4)), query.from_canonical(np.zeros((12, 12))).shape
    ((12, 12), (12, 3, 4))
    """

    name: str
    path: str | tuple[str, ...]
    axes: tuple[int, ...] | None = None
    split: tuple[int, int] | None = None
    rows: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise MappingError(f"an entry needs a name: expected a non-empty string, got {quote(self.name)}")
        paths = self.path if isinstance(self.path, tuple) else (self.path,)
        if not paths or not all(isinstance(path, str) and path for path in paths):
            raise MappingError(
                f"an entry needs a path: expected a non-empty string, or a tuple of them, got {quote(self.path)}"
            )
        if self.axes is not None and not _is_permutation(self.axes):
            raise MappingError(f"parameter {self.name!r}: expected a permutation as axes, got {quote(self.axes)}")
        if self.split is not None and not _is_split(self.split, self.axes):
            raise MappingError(
                f"parameter {self.name!r}: expected as split a canonical dim and the size of the inner of two dims, which the "
                f"axes count, got {quote(self.split)} with axes {self.axes}"
            )
        if self.rows is not None and not (_are_sizes(self.rows) and len(self.rows) == len(paths) > 1):
            raise MappingError(
                f"parameter {self.name!r}: expected as rows a positive number for each of several paths, got "
                f"{quote(self.rows)} for {len(paths)}"
            )

    @property
    def paths(self) -> tuple[str, ...]:
        """The flax paths in the order in which their arrays are concatenated."""
        return self.path if isinstance(self.path, tuple) else (self.path,)

    @property
    def inverse_axes(self) -> tuple[int, ...] | None:
        """The axes that transpose torch's array, after its dim is split, to flax's axis order."""
        return None if self.axes is None else tuple(self.axes.index(i) for i in range(len(self.axes)))

    def to_canonical(self, *arrays: Any) -> Any:
        """Convert flax arrays (numpy or JAX), one for each path, to the canonical array."""
        self._check_count(arrays)
        parts = [self._merged(array if self.axes is None else array.transpose(self.axes)) for array in arrays]
        if len(parts) == 1:
            return parts[0]
        if all(isinstance(part, np.ndarray) for part in parts):
            return np.concatenate(parts)
        return parts[0].__array_namespace__().concat(parts)

    def from_canonical(self, array: Any, path: str | None = None) -> Any:
        """Convert a canonical array (numpy or JAX) to a flax array.

        Args:
            path: the path of the flax array, if the entry has several.
        """
        if len(self.paths) > 1:
            start, stop = self._run(array.shape, path)
            array = array[start:stop]
        if self.split is not None:
            array = array.reshape(self._split_shape(array.shape))
        return array if self.axes is None else array.transpose(self.inverse_axes)

    def canonical_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """The canonical shape for flax arrays of these shapes, one for each path.

        Raises:
            MappingError: the shapes do not match axes, split or rows, or cannot be concatenated.
        """
        self._check_count(shapes)
        found = [self._one_shape(shape, path) for shape, path in zip(shapes, self.paths, strict=True)]
        if len(found) == 1:
            return found[0]
        if () in found or len({shape[1:] for shape in found}) > 1:
            raise MappingError(
                f"parameter {self.name!r}: expected shapes that differ along dim 0 alone, to join, got {found} of {self.paths}"
            )
        rows = tuple(shape[0] for shape in found)
        if rows != (self.rows or rows[:1] * len(rows)):
            raise MappingError(
                f"parameter {self.name!r}: expected {self.rows or 'as many'} rows of {self.paths}, got {rows}; correct the "
                "map's rows"
            )
        return sum(rows), *found[0][1:]

    def leaf_shape(self, shape: tuple[int, ...], path: str) -> tuple[int, ...]:
        """The flax shape of the array of a path, for a canonical parameter of this shape."""
        if len(self.paths) > 1:
            start, stop = self._run(shape, path)
            shape = (stop - start, *shape[1:])
        if self.split is not None:
            shape = self._split_shape(shape)
        return shape if self.inverse_axes is None else tuple(shape[i] for i in self.inverse_axes)

    def _merged(self, array: Any) -> Any:
        if self.split is None:
            return array
        dim, shape = self.split[0], array.shape
        return array.reshape(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])

    def _split_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        assert self.split is not None
        dim, size = self.split
        return (*shape[:dim], shape[dim] // size, size, *shape[dim + 1 :])

    def _one_shape(self, shape: tuple[int, ...], path: str) -> tuple[int, ...]:
        if self.axes is not None and len(self.axes) != len(shape):
            raise MappingError(
                f"parameter {self.name!r}: expected {len(shape)} axes for {path!r} of shape {shape}, got {self.axes}; "
                "correct the map"
            )
        shape = shape if self.axes is None else tuple(shape[i] for i in self.axes)
        if self.split is None:
            return shape
        dim, size = self.split
        if len(shape) < dim + 2 or shape[dim + 1] != size:
            raise MappingError(
                f"parameter {self.name!r}: split {self.split} does not fit {path!r}, which has shape {shape} in torch's order: "
                f"expected {size} at dim {dim + 1}"
            )
        return *shape[:dim], shape[dim] * size, *shape[dim + 2 :]

    def _check_count(self, given: tuple[Any, ...]) -> None:
        if len(given) != len(self.paths):
            raise MappingError(f"parameter {self.name!r}: expected one for each of {self.paths}, got {len(given)}")

    def _run(self, shape: tuple[int, ...], path: str | None) -> tuple[int, int]:
        """The canonical rows of one of several paths."""
        if path not in self.paths:
            raise MappingError(f"parameter {self.name!r}: expected one of the paths {self.paths}, got {quote(path)}")
        index = self.paths.index(path)
        rows = self.rows or (shape[0] // len(self.paths),) * len(self.paths)
        return sum(rows[:index]), sum(rows[: index + 1])


def _is_permutation(axes: Any) -> bool:
    return isinstance(axes, tuple) and all(type(i) is int for i in axes) and sorted(axes) == list(range(len(axes)))


def _are_sizes(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and value > 0 for value in values)


def _is_split(split: Any, axes: tuple[int, ...] | None) -> bool:
    if not isinstance(split, tuple) or len(split) != 2 or not all(type(value) is int for value in split):
        return False
    dim, size = split
    return dim >= 0 and size > 0 and (axes is None or dim + 1 < len(axes))


@dataclass(frozen=True)
class ParamMap:
    """A one-to-one map between canonical names and flax paths, in canonical order.

    >>> pmap = ParamMap((MapEntry("fc.weight", "fc.kernel", (1, 0)), MapEntry("fc.bias", "fc.bias")))
    >>> pmap.by_path["fc.kernel"].name
    'fc.weight'
    """

    entries: tuple[MapEntry, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.entries, tuple) or not all(isinstance(entry, MapEntry) for entry in self.entries):
            raise MappingError(f"expected a tuple of MapEntry, got {quote(self.entries)}")
        for field, values in (
            ("name", [entry.name for entry in self.entries]),
            ("path", [path for entry in self.entries for path in entry.paths]),
        ):
            if twice := sorted(value for value, times in Counter(values).items() if times > 1):
                raise MappingError(f"a map is one to one, but these occur twice as {field}: {twice}")

    @classmethod
    def of(cls, *tables: Iterable[MapEntry]) -> "ParamMap":
        """The map of several modules, in this order.

        >>> pmap = ParamMap.of(embedding("embed", "embed"), norm("norm", "norm"), linear("head", "head", bias=False))
        >>> [(entry.name, entry.path) for entry in pmap.entries[-2:]]
        [('norm.bias', 'norm.bias'), ('head.weight', 'head.kernel')]
        """
        return cls(tuple(entry for table in tables for entry in table))

    @cached_property
    def by_name(self) -> Mapping[str, MapEntry]:
        """Entries by canonical name."""
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def by_path(self) -> Mapping[str, MapEntry]:
        """Entries by flax path."""
        return {path: entry for entry in self.entries for path in entry.paths}

    def check(self, names: Iterable[str], paths: Iterable[str]) -> None:
        """Raise MappingError if the map lacks names or paths of the models, or has others. The message lists them."""
        problems = []
        for what, have, mapped in (("name", set(names), set(self.by_name)), ("path", set(paths), set(self.by_path))):
            if missing := sorted(have - mapped):
                problems.append(f"not in the map, by {what}: {missing}")
            if extra := sorted(mapped - have):
                problems.append(f"in the map but not in the model, by {what}: {extra}")
        if problems:
            raise MappingError("the map does not fit the models; " + "; ".join(problems))

    def from_canonical(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Flax arrays by path, from canonical arrays by name: for instance the initial values of a flax model from torch's
        state dict. Entries that are not in the map, such as buffers, are left out.

        Raises:
            MappingError: parameters of the map are missing.

        >>> pmap = ParamMap.of(linear("fc", "dense"))
        >>> leaves = pmap.from_canonical({"fc.weight": np.zeros((3, 2)), "fc.bias": np.zeros(3)})
        >>> {path: leaf.shape for path, leaf in leaves.items()}
        {'dense.kernel': (2, 3), 'dense.bias': (3,)}
        """
        if missing := [entry.name for entry in self.entries if entry.name not in arrays]:
            raise MappingError(f"expected an array for each parameter of the map, but these are missing: {missing}")
        return {path: self.by_path[path].from_canonical(arrays[self.by_path[path].name], path) for path in self.by_path}

    def to_json(self) -> list:
        """The map as JSON: [name, path, axes] for each entry, or [name, paths, axes, split, rows] if it splits or joins."""
        rows = []
        for entry in self.entries:
            row = [entry.name, entry.path, entry.axes]
            if entry.split is not None or isinstance(entry.path, tuple):
                row += [entry.split, entry.rows]
            rows.append([list(value) if isinstance(value, tuple) else value for value in row])
        return rows

    @classmethod
    def from_json(cls, rows: list) -> "ParamMap":
        """The map that `to_json` wrote; MappingError if `rows` is not a map."""
        entries = []
        for row in rows if isinstance(rows, list) else [rows]:
            if not isinstance(row, list) or len(row) not in (3, 5):
                raise MappingError(f"expected a list of [name, path, axes], got {quote(row)}")
            fields: list[Any] = [tuple(value) if isinstance(value, list) else value for value in row]
            entries.append(MapEntry(*fields))
        return cls(tuple(entries))


def identity_map(names: Iterable[str]) -> ParamMap:
    """The map of a model whose paths and axis orders are those of torch."""
    return ParamMap(tuple(MapEntry(name, name) for name in names))


# The entries of each kind of module, in torch's order of registration, given its name in torch and its path in flax.


def linear(name: str, path: str, *, bias: bool = True) -> tuple[MapEntry, ...]:
    """The entries of torch's nn.Linear, whose weight is (out, in), and flax's Linear, whose kernel is (in, out)."""
    return MapEntry(f"{name}.weight", f"{path}.kernel", (1, 0)), *_bias(name, path, bias)


def conv(name: str, path: str, *, dims: int = 2, bias: bool = True) -> tuple[MapEntry, ...]:
    """The entries of torch's nn.Conv1d, 2d or 3d, with a weight of (out, in, *kernel), and flax's Conv, with (*kernel, in, out).

    >>> conv("stem", "stem")[0].axes
    (3, 2, 0, 1)
    """
    return MapEntry(f"{name}.weight", f"{path}.kernel", (dims + 1, dims, *range(dims))), *_bias(name, path, bias)


def embedding(name: str, path: str) -> tuple[MapEntry, ...]:
    """The entry of torch's nn.Embedding and flax's Embed, both of (number of embeddings, width)."""
    return (MapEntry(f"{name}.weight", f"{path}.embedding"),)


def norm(name: str, path: str, *, bias: bool = True) -> tuple[MapEntry, ...]:
    """The entries of layer, group, batch and RMS norms, the last of which has no bias. Running statistics are not parameters."""
    return MapEntry(f"{name}.weight", f"{path}.scale"), *_bias(name, path, bias)


def attention(name: str, path: str, head_width: int, *, bias: bool = True) -> tuple[MapEntry, ...]:
    """The entries of torch's nn.MultiheadAttention, which stores query, key and value in one parameter, and flax's
    MultiHeadAttention.

    >>> [(entry.name, len(entry.paths)) for entry in attention("a", "a", head_width=8)]
    [('a.in_proj_weight', 3), ('a.in_proj_bias', 3), ('a.out_proj.weight', 1), ('a.out_proj.bias', 1)]
    """
    parts = [f"{path}.{part}" for part in ("query", "key", "value")]
    entries = [MapEntry(f"{name}.in_proj_weight", tuple(f"{p}.kernel" for p in parts), (1, 2, 0), (0, head_width))]
    if bias:
        entries.append(MapEntry(f"{name}.in_proj_bias", tuple(f"{p}.bias" for p in parts), None, (0, head_width)))
    return *entries, *from_heads(f"{name}.out_proj", f"{path}.out", head_width, bias=bias)


def to_heads(name: str, path: str, head_width: int, *, bias: bool = True) -> tuple[MapEntry, ...]:
    """The entries of a separate query, key or value: torch's nn.Linear, and flax's LinearGeneral of
    (in, (num_heads, head_width))."""
    kernel = MapEntry(f"{name}.weight", f"{path}.kernel", (1, 2, 0), (0, head_width))
    return (kernel, MapEntry(f"{name}.bias", f"{path}.bias", None, (0, head_width))) if bias else (kernel,)


def from_heads(name: str, path: str, head_width: int, *, bias: bool = True) -> tuple[MapEntry, ...]:
    """The entries of the projection after attention: torch's nn.Linear, and flax's LinearGeneral of
    ((num_heads, head_width), out)."""
    return MapEntry(f"{name}.weight", f"{path}.kernel", (2, 0, 1), (1, head_width)), *_bias(name, path, bias)


def _bias(name: str, path: str, bias: bool) -> tuple[MapEntry, ...]:
    return (MapEntry(f"{name}.bias", f"{path}.bias"),) if bias else ()
