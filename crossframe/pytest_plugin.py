"""Plugin of pytest: the fixture `training`, which compares a training run with its golden. Imports nothing until it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from crossframe.cli.fixture import Training

_OPTION = "--update-baselines"
_WRITTEN = "crossframe golden"


def pytest_addoption(parser: Any) -> None:
    """Add the option that records goldens again."""
    parser.getgroup("crossframe").addoption(
        _OPTION,
        action="store_true",
        help="Record the goldens of the fixture `training` again instead of comparing with them.",
    )


@pytest.fixture
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Training:
    """Compares training runs with goldens, which lie in the folder `baselines` next to the test's file.

        def test_gpt(training):
            training.matches("gpt", train)

    See `crossframe.cli.fixture.Training.matches`.
    """
    from crossframe.cli.fixture import Training

    def tell(text: str) -> None:
        request.node.user_properties.append((_WRITTEN, text))

    updates = bool(request.config.getoption(_OPTION))
    return Training(request.path.parent, tmp_path, updates, of=request.node.nodeid, tell=tell)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the goldens that were written, also those of xdist's processes."""
    reports = (report for every in terminalreporter.stats.values() for report in every)
    written = [
        text
        for report in reports
        if getattr(report, "when", None) == "teardown"
        for name, text in report.user_properties
        if name == _WRITTEN
    ]
    if written:
        terminalreporter.section("goldens")
        for text in written:
            terminalreporter.write_line(text)
