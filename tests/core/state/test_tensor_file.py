"""Files of arrays: what is written is read again, bit for bit."""

import pickle

import numpy as np
import pytest

from crossframe.dtypes import FLOATING, numpy_dtype
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
