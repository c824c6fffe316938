"""The possible verdicts, and their order of gravity."""

from collections.abc import Iterable
from enum import Enum


class Verdict(Enum):
    """The verdict on one or several pairs of recordings.

    EQUAL: all compared values are bitwise equal. ROUNDING: all differences are within the bounds of rounding. BUG: a difference
    cannot be caused by rounding. DIFFERENT: two runs of the same program differ in bits, within the bounds or where no bound is
    known, so something was computed differently (`crossframe.verdict.bits`). INCONCLUSIVE: the recordings do not decide.
    INCOMPARABLE: two different runs.
    """

    EQUAL = "equal"
    ROUNDING = "rounding"
    BUG = "bug"
    DIFFERENT = "different computation"
    INCONCLUSIVE = "inconclusive"
    INCOMPARABLE = "incomparable"

    @property
    def agrees(self) -> bool:
        """Whether the runs agree: EQUAL or ROUNDING."""
        return self in (Verdict.EQUAL, Verdict.ROUNDING)


_GRAVITY = (Verdict.BUG, Verdict.INCOMPARABLE, Verdict.DIFFERENT, Verdict.INCONCLUSIVE, Verdict.ROUNDING, Verdict.EQUAL)


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on several pairs: the gravest one, or INCONCLUSIVE if there are none.

    >>> overall([Verdict.EQUAL, Verdict.ROUNDING]), overall([Verdict.BUG, Verdict.INCOMPARABLE]), overall([])
    (<Verdict.ROUNDING: 'rounding'>, <Verdict.BUG: 'bug'>, <Verdict.INCONCLUSIVE: 'inconclusive'>)
    """
    return min(verdicts, key=_GRAVITY.index, default=Verdict.INCONCLUSIVE)
