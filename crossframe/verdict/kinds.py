"""What a comparison can come to."""

from collections.abc import Iterable
from enum import Enum


class Verdict(Enum):
    """The answer for a pair of recordings, or for several.

    EQUAL: every bit that was compared. ROUNDING: they differ, within what rounding can do. BUG: something differs that
    rounding cannot have caused. DIFFERENT: two runs of the same program differ in bits, within what rounding can do or where no
    bound is known: something was computed in another way (`crossframe.verdict.bits`). INCONCLUSIVE: what was recorded cannot
    tell. INCOMPARABLE: two different runs.
    """

    EQUAL = "equal"
    ROUNDING = "rounding"
    BUG = "bug"
    DIFFERENT = "different computation"
    INCONCLUSIVE = "inconclusive"
    INCOMPARABLE = "incomparable"

    @property
    def exit_status(self) -> int:
        """The exit status of a command that found this: 0 the runs agree, 1 a bug, 3 undecided, 4 different runs, 5 a
        different computation. A command exits with 2 if it was used wrongly."""
        return _EXIT_STATUS[self]


_EXIT_STATUS = {
    Verdict.EQUAL: 0,
    Verdict.ROUNDING: 0,
    Verdict.BUG: 1,
    Verdict.INCONCLUSIVE: 3,
    Verdict.INCOMPARABLE: 4,
    Verdict.DIFFERENT: 5,
}
_GRAVITY = (Verdict.BUG, Verdict.INCOMPARABLE, Verdict.DIFFERENT, Verdict.INCONCLUSIVE, Verdict.ROUNDING, Verdict.EQUAL)


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on several pairs: the gravest of them. Of no pair at all nothing is known.

    >>> overall([Verdict.EQUAL, Verdict.ROUNDING]), overall([Verdict.BUG, Verdict.INCOMPARABLE]), overall([])
    (<Verdict.ROUNDING: 'rounding'>, <Verdict.BUG: 'bug'>, <Verdict.INCONCLUSIVE: 'inconclusive'>)
    """
    return min(verdicts, key=_GRAVITY.index, default=Verdict.INCONCLUSIVE)
