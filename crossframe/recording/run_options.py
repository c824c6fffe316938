"""The options of a recorder that mean the same in every backend."""

import importlib.metadata
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from crossframe.errors import UsageError
from crossframe.layout import Layout
from crossframe.recording.event_format import perturbed_run_folder
from crossframe.recording.known_settings import COMMAND, FORWARD_ONLY
from crossframe.recording.manifest import FULL, SKETCH, Manifest
from crossframe.recording.perturbed_runs import perturbed_run_number
from crossframe.recording.program import PROGRAM
from crossframe.recording.recorded_steps import Schedule
from crossframe.recording.sketch import FULL_NUMEL

_AUTO = "auto"
_NEVER = 10**9


@dataclass(frozen=True)
class RunOptions:
    """Where a run is recorded, and how much of it.

    Attributes:
        path: the directory of the recording. That of a perturbed run is a folder inside the original run's.
        schedule, steps, seed, settings: for the manifest.
        detail: "full", "sketch", or "auto", which depends on the size of the model.
        perturbed_run: number of the perturbed run; 0: the original run.
        forward_only: whether calls of a model are recorded, and no training.
        overwrite: replace an existing recording.
    """

    path: Path
    schedule: Schedule
    detail: str
    steps: int | None
    seed: int | None
    perturbed_run: int
    forward_only: bool
    overwrite: bool
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls,
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
    ) -> Self:
        """The options of a recorder, from its arguments.

        Args:
            manifest: that of an existing recording in the directory, which determines what is recorded; None: a new recording.
            trace_directory: the destination of a trace of operators, if the run is repeated for one. Its recording is not used.

        Raises:
            UsageError: an invalid detail or number of the perturbed run.
            RecordingError: an invalid schedule.
        """
        if detail not in (_AUTO, FULL, SKETCH):
            raise UsageError(f"Recorder: detail: expected 'auto', 'full' or 'sketch', got {detail!r}")
        number = perturbed_run_number(perturbed_run)
        path, schedule = Path(directory), Schedule(dense, every, tuple(windows))
        if manifest is not None:
            schedule, detail = manifest.schedule, manifest.detail
        elif trace_directory is not None:
            path, schedule, detail, overwrite = Path(trace_directory, "recording"), Schedule(0, _NEVER), SKETCH, True
        elif number:
            path = path / perturbed_run_folder(number)
        return cls(path, schedule, detail, steps, seed, number, forward_only, overwrite, dict(settings or {}))

    def sketches(self, units: Iterable[tuple[str, Layout]]) -> bool:
        """Whether large tensors of a model of these units are recorded as sketches."""
        numel = sum(spec.numel for _, layout in units for spec in layout.params)
        return self.detail == SKETCH or (self.detail == _AUTO and numel > FULL_NUMEL)

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
            program: what the bits of the run depend on (`crossframe.recording.program`).
            stated: settings that the backend knows. Those of the user replace them.
            fields: the other fields of the manifest.
        """
        found = dict(stated) | {COMMAND: shlex.join(["python", *sys.argv]), PROGRAM: dict(program)}
        if self.perturbed_run:
            found["perturbed_run"] = self.perturbed_run
        if self.forward_only:
            found[FORWARD_ONLY] = True
        return Manifest(
            units=units,
            schedule=self.schedule,
            steps=self.steps,
            seed=self.seed,
            detail=SKETCH if self.sketches(units) else FULL,
            versions={name: importlib.metadata.version(name) for name in packages if name in sys.modules},
            settings=found | dict(self.settings),
            **fields,
        )
