"""Ranks that tests of failures share."""

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks, started_ranks


@pytest.fixture(scope="package")
def fragile() -> Iterator[Ranks]:
    """Ranks whose process groups may be left broken."""
    with started_ranks() as started:
        yield started
