"""Checkpoints of sharded models, which any backend reads at any world size and in any layout.

    PATH/index.json               metadata; the layouts of each section; size and checksum of each file; its own checksum
    PATH/rank00000.safetensors    the shards of rank 0 of a shard group: one line for each bucket, with padding 0
    PATH/rank00001.safetensors    ...

The section "model" has the parameters by canonical name. The section "state" has the optimizer state, by the names of the entry
in torch and of the parameter: "exp_avg:head.weight". Values that belong to no parameter, such as Adam's "step", are in the file
of rank 0. A reader requests the lines of its own layout and gets them by copies of ranges (`crossframe.layout.overlay`),
without full parameters. It verifies the whole content of each file that it needs.

[Note: ownership of a folder] A job writes to its own folder, `writing-NAME-TOKEN`, and renames it to NAME when everything is on
disk. So NAME is complete or absent, whichever process is killed. One rank draws the random token and sends it to the others, and
no other job writes to that folder or removes it. If two jobs save under one name at the same time, the first to finish succeeds
and the other raises, since a folder cannot be renamed to that of a checkpoint. The remains of a killed job block no other job;
`remove_unfinished` removes them when the caller knows that no job is writing.
"""

import errno
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from crossframe.dtypes import FLOATING, numpy_dtype
from crossframe.errors import CrossframeError
from crossframe.files import FileError, VerifiedFile, parse_json, read_bytes
from crossframe.layout import FlatLayout, Layout, Sharding, layout_from_json, overlay
from crossframe.mesh import MeshSpec
from crossframe.params import OVERFLOW, ParamSpec
from crossframe.shown import shown, shown_error, shown_path
from crossframe.tensor_file import MOST_DIMS, TensorFile, write_tensors

T = TypeVar("T")

FORMAT = "crossframe checkpoint 3"
# The formats that can be read. Format 2 does not state the offsets of parameters, which are computed as in format 3.
FORMATS = ("crossframe checkpoint 2", FORMAT)
MOST_INDEX_BYTES = 1 << 26
MOST_RANKS = 1 << 17
INDEX = "index.json"
# Suffix of the file in which a rank describes its data file until the index is written.
DESCRIBED = ".json"
MODEL, STATE = "model", "state"


