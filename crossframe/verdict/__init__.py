"""Compares two recordings: equal, rounding, a bug and where, or no answer and why."""

from crossframe.verdict.bounds import Bounds, bounds_for
from crossframe.verdict.compare import PairVerdict, compare
from crossframe.verdict.judge import Divergence
from crossframe.verdict.kinds import Verdict, overall

__all__ = ["Bounds", "Divergence", "PairVerdict", "Verdict", "bounds_for", "compare", "overall"]
