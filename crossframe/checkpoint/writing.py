"""Writes checkpoints: each process its shards, one of them the index; removes those that were not finished.

[Note: ownership of a folder] A job writes to its own folder, `writing-NAME-TOKEN`, and renames it to NAME when everything is on
disk. So NAME is complete or absent, whichever process is killed. One rank draws the random token and sends it to the others, and
no other job writes to that folder or removes it. If two jobs save under one name at the same time, the first to finish succeeds
and the other raises, since a folder cannot be renamed to that of a checkpoint. The remains of a killed job block no other job;
`remove_unfinished` removes them when the caller knows that no job is writing.
"""

import errno
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from crossframe.checkpoint.index import FORMAT, INDEX, CheckpointError, checked_path, digest_of, file_name, unit_to_json
from crossframe.files import FileError, read_bytes
from crossframe.layout import Sharding
from crossframe.quoting import quote, quote_path
from crossframe.tensor_file import write_tensors

T = TypeVar("T")

# The steps of a save, in messages.
WRITING, END = "writing of a checkpoint", "end of a checkpoint"
# Suffix of the file in which a rank describes its data file until the index is written.
DESCRIBED = ".json"
# Names of the folder of an unfinished checkpoint, and of the files of a checkpoint, finished or not.
_UNFINISHED = re.compile(r"writing-.+-[0-9a-f]{16}", re.DOTALL)
_OWN = re.compile(r"index\.json|rank\d{5,}\.(safetensors|json)")


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
    each = Save(path, processes, about)
    each.begin(contents, copies=False)
    try:
        processes.together(WRITING, each.write)
        processes.together(END, each.finish)
    except BaseException:
        each.abandon()
        raise


class Save:
    """One process's part of one save: `begin`, `write` and `finish`, in this order.

    Attributes:
        processes: the processes that save together.
        path: folder of the checkpoint.
        token: of the folder that is written to, once `begin` has returned.
    """

    def __init__(self, path: Path | str, processes: Processes, about: Mapping[str, Any] | None) -> None:
        self.path, self.processes, self.token = path, processes, ""
        self._about = about
        self._sections: Mapping[str, Sharding] = {}
        self._places: tuple[int, ...] = ()
        self._values: dict[str, np.ndarray] = {}
        self._arrays: Callable[[int], Any] = {}.pop

    def begin(self, contents: Callable[[], Contents], *, copies: bool) -> None:
        """Create the folder. All processes call it. If it raises, nothing is left.

        Args:
            copies: whether to copy the shards of this process first, so that `write` needs nothing that training changes or
                frees. Without, `write` copies those of one rank at a time.
        """

        def begun() -> None:
            check_about(self._about)
            own = contents()
            self._sections, self._places = own.sections, tuple(own.places)
            self._values = {key: np.array(value) for key, value in own.values.items()}
            self._arrays = lambda place: rank_arrays(place, own.sections, own.lines(place), self._values)
            if copies:
                # Without `own`, whose `lines` would keep arrays on the devices.
                self._arrays = {place: self._arrays(place) for place in self._places}.pop
            if self.processes.is_first:
                self.token = begin(self.path)

        try:
            self.processes.together("beginning of a checkpoint", begun)
            self.token = self.processes.from_first(self.token)
        except BaseException:
            self.abandon()
            raise

    def write(self) -> None:
        """Write the files of this process."""
        for place in self._places:
            _write_file(self.path, self.token, place, self._arrays(place))

    def is_written(self) -> bool:
        """Whether the files of all ranks are there, as this process sees the folder."""
        folder = _writing(checked_path(self.path), self.token)
        return all(_description(folder / name) is not None for name in _file_names(self._sections))

    def finish(self) -> None:
        """Give the checkpoint its name, in the first process, after all have written."""
        if self.processes.is_first:
            finish(self.path, self.token, self._sections, self._values, self._about)

    def abandon(self) -> None:
        """Remove what was written, in the first process."""
        if self.processes.is_first and self.token:
            abandon(self.path, self.token)


