"""One rank's `events.jsonl`, read as a whole and checked against the manifest."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crossframe.dtypes import itemsize
from crossframe.errors import CrossframeError, RecordingError
from crossframe.recording import lines
from crossframe.recording.manifest import Manifest
from crossframe.trace import Event


@dataclass(frozen=True)
class Batch:
    """What a rank was fed at a step: sha256 of the batch in hex, and which samples of the data were in it."""

    digest: str
    sample_ids: tuple[int, ...]


@dataclass
class RankIndex:
    """What one rank recorded, in whole steps; tensors as the lines that say where they lie."""

    num_steps: int = 0
    ended: bool = False
    losses: dict[int, float] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    collectives: dict[int, list[Event]] = field(default_factory=dict)
    tensors: dict[tuple[str, int, str], dict[str, Any]] = field(default_factory=dict)
    outputs: dict[tuple[int, int, str], dict[str, Any]] = field(default_factory=dict)


def read_index(path: Path, manifest: Manifest, rank: int) -> RankIndex:
    """Read a rank's lines up to its last whole step; an absent file holds none.

    What follows the last "step" line is of a step that never ended, and is left out; so is a last line that a killed
    process cut in two. Any other line that cannot be read raises RecordingError.
    """
    index = RankIndex()
    if not path.is_file():
        return index
    *whole, cut = path.read_bytes().split(b"\n")
    open_step: list[tuple[dict[str, Any], str]] = []
    for number, line in enumerate(whole, 1):
        where = f"{path}, line {number}"
        fields = lines.decode(line, rank, where)
        if index.ended:
            raise RecordingError(f"{where}: a line after the end; two runs wrote here, record the run again")
        if fields["event"] == "end":
            _check_end(fields, index, open_step, manifest, where)
            index.ended = True
        elif fields["event"] == "step":
            _close_step(index, open_step, fields["step"], manifest, where)
            open_step = []
        else:
            open_step.append((fields, where))
    if cut and index.ended:
        raise RecordingError(f"{path}: text after the end; two runs wrote here, record the run again")
    return index


def _check_end(fields: dict, index: RankIndex, open_step: list, manifest: Manifest, where: str) -> None:
    if open_step or not fields["steps"] == index.num_steps == manifest.steps:
        raise RecordingError(
            f"{where}: expected the end after {manifest.steps} whole steps, got it after {index.num_steps}"
        )


def _close_step(index: RankIndex, members: list, step: int, manifest: Manifest, where: str) -> None:
    if step != index.num_steps or step >= manifest.steps:
        raise RecordingError(f"{where}: expected step {index.num_steps} of {manifest.steps}, got {step}; record again")
    for fields, place in members:
        if fields["step"] != step:
            raise RecordingError(f"{place}: a line of step {fields['step']} inside step {step}; record the run again")
        _file(index, fields, step, manifest, place)
    if step not in index.losses or step not in index.batches:
        raise RecordingError(f"{where}: step {step} has no loss or no batch; record the run again")
    index.num_steps += 1


def _file(index: RankIndex, fields: dict[str, Any], step: int, manifest: Manifest, where: str) -> None:
    match fields["event"]:
        case "loss":
            index.losses[step] = fields["value"]
        case "batch":
            ids = fields["sample_ids"]
            if not all(type(i) is int for i in ids):
                raise RecordingError(f"{where}: expected sample ids that are ints, got {ids!r}; record the run again")
            index.batches[step] = Batch(fields["digest"], tuple(ids))
        case "collective":
            index.collectives.setdefault(step, []).append(_event(fields["collective"], where))
        case "output":
            _check_output(fields, manifest, where)
            at = (step, fields["microbatch"], fields["unit"])
            if at in index.outputs:
                raise RecordingError(f"{where}: an output of {at[2]!r} stands twice in step {step}; record again")
            index.outputs[at] = fields
        case "tensor":
            _check_tensor(fields, manifest, where)
            key = (fields["phase"], step, fields["name"])
            if key in index.tensors:
                raise RecordingError(f"{where}: {key[0]!r} of {key[2]!r} stands twice in step {step}; record again")
            index.tensors[key] = fields


def _event(fields: dict[str, Any], where: str) -> Event:
    expected = {"kind": str, "unit": str, "phase": str, "dtype": str, "num_bytes": int, "group": list}
    for name, kind in expected.items():
        if type(fields.get(name)) is not kind:
            raise RecordingError(
                f"{where}: field {name!r} of a collective: expected {kind.__name__}, got {fields.get(name)!r}"
            )
    return Event.from_json(fields)


def _check_tensor(fields: dict[str, Any], manifest: Manifest, where: str) -> None:
    name, phase, start, stop = fields["name"], fields["phase"], fields["start"], fields["stop"]
    spec = manifest.params.get(name)
    if spec is None or manifest.unit_of[name] != fields["unit"]:
        raise RecordingError(f"{where}: the manifest has no parameter {name!r} in unit {fields['unit']!r}")
    if phase not in lines.TENSOR_USES:
        raise RecordingError(f"{where}: expected a phase among {list(lines.TENSOR_USES)}, got {phase!r}; record again")
    whole = phase == lines.BACKWARD
    if not 0 <= start < stop <= spec.numel or (whole and stop - start != spec.numel):
        raise RecordingError(f"{where}: expected a range of the {spec.numel} elements of {name!r}, got {start}:{stop}")
    _check_dtype(fields, where)


def _check_output(fields: dict[str, Any], manifest: Manifest, where: str) -> None:
    if fields["unit"] not in {"", *(unit for unit, _ in manifest.units)} or fields["microbatch"] < 0:
        raise RecordingError(
            f"{where}: an output of unit {fields['unit']!r}, microbatch {fields['microbatch']}: the manifest has none"
        )
    if not all(type(size) is int and size >= 0 for size in fields["shape"]):
        raise RecordingError(f"{where}: expected a shape, got {fields['shape']!r}; record the run again")
    _check_dtype(fields, where)


def _check_dtype(fields: dict[str, Any], where: str) -> None:
    try:
        itemsize(fields["dtype"])
    except CrossframeError as error:
        raise RecordingError(f"{where}: {error}; record the run again") from None
