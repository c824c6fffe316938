"""The exit status of a command for each verdict."""

from crossframe.verdict import Verdict

AGREE = 0
FOUND = 1
"""A bug, or in `crossframe inspect` and `crossframe check` a finding."""
WRONG_USE = 2
UNSETTLED = 3
"""Inconclusive, or in `crossframe check` differences that may change numbers."""
SKIP, ABORT = 125, 128
"""Statuses of a command that `git bisect run` executes: the commit cannot be tested, and the search cannot go on."""
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


def git_bisect_status(status: int) -> int:
    """The exit status of a comparison as `git bisect run` reads it: 0 good, 1 bad, 125 undecided.

    >>> [git_bisect_status(status) for status in (AGREE, FOUND, UNSETTLED, 4, 5)]
    [0, 1, 125, 1, 1]
    """
    return {AGREE: AGREE, UNSETTLED: SKIP}.get(status, FOUND)
