"""The tensors of a recorded step, in a file of the safetensors format."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from crossframe import tensor_file
from crossframe.dtypes import numpy_dtype
from crossframe.errors import RecordingError
from crossframe.files import FileError
from crossframe.recording.lines import SKETCHES_KEY
from crossframe.recording.sketch import ROW


def dtype_name(dtype: np.dtype) -> str:
    """The name that the core uses; ParamError if it is no floating dtype that can be sharded."""
    numpy_dtype(dtype.name)
    return dtype.name


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> str:
    """Write flat arrays to `path`, which appears only when all of them are in it; returns the sha256 of the file, in hex.

    Not synced to disk: a recording outlives a killed process, not a power cut.
    """
    part = path.with_name(path.name + ".part")
    _, sha256 = tensor_file.write_tensors(part, tensors)
    os.replace(part, path)
    return sha256


class TensorFile:
    """The file of a step; arrays are read on demand (`crossframe.tensor_file`).

    Raises:
        RecordingError: a file that is missing, cut off or damaged, or not the one that was written.
    """

    def __init__(self, path: Path, sha256: str, most_bytes: int, *, in_memory: bool = False) -> None:
        """Verify the file.

        Args:
            sha256: what `write_tensors` returned.
            most_bytes: a file of more bytes is not read.
            in_memory: keep what was verified, instead of reading it again.
        """
        self._rows: np.ndarray | None = None
        try:
            self._file = tensor_file.TensorFile(path, sha256, most_bytes=most_bytes, in_memory=in_memory)
        except FileError as error:
            raise RecordingError(f"{error}; copy it again, or record the run again") from None

    def read(self, key: str, dtype: str, numel: int) -> np.ndarray:
        """A flat array of `numel` elements; RecordingError unless the file holds it so."""
        try:
            return self._file.read(key, numpy_dtype(dtype), (numel,))
        except FileError as error:
            raise RecordingError(f"{error}; record the run again") from None

    def rows(self, num: int) -> np.ndarray:
        """All sketches of the file, one a row, of shape (num, ROW)."""
        if self._rows is None:
            self._rows = self.read(SKETCHES_KEY, "float64", num * ROW).reshape(num, ROW)
        return self._rows
