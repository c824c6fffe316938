"""Checkpoints of sharded models, which any backend reads at any world size and layout.

    PATH/index.json               what it is of; sections, of each its layouts; size and checksum of each file; its own checksum
    PATH/rank00000.safetensors    what rank 0 of a shard group holds: of each bucket one line, padding 0
    PATH/rank00001.safetensors    ...

The section "model" has the parameters by canonical name; "state" has what an optimizer keeps of them, by torch's name of it and
the parameter's: "exp_avg:head.weight". Values that belong to no parameter (Adam's "step") are in the file of rank 0. A reader
asks for the lines of its own layout, and is given them by copies of ranges (`crossframe.layout.overlay`): no full parameter is
made. Of each file that it needs it checks the whole content first.

[Note: ownership of a folder] A job writes into a folder of its own, `writing-NAME-TOKEN`, and renames it to NAME once all of it
is on disk. So NAME is whole or absent, whichever process is killed. The token is random; the rank that begins makes it and sends
it to the others. No other job writes to that folder or removes it. Two jobs may save under one name at the same time: a folder
cannot be renamed to that of a checkpoint, so the first to finish succeeds and the other raises. What a killed job leaves blocks
nobody; `remove_unfinished` removes it where the caller knows that no job is writing.
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
from typing import Any

import numpy as np

from crossframe.dtypes import FLOATING, numpy_dtype
from crossframe.errors import CrossframeError
from crossframe.files import FileError, VerifiedFile, parse_json, read_bytes
from crossframe.layout import FlatLayout, Layout, Sharding, layout_from_json, overlay
from crossframe.mesh import MeshSpec
from crossframe.params import OVERFLOW, ParamSpec
from crossframe.shown import shown, shown_error, shown_path
from crossframe.tensor_file import MOST_DIMS, TensorFile, write_tensors

FORMAT = "crossframe checkpoint 3"
# Those that are read. 2 does not state where layouts put parameters, which was as in 3.
FORMATS = ("crossframe checkpoint 2", FORMAT)
MOST_INDEX_BYTES = 1 << 26
MOST_RANKS = 1 << 17
INDEX = "index.json"
# What a rank tells of its file until the index does.
DESCRIBED = ".json"
MODEL, STATE = "model", "state"


# What Adam counts its steps in, in both frameworks, and under which name it is kept.
STEP, STEP_DTYPE = "step", np.dtype(np.int32)
# How many names an error lists.
LISTED = 5
# Of values that belong to no parameter.
_VALUE_DTYPES = (*FLOATING, "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Names of the folder that is written into, and of the files that a checkpoint consists of while it is.
_UNFINISHED = re.compile(r"writing-.+-[0-9a-f]{16}", re.DOTALL)
_OWN = re.compile(r"index\.json|rank\d{5,}\.(safetensors|json)")


class CheckpointError(CrossframeError, RuntimeError):
    """A checkpoint that is missing, damaged, or of another model; or one that cannot be written."""


# Writing


def state_layout(layout: Any, entry: str, dtype: str, rename: Callable[[str], str] = str) -> Layout:
    """The layout of what an optimizer keeps of a bucket's parameters, which lies as they do.

    Args:
        entry: what it is, by torch's name; "" for the parameters themselves.
        dtype: of its values.
        rename: a parameter's name to that under which it is saved.

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
    if isinstance(layout, FlatLayout):  # whose alignment goes by the dtype of the parameters, not by that of moments
        return replace(layout, params=params, compute_dtype=layout.compute_dtype or layout.dtype)
    return replace(layout, params=params)


