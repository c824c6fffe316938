"""Goldens: recordings small enough to commit, which later runs are checked against."""

from crossframe.baseline.condense import condense

__all__ = ["condense"]
