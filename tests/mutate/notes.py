"""A plugin of pytest that writes down, for each test, whether it passed, what it took and which probes it executed."""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import hypothesis
import pytest

NOTES = "CROSSFRAME_MUTATE_NOTES"
"""The folder to which each process of pytest writes a file of its own."""
PROBES = "CROSSFRAME_MUTATE_PROBES"
"""The folder in which a probe makes a file, in the processes that this process starts too."""


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.register_profile("mutate", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
    hypothesis.settings.load_profile("mutate")
    config.pluginmanager.register(_Notes(Path(os.environ[NOTES])))


class _Notes:
    def __init__(self, folder: Path) -> None:
        self.probes = Path(tempfile.mkdtemp(dir=folder))
        os.environ[PROBES] = str(self.probes)
        self.path = folder / f"{os.getpid()}.jsonl"
        self.passed, self.setup = True, list[int]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.passed, self.setup = True, []
        self._executed()
        began = time.monotonic()
        try:
            return (yield)
        finally:
            fields = {"test": item.nodeid, "passed": self.passed, "seconds": time.monotonic() - began}
            with open(self.path, "a") as file:
                file.write(json.dumps(fields | {"setup": self.setup, "call": self._executed()}) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed = self.passed and not report.failed
        if report.when == "setup":
            self.setup = self._executed()

    def _executed(self) -> list[int]:
        """The probes that were executed since this was last asked."""
        found = list(self.probes.iterdir())
        for path in found:
            path.unlink()
        return [int(path.name) for path in found]
