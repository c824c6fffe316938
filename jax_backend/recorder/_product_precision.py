"""Bounds how an accelerator may round a matrix product, by the dtypes of its factors and the `precision` of the equation.

The hardware may multiply in a coarser format than that of the factors. It rounds them, or splits each into components x1 + x2
+ ..., each the rounded remainder. With n components of unit roundoff u, at most u^n of a factor is lost. Algorithms also leave
out products of components as small as u^n of the result, at most two of them: 2 u^n of each factor covers both.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.lax import DotAlgorithm, DotAlgorithmPreset, Precision

from crossframe.dtypes import TF32, unit_roundoff

PRODUCTS = frozenset(["dot_general", "ragged_dot_general", "conv_general_dilated"])
_ON_CUDA = {Precision.DEFAULT: (TF32, 1), Precision.HIGH: (TF32, 1)}
_ON_TPU = {Precision.DEFAULT: ("bfloat16", 1), Precision.HIGH: ("bfloat16", 2), Precision.HIGHEST: ("bfloat16", 3)}
_BY_PLATFORM = {"cuda": _ON_CUDA, "tpu": _ON_TPU}
"""The dtype and number of components of a factor in float32. AMD GPUs multiply it in float32 unless a setting allows TF32."""
_BY_NAME = {"F16": "float16", "BF16": "bfloat16", "TF32": TF32}
_COMPONENTS = {"X3": 2, "X6": 3, "X9": 3}
"""By the number of products with which an algorithm's name ends."""


def unrounded(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a product, for factors in float64 that no algorithm rounds."""
    return {**params, "precision": Precision.HIGHEST}


class Roundings(NamedTuple):
    """Unit roundoffs in a product.

    Args:
        of_factors: of the format in which factors are multiplied; 0 if they are not rounded.
        of_sums: of the dtype in which products are added; 0 if it is not stated.
    """

    of_factors: float = 0.0
    of_sums: float = 0.0


def roundings_of_product(params: Mapping[str, Any], dtypes: Sequence[str]) -> Roundings | None:
    """The roundings that an equation asks for, on this backend; None if its algorithm adds in a format that is not documented.

    Args:
        params: of an equation of `PRODUCTS`.
        dtypes: of its two factors.
    """
    precision = params.get("precision")
    if precision is DotAlgorithmPreset.DEFAULT:
        precision = None
    if isinstance(precision, DotAlgorithmPreset):
        if precision.name.endswith("FAST_ACCUM"):
            return None
        first, *_, last = precision.name.split("_")
        factors, sums = [(_BY_NAME.get(first), _COMPONENTS.get(last, 1))] * 2, precision.accumulation_type
    elif isinstance(precision, DotAlgorithm):
        if precision.allow_imprecise_accumulation:
            return None
        factors = [
            (np.dtype(precision.lhs_precision_type).name, precision.lhs_component_count),
            (np.dtype(precision.rhs_precision_type).name, precision.rhs_component_count),
        ]
        sums = precision.accumulation_type
    else:
        pair = precision if isinstance(precision, tuple) else (precision, precision)
        of_platform = _BY_PLATFORM.get(_platform(), {})
        factors = [
            of_platform.get(one or Precision.DEFAULT, (None, 1)) if dtype == "float32" else (None, 1)
            for one, dtype in zip(pair, dtypes, strict=True)
        ]
        sums = None
    rounded = [_of_factor(stored, *each) for stored, each in zip(dtypes, factors, strict=True)]
    return Roundings(max(rounded), 0.0 if sums is None else unit_roundoff(np.dtype(sums).name))


def _platform() -> str:
    """The default backend; "cuda" or "rocm" for a GPU, which JAX calls "gpu" in both cases."""
    version = str(jax.devices()[0].client.platform_version)
    return next((name for name in ("cuda", "rocm") if name in version), jax.default_backend())


def _of_factor(stored: str, dtype: str | None, components: int) -> float:
    if dtype is None or unit_roundoff(dtype) <= unit_roundoff(stored):
        return 0.0
    of_one = unit_roundoff(dtype)
    return of_one if components == 1 else 2 * of_one**components
