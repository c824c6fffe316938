"""Diagnoses a difference with hypotheses that predict one side from recorded values.

The `*_hypotheses` modules read recorded values from a `Case` and pass them to the numerical modules `*_fits`, `*_deviations`,
`batches`, `optimizer_rules` and `tied_weights`. `fit` defines when a hypothesis is accepted and which one is reported.
"""

from crossframe.verdict.diagnosis.diagnose import (
    Diagnosis,
    diagnose,
    diagnose_batches,
    diagnose_untied,
    follows_optimizer,
    needs_full_tensors,
)
from crossframe.verdict.diagnosis.fit import SIGNATURES

__all__ = [
    "SIGNATURES",
    "Diagnosis",
    "diagnose",
    "diagnose_batches",
    "diagnose_untied",
    "follows_optimizer",
    "needs_full_tensors",
]
