"""Searches for causes by runs: minimal sets of settings that make two runs diverge, and groups of runs that agree."""

from crossframe.bisect.delta_debugging import Outcome, causes
from crossframe.bisect.grouping import Grouping, grouped

__all__ = ["Grouping", "Outcome", "causes", "grouped"]
