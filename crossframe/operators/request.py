"""Requests to trace operators. A recorder reads the request from the environment variable TRACE, as JSON."""

import json
import os
from dataclasses import asdict, dataclass
from typing import Self

from crossframe.errors import UsageError

TRACE = "CROSSFRAME_TRACE"
TRACE_NAME = "operators.jsonl"


@dataclass(frozen=True)
class Request:
    """The part of a step of one rank to trace.

    Attributes:
        directory: the destination of the trace.
        step, rank: the step and the rank whose operators are traced. The run ends after the step.
        phase: phase of the quantity that differs (`crossframe.recording.event_format`).
        unit: the unit inside of which forward and backward are traced; "": everywhere.
        in_bits: whether values will be compared bit for bit only.
        judged: whether each operator is repeated in float64 and tested against its bound.
        compiled: whether graphs of torch.compile run compiled, and are judged; otherwise they run operator by operator.
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
        """The environment variable of this request."""
        return {TRACE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Self | None:
        """The request in the environment of this process; None if there is none.

        Raises:
            UsageError: the variable is not a request.
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
