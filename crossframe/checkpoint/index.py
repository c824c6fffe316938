"""The index of a checkpoint: names of files, layouts and values as JSON, and checks of every field that is read."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from crossframe.dtypes import FLOATING, numpy_dtype
from crossframe.errors import CrossframeError
from crossframe.layout import FlatLayout, Layout, layout_from_json
from crossframe.params import OVERFLOW, ParamSpec
from crossframe.quoting import quote
from crossframe.tensor_file import MOST_DIMS

FORMAT = "crossframe checkpoint 3"
INDEX = "index.json"
MODEL, STATE = "model", "state"
# Name and dtype of Adam's count of its steps in both frameworks.
STEP, STEP_DTYPE = "step", np.dtype(np.int32)
# Dtypes of values that belong to no parameter.
_VALUE_DTYPES = (*FLOATING, "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))


class CheckpointError(CrossframeError, RuntimeError):
    """A checkpoint that is missing, damaged or of another model, or that cannot be written."""


def state_layout(layout: Any, entry: str, dtype: str, rename: Callable[[str], str] = str) -> Layout:
    """The layout of an optimizer state entry of a bucket, in which elements have the same places as in the parameters.

    Args:
        layout: layout of the parameters.
        entry: name of the entry in torch; "" for the parameters themselves.
        dtype: dtype of its values.
        rename: maps the name of a parameter to its name in the checkpoint.

    >>> from crossframe.layout import RaggedLayout
    >>> state_layout(RaggedLayout((ParamSpec("w", (3,), "bfloat16"),), 2), "exp_avg", "float32").params[0].name
    'exp_avg:w'
    """
    prefix = f"{entry}:" if entry else ""
    params = tuple(
        replace(
            spec,
            name=prefix + rename(spec.name),
            aliases=tuple(prefix + rename(alias) for alias in spec.aliases),
            dtype=dtype,
        )
        for spec in layout.params
    )
    if isinstance(layout, FlatLayout):  # its alignment depends on the dtype of the parameters, not on that of moments
        return replace(layout, params=params, compute_dtype=layout.compute_dtype or layout.dtype)
    return replace(layout, params=params)


def field_of(fields: Any, name: str, kind: type) -> Any:
    """A field of exactly this type: unlike in Python, True is not an int."""
    value = fields.get(name) if isinstance(fields, dict) else None
    if type(value) is not kind:
        raise CheckpointError(f"{quote(name)}: expected {kind.__name__}, got {quote(value)}")
    return value


def value_dtype(name: str) -> np.dtype:
    return numpy_dtype(name) if name in FLOATING else np.dtype(name)


def value_from_json(key: str, value: Any) -> tuple[str, tuple[int, ...]]:
    pair = isinstance(value, list) and len(value) == 2
    dtype, shape = value if pair else (None, None)
    if dtype not in _VALUE_DTYPES or not isinstance(shape, list) or len(shape) > MOST_DIMS:
        raise CheckpointError(f"value {quote(key)}: expected its dtype and shape, got {quote(value)}")
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) >= OVERFLOW:
        raise CheckpointError(f"value {quote(key)}: expected a shape, got {quote(shape)}")
    return dtype, tuple(shape)


def unit_to_json(name: str, layout: Any) -> dict:
    params = [
        [spec.name, list(spec.shape), spec.dtype, list(spec.aliases), spec.requires_grad] for spec in layout.params
    ]
    return {"unit": name, "params": params, "layout": layout.to_json()}


def unit_from_json(unit: Any) -> tuple[str, Layout]:
    params = []
    for row in field_of(unit, "params", list):
        if not isinstance(row, list) or len(row) != 5 or not isinstance(row[1], list) or not isinstance(row[3], list):
            raise CheckpointError(f"'params': expected name, shape, dtype, aliases and requires_grad, got {quote(row)}")
        name, shape, dtype, aliases, trained = row
        params.append(ParamSpec(name, tuple(shape), dtype, tuple(aliases), trained))
    return field_of(unit, "unit", str), layout_from_json(field_of(unit, "layout", dict), tuple(params))


def checked_path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike) or not Path(path).name:
        raise CheckpointError(f"expected the folder of a checkpoint as a path with a name, got {quote(path)}")
    return Path(path)


def file_name(place: int) -> str:
    return f"rank{place:05d}.safetensors"


def digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
