"""The progress of a run that is being recorded, for progress bars."""

from pathlib import Path

from crossframe.recording import event_format

_MARK = b'{"event": "step", '


class Progress:
    """Counts the "step" lines of every rank. Each call reads only what was appended since the previous one."""

    def __init__(self, directory: Path, world_size: int) -> None:
        self._paths = [
            directory / event_format.rank_folder(rank) / event_format.EVENTS_NAME for rank in range(world_size)
        ]
        self._offsets = [0] * world_size
        self._counts = [0] * world_size
        self._inodes = [0] * world_size

    def steps_done(self) -> int:
        """The number of steps that are complete on every rank; 0 if a rank has not begun."""
        for rank, path in enumerate(self._paths):
            inode = _inode(path)
            if inode != self._inodes[rank]:  # a new file, or one that replaced an earlier recording
                self._inodes[rank], self._offsets[rank], self._counts[rank] = inode, 0, 0
            if inode:
                with open(path, "rb") as file:
                    file.seek(self._offsets[rank])
                    # After the last line feed there is an incomplete line, which the next call reads again.
                    whole = file.read().rpartition(b"\n")[0]
                self._offsets[rank] += len(whole) + bool(whole)
                self._counts[rank] += sum(line.startswith(_MARK) for line in whole.split(b"\n"))
        return min(self._counts)


def _inode(path: Path) -> int:
    """The inode of a file; 0 if it cannot be read, since progress display must not raise."""
    try:
        return path.stat().st_ino if path.is_file() else 0
    except OSError:
        return 0
