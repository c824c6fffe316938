"""Fixtures that several folders use."""

import os
from collections.abc import Iterator

import pytest

from tests.on_torch.ranks import Ranks, started_ranks

EXHAUSTIVE = "CROSSFRAME_EXHAUSTIVE_TESTS"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--exhaustive`: every combination, where a test otherwise takes those that differ."""
    parser.addoption("--exhaustive", action="store_true", help="every combination, where tests take a part of them")


def pytest_configure(config: pytest.Config) -> None:
    """Tests look at it when they are collected."""
    if config.getoption("--exhaustive"):
        os.environ[EXHAUSTIVE] = "1"
    else:
        # Small models run for milliseconds, and JAX compiles them for seconds: twice as long if it optimises machine code.
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    # In several processes files go by their names. xdist would begin with those of many tests, and end with the few long ones,
    # one after the other in one process while the others have nothing to do.
    config.option.loadscopereorder = False


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes with a gloo group, by world size."""
    with started_ranks() as started:
        yield started
