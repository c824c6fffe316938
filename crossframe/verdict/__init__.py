"""Compares two recordings: equal, rounding, a bug and where, or no answer and why.

Where to look: `compare` states the order of a comparison; `walk` lists what is compared, `judge` and `envelope` say how far two
values may differ, `findings` collects that; `conclude` words the verdict, `evidence` overrules it for differences as small as
rounding, `diagnosis` names causes; `result` is what a caller gets.
"""

from crossframe.verdict.bounds import Bounds, bounds_for
from crossframe.verdict.compare import compare
from crossframe.verdict.kinds import Verdict, overall
from crossframe.verdict.locate import Divergence
from crossframe.verdict.result import PairVerdict

__all__ = ["Bounds", "Divergence", "PairVerdict", "Verdict", "bounds_for", "compare", "overall"]
