"""Compares two recordings: equal, rounding, a bug and where, or no answer and why.

Where to look: `compare` states the order of a comparison; `measure.walk` lists what is compared, `measure.judge` and `envelope`
say how far two values may differ, `findings` collects that; `conclude` words the verdict, `evidence` overrules it for differences
as small as rounding, `diagnosis` names causes; `result` is what a caller gets. Imports go from this folder to `diagnosis` and
from both to `measure`.
"""

from crossframe.verdict.compare import compare
from crossframe.verdict.kinds import Verdict, overall
from crossframe.verdict.measure.bounds import Bounds, bounds_for
from crossframe.verdict.measure.locate import Divergence
from crossframe.verdict.result import PairVerdict

__all__ = ["Bounds", "Divergence", "PairVerdict", "Verdict", "bounds_for", "compare", "overall"]
