"""What a run is asked to trace. A recorder finds the request in the environment variable TRACE, as JSON."""

import json
import os
from dataclasses import asdict, dataclass
from typing import Self

from crossframe.errors import UsageError

TRACE = "CROSSFRAME_TRACE"
TRACE_NAME = "operators.jsonl"


@dataclass(frozen=True)
class Request:
    """One part of one step of one rank.

    Attributes:
        directory: where the trace goes.
        step, rank: of which the operators are traced. The run ends after the step.
        phase: of the quantity that differs (`crossframe.recording.lines`).
        unit: inside of which forward and backward are traced; "": everywhere.
        in_bits: whether values will be compared in bits alone.
        judged: whether each operator is repeated in float64 and held against its bound.
        compiled: whether what torch.compile made is run, and judged. If not, it runs uncompiled, operator by operator.
    """

    directory: str
    step: int
    rank: int
    phase: str
    unit: str
    in_bits: bool = True
    judged: bool = False
    compiled: bool = False

    def to_environment(self) -> dict[str, str]:
        """The variable that makes a recorder trace."""
        return {TRACE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Self | None:
        """The request of this process's environment; None if there is none.

        Raises:
            UsageError: the variable holds something else.
        """
        text = os.environ.get(TRACE)
        if not text:
            return None
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError):
            raise UsageError(
                f"{TRACE}: expected a request as crossframe explain makes it; unset the variable"
            ) from None
