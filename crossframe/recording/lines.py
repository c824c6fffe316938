"""The lines of `events.jsonl`: what they hold, how they are written, and how they are checked when read back.

A line is one JSON object. "event" says which of these it is:

- "batch": what a rank was fed. `digest` (sha256, hex) and `sample_ids`.
- "loss": `value`, of this rank alone.
- "output": what a unit's forward gave on this rank, of `shape`, lies in the step's safetensors file under `output_key`.
- "tensor": elements `start:stop` of a parameter lie in the step's safetensors file under `tensor_key`, as `dtype`.
- "collective": `collective` is a `crossframe.trace.Event`.
- "step": everything of `step` stands before this line.
- "end": the run is over, after `steps` steps.

All but the last two carry the keys step, microbatch, rank, phase, unit, name (canonical parameter, or "") and use.
"""

import json
import math
import re
from typing import Any

from crossframe.errors import RecordingError

EVENTS_NAME = "events.jsonl"

BATCH = "batch"
PARAMETERS = "parameters"
FORWARD = "forward"
BACKWARD = "backward"
REDUCE = "reduce"
UPDATE = "update"
COLLECTIVE = "collective"

TENSOR_USES = {PARAMETERS: "parameter", BACKWARD: "local_grad", REDUCE: "reduced_grad", UPDATE: "parameter"}
"""Phases that hold tensors, in the causal order of a step, and what a tensor of that phase is."""

_PLACE = {"step": int, "microbatch": int, "rank": int, "phase": str, "unit": str, "name": str, "use": str}
_FIELDS: dict[str, dict[str, Any]] = {
    "batch": _PLACE | {"digest": str, "sample_ids": list},
    "loss": _PLACE | {"value": (float, str)},
    "output": _PLACE | {"shape": list, "dtype": str},
    "tensor": _PLACE | {"start": int, "stop": int, "dtype": str},
    "collective": _PLACE | {"collective": dict},
    "step": {"step": int},
    "end": {"steps": int},
}
_DIGEST = re.compile(r"[0-9a-f]{64}")


def rank_folder(rank: int) -> str:
    """The folder of a rank, inside the recording."""
    return f"rank{rank:05d}"


def twin_folder(twin: int) -> str:
    """The folder of a twin, a recording of its own, inside the recording. Twins count from 1."""
    return f"twin{twin:05d}"


def step_file(step: int) -> str:
    """The file that holds a rank's tensors of a step, inside the rank's folder."""
    return f"step{step:05d}.safetensors"


def tensor_key(phase: str, name: str) -> str:
    """Under which key a tensor lies in the file of its step."""
    return f"{phase}/{name}"


def output_key(unit: str, microbatch: int) -> str:
    """Under which key the output of a unit lies in the file of its step."""
    return f"output/{microbatch}/{unit}"


def place(
    step: int, rank: int, phase: str, use: str, *, unit: str = "", name: str = "", microbatch: int = 0
) -> dict[str, Any]:
    """The keys that say what a line is of. All but outputs are of a whole step, and have 0 as their microbatch."""
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
        raise RecordingError(f"expected the sha256 of the batch as 64 hex digits, got {digest!r}")


def encode(event: str, fields: dict[str, Any]) -> str:
    """One line, its line feed included. Losses that are not finite become strings: JSON has no word for them."""
    value = fields.get("value")
    if isinstance(value, float) and not math.isfinite(value):
        fields = fields | {"value": repr(value)}
    return json.dumps({"event": event} | fields, allow_nan=False) + "\n"


def decode(line: bytes, rank: int, where: str) -> dict[str, Any]:
    """A line that `encode` wrote, checked.

    Args:
        rank: the rank in whose folder it stands.
        where: path and line number, for messages.

    Raises:
        RecordingError: no JSON, an unknown event, a field that is missing or of another type, another rank's line.
    """
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise RecordingError(f"{where}: expected JSON, but {error}; damaged, record the run again") from None
    event = fields.get("event") if isinstance(fields, dict) else None
    if not isinstance(event, str) or event not in _FIELDS:
        raise RecordingError(f"{where}: expected an event among {list(_FIELDS)}, got {event!r}; record the run again")
    for name, kind in _FIELDS[event].items():
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if type(fields.get(name)) not in kinds:
            raise RecordingError(
                f"{where}: field {name!r} of a {event!r} line: expected {' or '.join(k.__name__ for k in kinds)}, got "
                f"{fields.get(name)!r}; record the run again"
            )
    if fields.get("rank", rank) != rank:
        raise RecordingError(f"{where}: a line of rank {fields['rank']} in the folder of rank {rank}; record again")
    if event == "loss":
        fields["value"] = _to_float(fields["value"], where)
    if event == "batch" and not _DIGEST.fullmatch(fields["digest"]):
        raise RecordingError(f"{where}: expected a sha256 as digest, got {fields['digest']!r}; record the run again")
    return fields


def _to_float(value: float | str, where: str) -> float:
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        raise RecordingError(f"{where}: expected a loss, got {value!r}; record the run again")
    return float(value)
