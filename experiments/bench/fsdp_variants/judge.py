"""What comes of two recordings of a set."""

import math
from dataclasses import dataclass
from typing import Any

from crossframe.errors import RecordingError
from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from experiments.bench.fsdp_variants.cells import Both

FINE = (Verdict.EQUAL.value, Verdict.ROUNDING.value)
ANOTHER = "another function"
NOT_COMPARED = "not compared"

Of = tuple[str, str, str]
"""What names a set of runs: dtype, model, setting."""


@dataclass(frozen=True)
class Judged:
    """One line of the results.

    Attributes:
        kind, a, b: as in `Both`; what the runs are called.
        verdict: that of the comparison; ANOTHER where runs that compute different functions by definition were found to part;
            NOT_COMPARED where one of both failed.
        difference: the largest of any parameter, relative; None if not taken, or not finite.
        used: the largest ratio of a difference to the spread of perturbed runs; None without perturbed runs.
        where, signature: the first divergence, and what it looks like.
        why: the verdict's reason.
    """

    model: str
    dtype: str
    setting: str
    kind: str
    a: str
    b: str
    verdict: str
    difference: float | None = None
    used: float | None = None
    where: dict[str, Any] | None = None
    signature: str | None = None
    evidence: str | None = None
    why: str = ""

    @property
    def is_fine(self) -> bool:
        """Whether the two agree."""
        return self.verdict in FINE

    @property
    def of(self) -> Of:
        """Which set it is of."""
        return self.dtype, self.model, self.setting


@dataclass(frozen=True)
class Failure:
    """A run that did not come to its end."""

    model: str
    dtype: str
    setting: str
    run: str
    why: str

    @property
    def of(self) -> Of:
        """Which set it is of."""
        return self.dtype, self.model, self.setting

    def __str__(self) -> str:
        """In a line."""
        return f"{self.model}, {self.dtype}, {self.setting}: {self.run}: {self.why}"


def judged(both: Both, a: Recording | None, b: Recording | None) -> Judged:
    """Compare two recordings; None is one that failed."""
    run = both.a
    what = (run.model, run.dtype, run.setting, both.kind, str(both.a), str(both.b))
    if a is None or b is None:
        return Judged(*what, NOT_COMPARED, why=f"{both.a if a is None else both.b} failed")
    try:
        said = compare(a, b)
    except RecordingError as error:
        return Judged(*what, NOT_COMPARED, why=str(error))
    verdict, apart = said.verdict.value, said.max_relative_parameter_difference
    if both.by_definition and verdict not in FINE:
        verdict = ANOTHER
    where, diagnosis = said.first_divergence, said.diagnosis
    return Judged(
        *what,
        verdict,
        apart if apart is not None and math.isfinite(apart) else None,
        said.limit_used if said.limit_used is not None and math.isfinite(said.limit_used) else None,
        where.to_json() if where else None,
        diagnosis.signature if diagnosis else None,
        diagnosis.evidence if diagnosis else None,
        said.reason,
    )
