"""A writer for ranks whose recording another rank writes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from crossframe.recording.manifest import Manifest
from crossframe.recording.sketch import Sketch
from crossframe.recording.writer import Pieces, RecordingWriter


class SilentWriter(RecordingWriter):
    """Writes nothing: the writer of a rank that computes one replica together with another rank, which writes for both. It asks
    for the same steps as that rank's writer."""

    def __init__(self, directory: str | Path, manifest: Manifest, rank: int) -> None:
        self.manifest, self.rank = manifest, rank
        self._step, self._dense_until = 0, 0

    def environment(self, content: bytes) -> None:
        """Nothing."""

    def _add(self, event: str, fields: dict[str, Any], once: str = "") -> None:
        """Nothing."""

    def activation(self, *args: Any, **options: Any) -> None:
        """Nothing."""

    def buffers(self, *args: Any, **options: Any) -> None:
        """Nothing."""

    def counts(self, step: int, counts: Mapping[str, float]) -> None:
        """Nothing."""

    def _whole(self, phase: str, what: str, step: int, unit: str, arrays: Mapping[str, np.ndarray | Sketch]) -> None:
        """Nothing."""

    def _put(self, phase: str, step: int, unit: str, pieces: Pieces, slot: str = "") -> None:
        """Nothing."""

    def end_step(self, step: int, rates: Sequence[float] = ()) -> None:
        """Go to the next step."""
        self._step = step + 1

    def leave_step(self) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing."""
