"""The options of a recorder that mean the same in every backend."""

import importlib.metadata
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from crossframe.errors import UsageError
from crossframe.layout import Layout
from crossframe.recording.event_format import perturbed_run_folder
from crossframe.recording.known_settings import COMMAND, FORWARD_ONLY
from crossframe.recording.manifest import FULL, SKETCH, Manifest
from crossframe.recording.perturbed_runs import perturbed_run_number
from crossframe.recording.program import PROGRAM, with_digests
from crossframe.recording.recorded_steps import Schedule
from crossframe.recording.sketch import FULL_NUMEL

_AUTO = "auto"
_NEVER = 10**9


class RunOptions:
    """Where a run is recorded, and how much of it, from the arguments of a recorder.

    Args:
        directory, every, dense, windows, detail, steps, seed, perturbed_run, forward_only, overwrite, settings: of `Recorder`.
        manifest: that of an existing recording in the directory, which determines what is recorded; None: a new recording.
        trace_directory: the destination of a trace of operators, if the run is repeated for one. Its recording is not used.

    Attributes:
        path: the directory of the recording. That of a perturbed run is a folder inside the original run's.
        perturbed_run: number of the perturbed run; 0: the original run.
        schedule: the steps that are recorded.
        overwrite: replace an existing recording.

    Raises:
        UsageError: an invalid detail or number of the perturbed run.
        RecordingError: an invalid schedule.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every: int,
        dense: int,
        windows: Iterable[tuple[int, int]],
        detail: str,
        steps: int | None,
        seed: int | None,
        perturbed_run: int | None,
        forward_only: bool,
        overwrite: bool,
        settings: Mapping[str, Any] | None,
        manifest: Manifest | None,
        trace_directory: str | None,
    ) -> None:
        if detail not in (_AUTO, FULL, SKETCH):
            raise UsageError(f"Recorder: detail: expected 'auto', 'full' or 'sketch', got {detail!r}")
        self.perturbed_run, self.overwrite = perturbed_run_number(perturbed_run), overwrite
        self.path, self.schedule = Path(directory), Schedule(dense, every, tuple(windows))
        self._detail, self._steps, self._seed = detail, steps, seed
        self._settings = ({FORWARD_ONLY: True} if forward_only else {}) | dict(settings or {})
        if manifest is not None:
            self.schedule, self._detail = manifest.schedule, manifest.detail
        elif trace_directory is not None:
            self.path, self.overwrite = Path(trace_directory, "recording"), True
            self.schedule, self._detail = Schedule(0, _NEVER), SKETCH
        elif self.perturbed_run:
            self.path /= perturbed_run_folder(self.perturbed_run)

    def sketches(self, units: Iterable[tuple[str, Layout]]) -> bool:
        """Whether large tensors of a model of these units are recorded as sketches."""
        numel = sum(spec.numel for _, layout in units for spec in layout.params)
        return self._detail == SKETCH or (self._detail == _AUTO and numel > FULL_NUMEL)

    def manifest(
        self,
        *,
        units: tuple[tuple[str, Layout], ...],
        packages: Iterable[str],
        program: Mapping[str, Any],
        stated: Mapping[str, Any],
        **fields: Any,
    ) -> Manifest:
        """The manifest of the run.

        Args:
            packages: those whose versions are stated if they are imported.
            program: what the bits of the run depend on (`crossframe.recording.program`), to which digests are added.
            stated: settings that the backend knows. Those of the user replace them, `program` too.
            fields: the other fields of the manifest.
        """
        found = {**stated, COMMAND: shlex.join(["python", *sys.argv]), PROGRAM: program, **self._settings}
        if isinstance(found[PROGRAM], Mapping):
            found[PROGRAM] = with_digests(found[PROGRAM])
        if self.perturbed_run:
            found.setdefault("perturbed_run", self.perturbed_run)
        return Manifest(
            units=units,
            schedule=self.schedule,
            steps=self._steps,
            seed=self._seed,
            detail=SKETCH if self.sketches(units) else FULL,
            versions={name: importlib.metadata.version(name) for name in packages if name in sys.modules},
            settings=found,
            **fields,
        )
