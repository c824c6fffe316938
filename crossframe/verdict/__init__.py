"""Compares two recordings: equal, rounding, a bug and where, or no answer and why."""

from crossframe.verdict.bounds import Bounds, bounds_for
from crossframe.verdict.compare import PairVerdict, compare
from crossframe.verdict.kinds import Verdict, overall
from crossframe.verdict.locate import Divergence

__all__ = ["Bounds", "Divergence", "PairVerdict", "Verdict", "bounds_for", "compare", "overall"]
