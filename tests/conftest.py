"""Fixtures that several folders use."""

from collections.abc import Iterator

import pytest

from tests.on_torch.ranks import Ranks, started_ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes with a gloo group, by world size."""
    with started_ranks() as started:
        yield started
