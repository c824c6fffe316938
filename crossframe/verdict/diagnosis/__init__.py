"""What a bug looks like."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from crossframe.recording import Recording
from crossframe.verdict.judge import Judgement
from crossframe.verdict.locate import Divergence
from crossframe.verdict.pair import Pair
from crossframe.verdict.quantities import Quantity


@dataclass(frozen=True)
class Diagnosis:
    """A signature that fits, and in one sentence why."""

    signature: str
    evidence: str

    def to_json(self) -> dict:
        """As a JSON object."""
        return asdict(self)


def diagnose(
    pair: Pair, judgement: Judgement, where: Divergence, limit: Callable[[Quantity], float]
) -> Diagnosis | None:
    """What the first divergence looks like."""
    return None


def diagnose_batches(a: Recording, b: Recording) -> Diagnosis | None:
    """How the batches of two recordings differ; None if they do not."""
    return None
