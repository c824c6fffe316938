"""The parameters of a stored model: a checkpoint, safetensors files, or a recording with the gradients of its first step."""

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, deserialize

from crossframe.alignment.golden_values import golden_values
from crossframe.alignment.matching import Arrays
from crossframe.alignment.summary import Summary
from crossframe.checkpoint import INDEX, MODEL, read, whole_tensors
from crossframe.dtypes import numpy_dtype
from crossframe.errors import RecordingError, UsageError
from crossframe.recording import Recording
from crossframe.recording.event_format import PARAMETERS, REDUCE
from crossframe.shapes.stored import STORED_DTYPES, SUFFIX, is_recording


def read_models(paths: tuple[Path, Path]) -> tuple[tuple[Arrays, Arrays], tuple[Arrays, Arrays]]:
    """(initial values, gradients of the first step) by name of two models. Recordings alone have gradients.

    Raises:
        CheckpointError: a damaged checkpoint.
        RecordingError: a damaged recording, or one without the initial values of parameters.
        UsageError: no recording, no checkpoint, and no safetensors files with floating tensors.
    """
    return alike(*map(_read, paths))


def read_recordings(first: Recording, second: Recording) -> tuple[tuple[Arrays, Arrays], tuple[Arrays, Arrays]]:
    """(initial values, gradients of the first step) by name of two recordings, the values of a golden as far as the other one has
    them.

    Raises:
        RecordingError: as of `read_recorded`; two goldens.
    """
    if (first.golden is None) == (second.golden is None):
        return alike(read_recorded(first), read_recorded(second))
    golden, other = (first, second) if second.golden is None else (second, first)
    known = read_recorded(other)
    gradients = {name: _gradient(golden, name) for name in golden.manifest.params if golden.has(REDUCE, 0, name)}
    both = (golden_values(golden, known[0]), gradients), known
    return alike(*(both if golden is first else both[::-1]))


def _read(path: Path) -> tuple[Arrays, Arrays]:
    if is_recording(path):
        return read_recorded(Recording.open(path, partial=True))
    return (whole_tensors(read(path), MODEL) if (path / INDEX).is_file() else _safetensors(path)), {}


def alike(
    first: tuple[Arrays, Arrays], second: tuple[Arrays, Arrays]
) -> tuple[tuple[Arrays, Arrays], tuple[Arrays, Arrays]]:
    """Values and gradients of two models, as summaries if one of them has a summary."""
    models = (first, second)
    if not any(isinstance(each, Summary) for values, _ in models for each in values.values()):
        return models
    summaries = [tuple({name: Summary.of(each) for name, each in side.items()} for side in model) for model in models]
    return summaries[0], summaries[1]  # type: ignore[return-value]


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
    """(initial values, gradients of the first step) of a recording by name; those that were recorded as sketches as summaries.

    Raises:
        RecordingError: damaged, or with sketches of parameters without samples.
    """
    names, path = recording.manifest.params, recording.directory
    if not recording.num_steps:
        raise RecordingError(f"{path}: expected one complete step, got none")
    values: dict[str, np.ndarray | Summary] = {}
    for name in names:
        if not recording.is_sketched(PARAMETERS, 0, name):
            values[name] = recording.full(PARAMETERS, 0, name)
        elif (sample := recording.sample(name)) is None:
            raise RecordingError(
                f"{path}: expected the elements or samples of parameters, but {name!r} was recorded as a sketch alone, as in "
                "goldens and up to format 6; record again with this version, in full (--detail full), or align checkpoints"
            )
        else:
            values[name] = Summary(names[name].shape, recording.sketch(PARAMETERS, 0, name), sample)
    return values, {name: _gradient(recording, name) for name in names if recording.has(REDUCE, 0, name)}


def _gradient(recording: Recording, name: str) -> np.ndarray | Summary:
    if recording.is_sketched(REDUCE, 0, name):
        return Summary(recording.manifest.params[name].shape, recording.sketch(REDUCE, 0, name))
    return recording.full(REDUCE, 0, name)
