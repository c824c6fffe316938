"""A plugin of pytest that writes down, for each test, whether it passed, what it took and which functions with probes ran."""

import importlib
import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.mutate.probes import PROBES

NOTES = "CROSSFRAME_MUTATE_NOTES"
"""The environment variable with the file to write: a JSON object on a line for each test."""


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.register_profile("mutate", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
    hypothesis.settings.load_profile("mutate")
    config.pluginmanager.register(_Notes(Path(os.environ[NOTES])))


class _Notes:
    """What runs when test files are imported and in fixtures for several tests is `shared` by all tests of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.probes = Path(tempfile.mkdtemp(dir=path.parent))
        os.environ[PROBES] = str(self.probes)
        self.module: Any = None
        with suppress(ImportError):  # there are no probes while a fault is judged
            self.module = importlib.import_module("crossframe._probe")
            self.module.SEEN = set()
        self.passed, self.own, self.shared = True, set[int](), set[int]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.passed, self.own, self.shared = True, set(), self._executed()
        began = time.monotonic()
        try:
            return (yield)
        finally:
            seconds, own = time.monotonic() - began, self.own | self._executed()
            fields = {"test": item.nodeid, "passed": self.passed, "seconds": seconds}
            with open(self.path, "a") as file:
                file.write(json.dumps(fields | {"own": sorted(own), "shared": sorted(self.shared)}) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        self.own |= self._executed()
        try:
            return (yield)
        finally:
            (self.own if fixturedef.scope == "function" else self.shared).update(self._executed())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed = self.passed and not report.failed

    def _executed(self) -> set[int]:
        """The functions that ran since this was last asked."""
        found = list(self.probes.iterdir())
        for path in found:
            path.unlink()
        if self.module is not None:
            self.module.SEEN.clear()
        return {int(path.name) for path in found}
