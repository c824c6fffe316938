"""Maps the names and axis orders of a model between two frameworks (`ParamMap`).

The names and the axis order of torch are canonical: recordings, shards and checkpoints of every framework use them.

In most cases a parameter of torch is one array of flax with its dims in another order. Attention differs in two ways: flax keeps
heads separate, with (width, num_heads, head_width) instead of torch's (width, width); and torch may store query, key and value in
one parameter of (3 * width, width), where flax has three arrays. An entry therefore has a pattern (`crossframe.rearrange`), and
can join several arrays. Nothing is computed, so a round trip gives the same bits.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from crossframe.errors import MappingError
from crossframe.quoting import quote, quote_error, quote_path
from crossframe.rearrange import Rearrangement


@dataclass(frozen=True)
class MapEntry:
    """One parameter in both frameworks.

    Attributes:
        name: canonical (torch) name.
        path: flax path, with parts joined by "."; or a tuple of paths whose arrays are joined, along canonical dim 0 unless the
            pattern states another dim.
        pattern: from a flax array to the canonical one (`crossframe.rearrange`); None: the same.
        rows: for several paths, the size of each in the canonical dim in which they are joined; None: the same size.

    Raises:
        MappingError: a field is invalid.

    >>> query = MapEntry("query.weight", "query.kernel", "i h w=4 -> (h w) i")
    >>> query.canonical_shape((12, 3, 4)), query.from_canonical(np.zeros((12, 12))).shape
    ((12, 12), (12, 3, 4))
    """

    name: str
    path: str | tuple[str, ...]
    pattern: str | None = None
    rows: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise MappingError(f"an entry needs a name: expected a non-empty string, got {quote(self.name)}")
        paths = self.path if isinstance(self.path, tuple) else (self.path,)
        if not paths or not all(isinstance(path, str) and path for path in paths):
            raise MappingError(
                f"an entry needs a path: expected a non-empty string, or a tuple of them, got {quote(self.path)}"
            )
        try:
            self._rearrangement  # noqa: B018 (raises for an invalid pattern)
        except MappingError as error:
            raise MappingError(f"parameter {self.name!r}: {error}") from None
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
    def axes(self) -> tuple[int, ...] | None:
        """The axes of `numpy.transpose` for the pattern; () without a pattern, None if it is more than a transposition."""
        return () if self._rearrangement is None else self._rearrangement.axes

    @property
    def joined_dim(self) -> int | None:
        """The canonical dim that is several dims in flax; None if there is no such dim."""
        dims = () if self._rearrangement is None else self._rearrangement.right
        return next((i for i, dim in enumerate(dims) if len(dim) > 1), None)

    @cached_property
    def _rearrangement(self) -> Rearrangement | None:
        return None if self.pattern is None else Rearrangement(self.pattern)

    @property
    def selects(self) -> bool:
        """Whether the entry has only a portion of its path; other entries may have others."""
        return self._rearrangement is not None and self._rearrangement.selects

    @property
    def keeps_order(self) -> bool:
        """Whether the parameter has the elements of its only path in the same order, in any shape."""
        return len(self.paths) == 1 and (self._rearrangement is None or self._rearrangement.is_reshape)

    @property
    def reorders(self) -> bool:
        """Whether blocks of the parameter have another order in the path."""
        return self._rearrangement is not None and bool(self._rearrangement.orders)

    @property
    def pads(self) -> bool:
        """Whether the parameter has padding that no path has."""
        return self._rearrangement is not None and self._rearrangement.pads

    def unpadded(self) -> "MapEntry":
        """The entry for a parameter without its padding."""
        form = self._rearrangement
        return self if form is None or not form.pads else replace(self, pattern=form.without_padding)

    def trimming(self, shape: tuple[int, ...]) -> "MapEntry":
        """The entry that removes the padding of the parameter, which has this shape."""
        assert self._rearrangement is not None
        return MapEntry(self.name, self.name, self._rearrangement.trimming(shape))

    def to_canonical(self, *arrays: Any) -> Any:
        """Convert flax arrays (numpy or JAX), one for each path, to the canonical array."""
        self._check_count(arrays)
        if (form := self._form(arrays[0].shape)) is None:
            return arrays[0]
        return form.join([form(array) for array in arrays])

    def from_canonical(self, array: Any, path: str | None = None) -> Any:
        """Convert a canonical array (numpy or JAX) to a flax array.

        Args:
            path: the path of the flax array, if the entry has several.

        Raises:
            MappingError: the path has further parameters, or the array is not canonical; `ParamMap.from_canonical` joins the
                parameters of a path.
        """
        if self.selects:
            raise MappingError(
                f"parameter {self.name!r} is a portion of {self.paths}: expected a map whose paths are of one parameter each"
            )
        form = self._form(array.shape)
        return array if form is None else form.back(self._part(form, array, path))

    def write(self, leaf: np.ndarray, array: np.ndarray, path: str) -> None:
        """Write a canonical array to its place in the contiguous flax array of a path."""
        form = self._form(array.shape)
        if form is None:
            leaf[...] = array
        else:
            form.write(leaf, self._part(form, array, path))

    def _part(self, form: Rearrangement, array: Any, path: str | None) -> Any:
        array = form.unpadded(array)
        return array if len(self.paths) == 1 else form.split(array, *self._run(array.shape[form.joint_dim], path))

    def canonical_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """The canonical shape for flax arrays of these shapes, one for each path.

        Raises:
            MappingError: the shapes do not match the pattern or rows, or cannot be concatenated.
        """
        self._check_count(shapes)
        if (form := self._form(shapes[0])) is None:
            return shapes[0]
        found = [self._one_shape(form, shape, path) for shape, path in zip(shapes, self.paths, strict=True)]
        dim = form.joint_dim
        if len(found) > 1 and (() in found or len({(*shape[:dim], *shape[dim + 1 :]) for shape in found}) > 1):
            raise MappingError(
                f"parameter {self.name!r}: expected shapes that differ in dim {dim} alone, to join, got {found} of {self.paths}"
            )
        rows = tuple(shape[dim] for shape in found) if len(found) > 1 else ()
        if rows != (self.rows or rows[:1] * len(rows)):
            raise MappingError(
                f"parameter {self.name!r}: expected {self.rows or 'as many'} rows of {self.paths}, got {rows}; correct the "
                "map's rows"
            )
        return form.join_shapes(found)

    def leaf_shape(self, shape: tuple[int, ...], path: str) -> tuple[int, ...]:
        """The flax shape of the array of a path, for a canonical parameter of this shape."""
        if (form := self._form(shape)) is None:
            return shape
        shape = form.unpadded_shape(shape)
        if len(self.paths) > 1:
            shape = form.split_shape(shape, *self._run(shape[form.joint_dim], path))
        return form.back_shape(shape)

    def _form(self, shape: tuple[int, ...]) -> Rearrangement | None:
        """The rearrangement of each array; None if the only array is the parameter. Without a pattern, several are joined."""
        if self._rearrangement is None and len(self.paths) > 1:
            return Rearrangement.transposing(tuple(range(len(shape))))
        return self._rearrangement

    def _one_shape(self, form: Rearrangement, shape: tuple[int, ...], path: str) -> tuple[int, ...]:
        try:
            return form.shape(shape)
        except MappingError as error:
            raise MappingError(
                f"parameter {self.name!r}, {path!r} of shape {shape}: {error}; correct the map"
            ) from None

    def _check_count(self, given: tuple[Any, ...]) -> None:
        if len(given) != len(self.paths):
            raise MappingError(f"parameter {self.name!r}: expected one for each of {self.paths}, got {len(given)}")

    def _run(self, size: int, path: str | None) -> tuple[int, int]:
        """The rows of one of several paths, in the dim of the joint, which has this size."""
        if path not in self.paths:
            raise MappingError(f"parameter {self.name!r}: expected one of the paths {self.paths}, got {quote(path)}")
        index = self.paths.index(path)
        rows = self.rows or (size // len(self.paths),) * len(self.paths)
        return sum(rows[:index]), sum(rows[: index + 1])


def _are_sizes(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and value > 0 for value in values)


@dataclass(frozen=True)
class ParamMap:
    """A map between canonical names and flax paths, in canonical order. Several names may share a path, if their patterns select
    portions of it, such as one of its stacked layers.

    >>> pmap = ParamMap((MapEntry("fc.weight", "fc.kernel", "i o -> o i"), MapEntry("fc.bias", "fc.bias")))
    >>> pmap.by_path["fc.kernel"].name
    'fc.weight'
    """

    entries: tuple[MapEntry, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.entries, tuple) or not all(isinstance(entry, MapEntry) for entry in self.entries):
            raise MappingError(f"expected a tuple of MapEntry, got {quote(self.entries)}")
        twice = [name for name, times in Counter(entry.name for entry in self.entries).items() if times > 1]
        if twice:
            raise MappingError(
                f"a map has one entry for each parameter, but these occur twice as name: {sorted(twice)}"
            )
        for path, entries in self.of_path.items():
            if len(entries) > 1 and not all(entry.selects for entry in entries):
                raise MappingError(
                    f"path {path!r} occurs twice, for {[entry.name for entry in entries][:4]}: expected patterns that select a "
                    "portion of it, such as '[0/12] i o -> o i'"
                )

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
        """Entries by flax path; the first one of a path that several share."""
        return {path: entries[0] for path, entries in self.of_path.items()}

    @cached_property
    def of_path(self) -> Mapping[str, tuple[MapEntry, ...]]:
        """All entries of each flax path."""
        found: dict[str, tuple[MapEntry, ...]] = {}
        for entry in self.entries:
            for path in entry.paths:
                found[path] = (*found.get(path, ()), entry)
        return found

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
        return {path: self._leaf(path, entries, arrays) for path, entries in self.of_path.items()}

    def _leaf(self, path: str, entries: Sequence[MapEntry], arrays: Mapping[str, Any]) -> Any:
        """The array of a path, zero where no parameter has it."""
        first = arrays[entries[0].name]
        if not entries[0].selects:
            return entries[0].from_canonical(first, path)
        shapes = {entry.name: entry.leaf_shape(tuple(arrays[entry.name].shape), path) for entry in entries}
        shape = next(iter(shapes.values()))
        leaf, count = np.zeros(shape, first.dtype), np.zeros(shape, np.int64)
        for entry in entries:
            if shapes[entry.name] != shape:
                raise MappingError(f"path {path!r}: expected portions of one shape, got {shapes}; correct the map")
            array = np.asarray(arrays[entry.name])
            entry.write(leaf, array, path)
            one = np.zeros(shape, np.int64)
            entry.write(one, np.ones(array.shape, np.int64), path)
            count += one
        if (count > 1).any():
            raise MappingError(f"path {path!r}: the portions of {list(shapes)[:4]} overlap; correct the map")
        return leaf

    def save(self, path: str | Path) -> None:
        """Write the map to a file, one entry in a line, to be read and edited."""
        rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in self.to_json())
        Path(path).write_text(f"[\n{rows}\n]\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "ParamMap":
        """Read the file that `save` wrote.

        Raises:
            MappingError: it cannot be read, or is not a map.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise MappingError(f"{quote_path(path)}: expected a map of parameters: {quote_error(error)}") from None

    def to_json(self) -> list:
        """The map as JSON: [name, path, pattern] for each entry, or [name, paths, pattern, rows] for several paths."""
        found = []
        for entry in self.entries:
            row = [entry.name, entry.path, entry.pattern]
            if isinstance(entry.path, tuple):
                row = [entry.name, list(entry.path), entry.pattern, None if entry.rows is None else list(entry.rows)]
            found.append(row)
        return found

    @classmethod
    def from_json(cls, rows: list) -> "ParamMap":
        """The map that `to_json` wrote; MappingError if `rows` is not a map."""
        entries = []
        for row in rows if isinstance(rows, list) else [rows]:
            if not isinstance(row, list) or len(row) not in (3, 4, 5):
                raise MappingError(f"expected a list of [name, path, pattern], got {quote(row)}")
            fields: list[Any] = [tuple(value) if isinstance(value, list) else value for value in row]
            if len(fields) == 5 or isinstance(fields[2], tuple):
                fields = _of_axes(*fields)
            entries.append(MapEntry(*fields))
        return cls(tuple(entries))


