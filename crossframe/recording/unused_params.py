"""Parameters that a recorded training does not use: they have no gradient, or one of zeros, at all recorded steps."""

from collections.abc import Iterable

from crossframe.recording.event_format import REDUCE
from crossframe.recording.known_settings import FORWARD_ONLY
from crossframe.recording.reader import Recording


def unused_params(recording: Recording, names: Iterable[str]) -> tuple[str, ...]:
    """Those of these parameters that have no gradient but zeros: frozen ones, such as positions that other programs compute, and
    those of modules that are not called. None in a recording of forward alone, where no parameter has a gradient.
    """
    steps = recording.recorded_steps()
    if not steps or recording.manifest.settings.get(FORWARD_ONLY):
        return ()
    return tuple(name for name in names if all(_has_no_gradient(recording, step, name) for step in steps))


def _has_no_gradient(recording: Recording, step: int, name: str) -> bool:
    if not recording.has(REDUCE, step, name):
        return True
    if recording.is_sketched(REDUCE, step, name):
        sketch = recording.sketch(REDUCE, step, name)
        return sketch.squares == 0 and not sketch.num_not_finite
    return not recording.full(REDUCE, step, name).any()
