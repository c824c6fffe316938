"""Arrays in files of the safetensors format: no pickles, and every dtype that can be sharded, bit for bit.

The format: eight bytes with the length of the header, the header as JSON ({name: {"dtype", "shape", "data_offsets"}}), then the
arrays one after the other without gaps.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

_CARRIERS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}
# What safetensors calls the dtypes that arrays are stored as.
_TAGS = {"float64": "F64", "float32": "F32", "float16": "F16", "uint16": "U16", "uint8": "U8"}
# Data starts at a multiple of this, so that arrays can be mapped into memory as they are.
_ALIGNMENT = 8
_CHUNK = 1 << 24


def carrier(dtype: np.dtype) -> np.dtype:
    """The dtype under which an array lies in the file. How much of bfloat16 and float8 readers of safetensors know depends
    on their version, so they travel as unsigned integers of the same bits.

    >>> from crossframe.dtypes import numpy_dtype
    >>> carrier(np.dtype("float32")).name, carrier(numpy_dtype("bfloat16")).name
    ('float32', 'uint16')
    """
    return dtype if dtype.kind in "fu" and dtype.isbuiltin == 1 else _CARRIERS[dtype.itemsize]


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> tuple[int, str]:
    """Write arrays to a new file, their bytes as they are: no second copy of them is made in memory.

    The data is written, not mapped: a full disk is an OSError, where a mapped file would end the process with SIGBUS. The file is
    not synced to disk.

    Returns:
        The size of the file in bytes, and its sha256 in hex.

    Raises:
        OSError: the disk refuses.
    """
    stored = {name: np.ascontiguousarray(array).view(carrier(array.dtype)) for name, array in tensors.items()}
    # Larger items first: then each array is aligned to its own item size.
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
