"""The shapes of a model that is stored: in safetensors files, or as a recording."""

import re
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from crossframe.errors import UsageError
from crossframe.params import ParamSpec
from crossframe.recording.manifest import MANIFEST_NAME, Manifest
from crossframe.shapes.model_shapes import ModelShapes

SUFFIX = ".safetensors"
# The floating dtypes of the safetensors format that can be sharded. Buffers of integers are not parameters.
STORED_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}


def from_safetensors(path: Path) -> ModelShapes:
    """The floating tensors of a safetensors file, or of all such files in a folder, in alphabetical order by file.

    The units are `numbered_blocks` of the names.

    Raises:
        UsageError: no such file, or a file that is not in the safetensors format.
    """
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    params: list[ParamSpec] = []
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    stored = opened.get_slice(name)
                    if dtype := STORED_DTYPES.get(stored.get_dtype()):
                        params.append(ParamSpec(name, tuple(stored.get_shape()), dtype))
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{file}: expected a safetensors file, cannot read it: {error}") from None
    if not params:
        raise UsageError(f"{path}: expected at least one floating tensor in safetensors files, got none")
    return ModelShapes(path.stem, tuple(params), numbered_blocks(param.name for param in params), is_ordered=False)


def from_recording(directory: Path) -> ModelShapes:
    """The parameters and units of the run that was recorded in a folder.

    Raises:
        RecordingError: the manifest cannot be read.
    """
    manifest = Manifest.read(directory)
    params = tuple(param for _, layout in manifest.units for param in layout.params)
    return ModelShapes(manifest.model, params, tuple(dict.fromkeys(unit for unit, _ in manifest.units if unit)))


def is_recording(path: Path) -> bool:
    """Whether a folder holds a recording."""
    return (path / MANIFEST_NAME).is_file()


def numbered_blocks(names: Iterable[str]) -> tuple[str, ...]:
    """The outermost modules whose name is a number and that contain modules: the blocks of a transformer, in order.

    >>> numbered_blocks(["wte.weight", "h.10.mlp.up.weight", "h.2.mlp.up.weight", "h.2.mlp.0.up.weight", "head.0.weight"])
    ('h.2', 'h.10')
    """
    found: dict[str, set[int]] = {}
    for name in names:
        if block := re.match(r"((?:[^.]*[^.\d][^.]*\.)*?)(\d+)\.[^.]+\.", name):
            found.setdefault(block[1], set()).add(int(block[2]))
    return tuple(f"{prefix}{i}" for prefix, numbers in found.items() for i in sorted(numbers))
