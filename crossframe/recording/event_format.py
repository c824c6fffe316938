"""The lines of `events.jsonl`: their fields, and functions that write and check them.

A line is one JSON object. Its "event" is one of these:

- "begin": the first line. `manifest` is the sha256 of the manifest.
- "batch": the batch of the rank: `digest` (sha256, hex), `sample_ids`, and optionally `inputs`, two numbers for each array
  (`crossframe.recording.batches.inputs_of`).
- "loss": `value`, the loss of this rank. `backwards`, which is optional, are the losses of which this is the sum where optimizers
  take turns in the step: [number of forwards before it, loss] for each backward. `num_losses`, which is optional, is the
  number of losses that the recorder has added: one for each backward.
- "activation": the input or output (`use`) of a module in forward, of `shape`, which is stored in the step's safetensors file
  under `activation_key`. `name` is the module. `order` is the known order of dims (`crossframe.recording.dims`); if it is unknown
  and the activation is sketched, "channels_first" is the sketch with channels first. `operator`, which is optional, is the
  framework's name of the operator that computed it. These lines are in the order of forward.
- "buffer": a tensor of the model that is no parameter, of `shape`, which is stored under `tensor_key`, as `dtype`. `use` is
  `INITIAL` for the value before the first step and `CHANGED` for the value after a step. Buffers that no step has changed so far
  have the first line alone.
- "tensor": elements `start:stop` of a parameter, or of a tensor of its shape, which are stored in the step's safetensors file
  under `tensor_key`, as `dtype`.
- "norm": `value`, the gradient norm that the loop computed.
- "count": the optimizer counts its steps for this parameter; the count is in the `counts` of the step.
- "collective": `collective` is a `crossframe.trace.Event`.
- "disagreement": the ranks that compute this replica together have other values of a tensor, which must be the same on all of
  them: `ranks` have others than the first one, along the mesh `axis`. `difference` is the largest
  norm(other - first) / norm(first). In the phase FORWARD, `name` and `use` are those of an activation, or of the batch, the input
  of "".
- "step": the end of `step`, after all its other lines. `sha256` is that of its tensor file, "" if it has none. Optional fields:
  `rates`, the learning rate of each parameter group at this step; `counts`, one number for all "count" lines, or a list with one
  for each; `buffers`, true if all buffers that have changed have a line; and `as`, an earlier step whose lines of kind
  `STRUCTURE` are, but for the number of the step, those of this step, which are then omitted.
- "end": the end of the run after `steps` steps. `sha256` is that of all bytes of this file before this line, and `content` that
  of all bytes but the first line: equal contents mean that all recorded values are equal bit for bit.

All lines but "begin", "step" and "end" have the keys step, microbatch, rank, phase, unit, name (canonical name of a parameter
or module, or "") and use. Where optimizers take turns, the microbatch of a gradient, a state or an updated parameter is the
number of forwards before its optimizer stepped. "sketch", of a tensor or an activation, is the row of its sketch
(`crossframe.recording.sketch`) in the array `SKETCHES_KEY` of the step's file. "sample", of a parameter before the first step,
is the range of its sample (`crossframe.recording.sample`) in the array `SAMPLES_KEY`. A tensor or an activation with `at` has
the same bytes as another tensor and is not stored again: its elements are those under that key, in the file of the previous
step if `before` is true.

Up to format 4, "sketch" and "channels_first" are objects (`fingerprint`, `squares`, `num_not_finite`), and the sums are stored
under `activation_key`, `channels_first_key` or `tensor_key`; "count" has its own `value`, and every step has all its lines.
"""

import json
import math
import re
from typing import Any

from crossframe.errors import RecordingError
from crossframe.files import parse_json
from crossframe.params import OVERFLOW
from crossframe.quoting import quote, quote_error
from crossframe.recording.dims import LEAST_DIMS, Order

EVENTS_NAME = "events.jsonl"
ENVIRONMENT_NAME = "environment.json"
"""The file in the folder of a rank that states the environment of its process (`crossframe.environment`)."""

BATCH = "batch"
PARAMETERS = "parameters"
UNSHARDED = "unsharded"
FORWARD = "forward"
BACKWARD = "backward"
REDUCE = "reduce"
NORM = "norm"
STATE = "state"
UPDATE = "update"
BUFFERS = "buffers"
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
"""The phases that have tensors, in the causal order of a step, and the use of their tensors. For optimizer state the use is the
name of the entry in torch: "exp_avg", "momentum_buffer"."""
WHOLE_ON_RANK = (UNSHARDED, BACKWARD)
"""Phases in which a rank records all elements of a parameter, not only its pieces."""
INPUT, OUTPUT = "input", "output"
INITIAL, CHANGED = "initial", "changed"

