"""Arrays in safetensors files: no pickles, and every dtype that can be sharded, bit for bit."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from crossframe import tensor_file
from crossframe.dtypes import numpy_dtype
from crossframe.errors import RecordingError
from crossframe.tensor_file import carrier


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
    """One safetensors file, mapped into memory; arrays are copied out on demand.

    Raises:
        RecordingError: a file that is missing, cut off or damaged, or not the one that was written.
    """

    def __init__(self, path: Path, sha256: str) -> None:
        """`sha256` is what `write_tensors` returned."""
        self.path = path
        try:
            with open(path, "rb") as file:
                came = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise RecordingError(
                f"{path}: expected the tensors of a step, but there is no such file; record the run again"
            ) from None
        except OSError as error:
            raise RecordingError(f"{path}: cannot be read ({error})") from None
        if came != sha256:
            raise RecordingError(
                f"{path}: cut off or changed since it was written: expected the sha256 {sha256[:12] or 'of no file'}..., got "
                f"{came[:12]}...; copy it again, or record the run again"
            )
        try:
            self._file: Any = safe_open(path, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise RecordingError(f"{path}: cut off or damaged ({error}); record the run again") from None
        self._keys = frozenset(self._file.keys())

    def read(self, key: str, dtype: str, numel: int) -> np.ndarray:
        """A flat array of `numel` elements; RecordingError unless the file holds it so."""
        expected = numpy_dtype(dtype)
        if key not in self._keys:
            raise RecordingError(f"{self.path}: expected a tensor {key!r}, it is not in the file; record the run again")
        try:
            array = self._file.get_tensor(key)
        except (SafetensorError, AttributeError, TypeError) as error:
            raise RecordingError(f"{self.path}: tensor {key!r} cannot be read ({error}); record again") from None
        if array.dtype != carrier(expected) or array.shape != (numel,):
            raise RecordingError(
                f"{self.path}: tensor {key!r}: expected {numel} elements of {dtype} (as {carrier(expected).name}), got "
                f"shape {array.shape} of {array.dtype}; record the run again"
            )
        return array.view(expected)
