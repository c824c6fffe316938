"""Repeats an equation of a jaxpr in float64 on the same inputs, and bounds the difference that rounding can make.

`crossframe.operators.roundings` derives the bound.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from crossframe.dtypes import FLOATING, unit_roundoff
from crossframe.operators import Judged
from crossframe.operators.roundings import ARITHMETIC, DRAWS, OTHERS, SIGNIFICANT, bound_of, roundings_of_sum
from crossframe.operators.trace import worst
from jax_backend.recorder._product_precision import PRODUCTS, Roundings, roundings_of_product, unrounded
from jax_backend.tree import is_key

_IS_ARITHMETIC = frozenset(
    ["add", "add_any", "sub", "mul", "div", "neg", "sqrt", "square", "max", "min", "abs", "select_n"]
)
_SUMS = PRODUCTS | {"reduce_sum", "cumsum", "reduce_window_sum", "scatter-add"}
_MOVES = frozenset(
    [
        "broadcast_in_dim",
        "reshape",
        "squeeze",
        "transpose",
        "slice",
        "concatenate",
        "rev",
        "gather",
        "iota",
        "pad",
        "split",
    ]
)
"""Primitives without rounding, which have one correct result."""


def judge(primitive: Any, params: dict[str, Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Judged | None:
    """Compare the outputs of an equation with float64; None if it computes nothing or cannot be repeated.

    Args:
        params: the parameters that the primitive was bound with.
        inputs, outputs: arrays of one rank.
    """
    if primitive.name in _MOVES or not any(_is_floating(each) for each in inputs):
        return None
    if not any(_is_floating(each) for each in outputs) or any(_holds_functions(each) for each in params.values()):
        return None
    arrays = [np.asarray(each) for each in inputs]
    wide_params = {name: _widened(value) for name, value in params.items()}
    try:
        roundings: Roundings | None = Roundings()
        if primitive.name in PRODUCTS:
            roundings = roundings_of_product(params, [each.dtype.name for each in arrays[:2]])
            wide_params = unrounded(wide_params)
        if roundings is None:
            return None
        with jax.enable_x64(True):
            exact = _results(primitive, wide_params, arrays)
            reaches = _reaches(primitive, wide_params, arrays, exact, roundings)
    except Exception:  # a primitive may reject float64 with any error
        return None
    return worst(
        _judged(np.asarray(own), wide, reach)
        for own, wide, reach in zip(outputs, exact, reaches, strict=True)
        if _is_floating(own)
    )


def _is_floating(array: Any) -> bool:
    return not is_key(array) and np.dtype(array.dtype).name in FLOATING


def _holds_functions(value: Any) -> bool:
    each = value if isinstance(value, tuple | list) else (value,)
    return any((callable(one) and not isinstance(one, type | np.dtype)) or hasattr(one, "jaxpr") for one in each)


def _widened(value: Any) -> Any:
    """A parameter of the equation in float64."""
    if isinstance(value, type | np.dtype) and np.dtype(value).name in FLOATING:
        return np.dtype(np.float64)
    return value


def _results(
    primitive: Any, params: dict[str, Any], arrays: Sequence[np.ndarray], signs: Any = None
) -> list[np.ndarray]:
    """The results in float64.

    Args:
        signs: perturbs an array; None: none is perturbed.
    """
    wide = [each.astype(np.float64) if each.dtype.name in FLOATING else each for each in arrays]
    moved = [signs(each) if signs is not None and each.dtype == np.float64 else each for each in wide]
    result = primitive.bind(*map(jax.numpy.asarray, moved), **params)
    return [np.asarray(each) for each in (result if primitive.multiple_results else [result])]


def _reaches(
    primitive: Any,
    wide_params: dict[str, Any],
    arrays: Sequence[np.ndarray],
    exact: Sequence[np.ndarray],
    roundings: Roundings,
) -> list[float]:
    """For each result a bound on the norm of the difference that rounding can make."""
    stored = max(unit_roundoff(each.dtype.name) for each in arrays if each.dtype.name in FLOATING)
    inner = min(stored, unit_roundoff("float32"))
    terms = _terms(primitive.name, wide_params, arrays, exact[0])
    size = (ARITHMETIC if primitive.name in _IS_ARITHMETIC else OTHERS) * inner
    of_results = 0.0
    if primitive.name in _SUMS:
        size, of_results = roundings_of_sum(terms, max(inner, roundings.of_sums), roundings.of_factors)
        if primitive.name not in PRODUCTS:  # they may be added up in the dtype of the result
            of_results = math.sqrt(terms) * stored
    squares = [0.0] * len(exact)
    for seed in range(DRAWS):
        rng = np.random.default_rng(seed)
        drawn = _results(
            primitive, wide_params, arrays, lambda x, rng=rng: x * (1 + size * rng.choice((-1.0, 1.0), x.shape))
        )
        for i, (one, other) in enumerate(zip(drawn, exact, strict=True)):
            if other.dtype == np.float64:
                kept = np.isfinite(one) & np.isfinite(other)
                squares[i] += float(np.sum(np.square(one[kept] - other[kept])))
    sizes = [_norm(each[np.isfinite(each)]) if each.dtype == np.float64 else 0.0 for each in exact]
    return [
        SIGNIFICANT * (math.sqrt(square / DRAWS) + of_results * size)
        for square, size in zip(squares, sizes, strict=True)
    ]


def _judged(computed: np.ndarray, exact: np.ndarray, reach: float) -> Judged | None:
    if exact.shape != computed.shape or exact.dtype.name not in FLOATING:
        return None
    kept = np.isfinite(exact)
    wanted = exact[kept].astype(np.float64)
    size = _norm(wanted)
    if not size:
        return None
    bound, wide = bound_of(reach, size, computed.dtype.name, wanted.size), computed.astype(np.float64)
    largest = float(jax.numpy.finfo(computed.dtype).max)
    if not np.array_equal(np.isfinite(wide), kept) and float(np.abs(wanted).max()) < largest:
        return Judged(math.inf, bound)
    return Judged(_norm(wide[kept] - wanted) / size, bound)


def _norm(array: np.ndarray) -> float:
    return float(np.sqrt(np.sum(np.square(array))))


def _terms(name: str, params: dict[str, Any], arrays: Sequence[np.ndarray], result: np.ndarray) -> int:
    """A lower bound of the number of terms in an element of the result."""
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return math.prod(arrays[0].shape[dim] for dim in contracted)
    if name == "ragged_dot_general":
        (contracted, _), _ = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return math.prod(arrays[0].shape[dim] for dim in contracted)
    if name == "conv_general_dilated":
        return arrays[1].size
    if name in ("reduce_sum", "reduce_window_sum"):
        return max(arrays[0].size // max(result.size, 1), 1)
    return max(max(each.shape, default=1) for each in arrays)
