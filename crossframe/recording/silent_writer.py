"""A writer for ranks whose recording another rank writes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crossframe.recording.manifest import Manifest
from crossframe.recording.writer import RecordingWriter


class SilentWriter(RecordingWriter):
    """Writes nothing: the writer of a rank that computes one replica together with another rank, which writes for both. It asks
    for the same steps as that rank's writer."""

    def __init__(self, directory: str | Path, manifest: Manifest, rank: int) -> None:
        self.manifest, self.rank = manifest, rank
        self._step, self._dense_until = 0, 0

    def end_step(self, step: int, rates: Sequence[float] = ()) -> None:
        """Go to the next step."""
        self._step = step + 1

    def _nothing(self, *args: Any, **options: Any) -> None:
        """Nothing."""

    environment = activation = buffers = counts = leave_step = finish = __exit__ = _nothing
    _add = _whole = _put = _nothing
