"""What a difference looks like: hypotheses that predict one side from what was recorded, and the one that fits.

One file a family: `factors`, `moved`, `reduction`, `tied`, `forward`, `rules` with `update_deviations` and `moments`, and
`batches` know numbers alone; `of_values`, `of_ranks`, `of_modules` and `of_optimizer` put to them what two recordings hold
(`case`). When a fit is accepted, and which one is reported: `fit`.
"""

from crossframe.verdict.diagnosis.diagnose import (
    Diagnosis,
    diagnose,
    diagnose_batches,
    follows_optimizer,
    needs_full_tensors,
)
from crossframe.verdict.diagnosis.fit import SIGNATURES

__all__ = ["SIGNATURES", "Diagnosis", "diagnose", "diagnose_batches", "follows_optimizer", "needs_full_tensors"]