# Name and dtype of Adam's count of its steps in both frameworks.
STEP, STEP_DTYPE = "step", np.dtype(np.int32)
# Maximum number of names that an error lists.
LISTED = 5
# Dtypes of values that belong to no parameter.
_VALUE_DTYPES = (*FLOATING, "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Names of the folder of an unfinished checkpoint, and of the files of a checkpoint, finished or not.
_UNFINISHED = re.compile(r"writing-.+-[0-9a-f]{16}", re.DOTALL)
_OWN = re.compile(r"index\.json|rank\d{5,}\.(safetensors|json)")


class CheckpointError(CrossframeError, RuntimeError):
    """A checkpoint that is missing, damaged or of another model, or that cannot be written."""


# Writing


def state_layout(layout: Any, entry: str, dtype: str, rename: Callable[[str], str] = str) -> Layout:
    """The layout of an optimizer state entry of a bucket, in which elements have the same places as in the parameters.

    Args:
        layout: layout of the parameters.
        entry: name of the entry in torch; "" for the parameters themselves.
        dtype: dtype of its values.
        rename: maps the name of a parameter to its name in the checkpoint.

    >>> from crossframe.layout import RaggedLayout
    >>> state_layout(RaggedLayout((ParamSpec("w", (3,), "bfloat16"),), 2), "exp_avg", "float32").params[0].name
    'exp_avg:w'
    """
    prefix = f"{entry}:" if entry else ""
    params = tuple(
        replace(
            spec,
            name=prefix + rename(spec.name),
            aliases=tuple(prefix + rename(alias) for alias in spec.aliases),
            dtype=dtype,
        )
        for spec in layout.params
    )
    if isinstance(layout, FlatLayout):  # its alignment depends on the dtype of the parameters, not on that of moments
        return replace(layout, params=params, compute_dtype=layout.compute_dtype or layout.dtype)
    return replace(layout, params=params)


@dataclass(frozen=True)
class Contents:
    """What one process has of a checkpoint.

    Attributes:
        sections: the sharding of each section over the ranks of one replica, by name.
        values: arrays that belong to no parameter.
        places: the ranks of a shard group whose shards this process writes. Only one replica writes.
        lines: gives the buffers of one of these ranks, of shape (padded_shard_numel,), by section and bucket.
    """

    sections: Mapping[str, Sharding]
    values: Mapping[str, np.ndarray]
    places: Sequence[int]
    lines: Callable[[int], Mapping[str, Sequence[np.ndarray]]]


class Processes(Protocol):
    """The processes that save a checkpoint together. One of them is the first."""

    @property
    def is_first(self) -> bool: ...

    def together(self, title: str, act: Callable[[], T]) -> T:
        """Do something in every process, and return once all have done it. If it raises in one, raise in all."""
        ...

    def from_first(self, value: str) -> str:
        """The first process's value."""
        ...


def save(
    path: Path | str,
    processes: Processes,
    contents: Callable[[], Contents],
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint. All processes call it; none returns before the checkpoint has its name, and all raise if one does.

    Args:
        contents: gives what this process has. It may raise.
        about: further information for readers, such as the step, as JSON.

    Raises:
        CheckpointError: see `begin`, `write_rank` and `finish`. Nothing is left of the checkpoint.
    """
    tokens: list[str] = []

    def begun() -> Contents:
        check_about(about)
        own = contents()
        if processes.is_first:
            tokens.append(begin(path))
        return own

    def written() -> None:
        for place in own.places:
            values = own.values if place == 0 else None
            write_rank(path, token, place, own.sections, own.lines(place), values)

    def finished() -> None:
        if processes.is_first:
            finish(path, token, own.sections, own.values, about)

    try:
        own = processes.together("beginning of a checkpoint", begun)
        token = processes.from_first("".join(tokens))
        processes.together("writing of a checkpoint", written)
        processes.together("end of a checkpoint", finished)
    except BaseException:
        for each in tokens:
            abandon(path, each)
        raise


def begin(path: Path | str) -> str:
    """Create the folder in which a checkpoint is written. One rank calls it. See [Note: ownership of a folder].

    Returns:
        The token of this save, which every rank passes to `write_rank`. If the save fails, pass it to `abandon`.

    Raises:
        CheckpointError: `path` exists, which is not overwritten, or the folder cannot be created.
    """
    path, token = _path(path), secrets.token_hex(8)
    writing = _writing(path, token)
    with _writes(path):
        if os.path.lexists(path):
            raise CheckpointError(
                f"{shown_path(path)}: expected nothing there, got a file or folder; pass another path, or remove it"
            )
        writing.mkdir(parents=True)
    return token


def write_rank(
    path: Path | str,
    token: str,
    place: int,
    sections: Mapping[str, Sharding],
    lines: Mapping[str, Sequence[np.ndarray]],
    values: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write the shards of one rank of a shard group, between `begin` and `finish`.

    Args:
        token: the result of `begin`.
        place: the rank's index in its shard group. Only one replica writes.
        sections: the sharding of each section over the ranks of one replica, by name.
        lines: the rank's buffers, of shape (padded_shard_numel,), by section and bucket. Padding is written as 0.
        values: on place 0, arrays that belong to no parameter.

    Raises:
        CheckpointError: the file cannot be written, for example because the disk is full.
    """
    arrays: dict[str, np.ndarray] = {}
    for section, sharding in sections.items():
        for bucket, ((_, layout), line) in enumerate(zip(sharding.units, lines[section], strict=True)):
            clean = np.array(line)
            for run in layout.padding(place):
                clean[run.start : run.stop] = 0
            arrays[f"{section}:{bucket}"] = clean
    for key, value in (values or {}).items():
        arrays[f"value:{key}"] = np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)
    file = _writing(_path(path), token) / _file_of(place)
    with _writes(file):
        size, sha256 = write_tensors(file, arrays)
        flush(file)
        file.with_suffix(DESCRIBED).write_text(json.dumps({"bytes": size, "sha256": sha256}))


def finish(
    path: Path | str,
    token: str,
    sections: Mapping[str, Sharding],
    values: Mapping[str, np.ndarray] | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write the index and give the checkpoint its name. One rank calls it, after all ranks have written.

    Args:
        token: the result of `begin`.
        sections: as for `write_rank`.
        values: as for `write_rank`.
        about: further information for readers, such as the step, as JSON.

    Raises:
        CheckpointError: the file of a rank is missing or has another size; the index cannot be written; or another job has saved
            under this name in the meantime.
    """
    path = _path(path)
    writing = _writing(path, token)
    world_size = next(iter(sections.values())).mesh.shard
    names = [_file_of(place) for place in range(world_size)]
    content = {
        "format": FORMAT,
        "about": dict(about or {}),
        "world_size": world_size,
        "sections": {name: [_unit_json(*unit) for unit in each.units] for name, each in sections.items()},
        "values": {key: [value.dtype.name, list(value.shape)] for key, value in (values or {}).items()},
        "files": {name: _told(writing / name, world_size) for name in names},
    }
    with _writes(writing):
        for name in names:
            (writing / name).with_suffix(DESCRIBED).unlink()
        (writing / INDEX).write_text(json.dumps({"content": content, "sha256": _digest(content)}, indent=1))
        flush(writing / INDEX)
        flush(writing)
        _publish(writing, path)
        flush(path.parent)


def _publish(writing: Path, path: Path) -> None:
    """Rename a folder to its final name. This fails if the name is a file or a folder that is not empty."""
    try:
        taken = os.path.lexists(path)
        if not taken:
            writing.rename(path)
    except OSError as error:
        taken = error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
        if not taken:
            raise
    if taken:
        raise CheckpointError(
            f"{shown_path(path)}: expected nothing there, but another job has saved under this name since this one began; save "
            "under another name"
        )


def abandon(path: Path | str, token: str) -> None:
    """Remove an unfinished checkpoint as far as possible. One rank calls it."""
    with suppress(CheckpointError, OSError):
        remove(_writing(_path(path), token))


def remove(path: Path | str) -> None:
    """Delete the files of a checkpoint, finished or not, and its folder.

    Raises:
        CheckpointError: the folder has other files or is a link, in which case nothing is deleted; or the deletion fails.
    """
    path = _path(path)
    with _writes(path, "deleted"):
        entries = list(os.scandir(path)) if not path.is_symlink() else None
        foreign = [entry.name for entry in entries or () if not _is_own(entry)]
        if entries is None or foreign:
            raise CheckpointError(
                f"{shown_path(path)}: expected the files of a checkpoint and nothing else, got "
                f"{shown(foreign[0]) if foreign else 'a link'}; nothing was deleted, move it or remove it by hand"
            )
        for entry in entries:
            os.unlink(entry.path)
        path.rmdir()


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished checkpoints of killed jobs from a folder. Call it only if no job is writing to the folder.

    It removes folders called `writing-NAME-TOKEN` that have only files of a checkpoint, and nothing else.

    Raises:
        OSError: the folder cannot be read.
    """
    for path in folder.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            with suppress(CheckpointError):
                remove(path)


def _is_own(entry: os.DirEntry) -> bool:
    """Whether this is a file of a checkpoint."""
    return bool(_OWN.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False)


def check_about(about: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError unless this is None or a mapping that JSON represents exactly."""
    try:
        same = about is None or json.loads(json.dumps(about)) == about
    except (TypeError, ValueError):
        same = False
    if not same or not isinstance(about, Mapping | None):
        raise CheckpointError(
            f"about: expected a dict of what JSON has, its keys strings and no tuples, got {shown(about)}"
        )


# Reading


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk whose index was read and checked. Its data is read on demand.

    Attributes:
        path: folder of the checkpoint.
        about: the information that the writer passed to `finish`.
        sections: the sharding of each section, by name.
        values: (dtype, shape) of the values that belong to no parameter.
    """

    path: Path
    about: Mapping[str, Any]
    sections: Mapping[str, Sharding]
    values: Mapping[str, tuple[str, tuple[int, ...]]]
    _files: Mapping[str, Any]
    _checked: dict[str, TensorFile] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """The names of the data files."""
        return sorted(self._files)

    def complaint(self, name: str) -> str:
        """The defect of a file, as a text that follows its name; "" if the file is as it was written."""
        try:
            VerifiedFile(self.path / name, self._files[name]["sha256"], self._files[name]["bytes"])
        except FileError as error:
            return "is missing" if error.missing else error.reason
        return ""

    def lines(self, section: str, target: Sharding, rank: int) -> list[np.ndarray]:
        """The lines of all buckets of a rank in the target's layouts, with padding 0, read from the ranges that contain them.

        Raises:
            CheckpointError: the section does not exist; parameters, shapes or dtypes differ, which are listed by name; or a file
                is damaged, does not match the index, or changes while it is read.
        """
        if section not in self.sections:
            raise CheckpointError(
                f"{self._at}: expected a section {section!r}, got {shown(sorted(self.sections))}; it was saved without"
            )
        try:
            transfers = list(overlay(self.sections[section], target, rank))
        except CrossframeError as error:
            raise CheckpointError(f"{self._at}, of which nothing was loaded: {error}") from error
        found = [np.zeros(layout.padded_shard_numel, numpy_dtype(layout.dtype)) for _, layout in target.units]
        for place in sorted({each.source_rank for each in transfers}):
            wanted = [each for each in transfers if each.source_rank == place]
            file = self._opened(place, [each.name for each in wanted])
            for each in wanted:
                line, stop = found[each.target_bucket], each.source_start + each.numel
                layout = self.sections[section].units[each.source_bucket][1]
                with self._named():
                    line[each.target_start : each.target_start + each.numel] = file.read_run(
                        f"{section}:{each.source_bucket}",
                        numpy_dtype(layout.dtype),
                        layout.padded_shard_numel,
                        each.source_start,
                        stop,
                    )
        return found

    def value(self, key: str) -> np.ndarray:
        """A value that belongs to no parameter; CheckpointError if the key does not exist."""
        if key not in self.values:
            raise CheckpointError(f"{self._at}: expected a value {shown(key)}, got {shown(sorted(self.values))}")
        dtype, shape = self.values[key]
        numel = math.prod(shape) * _value_dtype(dtype).itemsize
        file = self._opened(0, [key])
        with self._named():
            data = file.read(f"value:{key}", np.dtype(np.uint8), (numel,))
        return data.view(_value_dtype(dtype)).reshape(shape)

    @property
    def _at(self) -> str:
        return shown_path(self.path)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Convert FileError to CheckpointError."""
        try:
            yield
        except FileError as error:
            raise CheckpointError(
                f"{error}; nothing was loaded, restore the file from a copy, or load another checkpoint"
            ) from None

    def _opened(self, place: int, wanted: Sequence[str]) -> TensorFile:
        name = _file_of(place)
        if name not in self._checked:
            expected = self._files[name]
            try:
                self._checked[name] = TensorFile(self.path / name, expected["sha256"], expected["bytes"])
            except FileError as error:
                reason = "is missing" if error.missing else error.reason
                raise CheckpointError(
                    f"{self._at}, of which nothing was loaded: {name} {reason}; with it is lost what rank {place} held of "
                    f"{_listed(wanted)}. Restore the file from a copy, or load another checkpoint"
                ) from None
        return self._checked[name]


def read(path: Path | str) -> Saved:
    """Read the index of a checkpoint.

    Raises:
        CheckpointError: `path` is not a checkpoint, or its index was changed.
    """
    path = _path(path)
    try:
        wrapped = parse_json(read_bytes(path / INDEX, MOST_INDEX_BYTES))
        content, digest = wrapped["content"], wrapped["sha256"]
    except FileError as error:
        if error.missing:
            raise CheckpointError(
                f"{shown_path(path)}: expected a checkpoint, got no {INDEX} there; pass the folder that was saved"
            ) from None
        raise CheckpointError(f"{error}; restore it from a copy") from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise CheckpointError(
            f"{shown_path(path / INDEX)}: is not an index of a checkpoint; restore it from a copy"
        ) from None
    if not isinstance(content, dict) or digest != _digest(content) or content.get("format") not in FORMATS:
        raise CheckpointError(
            f"{shown_path(path / INDEX)}: has other content than was written (its checksum or format differs from {FORMAT!r}); "
            "restore it from a copy"
        )
    try:
        return _saved(path, content)
    except CrossframeError as error:
        raise CheckpointError(f"{shown_path(path / INDEX)}: {shown_error(error)}; restore it from a copy") from None


def _saved(path: Path, content: dict[str, Any]) -> Saved:
    """The checkpoint that an index describes, after a check of every field."""
    about, sections, values, files = (_field(content, name, dict) for name in ("about", "sections", "values", "files"))
    world_size = _field(content, "world_size", int)
    if not 1 <= world_size <= MOST_RANKS:
        raise CheckpointError(f"'world_size': expected 1 to {MOST_RANKS} ranks, got {shown(world_size)}")
    if not sections:
        raise CheckpointError("'sections': expected at least one, got none")
    mesh = MeshSpec(world_size)
    made = {
        name: Sharding(tuple(_unit_from_json(unit) for unit in _field(sections, name, list)), mesh) for name in sections
    }
    if files.keys() != {_file_of(place) for place in range(world_size)}:
        raise CheckpointError(f"'files': expected one for each of {world_size} ranks, got {shown(sorted(files))}")
    for name in files:
        file = _field(files, name, dict)
        if _field(file, "bytes", int) < 0 or not _SHA256.fullmatch(_field(file, "sha256", str)):
            raise CheckpointError(f"'files': {name}: expected its size and its sha256, got {shown(file)}")
    return Saved(path, about, made, {key: _value_from_json(key, value) for key, value in values.items()}, files)


def _field(fields: Any, name: str, kind: type) -> Any:
    """A field of exactly this type: unlike in Python, True is not an int."""
    value = fields.get(name) if isinstance(fields, dict) else None
    if type(value) is not kind:
        raise CheckpointError(f"{shown(name)}: expected {kind.__name__}, got {shown(value)}")
    return value


def _value_dtype(name: str) -> np.dtype:
    return numpy_dtype(name) if name in FLOATING else np.dtype(name)


def _value_from_json(key: str, value: Any) -> tuple[str, tuple[int, ...]]:
    pair = isinstance(value, list) and len(value) == 2
    dtype, shape = value if pair else (None, None)
    if dtype not in _VALUE_DTYPES or not isinstance(shape, list) or len(shape) > MOST_DIMS:
        raise CheckpointError(f"value {shown(key)}: expected its dtype and shape, got {shown(value)}")
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) >= OVERFLOW:
        raise CheckpointError(f"value {shown(key)}: expected a shape, got {shown(shape)}")
    return dtype, tuple(shape)


def _unit_json(name: str, layout: Any) -> dict:
    params = [
        [spec.name, list(spec.shape), spec.dtype, list(spec.aliases), spec.requires_grad] for spec in layout.params
    ]
    return {"unit": name, "params": params, "layout": layout.to_json()}


def _unit_from_json(unit: Any) -> tuple[str, Layout]:
    params = []
    for row in _field(unit, "params", list):
        if not isinstance(row, list) or len(row) != 5 or not isinstance(row[1], list) or not isinstance(row[3], list):
            raise CheckpointError(f"'params': expected name, shape, dtype, aliases and requires_grad, got {shown(row)}")
        name, shape, dtype, aliases, trained = row
        params.append(ParamSpec(name, tuple(shape), dtype, tuple(aliases), trained))
    return _field(unit, "unit", str), layout_from_json(_field(unit, "layout", dict), tuple(params))


def _path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike) or not Path(path).name:
        raise CheckpointError(f"expected the folder of a checkpoint as a path with a name, got {shown(path)}")
    return Path(path)


@contextmanager
def _writes(path: Path, done: str = "written") -> Iterator[None]:
    """Convert errors of the disk to CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:  # a path with a null byte, or with a surrogate, is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{shown_path(path)}: cannot be {done} ({reason}); make space there, or pass another path"
        ) from error


def _writing(path: Path, token: str) -> Path:
    """The folder that a save writes to, which no other save uses."""
    return path.with_name(f"writing-{path.name}-{token}")


def _file_of(place: int) -> str:
    return f"rank{place:05d}.safetensors"


def _told(file: Path, world_size: int) -> dict[str, Any]:
    """The description of a file by the rank that wrote it; CheckpointError if this rank sees no such file or another size."""
    try:
        told, size = json.loads(read_bytes(file.with_suffix(DESCRIBED), 1 << 10)), file.stat().st_size
    except (FileError, OSError):
        raise CheckpointError(
            f"{shown_path(file.parent)}: expected the files of {world_size} ranks, got none of {file.name}; all ranks must see "
            "one folder, and have written to it before one of them finishes"
        ) from None
    if told["bytes"] != size:
        raise CheckpointError(
            f"{shown_path(file)}: its rank wrote {told['bytes']} bytes, and here it has {size}; is the disk full?"
        )
    return told


def _listed(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(map(shown, names[:LISTED])) + more


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def flush(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
