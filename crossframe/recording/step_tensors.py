"""The tensors of a recorded step, in a file of the safetensors format."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from crossframe import tensor_file
from crossframe.dtypes import numpy_dtype
from crossframe.errors import RecordingError
from crossframe.files import FileError
from crossframe.recording.event_format import SKETCHES_KEY
from crossframe.recording.sketch import ROW


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """The core's name of a dtype; ParamError if it is not a floating dtype that can be sharded."""
    numpy_dtype(dtype.name)
    return dtype.name


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> str:
    """Write flat arrays to `path`, which appears only when it is complete; returns the sha256 of the file, in hex.

    The file is not synced to disk: a recording survives a killed process, but not a power failure.
    """
    part = path.with_name(path.name + ".part")
    _, sha256 = tensor_file.write_tensors(part, tensors)
    os.replace(part, path)
    return sha256


class TensorFile:
    """The file of a step; arrays are read on demand (`crossframe.tensor_file`).

    Raises:
        RecordingError: the file is missing, cut off or damaged, or is not the one that was written.
    """

    def __init__(self, path: Path, sha256: str, most_bytes: int, *, in_memory: bool = False) -> None:
        """Verify the file.

        Args:
            sha256: the digest that `write_tensors` returned.
            most_bytes: maximum size of a file that is read.
            in_memory: keep the content in memory instead of reading it again.
        """
        self._rows: np.ndarray | None = None
        try:
            self._file = tensor_file.TensorFile(path, sha256, most_bytes=most_bytes, in_memory=in_memory)
        except FileError as error:
            raise RecordingError(f"{error}; copy it again, or record the run again") from None

    def read(self, key: str, dtype: str, numel: int) -> np.ndarray:
        """A flat array of `numel` elements; RecordingError if the file has no such array."""
        try:
            return self._file.read(key, numpy_dtype(dtype), (numel,))
        except FileError as error:
            raise RecordingError(f"{error}; record the run again") from None

    def rows(self, num: int) -> np.ndarray:
        """The rows of all sketches in the file, of shape (num, ROW)."""
        if self._rows is None:
            self._rows = self.read(SKETCHES_KEY, "float64", num * ROW).reshape(num, ROW)
        return self._rows
