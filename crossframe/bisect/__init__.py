"""Searches for causes by runs: minimal sets of settings that make two runs diverge, and groups of runs that agree."""

from crossframe.bisect.delta_debugging import Outcome, find_causes
from crossframe.bisect.grouping import Grouping, group_by_agreement

__all__ = ["Grouping", "Outcome", "find_causes", "group_by_agreement"]