STRUCTURE = frozenset({"activation", "buffer", "tensor", "count", "collective"})
"""The lines that describe the structure of a step, which many steps share."""
SKETCHES_KEY = "sketches"
"""The key of the rows of all sketches in the file of a step."""
SAMPLES_KEY = "samples"
"""The key of all samples in the file of the first step."""

_PLACE = {"step": int, "microbatch": int, "rank": int, "phase": str, "unit": str, "name": str, "use": str}
_NUMBER = (float, str)
_FIELDS: dict[str, dict[str, Any]] = {
    "begin": {"manifest": str},
    "batch": _PLACE | {"digest": str, "sample_ids": list},
    "loss": _PLACE | {"value": _NUMBER},
    "activation": _PLACE | {"shape": list, "dtype": str, "order": str},
    "buffer": _PLACE | {"shape": list, "dtype": str},
    "tensor": _PLACE | {"start": int, "stop": int, "dtype": str},
    "norm": _PLACE | {"value": _NUMBER},
    "count": _PLACE,
    "collective": _PLACE | {"collective": dict},
    "disagreement": _PLACE | {"difference": _NUMBER, "axis": str, "ranks": list},
    "step": {"step": int, "sha256": str},
    "end": {"steps": int, "sha256": str},
}
_SKETCH = {"fingerprint": str, "squares": _NUMBER, "num_not_finite": int}
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_LONGEST_OPERATOR = 200
_SLOT = re.compile(r"\w[\w.]{0,63}")


def rank_folder(rank: int) -> str:
    """The folder of a rank in the recording."""
    return f"rank{rank:05d}"


def perturbed_run_folder(perturbed_run: int) -> str:
    """The folder of a perturbed run, itself a recording, in the recording. Perturbed runs are numbered from 1."""
    return f"twin{perturbed_run:05d}"


def step_file(step: int) -> str:
    """The file of the tensors of a step in the folder of a rank."""
    return f"step{step:05d}.safetensors"


def tensor_key(phase: str, name: str, slot: str = "") -> str:
    """The key of a tensor in the file of its step."""
    return f"{phase}/{slot}/{name}" if slot else f"{phase}/{name}"


def activation_key(use: str, microbatch: int, module: str) -> str:
    """The key of the input or the output of a module in the file of its step."""
    return f"{use}/{microbatch}/{module}"


def channels_first_key(key: str) -> str:
    """The key of the sketch with channels first of an activation whose key is `key`, up to format 4."""
    return f"channels_first/{key}"


def before_step(step: int) -> tuple[str, int]:
    """(phase, step) of the values that parameters have before a step.

    >>> before_step(0), before_step(2)
    (('parameters', 0), ('update', 1))
    """
    return (UPDATE, step - 1) if step else (PARAMETERS, 0)


def place(
    step: int, rank: int, phase: str, use: str, *, unit: str = "", name: str = "", microbatch: int = 0
) -> dict[str, Any]:
    """The fields that identify the subject of a line. What belongs to a whole step has microbatch 0."""
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
        raise RecordingError(f"expected the sha256 of the batch as 64 hex digits, got {quote(digest)}")


def check_slot(slot: str) -> None:
    """Raise RecordingError unless this is a valid name of an entry of optimizer state."""
    if not isinstance(slot, str) or not _SLOT.fullmatch(slot):
        raise RecordingError(f"expected the name of an optimizer's state, such as 'exp_avg', got {quote(slot)}")


def encode(event: str, fields: dict[str, Any]) -> str:
    """One line with its line feed. Numbers that are not finite become strings, since JSON cannot represent them."""
    return json.dumps({"event": event} | _writable(fields)) + "\n"


