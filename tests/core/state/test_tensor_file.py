"""Files of arrays: what is written is read again, bit for bit."""

import hashlib
import pickle
import re

import numpy as np
import pytest

from crossframe.dtypes import FLOATING, numpy_dtype
from crossframe.files import FileError
from crossframe.tensor_file import TensorFile, write_tensors


@pytest.mark.parametrize(
    "of",
    [lambda dtype: dtype, lambda dtype: pickle.loads(pickle.dumps(dtype)), lambda dtype: dtype.newbyteorder("=")],
    ids=["the dtype", "pickled", "in native order"],
)
@pytest.mark.parametrize("name", FLOATING)
def test_an_array_is_read_as_it_was_written(name, of, tmp_path):
    """numpy's `isbuiltin` is 0 for the second and third kind, although they equal the first."""
    array = np.arange(6.0).reshape(2, 3).astype(of(numpy_dtype(name)))
    size, sha256 = write_tensors(tmp_path / "f", {"w": array})
    found = TensorFile(tmp_path / "f", sha256, size).read("w", numpy_dtype(name), (2, 3))
    assert found.dtype == numpy_dtype(name)
    assert found.tobytes() == array.tobytes()


def test_an_array_of_the_other_byte_order_keeps_its_values(tmp_path):
    size, sha256 = write_tensors(tmp_path / "f", {"w": np.arange(3.0, dtype=">f4")})
    found = TensorFile(tmp_path / "f", sha256, size).read("w", np.dtype("float32"), (3,))
    assert found.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x01\0\0", "is not a file of tensors: its header is longer than the file, or too long"),
        (
            (9).to_bytes(8, "little") + b"{}",
            "is not a file of tensors: its header is longer than the file, or too long",
        ),
        ((1).to_bytes(8, "little") + b"{", "is not a file of tensors: its header is not JSON ("),
        ((2).to_bytes(8, "little") + b"[]", "is not a file of tensors: its header is []"),
    ],
)
def test_a_file_without_a_header_is_refused(content, reason, tmp_path):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(FileError) as caught:
        TensorFile(tmp_path / "f", hashlib.sha256(content).hexdigest(), len(content))
    assert caught.value.reason.startswith(reason)


def test_a_tensor_is_read_with_its_own_dtype_and_shape_alone(tmp_path):
    size, sha256 = write_tensors(tmp_path / "f", {"w": np.arange(6, dtype=np.float32).reshape(2, 3)})
    file = TensorFile(tmp_path / "f", sha256, size)
    with pytest.raises(FileError, match=r"f: expected a tensor 'v', it is not in the file$"):
        file.read("v", np.dtype("float32"), (2, 3))
    for dtype, shape in (("float64", (2, 3)), ("float32", (3, 2))):
        expected = f"expected shape {shape} of {dtype} (as {dtype}), got shape (2, 3) of float32"
        with pytest.raises(FileError, match=f"f: tensor 'w': {re.escape(expected)}$"):
            file.read("w", np.dtype(dtype), shape)
