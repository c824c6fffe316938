"""The lines of `events.jsonl`: what they hold, how they are written, and how they are checked when read back.

A line is one JSON object. "event" says which of these it is:

- "begin": the first line. `manifest` is the sha256 of the manifest that the rank wrote by.
- "batch": what a rank was fed. `digest` (sha256, hex) and `sample_ids`.
- "loss": `value`, of this rank alone.
- "activation": what a module was given or gave in forward (`use`), of `shape`; it lies in the step's safetensors file under
  `activation_key`. `name` is the module. `order` is what is known of its order of dims (`crossframe.recording.dims`); a sketched
  one whose order is not known has the sketch of it with channels first as well, as "channels_first".
  `operator`, which may be absent, is the framework's name of the operator that computed it.
  These lines stand in the order in which forward came by.
- "tensor": elements `start:stop` of a parameter, or of what has its shape, lie in the step's safetensors file under `tensor_key`,
  as `dtype`.
- "norm": `value`, the norm of the gradient as the loop computed it.
- "count": the optimizer counts its steps for this parameter; the step's `counts` say how many.
- "collective": `collective` is a `crossframe.trace.Event`.
- "step": everything of `step` stands before this line. `sha256` is that of its tensor file, "" if it has none. It may have
  `rates`: the learning rate of each group of the optimizer's parameters at this step, where the recorder knows it; and `counts`:
  one number for all "count" lines, or a list with one for each. `as` names an earlier step: the lines of kind `STRUCTURE` of this
  step are those of that one, but for the number of the step, and are not repeated.
- "end": the run is over, after `steps` steps. `sha256` is that of all bytes of this file before this line, `content` that of all
  but the first line: equal contents were recorded by runs that saw the same in every bit.

All but the first and the last two carry the keys step, microbatch, rank, phase, unit, name (canonical parameter or module, or "")
and use. A tensor or an activation with a "sketch" is one of `crossframe.recording.sketch`, and the number says which row of the
array `SKETCHES_KEY` in the step's file. One with `at` has the same bytes as another tensor, and is not stored again: it lies
under that key, in the file of the step before where `before` is true.

Up to format 4, "sketch" and "channels_first" are objects (`fingerprint`, `squares`, `num_not_finite`), and the sums lie in the
file under `activation_key`, `channels_first_key` or `tensor_key`; "count" has its own `value`, and every step has all its lines.
"""

import json
import math
import re
from typing import Any

from crossframe.errors import RecordingError
from crossframe.files import parse_json
from crossframe.recording.dims import LEAST_DIMS, Order
from crossframe.shown import shown, shown_error

EVENTS_NAME = "events.jsonl"

BATCH = "batch"
PARAMETERS = "parameters"
UNSHARDED = "unsharded"
FORWARD = "forward"
BACKWARD = "backward"
REDUCE = "reduce"
NORM = "norm"
STATE = "state"
UPDATE = "update"
COUNT = "step"  # the entry of an optimizer's state that counts its steps
COLLECTIVE = "collective"

TENSOR_USES = {
    PARAMETERS: "parameter",
    UNSHARDED: "unsharded_param",
    BACKWARD: "local_grad",
    REDUCE: "reduced_grad",
    STATE: "",
    UPDATE: "parameter",
}
"""Phases that hold tensors, in the causal order of a step, and what a tensor of that phase is. Of the optimizer's state the use
is the slot, by torch's name: "exp_avg", "momentum_buffer"."""
WHOLE_ON_RANK = (UNSHARDED, BACKWARD)
"""Phases of which a rank records a parameter's elements all, and not its pieces."""
INPUT, OUTPUT = "input", "output"

STRUCTURE = frozenset({"activation", "tensor", "count", "collective"})
"""Lines that say what a step consists of, which many steps have alike."""
SKETCHES_KEY = "sketches"
"""Under which key the rows of all sketches of a step lie in its file."""

_PLACE = {"step": int, "microbatch": int, "rank": int, "phase": str, "unit": str, "name": str, "use": str}
_NUMBER = (float, str)
_FIELDS: dict[str, dict[str, Any]] = {
    "begin": {"manifest": str},
    "batch": _PLACE | {"digest": str, "sample_ids": list},
    "loss": _PLACE | {"value": _NUMBER},
    "activation": _PLACE | {"shape": list, "dtype": str, "order": str},
    "tensor": _PLACE | {"start": int, "stop": int, "dtype": str},
    "norm": _PLACE | {"value": _NUMBER},
    "count": _PLACE,
    "collective": _PLACE | {"collective": dict},
    "step": {"step": int, "sha256": str},
    "end": {"steps": int, "sha256": str},
}
_SKETCH = {"fingerprint": str, "squares": _NUMBER, "num_not_finite": int}
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_LONGEST_OPERATOR = 200
_SLOT = re.compile(r"\w[\w.]{0,63}")


def rank_folder(rank: int) -> str:
    """The folder of a rank, inside the recording."""
    return f"rank{rank:05d}"


def twin_folder(twin: int) -> str:
    """The folder of a perturbed run, a recording of its own, inside the recording. Perturbed runs count from 1."""
    return f"twin{twin:05d}"


def step_file(step: int) -> str:
    """The file that holds a rank's tensors of a step, inside the rank's folder."""
    return f"step{step:05d}.safetensors"


def tensor_key(phase: str, name: str, slot: str = "") -> str:
    """Under which key a tensor lies in the file of its step."""
    return f"{phase}/{slot}/{name}" if slot else f"{phase}/{name}"


def activation_key(use: str, microbatch: int, module: str) -> str:
    """Under which key the input or the output of a module lies in the file of its step."""
    return f"{use}/{microbatch}/{module}"