def _of_axes(name: Any, path: Any, axes: Any, split: Any = None, rows: Any = None) -> list[Any]:
    """The fields of an entry as maps stored them before patterns: the axes of `numpy.transpose`, and (canonical dim, size of the
    inner of its two dims)."""
    if axes is None and split is None:
        return [name, path, None, rows]
    if axes is not None and sorted(axes, key=repr) != list(range(len(axes))):
        raise MappingError(f"parameter {name!r}: expected a permutation as axes, got {quote(axes)}")
    # Only biases, of (num_heads, head_width), were split without axes.
    pattern = Rearrangement.transposing(axes or (0, 1)).text
    if split is None:
        return [name, path, pattern, rows]
    left, _, right = pattern.partition(" -> ")
    if not isinstance(split, tuple) or not _are_sizes(
        (len(split) - 1, split[0] + 1, split[1], len(right) - 2 * split[0] - 2)
    ):
        raise MappingError(
            f"parameter {name!r}: expected (dim, size of the inner of two dims) as split, got {quote(split)}"
        )
    names, dim = right.split(), split[0]
    inner = f"{names[dim + 1]}={split[1]}"
    joined = [*names[:dim], f"({names[dim]} {inner})", *names[dim + 2 :]]
    return [name, path, f"{left} -> {' '.join(joined)}", rows]


