"""Compares two recordings: equal, rounding, a bug and where, or no answer and why.

`compare` runs a comparison: `measure.causal_order` lists the compared quantities, `measure.judge` and `perturbed_runs` bound
their differences, `findings` collects the judgements, `conclude` derives the verdict, `evidence` overrules it for differences as
small as rounding, and `diagnosis` names causes. `result` is the return type. This folder imports `diagnosis`, and both import
`measure`.
"""

from crossframe.verdict.compare import compare
from crossframe.verdict.measure.bounds_by_dtype import Bounds, bounds_for
from crossframe.verdict.measure.locate import Divergence
from crossframe.verdict.result import PairVerdict
from crossframe.verdict.verdicts import Verdict, overall

__all__ = ["Bounds", "Divergence", "PairVerdict", "Verdict", "bounds_for", "compare", "overall"]