def channels_first_key(key: str) -> str:
    """Under which key the sketch of an activation with its channels first lies, beside that of `key`, up to format 4."""
    return f"channels_first/{key}"


def place(
    step: int, rank: int, phase: str, use: str, *, unit: str = "", name: str = "", microbatch: int = 0
) -> dict[str, Any]:
    """The keys that say what a line is of. All but activations are of a whole step, and have 0 as their microbatch."""
    return {
        "step": step,
        "microbatch": microbatch,
        "rank": rank,
        "phase": phase,
        "unit": unit,
        "name": name,
        "use": use,
    }


def check_digest(digest: str) -> None:
    """Raise RecordingError unless this is a sha256 in hex."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise RecordingError(f"expected the sha256 of the batch as 64 hex digits, got {shown(digest)}")


def check_slot(slot: str) -> None:
    """Raise RecordingError unless an optimizer's state may be called so."""
    if not isinstance(slot, str) or not _SLOT.fullmatch(slot):
        raise RecordingError(f"expected the name of an optimizer's state, such as 'exp_avg', got {shown(slot)}")


def encode(event: str, fields: dict[str, Any]) -> str:
    """One line, its line feed included. Numbers that are not finite become strings: JSON has no word for them."""
    return (
        json.dumps({"event": event} | {name: _writable(value) for name, value in fields.items()}, allow_nan=False)
        + "\n"
    )


def _writable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _writable(each) for name, each in value.items()}
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode(line: bytes, rank: int, where: str, framework: str = "") -> dict[str, Any]:
    """A line that `encode` wrote, checked.

    Args:
        rank: the rank in whose folder it stands.
        where: path and line number, for messages.
        framework: that wrote a recording of a format in which activations do not state their order of dims.

    Raises:
        RecordingError: no JSON, an unknown event, a field that is missing or of another type, another rank's line.
    """
    try:
        fields = parse_json(line)
    except ValueError as error:
        raise RecordingError(
            f"{where}: expected JSON, but {shown_error(error)}; damaged, record the run again"
        ) from None
    event = fields.get("event") if isinstance(fields, dict) else None
    if not isinstance(event, str) or event not in _FIELDS:
        raise RecordingError(
            f"{where}: expected an event among {list(_FIELDS)}, got {shown(event)}; record the run again"
        )
    if framework and event == "activation":
        dims = fields.get("shape")
        known = framework == "torch" or not isinstance(dims, list) or len(dims) < LEAST_DIMS
        fields["order"] = (Order.TORCH if known else Order.UNSTATED).value
    _check(fields, _FIELDS[event], event, where)
    if fields.get("rank", rank) != rank:
        raise RecordingError(
            f"{where}: a line of rank {shown(fields['rank'])} in the folder of rank {rank}; record again"
        )
    if "value" in _FIELDS[event] or (event == "count" and "value" in fields):
        _check(fields, {"value": _NUMBER}, event, where)
        fields["value"] = _to_float(fields["value"], where)
    for name in ("sketch", "channels_first"):
        sketch = fields.get(name)
        if type(sketch) is int:
            if sketch < 0:
                raise RecordingError(f"{where}: expected the row of a sketch, got {sketch}; record the run again")
        elif sketch is not None:
            _check(sketch, _SKETCH, name, where)
            if not _FINGERPRINT.fullmatch(sketch["fingerprint"]) or sketch["num_not_finite"] < 0:
                raise RecordingError(f"{where}: expected a sketch, got {shown(sketch)}; record the run again")
            sketch["squares"] = _to_float(sketch["squares"], where)
    if event == "activation":
        operator = fields.get("operator", "")
        if not isinstance(operator, str) or len(operator) > _LONGEST_OPERATOR:
            raise RecordingError(
                f"{where}: expected the name of an operator, got {shown(operator)}; record the run again"
            )
    if not isinstance(fields.get("at", ""), str) or type(fields.get("before", False)) is not bool:
        raise RecordingError(
            f"{where}: expected the key of a tensor as 'at', got {shown(fields)}; record the run again"
        )
    if event == "step":
        _check_step(fields, where)
    if event == "batch" and not _DIGEST.fullmatch(fields["digest"]):
        raise RecordingError(
            f"{where}: expected a sha256 as digest, got {shown(fields['digest'])}; record the run again"
        )
    return fields


def _check_step(fields: dict[str, Any], where: str) -> None:
    """Check what a "step" line may have."""
    for name in ("rates", "counts"):
        if (numbers := fields.get(name)) is None:
            continue
        one = name == "counts" and type(numbers) in _NUMBER
        if not one and (type(numbers) is not list or not all(type(number) in _NUMBER for number in numbers)):
            what = "learning rates" if name == "rates" else "counts of optimizer steps"
            raise RecordingError(f"{where}: expected {what}, got {shown(numbers)}; record the run again")
        listed: list[float | str] = [numbers] if one else numbers  # type: ignore[list-item]
        converted = [_to_float(number, where) for number in listed]
        fields[name] = converted[0] if one else converted
    if type(fields.get("as", 0)) is not int:
        raise RecordingError(f"{where}: expected the number of a step as 'as', got {shown(fields['as'])}; record again")


def _check(fields: Any, expected: dict[str, Any], what: str, where: str) -> None:
    for name, kind in expected.items():
        kinds = kind if isinstance(kind, tuple) else (kind,)
        value = fields.get(name) if isinstance(fields, dict) else None
        if type(value) not in kinds:
            raise RecordingError(
                f"{where}: field {name!r} of a {what!r} line: expected {' or '.join(k.__name__ for k in kinds)}, got "
                f"{shown(value)}; record the run again"
            )


def _to_float(value: float | str, where: str) -> float:
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        raise RecordingError(f"{where}: expected a number, got {shown(value)}; record the run again")
    return float(value)
