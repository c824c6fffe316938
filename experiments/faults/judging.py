"""What a comparison said of a fault, held against what it must say; and what simpler means would have said."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from crossframe.recording import Recording
from crossframe.recording.event_format import UPDATE
from crossframe.verdict import PairVerdict, Verdict
from experiments.faults.catalogue.fault import Answer, Fault

# torch.testing.assert_close's defaults, (rtol, atol); those of bfloat16 for runs that compute in it, whatever stores parameters.
CLOSE = {"float64": (1e-7, 1e-7), "float32": (1.3e-6, 1e-5), "bfloat16": (1.6e-2, 1e-5)}
LOSS_LIMIT = 0.01


@dataclass(frozen=True)
class Found:
    """What was found of one fault in one dtype.

    Attributes:
        verdict: by the whole recordings; "failed" where the faulty run did not end.
        detected: whether that is the answer's verdict.
        localised: whether it names just the place of the answer.
        diagnosed: whether it names the answer's signature; None where the answer has none.
        signature: what it said that the difference looks like.
        place: what it said where the difference begins.
        sketched: the verdict by sketches of everything large.
        by_allclose: whether final parameters are too far apart for torch.testing.assert_close.
        by_loss: whether losses differ by more than a hundredth at any step.
        seconds: for the recording and the verdict.
    """

    fault: str
    family: str
    framework: str
    dtype: str
    verdict: str
    detected: bool
    localised: bool
    diagnosed: bool | None
    signature: str | None
    place: str
    sketched: str
    by_allclose: bool
    by_loss: bool
    seconds: float
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """The same as a JSON object."""
        return asdict(self)


def found(
    fault: Fault,
    dtype: str,
    pair: tuple[Recording, Recording],
    said: PairVerdict,
    sketched: PairVerdict,
    seconds: float,
) -> Found:
    """What became of a fault.

    Args:
        pair: the clean recording and the faulty one.
        said, sketched: the verdicts on them, by whole tensors and by sketches.
    """
    answer = fault.answer
    signature = said.diagnosis.signature if said.diagnosis else None
    detected = said.verdict.value == answer.verdict
    return Found(
        fault.name,
        fault.family,
        fault.frameworks[0],
        dtype,
        said.verdict.value,
        detected,
        detected and is_localised(said, answer),
        None if answer.signature is None else detected and signature == answer.signature,
        signature,
        place_of(said),
        sketched.verdict.value,
        not parameters_close(*pair),
        loss_differs(*pair),
        seconds,
        said.reason,
    )


def failed(fault: Fault, dtype: str, why: str, seconds: float) -> Found:
    """A fault whose run did not end."""
    framework = fault.frameworks[0]
    return Found(
        fault.name,
        fault.family,
        framework,
        dtype,
        "failed",
        False,
        False,
        None,
        None,
        "",
        "failed",
        True,
        True,
        seconds,
        why,
    )


def module_of(said: PairVerdict) -> str | None:
    """The module whose input or output parts first; None where it is none of those."""
    first = said.parted
    if first is None or first.event not in ("input", "output"):
        return None
    name = first.name.removeprefix(f"{first.event} of ")
    return "" if name == "the model" else name


def is_localised(said: PairVerdict, answer: Answer) -> bool:
    """Whether the first divergence is just where the answer has it."""
    where = said.first_divergence
    if answer.verdict == Verdict.INCOMPARABLE.value:
        return where is None
    if where is None or (where.phase, where.event, where.step) != (answer.phase, answer.event, answer.step):
        return False
    names = where.parameter if (module := module_of(said)) is None else module
    expected = ((answer.unit, where.unit), (answer.parameter, names), (answer.rank, where.rank))
    return all(wanted is None or wanted == got for wanted, got in expected)


def place_of(said: PairVerdict) -> str:
    """The first divergence in few words."""
    where = said.first_divergence
    if where is None:
        return ""
    name = where.parameter or module_of(said) or ""
    rank = "" if where.rank is None else f", rank {where.rank}"
    return f"step {where.step}, {where.phase}/{where.event}, {where.unit or '(root)'} {name}{rank}".replace("  ", " ")


def parameters_close(a: Recording, b: Recording) -> bool:
    """Whether all final parameters are as close as torch.testing.assert_close asks."""
    step = min(a.num_steps, b.num_steps) - 1
    rtol, atol = CLOSE[a.manifest.dtype]
    for name in a.manifest.params:
        if not all(recording.has(UPDATE, step, name) for recording in (a, b)):
            continue
        x, y = (np.asarray(recording.full(UPDATE, step, name), np.float64) for recording in (a, b))
        if not np.allclose(y, x, rtol=rtol, atol=atol, equal_nan=True):
            return False
    return True


def loss_differs(a: Recording, b: Recording) -> bool:
    """Whether the mean loss of any step differs by more than a hundredth."""
    steps = min(a.num_steps, b.num_steps)
    x, y = (np.asarray(recording.losses(), np.float64)[:steps].mean(axis=1) for recording in (a, b))
    with np.errstate(invalid="ignore"):
        return not bool((np.abs(x - y) <= LOSS_LIMIT * np.abs(x)).all())
