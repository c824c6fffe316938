"""Compares two runs before their numbers: settings, environments, initial values and first batches."""

from crossframe.check.configurations import check_configurations
from crossframe.check.recordings import check_ranks_of, check_recordings
from crossframe.check.result import Check

__all__ = ["Check", "check_configurations", "check_ranks_of", "check_recordings"]
