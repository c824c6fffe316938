"""The parameters of a stored model: a checkpoint, safetensors files, or a recording with the gradients of its first step."""

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, deserialize

from crossframe.alignment.matching import Arrays
from crossframe.checkpoint import INDEX, MODEL, read, whole_tensors
from crossframe.dtypes import numpy_dtype
from crossframe.errors import RecordingError, UsageError
from crossframe.recording import Recording
from crossframe.recording.event_format import PARAMETERS, REDUCE
from crossframe.shapes.stored import STORED_DTYPES, SUFFIX, is_recording


def read_model(path: Path) -> tuple[Arrays, Arrays]:
    """(initial values, gradients of the first step) by name. There are gradients in dense recordings alone.

    Raises:
        CheckpointError: a damaged checkpoint.
        RecordingError: a damaged recording, or one without the values of parameters.
        UsageError: no recording, no checkpoint, and no safetensors files with floating tensors.
    """
    if is_recording(path):
        return read_recorded(Recording.open(path, partial=True))
    return (whole_tensors(read(path), MODEL) if (path / INDEX).is_file() else _safetensors(path)), {}


def _safetensors(path: Path) -> Arrays:
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    found = {}
    for file in files:
        try:
            tensors = deserialize(file.read_bytes())
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{file}: expected a safetensors file, cannot read it: {error}") from None
        for name, fields in sorted(tensors, key=lambda tensor: tensor[0]):
            if dtype := STORED_DTYPES.get(fields["dtype"]):
                found[name] = np.frombuffer(fields["data"], numpy_dtype(dtype)).reshape(fields["shape"])
    if not found:
        raise UsageError(
            f"{path}: expected a recording, a checkpoint, or safetensors files with floating tensors; there is none"
        )
    return found


def read_recorded(recording: Recording) -> tuple[Arrays, Arrays]:
    """(initial values, gradients of the first step) of a recording by name.

    Raises:
        RecordingError: damaged, or without the values of parameters.
    """
    names, path = recording.manifest.params, recording.directory
    if not recording.num_steps:
        raise RecordingError(f"{path}: expected one complete step, got none")
    if sketched := [name for name in names if recording.is_sketched(PARAMETERS, 0, name)]:
        raise RecordingError(
            f"{path}: expected the elements of parameters, but {sketched[0]!r} was recorded as a sketch, as those of models with "
            "more than a million parameters are; record in full (--detail full, or detail='full'), or align checkpoints"
        )
    values = {name: recording.full(PARAMETERS, 0, name) for name in names}
    gradients = {
        name: recording.full(REDUCE, 0, name)
        for name in names
        if recording.has(REDUCE, 0, name) and not recording.is_sketched(REDUCE, 0, name)
    }
    return values, gradients
