"""The exit status of a command for each verdict."""

from crossframe.verdict import Verdict

AGREE = 0
FOUND = 1
"""A bug, or in `crossframe inspect` and `crossframe check` a finding. Status 2 is a usage error."""
UNSETTLED = 3
"""Inconclusive, or in `crossframe check` differences that may change numbers."""
_STATUSES = {
    Verdict.EQUAL: AGREE,
    Verdict.ROUNDING: AGREE,
    Verdict.BUG: FOUND,
    Verdict.INCONCLUSIVE: UNSETTLED,
    Verdict.INCOMPARABLE: 4,
    Verdict.DIFFERENT: 5,
}


def exit_status(verdict: Verdict) -> int:
    """The exit status of a comparison: 0 the runs agree, 1 a bug, 3 inconclusive, 4 incomparable, 5 a different computation.

    >>> exit_status(Verdict.ROUNDING), exit_status(Verdict.INCONCLUSIVE)
    (0, 3)
    """
    return _STATUSES[verdict]