def identity_map(names: Iterable[str]) -> ParamMap:
    """The map of a model whose paths and axis orders are those of torch."""
    return ParamMap(tuple(MapEntry(name, name) for name in names))


# The entries of each kind of module, in torch's order of registration, given its name in torch and its path in flax.


def linear(name: str, path: str, *, bias: bool = True) -> tuple[MapEntry, ...]:
    """The entries of torch's nn.Linear, whose weight is (out, in), and flax's Linear, whose kernel is (in, out)."""
    return MapEntry(f"{name}.weight", f"{path}.kernel", "i o -> o i"), *_bias(name, path, bias)


def conv(name: str, path: str, *, dims: int = 2, bias: bool = True) -> tuple[MapEntry, ...]:
    """The entries of torch's nn.Conv1d, 2d or 3d, with a weight of (out, in, *kernel), and flax's Conv, with (*kernel, in, out).

    >>> conv("stem", "stem")[0].pattern
    'h w i o -> o i h w'
    """
    kernel = "d h w"[2 * (3 - dims) :]
    return MapEntry(f"{name}.weight", f"{path}.kernel", f"{kernel} i o -> o i {kernel}"), *_bias(name, path, bias)


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
    entries = [
        MapEntry(f"{name}.in_proj_weight", tuple(f"{p}.kernel" for p in parts), f"i h w={head_width} -> (h w) i")
    ]
    if bias:
        entries.append(
            MapEntry(f"{name}.in_proj_bias", tuple(f"{p}.bias" for p in parts), f"h w={head_width} -> (h w)")
        )
    return *entries, *from_heads(f"{name}.out_proj", f"{path}.out", head_width, bias=bias)


def to_heads(name: str, path: str, head_width: int, *, bias: bool = True) -> tuple[MapEntry, ...]:
    """The entries of a separate query, key or value: torch's nn.Linear, and flax's LinearGeneral of
    (in, (num_heads, head_width))."""
    kernel = MapEntry(f"{name}.weight", f"{path}.kernel", f"i h w={head_width} -> (h w) i")
    return (kernel, MapEntry(f"{name}.bias", f"{path}.bias", f"h w={head_width} -> (h w)")) if bias else (kernel,)


def from_heads(name: str, path: str, head_width: int, *, bias: bool = True) -> tuple[MapEntry, ...]:
    """The entries of the projection after attention: torch's nn.Linear, and flax's LinearGeneral of
    ((num_heads, head_width), out)."""
    return MapEntry(f"{name}.weight", f"{path}.kernel", f"h w={head_width} o -> o (h w)"), *_bias(name, path, bias)


def _bias(name: str, path: str, bias: bool) -> tuple[MapEntry, ...]:
    return (MapEntry(f"{name}.bias", f"{path}.bias"),) if bias else ()
