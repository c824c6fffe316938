"""Follows a recording while its run writes it."""

from pathlib import Path

from crossframe.errors import RecordingError
from crossframe.quoting import quote_path
from crossframe.recording.event_format import EVENTS_NAME, rank_folder
from crossframe.recording.event_index import IndexReader
from crossframe.recording.manifest import MANIFEST_NAME, Manifest
from crossframe.recording.reader import Recording


class LiveRecording:
    """A recording that is being written. Each `read` reads only what was written since the previous one.

    Attributes:
        manifest: that of the run.

    Raises:
        RecordingError: there is no recording, or in `read` a line is damaged, or another run has replaced it.
    """

    def __init__(self, directory: str | Path) -> None:
        self._path = Path(directory)
        self.manifest = Manifest.read(self._path)
        self._identity = self._identify()
        ranks = range(self.manifest.world_size)
        self._readers = [
            IndexReader(self._path / rank_folder(rank) / EVENTS_NAME, self.manifest, rank) for rank in ranks
        ]
        self._recording = Recording(self._path, self.manifest, [reader.index for reader in self._readers], 0)

    def read(self) -> Recording:
        """The recording with the steps that are complete on all ranks by now."""
        if self._identify() != self._identity:
            raise RecordingError(
                f"{quote_path(self._path)}: another run has replaced the recording; watch it from the start"
            )
        num_steps = min(reader.read().num_steps for reader in self._readers)
        if num_steps > self._recording.num_steps:
            self._recording = self._recording.with_num_steps(num_steps)
        return self._recording

    @property
    def ended(self) -> bool:
        """Whether all ranks have ended the recording."""
        return all(reader.index.ended for reader in self._readers)

    @property
    def steps_by_rank(self) -> list[int]:
        """The number of complete steps of each rank."""
        return [reader.index.num_steps for reader in self._readers]

    def forget(self, step: int) -> None:
        """Free what is kept of the batches of a step, so that long runs can be followed."""
        for reader in self._readers:
            reader.index.batches.pop(step, None)

    def _identify(self) -> tuple[int, int]:
        try:
            stat = (self._path / MANIFEST_NAME).stat()
        except OSError:
            return 0, 0
        return stat.st_dev, stat.st_ino