def begin(path: Path | str) -> str:
    """Make the folder in which a checkpoint is written; one rank calls it. See [Note: ownership of a folder].

    Returns:
        The token of this save, which every rank passes to `write_rank`. If the save fails, pass it to `abandon`.

    Raises:
        CheckpointError: something exists at `path`, which is not overwritten; or no folder can be made there.
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
    """Write what one rank of a shard group holds, between `begin` and `finish`.

    Args:
        token: what `begin` returned, on whichever rank.
        place: the rank's place in its group. One replica writes.
        sections: by name, how the ranks of one replica hold it.
        lines: by section and bucket the rank's buffer, of shape (padded_shard_numel,). What its padding holds is not written.
        values: of place 0: arrays that belong to no parameter.

    Raises:
        CheckpointError: it cannot be written, as on a full disk.
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
    """Write the index and give the checkpoint its name; one rank calls it, once all have written.

    Args:
        token: what `begin` returned.
        about: what else a reader wants to know of it, such as the step: JSON.

    Raises:
        CheckpointError: a rank's file is not there, or not as it was written; the index cannot be written; or another job has
            saved under this name meanwhile.
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
    """Give a folder its name, unless something has it: a folder cannot be renamed to one that is not empty, or to a file."""
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
    """Remove what was begun and cannot be finished, as far as the disk lets it; one rank calls it."""
    with suppress(CheckpointError, OSError):
        remove(_writing(_path(path), token))


def remove(path: Path | str) -> None:
    """Delete a checkpoint, or an unfinished one: the files that it consists of, then its folder.

    Raises:
        CheckpointError: something else is in the folder, or it is a link; nothing is deleted then. Or the disk refuses.
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
    """Remove what killed jobs left of checkpoints in a folder. Call it only where no job is writing there.

    What is not recognisably an unfinished checkpoint is left alone: folders are named `writing-NAME-TOKEN` and hold files of a
    checkpoint alone.

    Raises:
        OSError: the folder cannot be read.
    """
    for path in folder.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            with suppress(CheckpointError):
                remove(path)


def _is_own(entry: os.DirEntry) -> bool:
    """Whether a checkpoint consists of such files."""
    return bool(_OWN.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False)


def check_about(about: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError unless it is a mapping that JSON gives back as it is."""
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
    """A checkpoint on disk, its index read and checked, and nothing else of it yet.

    Attributes:
        path: its folder.
        about: what its writer told of it.
        sections: by name, how its ranks hold it.
        values: (dtype, shape) of what belongs to no parameter.
    """

    path: Path
    about: Mapping[str, Any]
    sections: Mapping[str, Sharding]
    values: Mapping[str, tuple[str, tuple[int, ...]]]
    _files: Mapping[str, Any]
    _checked: dict[str, TensorFile] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """The names of the files that it is made of, besides its index."""
        return sorted(self._files)

    def complaint(self, name: str) -> str:
        """What is wrong with one of its files, in words that follow its name; "" if it is as it was written."""
        try:
            VerifiedFile(self.path / name, self._files[name]["sha256"], self._files[name]["bytes"])
        except FileError as error:
            return "is missing" if error.missing else error.reason
        return ""

    def lines(self, section: str, target: Sharding, rank: int) -> list[np.ndarray]:
        """A rank's lines of all buckets in the target's layouts, padding 0, from the ranges of the files that hold them.

        Raises:
            CheckpointError: no such section, other parameters, shapes or dtypes, which are listed by name; a damaged file, or one
                that holds something else than the index says; or one that changes while it is read.
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
        """What belongs to no parameter; CheckpointError if there is none of that key."""
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
        """Around what reads of a file."""
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
        CheckpointError: no checkpoint, or an index that was changed.
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
            f"{shown_path(path / INDEX)}: is no index of a checkpoint; restore it from a copy"
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
    """What an index says, every field checked."""
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
    """A field of the right type. True is not an int here, though Python says that it is."""
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
    """Around what the disk may refuse."""
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
    """The folder that one save writes into, and no other."""
    return path.with_name(f"writing-{path.name}-{token}")


def _file_of(place: int) -> str:
    return f"rank{place:05d}.safetensors"


def _told(file: Path, world_size: int) -> dict[str, Any]:
    """What the rank that wrote a file told of it, if the file is there as this rank sees it."""
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
    """Have the disk hold a file, or the names in a folder, and not the machine's memory alone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
