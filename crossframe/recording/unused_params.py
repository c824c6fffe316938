"""Parameters that a recorded training does not use: without a gradient, or unchanged, at all recorded steps."""

from collections.abc import Iterable

from crossframe.recording.event_format import PARAMETERS, REDUCE, UPDATE
from crossframe.recording.hashing import same_bits
from crossframe.recording.known_settings import FORWARD_ONLY
from crossframe.recording.reader import Recording


def unused_params(recording: Recording, names: Iterable[str]) -> tuple[str, ...]:
    """Those of these parameters that have no gradient but zeros, or that an optimizer leaves as they are: frozen ones, such as
    positions that other programs compute, and those of modules that are not called. None in a recording of forward alone, where
    no parameter has a gradient.
    """
    steps = recording.recorded_steps()
    if not steps or recording.manifest.settings.get(FORWARD_ONLY):
        return ()
    return tuple(
        name
        for name in names
        if all(_has_no_gradient(recording, step, name) for step in steps)
        or all(_is_unchanged(recording, step, name) for step in steps)
    )


def _has_no_gradient(recording: Recording, step: int, name: str) -> bool:
    if not recording.has(REDUCE, step, name):
        return True
    if recording.is_sketched(REDUCE, step, name):
        sketch = recording.sketch(REDUCE, step, name)
        return sketch.squares == 0 and not sketch.num_not_finite
    return not recording.full(REDUCE, step, name).any()


def _is_unchanged(recording: Recording, step: int, name: str) -> bool:
    """Whether a parameter has its initial value after a step, in every bit."""
    if not recording.has(UPDATE, step, name):
        return False
    if recording.is_sketched(UPDATE, step, name):
        return recording.sketch(PARAMETERS, 0, name).equals(recording.sketch(UPDATE, step, name))
    return same_bits(recording.full(PARAMETERS, 0, name), recording.full(UPDATE, step, name))
