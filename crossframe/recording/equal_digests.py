"""Compares two recordings bit for bit by the digests that they state, without reading anything else."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from crossframe.errors import RecordingError
from crossframe.files import FileError, open_regular
from crossframe.recording import event_format
from crossframe.recording.event_index import LARGEST_EVENTS
from crossframe.recording.known_settings import COMMAND
from crossframe.recording.manifest import Manifest

# Maximum bytes of an "end" line: two digests and a number.
_LONGEST_END = 1 << 10


@dataclass(frozen=True)
class Stated:
    """The digests that a finished recording states.

    Attributes:
        manifest: the manifest.
        num_steps: number of steps, the same on all ranks.
        contents: for each rank the sha256, in hex, of its lines, which include the sha256 of every tensor file.
    """

    manifest: Manifest
    num_steps: int
    contents: tuple[str, ...]

    @classmethod
    def read(cls, directory: Path) -> "Stated | None":
        """Read the manifest and the last line of each rank.

        Returns:
            None if a rank has no end that states its content: the run was cut off, or the format is 4 or older.

        Raises:
            RecordingError: the manifest is missing or invalid.
        """
        manifest = Manifest.read(directory)
        contents, num_steps = [], set()
        for rank in range(manifest.world_size):
            end = _end(directory / event_format.rank_folder(rank) / event_format.EVENTS_NAME, rank)
            if end is None or not isinstance(end.get("content"), str):
                return None
            contents.append(end["content"])
            num_steps.add(end["steps"])
        return cls(manifest, num_steps.pop(), tuple(contents)) if len(num_steps) == 1 else None

    def equals(self, other: "Stated") -> bool:
        """Whether both state the same run with the same content. The job that recorded it and its command may differ."""
        return self.contents == other.contents and _run(self.manifest) == _run(other.manifest)


def _end(path: Path, rank: int) -> dict | None:
    try:
        file, size = open_regular(path, LARGEST_EVENTS)
    except FileError:
        return None
    with file:
        file.seek(max(size - _LONGEST_END, 0))
        last = file.read().splitlines(keepends=True)[-1:]
    try:
        fields = event_format.decode(last[0], rank, str(path)) if last else None
    except RecordingError:
        return None
    return fields if fields is not None and fields["event"] == "end" else None


def _run(manifest: Manifest) -> str:
    """A manifest without the fields that always differ between two recordings of a run."""
    fields = manifest.to_json()
    del fields["token"]
    fields["settings"].pop(COMMAND, None)
    return json.dumps(fields, sort_keys=True)


def exceeds(directory: Path, num_bytes: int) -> bool:
    """Whether the files of the ranks of a recording have more bytes than this. Stops counting as soon as it is known."""
    total = 0
    for folder in directory.glob("rank*"):
        with os.scandir(folder) as entries:
            for entry in entries:
                total += entry.stat().st_size
                if total > num_bytes:
                    return True
    return False
