"""Loops of every kind, recorded and held against one another."""

import pytest

from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from tests.on_torch.recorded_loops import KINDS, train, where

FINE = (Verdict.EQUAL, Verdict.ROUNDING)
PARALLEL = [kind for kind in KINDS if kind != "one"]


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory):
    """One device that is fed all samples."""
    directory = where(tmp_path_factory.mktemp("alone"), "run")
    ranks.run(1, train, "one", directory)
    return Recording.open(directory)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", PARALLEL)
def test_every_kind_of_sharding_records_the_run_of_one_device(ranks, tmp_path, alone, kind, world_size):
    ranks.run(world_size, train, kind, where(tmp_path, kind))
    recording = Recording.open(where(tmp_path, kind))
    found = compare(recording, alone)
    assert found.verdict in FINE, found
