"""Reads checkpoints: the index at once, shards on demand in any layout."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from crossframe.checkpoint.index import (
    FORMAT,
    INDEX,
    CheckpointError,
    checked_path,
    digest_of,
    field_of,
    file_name,
    unit_from_json,
    value_dtype,
    value_from_json,
)
from crossframe.dtypes import numpy_dtype
from crossframe.errors import CrossframeError
from crossframe.files import FileError, VerifiedFile, parse_json, read_bytes
from crossframe.layout import Sharding, overlay
from crossframe.mesh import MeshSpec
from crossframe.quoting import quote, quote_error, quote_path
from crossframe.tensor_file import TensorFile

# The formats that can be read. Format 2 does not state the offsets of parameters, which are computed as in format 3.
FORMATS = ("crossframe checkpoint 2", FORMAT)
MOST_INDEX_BYTES = 1 << 26
MOST_RANKS = 1 << 17
# Maximum number of names that an error lists.
LISTED = 5
_SHA256 = re.compile(r"[0-9a-f]{64}")


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
                f"{self._at}: expected a section {section!r}, got {quote(sorted(self.sections))}; it was saved without"
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
            raise CheckpointError(f"{self._at}: expected a value {quote(key)}, got {quote(sorted(self.values))}")
        dtype, shape = self.values[key]
        numel = math.prod(shape) * value_dtype(dtype).itemsize
        file = self._opened(0, [key])
        with self._named():
            data = file.read(f"value:{key}", np.dtype(np.uint8), (numel,))
        return data.view(value_dtype(dtype)).reshape(shape)

    @property
    def _at(self) -> str:
        return quote_path(self.path)

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
        name = file_name(place)
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
    path = checked_path(path)
    try:
        wrapped = parse_json(read_bytes(path / INDEX, MOST_INDEX_BYTES))
        content, digest = wrapped["content"], wrapped["sha256"]
    except FileError as error:
        if error.missing:
            raise CheckpointError(
                f"{quote_path(path)}: expected a checkpoint, got no {INDEX} there; pass the folder that was saved"
            ) from None
        raise CheckpointError(f"{error}; restore it from a copy") from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise CheckpointError(
            f"{quote_path(path / INDEX)}: is not an index of a checkpoint; restore it from a copy"
        ) from None
    if not isinstance(content, dict) or digest != digest_of(content) or content.get("format") not in FORMATS:
        raise CheckpointError(
            f"{quote_path(path / INDEX)}: has other content than was written (its checksum or format differs from {FORMAT!r}); "
            "restore it from a copy"
        )
    try:
        return _saved(path, content)
    except CrossframeError as error:
        raise CheckpointError(f"{quote_path(path / INDEX)}: {quote_error(error)}; restore it from a copy") from None


def _saved(path: Path, content: dict[str, Any]) -> Saved:
    """The checkpoint that an index describes, after a check of every field."""
    about, sections, values, files = (
        field_of(content, name, dict) for name in ("about", "sections", "values", "files")
    )
    world_size = field_of(content, "world_size", int)
    if not 1 <= world_size <= MOST_RANKS:
        raise CheckpointError(f"'world_size': expected 1 to {MOST_RANKS} ranks, got {quote(world_size)}")
    if not sections:
        raise CheckpointError("'sections': expected at least one, got none")
    mesh = MeshSpec(world_size)
    made = {
        name: Sharding(tuple(unit_from_json(unit) for unit in field_of(sections, name, list)), mesh)
        for name in sections
    }
    if files.keys() != {file_name(place) for place in range(world_size)}:
        raise CheckpointError(f"'files': expected one for each of {world_size} ranks, got {quote(sorted(files))}")
    for name in files:
        file = field_of(files, name, dict)
        if field_of(file, "bytes", int) < 0 or not _SHA256.fullmatch(field_of(file, "sha256", str)):
            raise CheckpointError(f"'files': {name}: expected its size and its sha256, got {quote(file)}")
    return Saved(path, about, made, {key: value_from_json(key, value) for key, value in values.items()}, files)


def _listed(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(map(quote, names[:LISTED])) + more
