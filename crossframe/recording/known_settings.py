"""The settings of a manifest that a comparison uses, and their valid values. All other settings are for readers."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from crossframe.dtypes import FLOATING
from crossframe.errors import RecordingError
from crossframe.quoting import quote
from crossframe.recording.program import PROGRAM

COMMAND = "command"
"""The command line that repeats the recording."""
RECORD, TRAIN = "crossframe record", "python -m experiments train"
"""The commands that record a script of a user, and a model of this repository. Each takes --output, --overwrite and
--perturbed-runs."""
MODULE_OPTION = "--module"
"""The option of RECORD by which the script is the name of a module."""
FORWARD_OPTION = "--forward"
"""The option of RECORD that records calls of a model instead of training."""
IDLE_OPTION = "--idle-optimizer"
"""The option of RECORD with the number of an optimizer that a script makes and never uses."""
BY_HAND_OPTION = "--by-hand"
"""The option of RECORD by which a script changes its parameters by itself, without an optimizer."""
PER_RANK = "per_rank_statistics"
"""Names of modules whose output for a sample depends on the other samples of the rank, as that of batch norm in training."""
NOT_RECORDED = "not_recorded"
"""Names of parameters of the model that are not recorded, such as those that its FSDP ignores."""
EPS_HAT = "eps_hat"
"""An epsilon of Adam that is added to the root of the second moment without its correction for the start at zero: epsilon hat of
Kingma and Ba (2015), section 2."""
GROUPS = "param_groups"
"""A list of parameter groups whose optimizer settings differ from the others: {"params": [names], "lr": ..., ...}."""
LOSSES, MEAN, GRADIENT_NORM = "losses", "mean", "gradient_norm"
"""The kind of loss that was recorded: MEAN if each rank recorded the mean over ranks, GRADIENT_NORM if no loss is known and it is
the norm of the gradients that the optimizer gets."""
UPDATES, BY_HAND = "updates", "by_hand"
"""Whether the script updates its parameters without an optimizer: gradients are then recorded as they are taken, before it
divides or clips them."""
FORWARD_ONLY = "forward_only"
"""Whether each step is one call of the model, whose loss is the root mean square of its output: nothing is trained."""
EARLIER_UPDATES = "earlier_updates"
"""The number of updates of each parameter before the recording began."""

MOST_MICROBATCHES = 1 << 16
_LARGEST = 1 << 53  # an int that is exact as a float


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf and (type(value) is float or abs(value) <= _LARGEST)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, str) and value in FLOATING


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def _are(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(is_one, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_NUMBER = ("a finite number", _is_number)
_DTYPE = (f"one of {', '.join(FLOATING)}", _is_dtype)
_OPTIONS = {
    "lr": _NUMBER,
    "weight_decay": _NUMBER,
    "momentum": _NUMBER,
    "eps": _NUMBER,
    EPS_HAT: _NUMBER,
    "betas": ("two numbers", lambda value: _are(value, _is_number) and len(value) == 2),
}
_KNOWN: dict[str, tuple[str, Callable[[Any], bool]]] = _OPTIONS | {
    "clip": _NUMBER,
    "accumulate": (f"an int from 1 to {MOST_MICROBATCHES}", lambda value: _is_count(value, MOST_MICROBATCHES)),
    "batch_size": ("an int of at least 1", lambda value: _is_count(value, _LARGEST)),
    "optimizer": ("a name", _is_text),
    "param_dtype": _DTYPE,
    "reduce_dtype": _DTYPE,
    COMMAND: ("a command line", _is_text),
    LOSSES: ("a name", _is_text),
    EARLIER_UPDATES: ("an int of at least 1", lambda value: _is_count(value, _LARGEST)),
    FORWARD_ONLY: ("true or false", lambda value: isinstance(value, bool)),
    PER_RANK: ("a list of names", lambda value: _are(value, _is_text)),
    NOT_RECORDED: ("a list of names", lambda value: _are(value, _is_text)),
    GROUPS: ("a list of groups of parameters", lambda value: _are(value, _is_group)),
    PROGRAM: ("an object of names, numbers and flags", lambda value: _is_program(value)),
}


def _is_group(value: Any) -> bool:
    if not isinstance(value, Mapping) or not _are(value.get("params"), _is_text):
        return False
    return all(is_right(value[name]) for name, (_, is_right) in _OPTIONS.items() if value.get(name) is not None)


def _is_program(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(each, str | int | bool) for each in value.values())


def check_settings(settings: Any) -> None:
    """Raise RecordingError unless the settings that a comparison uses are valid. A setting of None is the same as an absent
    one."""
    if not isinstance(settings, Mapping):
        raise RecordingError(f"manifest field 'settings': expected an object, got {quote(settings)}")
    for name, (expected, is_right) in _KNOWN.items():
        value = settings.get(name)
        if value is not None and not is_right(value):
            raise RecordingError(f"manifest field 'settings.{name}': expected {expected}, got {quote(value)}")
