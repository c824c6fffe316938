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
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from crossframe.dtypes import FLOATING, numpy_dtype
from crossframe.errors import CrossframeError
from crossframe.layout import FlatLayout, Layout, Sharding, layout_from_json, overlay
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.shown import shown, shown_path
from crossframe.tensor_file import write_tensors

FORMAT = "crossframe checkpoint 2"
INDEX = "index.json"
# What a rank tells of its file until the index does.
DESCRIBED = ".json"
MODEL, STATE = "model", "state"


# What Adam counts its steps in, in both frameworks, and under which name it is kept.
STEP, STEP_DTYPE = "step", np.dtype(np.int32)
# How many names an error lists.
LISTED = 5
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
    _checked: set[str] = field(default_factory=set)

    @property
    def files(self) -> list[str]:
        """The names of the files that it is made of, besides its index."""
        return sorted(self._files)

    def complaint(self, name: str) -> str:
        """What is wrong with one of its files, in words that follow its name; "" if it is as it was written."""
        return _complaint(self.path / name, self._files[name])

    def lines(self, section: str, target: Sharding, rank: int) -> list[np.ndarray]:
        """A rank's lines of all buckets in the target's layouts, padding 0, from the ranges of the files that hold them.

        Raises:
            CheckpointError: no such section, other parameters, shapes or dtypes, which are listed by name; or a damaged file.
        """
        if section not in self.sections:
            raise CheckpointError(
                f"{self.path}: expected a section {section!r}, got {sorted(self.sections)}; it was saved without"
            )
        try:
            transfers = list(overlay(self.sections[section], target, rank))
        except CrossframeError as error:
            raise CheckpointError(f"{self.path}, of which nothing was loaded: {error}") from error
        found = [np.zeros(layout.padded_shard_numel, numpy_dtype(layout.dtype)) for _, layout in target.units]
        for place in sorted({each.source_rank for each in transfers}):
            wanted = [each for each in transfers if each.source_rank == place]
            with self._opened(place, [each.name for each in wanted]) as file:
                for each in wanted:
                    line, stop = found[each.target_bucket], each.source_start + each.numel
                    run = file.get_slice(f"{section}:{each.source_bucket}")[each.source_start : stop]
                    line[each.target_start : each.target_start + each.numel] = run.view(line.dtype)
        return found

    def value(self, key: str) -> np.ndarray:
        """What belongs to no parameter; CheckpointError if there is none of that key."""
        if key not in self.values:
            raise CheckpointError(f"{self.path}: expected a value {key!r}, got {sorted(self.values)}")
        dtype, shape = self.values[key]
        with self._opened(0, [key]) as file:
            data = file.get_tensor(f"value:{key}")
        return np.frombuffer(data.tobytes(), numpy_dtype(dtype) if dtype in FLOATING else np.dtype(dtype)).reshape(
            shape
        )

    def _opened(self, place: int, wanted: Sequence[str]) -> Any:
        name = _file_of(place)
        if name not in self._checked:
            if complaint := self.complaint(name):
                raise CheckpointError(
                    f"{self.path}, of which nothing was loaded: {name} {complaint}; with it is lost what rank {place} held of "
                    f"{_listed(wanted)}. Restore the file from a copy, or load another checkpoint"
                )
            self._checked.add(name)
        try:
            return safe_open(self.path / name, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / name}: cannot be read ({error})") from error


def read(path: Path | str) -> Saved:
    """Read the index of a checkpoint.

    Raises:
        CheckpointError: no checkpoint, or an index that was changed.
    """
    path = _path(path)
    try:
        wrapped = json.loads((path / INDEX).read_bytes())
        content, digest = wrapped["content"], wrapped["sha256"]
    except OSError:
        raise CheckpointError(
            f"{path}: expected a checkpoint, got no {INDEX} there; pass the folder that was saved"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path / INDEX}: is no index of a checkpoint; restore it from a copy") from None
    if digest != _digest(content) or content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path / INDEX}: has other content than was written (its checksum or format differs from {FORMAT!r}); restore it "
            "from a copy"
        )
    mesh = MeshSpec(content["world_size"])
    sections = {
        name: Sharding(tuple(_unit_from_json(unit) for unit in units), mesh)
        for name, units in content["sections"].items()
    }
    values = {key: (dtype, tuple(shape)) for key, (dtype, shape) in content["values"].items()}
    return Saved(path, content["about"], sections, values, content["files"])


def _unit_json(name: str, layout: Any) -> dict:
    params = [
        [spec.name, list(spec.shape), spec.dtype, list(spec.aliases), spec.requires_grad] for spec in layout.params
    ]
    return {"unit": name, "params": params, "layout": layout.to_json()}


def _unit_from_json(unit: dict) -> tuple[str, Any]:
    params = tuple(
        ParamSpec(name, tuple(shape), dtype, tuple(aliases), trained)
        for name, shape, dtype, aliases, trained in unit["params"]
    )
    return unit["unit"], layout_from_json(unit["layout"], params)


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
        told, size = json.loads(file.with_suffix(DESCRIBED).read_text()), file.stat().st_size
    except OSError:
        raise CheckpointError(
            f"{file.parent}: expected the files of {world_size} ranks, got none of {file.name}; all ranks must see one "
            "folder, and have written to it before one of them finishes"
        ) from None
    if told["bytes"] != size:
        raise CheckpointError(
            f"{file}: its rank wrote {told['bytes']} bytes, and here it has {size}; is the disk full?"
        )
    return told


def _listed(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(map(repr, names[:LISTED])) + more


def _described(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def _complaint(file: Path, expected: Mapping[str, Any]) -> str:
    if not file.exists():
        return "is missing"
    if (size := file.stat().st_size) != expected["bytes"]:
        return f"has {size} bytes, not {expected['bytes']}: it was cut off or replaced"
    return "" if _described(file) == expected else "has other content than was written (its checksum differs)"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def flush(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder, and not the machine's memory alone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
