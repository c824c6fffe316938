"""The shapes of models, which is all that layouts and plans need: by name, from files, or from a recording."""

from pathlib import Path

from crossframe.errors import UsageError
from crossframe.params import ParamSpec
from crossframe.quoting import quote
from crossframe.shapes.json_file import from_json
from crossframe.shapes.model_shapes import ModelShapes
from crossframe.shapes.published import PUBLISHED
from crossframe.shapes.stored import SUFFIX, from_recording, from_safetensors, is_recording

__all__ = ["ModelShapes", "model_shapes"]


def model_shapes(name_or_path: str, dtype: str = "float32") -> ModelShapes:
    """The parameters and units of a model, without its values.

    Args:
        name_or_path: a name of PUBLISHED, or a path: of a `.safetensors` file, of a folder with such files, of a recording, or of
            a `.json` file. The JSON file is one mapping, either of names to shapes, or

                {"params": [{"name": "head.weight", "shape": [256, 128]}, ...], "units": ["blocks.0", ...]}

            where a parameter may also have "dtype", "aliases" and "requires_grad", and "units" is optional. List parameters in
            the order in which they are registered, and units in the order in which forward reaches them, without the root.
        dtype: of each parameter whose dtype is not stated.

    Raises:
        UsageError: an unknown name, or a file that cannot be read or has another format.
        ParamError: an invalid parameter, or a name that two parameters have.
        UnitError: a unit without parameters, or one that is listed twice.
        RecordingError: an invalid recording.

    >>> shapes = model_shapes("llama-3-8b", "bfloat16")
    >>> len(shapes.params), shapes.units[-1], shapes.params[0].shape
    (291, 'model.layers.31', (128256, 4096))
    """
    if not isinstance(name_or_path, str):
        raise UsageError(f"expected the name of a model or a path, got {quote(name_or_path)}")
    if config := PUBLISHED.get(name_or_path):
        params = tuple(ParamSpec(name, shape, dtype) for name, shape in config.shapes.items())
        return ModelShapes(name_or_path, params, config.units)
    path = Path(name_or_path)
    if name_or_path.endswith(".json"):
        return from_json(path, dtype)
    if name_or_path.endswith(SUFFIX):
        return from_safetensors(path)
    if name_or_path and "\0" not in name_or_path and path.is_dir():
        return from_recording(path) if is_recording(path) else from_safetensors(path)
    raise UsageError(
        f"unknown model {quote(name_or_path)}: expected one of {', '.join(PUBLISHED)}, the path of a {SUFFIX} or .json file, or "
        f"a folder with {SUFFIX} files or a recording"
    )
