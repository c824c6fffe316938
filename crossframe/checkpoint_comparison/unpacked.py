"""A folder into which a backend unpacks a checkpoint of its framework, so that the core reads it without the framework."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from crossframe.checkpoint_comparison.stored import StoredModel
from crossframe.dtypes import FLOATING, numpy_dtype

_INDEX = "unpacked.json"


class Unpacked:
    """Writes the folder, one file for each tensor.

    Args:
        folder: an existing empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, list[Any]] = {}
        self._values: dict[str, Any] = {}

    def add(self, key: str, value: Any) -> None:
        """Add an array, or a value that is no array. Values that are not JSON are described by their text."""
        if isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
            file = f"{len(self._tensors):06d}.bin"
            np.ascontiguousarray(array).tofile(self._folder / file)
            self._tensors[key] = [file, array.dtype.name, list(array.shape)]
        else:
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                value = repr(value)[:200]
            self._values[key] = value

    def finish(self) -> None:
        """Write the index."""
        content = {"tensors": self._tensors, "values": self._values}
        (self._folder / _INDEX).write_text(json.dumps(content))


def read_unpacked(folder: Path, name: str) -> StoredModel:
    """The model in the folder.

    Args:
        name: of the checkpoint that was unpacked.
    """
    content = json.loads((folder / _INDEX).read_text())
    tensors = {key: partial(_read, folder, *fields) for key, fields in content["tensors"].items()}
    values: Mapping[str, Any] = content["values"]
    return StoredModel.of_keys(name, tensors, values)


def _read(folder: Path, file: str, dtype: str, shape: list[int]) -> np.ndarray:
    kind = numpy_dtype(dtype) if dtype in FLOATING else np.dtype(dtype)
    return np.fromfile(folder / file, kind).reshape(shape)
