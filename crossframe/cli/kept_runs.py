"""Recordings of training commands in one folder, which a later call of the same search continues."""

import json
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from crossframe.cli.record import record_script
from crossframe.cli.training_command import TrainingCommand
from crossframe.errors import FailedRunError, UsageError
from crossframe.quoting import quote_path
from crossframe.recording import Recording

STATE = "bisect.json"


class KeptRuns:
    """Recordings by name. A run that was recorded before, or that failed, is not repeated.

    Args:
        folder: of the recordings and of the file that lists them.
        search: what is searched, as JSON: a folder of another search is rejected.
        overwrite: forget the runs of an earlier search.
        framework: as of `record_script`.

    Attributes:
        num_runs, num_kept: how many commands were run, and how many were already recorded.

    Raises:
        UsageError: the folder is of another search.
    """

    def __init__(
        self, folder: Path, search: dict[str, Any], *, overwrite: bool, framework: str | None, console: Console
    ) -> None:
        self.folder, self.framework, self.console = folder, framework, console
        self.num_runs = self.num_kept = 0
        self._path = folder / STATE
        self._state: dict[str, Any] = {"search": search, "runs": {}}
        if self._path.exists() and not overwrite:
            try:
                before = json.loads(self._path.read_text())
                is_same = before["search"] == search and isinstance(before["runs"], dict)
            except (ValueError, KeyError, TypeError):
                raise UsageError(f"{quote_path(self._path)}: damaged; start again with --overwrite") from None
            if not is_same:
                raise UsageError(
                    f"{quote_path(folder)}: holds the runs of another search; choose another folder with --output, or replace "
                    "them with --overwrite"
                )
            self._state = before
        self._write()

    def record(self, name: str, command: TrainingCommand, **options: Any) -> Recording:
        """The recording of a command.

        Args:
            name: path below the folder.
            options: of `record_script`.

        Raises:
            FailedRunError: it fails, or failed before.
        """
        key, runs = f"{command} {json.dumps(options, sort_keys=True)}", self._state["runs"]
        before = runs.get(name)
        if before is not None and before["key"] == key:
            self.num_kept += 1
            if before["failed"] is not None:
                raise FailedRunError(before["failed"])
            return Recording.open(self.folder / name)
        self.num_runs += 1
        self.console.print(f"running {name}: {command}", style="dim")
        began, failed = time.monotonic(), None
        try:
            record_script(
                command,
                output=self.folder / name,
                framework=self.framework,
                overwrite=True,
                prints_to_stderr=True,
                console=self.console,
                **({"perturbed_runs": 0, "windows": ()} | options),
            )
        except FailedRunError as error:
            failed = error
        seconds = round(time.monotonic() - began, 1)
        runs[name] = {"key": key, "failed": None if failed is None else str(failed), "seconds": seconds}
        self._write()
        if failed is not None:
            raise failed
        return Recording.open(self.folder / name)

    @property
    def result(self) -> dict[str, Any]:
        """What `conclude` kept."""
        return self._state["result"]

    def conclude(self, result: dict[str, Any]) -> None:
        """Keep the result next to the runs."""
        self._state["result"] = result
        self._write()

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps(self._state, indent=1) + "\n")
        os.replace(temporary, self._path)
