"""Reads and writes arrays in the safetensors format: no pickles, and every dtype that can be sharded, bit for bit.

A file has eight bytes with the length of the header, the header as JSON ({name: {"dtype", "shape", "data_offsets"}}), and the
arrays without gaps.
"""

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crossframe.files import FileError, VerifiedFile, parse_json
from crossframe.quoting import quote, quote_error

_CARRIERS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}
# The names in safetensors of the dtypes that arrays are stored as.
_TAGS = {"float64": "F64", "float32": "F32", "float16": "F16", "uint16": "U16", "uint8": "U8"}
# Every dtype of the format that is a builtin dtype of numpy.
_DTYPES = {
    tag: np.dtype(name) for name, tag in _TAGS.items()
} | {"BOOL": np.dtype(bool), "I8": np.dtype(np.int8), "I16": np.dtype(np.int16), "I32": np.dtype(np.int32),
     "I64": np.dtype(np.int64), "U32": np.dtype(np.uint32), "U64": np.dtype(np.uint64)}  # fmt: skip
MOST_HEADER_BYTES = 100_000_000
MOST_DIMS = 64
"""Maximum number of dims of a numpy array."""
# Data starts at a multiple of this, so that arrays can be mapped into memory.
_ALIGNMENT = 8
_CHUNK = 1 << 24


@functools.cache
def carrier(dtype: np.dtype) -> np.dtype:
    """The dtype that an array is stored as. Support of bfloat16 and float8 depends on the version of safetensors, so these are
    stored as unsigned integers of the same bits.

    >>> from crossframe.dtypes import numpy_dtype
    >>> carrier(np.dtype("float32")).name, carrier(numpy_dtype("bfloat16")).name
    ('float32', 'uint16')
    """
    # By name: numpy's `isbuiltin` says 0 of some float32 dtypes, such as that of an array that was pickled.
    return np.dtype(dtype.name) if dtype.name in _TAGS else _CARRIERS[dtype.itemsize]


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> tuple[int, str]:
    """Write arrays to a new file, without a second copy in memory.

    The data is written, not mapped, so that a full disk raises OSError; a mapped file would end the process with SIGBUS. The file
    is not synced to disk.

    Returns:
        The size of the file in bytes, and its sha256 in hex.

    Raises:
        OSError: the file cannot be written.
    """
    native = {name: np.ascontiguousarray(array, array.dtype.newbyteorder("=")) for name, array in tensors.items()}
    stored = {name: array.view(carrier(array.dtype)) for name, array in native.items()}
    # Larger items first, so that each array is aligned to its item size.
    order = sorted(stored, key=lambda name: (-stored[name].itemsize, name))
    header, offset = {}, 0
    for name in order:
        array, start = stored[name], offset
        offset += array.nbytes
        header[name] = {
            "dtype": _TAGS[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, offset],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for part in (len(text).to_bytes(8, "little"), text):
            digest.update(part)
            size += file.write(part)
        for name in order:
            content = stored[name].reshape(-1).view(np.uint8)
            for first in range(0, content.size, _CHUNK):
                chunk = content[first : first + _CHUNK].data
                digest.update(chunk)
                size += file.write(chunk)
    return size, digest.hexdigest()


@dataclass(frozen=True)
class _Entry:
    """The place of an array: the dtype that it is stored as, its shape, and the offset of its first byte in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """A file of arrays that was verified. Arrays are read on demand, and changes since the verification are detected.

    Raises:
        FileError: the file is missing, cut off or damaged, is not the one that was written, or has an invalid header.
    """

    def __init__(
        self,
        path: Path,
        sha256: str,
        size: int | None = None,
        *,
        most_bytes: int | None = None,
        in_memory: bool = False,
    ) -> None:
        """Verify the file.

        Args:
            sha256, size: the values that `write_tensors` returned.
            most_bytes: maximum size of a file that is read.
            in_memory: keep the content in memory instead of reading it again.
        """
        self.path = path
        self._file = VerifiedFile(path, sha256, size, most_bytes=most_bytes, in_memory=in_memory)
        self._entries = self._read_header()

    def read(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """Read an array; FileError unless the file has it with this dtype and shape."""
        entry = self._entry(name, dtype, shape)
        content = self._file.read(entry.start, entry.start + math.prod(shape) * dtype.itemsize)
        return np.frombuffer(content, dtype).reshape(shape)

    def read_run(self, name: str, dtype: np.dtype, numel: int, start: int, stop: int) -> np.ndarray:
        """Read elements `start:stop` of a 1-D array of `numel` elements; FileError as in `read`."""
        entry = self._entry(name, dtype, (numel,))
        content = self._file.read(entry.start + start * dtype.itemsize, entry.start + stop * dtype.itemsize)
        return np.frombuffer(content, dtype)

    def _entry(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise FileError(self.path, f"expected a tensor {quote(name)}, it is not in the file")
        if (entry.dtype, entry.shape) != (carrier(dtype), shape):
            raise FileError(
                self.path,
                f"tensor {quote(name)}: expected shape {quote(shape)} of {dtype.name} (as {carrier(dtype).name}), "
                f"got shape {quote(entry.shape)} of {entry.dtype.name}",
            )
        return entry

    def _read_header(self) -> dict[str, _Entry]:
        size = self._file.size
        length = int.from_bytes(self._file.read(0, min(8, size)), "little")
        if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
            raise FileError(self.path, "is not a file of tensors: its header is longer than the file, or too long")
        try:
            header = parse_json(bytes(self._file.read(8, 8 + length)))
        except ValueError as error:
            raise FileError(
                self.path, f"is not a file of tensors: its header is not JSON ({quote_error(error)})"
            ) from None
        if not isinstance(header, dict):
            raise FileError(self.path, f"is not a file of tensors: its header is {quote(header)}")
        header.pop("__metadata__", None)
        return {name: self._checked(name, fields, 8 + length) for name, fields in header.items()}

    def _checked(self, name: str, fields: Any, first: int) -> _Entry:
        """An entry of the header, after a check that its bytes are inside the file and match its shape."""
        entry = fields if isinstance(fields, dict) else {}
        dtype: Any = entry.get("dtype")
        shape: Any = entry.get("shape")
        offsets: Any = entry.get("data_offsets")
        found = _DTYPES.get(dtype) if isinstance(dtype, str) else None
        if found is None or not _are_sizes(shape, MOST_DIMS) or not _are_sizes(offsets, 2) or len(offsets) != 2:
            raise FileError(self.path, f"tensor {quote(name)}: its header has {quote(fields)}")
        start, stop = offsets
        if not 0 <= start <= stop <= self._file.size - first or stop - start != math.prod(shape) * found.itemsize:
            raise FileError(
                self.path,
                f"tensor {quote(name)}: shape {quote(shape)} of {found.name} does not lie at bytes {quote(offsets)} of "
                f"{self._file.size - first}",
            )
        return _Entry(found, tuple(shape), first + start)


def _are_sizes(value: Any, most: int) -> bool:
    return isinstance(value, list) and len(value) <= most and all(type(size) is int and size >= 0 for size in value)
