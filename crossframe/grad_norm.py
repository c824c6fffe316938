"""What the gradient norm and clipping are, for every backend: valid arguments, the dtype, the epsilon (R30).

The dtype is determined by the dtypes of all parameters, which every rank knows, and not by the gradients that a rank holds.
`crossframe.reference.grad_norm` computes both in numpy.
"""

import math
from collections.abc import Iterable

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.errors import UsageError
from crossframe.quoting import quote

# As in torch.nn.utils.clip_grad_norm_: added to the norm, which may be 0 and is divided by.
EPSILON = 1e-6


def check_norm_type(norm_type: object) -> float:
    """The order p of a norm as a float: a number above 0, inf, or "inf" as in torch.

    torch also accepts p <= 0, but its p = 0 counts tensors and not elements, so that it depends on the sharding.

    Raises:
        UsageError: any other value.

    >>> check_norm_type(2), check_norm_type("inf")
    (2.0, inf)
    """
    order = math.inf if norm_type == "inf" else _number(norm_type)
    if order is None or not order > 0:
        raise UsageError(f"norm_type: expected a number above 0, or inf, got {quote(norm_type)}")
    return order


def check_max_norm(max_norm: object) -> float:
    """The maximum norm after clipping, as a float: at least 0; inf clips nothing.

    Raises:
        UsageError: any other value. In torch a negative one reverses the gradients.
    """
    bound = _number(max_norm)
    if bound is None or not bound >= 0:
        raise UsageError(f"max_norm: expected a number of at least 0, got {quote(max_norm)}")
    return bound


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    try:
        return float(value)
    except OverflowError:  # an int past the largest float
        return math.inf if value > 0 else -math.inf


def norm_dtype(dtypes: Iterable[str]) -> str:
    """The dtype of partials and norm: the widest of float32 and the dtypes of all gradients (R30).

    >>> norm_dtype(["bfloat16", "float32"]), norm_dtype(["bfloat16", "float64"]), norm_dtype([])
    ('float32', 'float64', 'float32')
    """
    return max(["float32", *dtypes], key=lambda name: numpy_dtype(name).itemsize)