def begin(path: Path | str) -> str:
    """Create the folder in which a checkpoint is written. One rank calls it. See [Note: ownership of a folder].

    Returns:
        The token of this save, which every rank passes to `write_rank`. If the save fails, pass it to `abandon`.

    Raises:
        CheckpointError: `path` exists, which is not overwritten, or the folder cannot be created.
    """
    path, token = checked_path(path), secrets.token_hex(8)
    writing = _writing(path, token)
    with _writes(path):
        if os.path.lexists(path):
            raise CheckpointError(
                f"{quote_path(path)}: expected nothing there, got a file or folder; pass another path, or remove it"
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
    _write_file(path, token, place, rank_arrays(place, sections, lines, values or {}))


def rank_arrays(
    place: int,
    sections: Mapping[str, Sharding],
    lines: Mapping[str, Sequence[np.ndarray]],
    values: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """The arrays in the file of a rank, as copies; the arguments are those of `write_rank`."""
    arrays: dict[str, np.ndarray] = {}
    for section, sharding in sections.items():
        for bucket, ((_, layout), line) in enumerate(zip(sharding.units, lines[section], strict=True)):
            clean = np.array(line)
            for run in layout.padding(place):
                clean[run.start : run.stop] = 0
            arrays[f"{section}:{bucket}"] = clean
    if place == 0:
        for key, value in values.items():
            arrays[f"value:{key}"] = np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)
    return arrays


def _write_file(path: Path | str, token: str, place: int, arrays: Mapping[str, np.ndarray]) -> None:
    file = _writing(checked_path(path), token) / file_name(place)
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
    path = checked_path(path)
    writing = _writing(path, token)
    names = _file_names(sections)
    content = {
        "format": FORMAT,
        "about": dict(about or {}),
        "world_size": len(names),
        "sections": {name: [unit_to_json(*unit) for unit in each.units] for name, each in sections.items()},
        "values": {key: [value.dtype.name, list(value.shape)] for key, value in (values or {}).items()},
        "files": {name: _checked_description(writing / name, len(names)) for name in names},
    }
    with _writes(writing):
        for name in names:
            (writing / name).with_suffix(DESCRIBED).unlink()
        (writing / INDEX).write_text(json.dumps({"content": content, "sha256": digest_of(content)}, indent=1))
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
            f"{quote_path(path)}: expected nothing there, but another job has saved under this name since this one began; save "
            "under another name"
        )


def abandon(path: Path | str, token: str) -> None:
    """Remove an unfinished checkpoint as far as possible. One rank calls it."""
    with suppress(CheckpointError):
        remove(_writing(checked_path(path), token))


def remove(path: Path | str) -> None:
    """Delete the files of a checkpoint, finished or not, and its folder.

    Raises:
        CheckpointError: the folder has other files or is a link, in which case nothing is deleted; or the deletion fails.
    """
    path = checked_path(path)
    with _writes(path, "deleted"):
        entries = list(os.scandir(path)) if not path.is_symlink() else None
        foreign = [entry.name for entry in entries or () if not _is_own(entry)]
        if entries is None or foreign:
            raise CheckpointError(
                f"{quote_path(path)}: expected the files of a checkpoint and nothing else, got "
                f"{quote(foreign[0]) if foreign else 'a link'}; nothing was deleted, move it or remove it by hand"
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
            f"about: expected a dict of JSON values, with string keys and without tuples, got {quote(about)}"
        )


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
            f"{quote_path(path)}: cannot be {done} ({reason}); make space there, or pass another path"
        ) from error


def _writing(path: Path, token: str) -> Path:
    """The folder that a save writes to, which no other save uses."""
    return path.with_name(f"writing-{path.name}-{token}")


def _file_names(sections: Mapping[str, Sharding]) -> list[str]:
    return [file_name(place) for place in range(next(iter(sections.values())).mesh.shard)]


def _description(file: Path) -> dict[str, Any] | None:
    """The description of a file by the rank that wrote it; None if this process does not see it, or only a part of it."""
    try:
        return json.loads(read_bytes(file.with_suffix(DESCRIBED), 1 << 10))
    except (FileError, OSError, ValueError):
        return None


def _checked_description(file: Path, world_size: int) -> dict[str, Any]:
    """The description of a file; CheckpointError if this rank sees no such file or another size."""
    description = _description(file)
    with suppress(OSError):
        size = file.stat().st_size
        if description is not None and description["bytes"] == size:
            return description
        if description is not None:
            raise CheckpointError(
                f"{quote_path(file)}: its rank wrote {description['bytes']} bytes, and here it has {size}; is the disk full?"
            )
    raise CheckpointError(
        f"{quote_path(file.parent)}: expected the files of {world_size} ranks, got none of {file.name}; all ranks must see "
        "one folder, and have written to it before one of them finishes"
    )


def flush(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