def _writable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _writable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_writable(each) for each in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode(line: bytes, rank: int, where: str, framework: str = "") -> dict[str, Any]:
    """Decode and check a line that `encode` wrote.

    Args:
        rank: the rank in whose folder the line is.
        where: path and line number, for messages.
        framework: the framework of the recording, if its format does not state the order of dims of activations; else "".

    Raises:
        RecordingError: invalid JSON, an unknown event, a missing field or one of another type, or a line of another rank.
    """
    try:
        fields = parse_json(line)
    except ValueError as error:
        raise RecordingError(
            f"{where}: expected JSON, but {quote_error(error)}; damaged, record the run again"
        ) from None
    event = fields.get("event") if isinstance(fields, dict) else None
    if not isinstance(event, str) or event not in _FIELDS:
        raise RecordingError(
            f"{where}: expected an event among {list(_FIELDS)}, got {quote(event)}; record the run again"
        )
    if framework and event == "activation":
        dims = fields.get("shape")
        known = framework == "torch" or not isinstance(dims, list) or len(dims) < LEAST_DIMS
        fields["order"] = (Order.TORCH if known else Order.UNSTATED).value
    _check(fields, _FIELDS[event], event, where)
    if fields.get("rank", rank) != rank:
        raise RecordingError(
            f"{where}: a line of rank {quote(fields['rank'])} in the folder of rank {rank}; record again"
        )
    if event == "disagreement":
        fields["difference"] = _to_float(fields["difference"], where)
        ranks = fields["ranks"]
        expect(bool(ranks) and all(type(each) is int for each in ranks), where, "ranks", ranks)
    if "value" in _FIELDS[event] or (event == "count" and "value" in fields):
        _check(fields, {"value": _NUMBER}, event, where)
        fields["value"] = _to_float(fields["value"], where)
    for name in ("sketch", "channels_first"):
        sketch = fields.get(name)
        if type(sketch) is int:
            expect(sketch >= 0, where, "the row of a sketch", sketch)
        elif sketch is not None:
            _check(sketch, _SKETCH, name, where)
            is_sketch = bool(_FINGERPRINT.fullmatch(sketch["fingerprint"])) and sketch["num_not_finite"] >= 0
            expect(is_sketch, where, "a sketch", sketch)
            sketch["squares"] = _to_float(sketch["squares"], where)
    sample, operator = fields.get("sample"), fields.get("operator", "")
    expect(sample is None or _is_range(sample), where, "the range of a sample", sample)
    is_operator = isinstance(operator, str) and len(operator) <= _LONGEST_OPERATOR
    expect(is_operator, where, "the name of an operator", operator)
    is_reference = isinstance(fields.get("at", ""), str) and type(fields.get("before", False)) is bool
    expect(is_reference, where, "the key of a tensor as 'at'", fields)
    if event == "step":
        _check_step(fields, where)
    if event == "loss" and "backwards" in fields:
        _check_backwards(fields, where)
    number = fields.get("num_losses", 1)
    expect(type(number) is int and number >= 1, where, "a number of losses", number)
    if event == "batch":
        expect(bool(_DIGEST.fullmatch(fields["digest"])), where, "a sha256 as digest", fields["digest"])
    return fields


def expect(holds: bool, where: str, what: str, got: Any) -> None:
    """Raise RecordingError unless this holds of a line.

    Args:
        where: path and line number.
        what: what is expected.
    """
    if not holds:
        raise RecordingError(f"{where}: expected {what}, got {quote(got)}; record the run again")


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and list(map(type, value)) == [int, int] and 0 <= value[0] < value[1] < OVERFLOW


def _check_step(fields: dict[str, Any], where: str) -> None:
    """Check the optional fields of a "step" line."""
    for name in ("rates", "counts"):
        if (numbers := fields.get(name)) is None:
            continue
        if name == "counts" and type(numbers) in _NUMBER:
            fields[name] = _to_float(numbers, where)
            continue
        what = "learning rates" if name == "rates" else "counts of optimizer steps"
        expect(type(numbers) is list and all(type(number) in _NUMBER for number in numbers), where, what, numbers)
        fields[name] = [_to_float(number, where) for number in fields[name]]
    for name, kind, what in (("buffers", bool, "true as 'buffers'"), ("as", int, "the number of a step as 'as'")):
        expect(name not in fields or type(fields[name]) is kind, where, what, fields.get(name))


def _check_backwards(fields: dict[str, Any], where: str) -> None:
    """Check the losses of the backwards of a step."""
    stated = fields["backwards"]
    are_backwards = type(stated) is list and all(
        type(each) is list and len(each) == 2 and type(each[0]) is int and each[0] >= 0 and type(each[1]) in _NUMBER
        for each in stated
    )
    expect(are_backwards, where, "a number of forwards and a loss for each backward", stated)
    fields["backwards"] = [[forwards, _to_float(loss, where)] for forwards, loss in stated]


def _check(fields: Any, expected: dict[str, Any], what: str, where: str) -> None:
    for name, kind in expected.items():
        kinds = kind if isinstance(kind, tuple) else (kind,)
        value = fields.get(name) if isinstance(fields, dict) else None
        if type(value) not in kinds:
            wanted = " or ".join(k.__name__ for k in kinds)
            raise RecordingError(
                f"{where}: field {name!r} of a {what!r} line: expected {wanted}, got {quote(value)}; record the run again"
            )


def _to_float(value: float | str, where: str) -> float:
    expect(not isinstance(value, str) or value in ("nan", "inf", "-inf"), where, "a number", value)
    return float(value)
