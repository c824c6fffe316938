"""Dtypes by name. The core represents dtypes by the names that torch, numpy and JAX share ("float32", "bfloat16")."""

import ml_dtypes
import numpy as np

from crossframe.errors import ParamError
from crossframe.quoting import quote

_DTYPES = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
FLOATING = tuple(_DTYPES)
COMPLEX = ("complex128", "complex64")
"""Dtypes of parameters that `fully_shard` takes too. No reference computes with them, and no bound is known of them."""
TF32 = "tf32"
"""The format to which accelerators round the factors of float32 products: 11 significant bits, as float16. No array is stored in
it."""


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a name; ParamError if it is not a floating dtype that can be sharded."""
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ParamError(f"unknown dtype {quote(name)}: expected one of {', '.join(FLOATING)}")
    return dtype


def itemsize(name: str) -> int:
    """Bytes of one element.

    >>> itemsize("float32"), itemsize("bfloat16")
    (4, 2)
    """
    return (np.dtype(name) if name in COMPLEX else numpy_dtype(name)).itemsize


def unit_roundoff(name: str) -> float:
    """Half the distance from 1 to the next larger number: the largest relative error of one rounding. Also of TF32.

    >>> unit_roundoff("float64") == 2.0**-53, unit_roundoff("tf32") == 2.0**-11
    (True, True)
    """
    if name == TF32:
        return 2.0**-11
    return float(ml_dtypes.finfo(numpy_dtype(name)).eps) / 2


def coarser(*names: str) -> str:
    """The dtype with the largest unit roundoff.

    >>> coarser("float32", "bfloat16", "float16")
    'bfloat16'
    """
    return max(names, key=unit_roundoff)
