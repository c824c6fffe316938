"""Finds, moves and casts the tensors in nested inputs and outputs of modules (R35)."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import SUPPORTED_NODES

from crossframe.errors import UsageError


def cast_floating(inputs: Any, dtype: torch.dtype) -> Any:
    """Cast all floating-point tensors in nested inputs to `dtype`; other tensors are not changed.

    >>> cast = cast_floating({"x": torch.ones(2), "n": torch.tensor(1)}, torch.bfloat16)
    >>> cast["x"].dtype, cast["n"].dtype
    (torch.bfloat16, torch.int64)
    """
    return _map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)


def moved(inputs: Any, device: torch.device) -> Any:
    """Move all tensors in nested inputs to `device`."""
    return _map_tensors(lambda t: t.to(device, non_blocking=True), inputs)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested inputs or outputs: dicts, sequences, sets, dataclasses, and classes that torch's pytree knows."""
    if isinstance(value, Tensor):
        yield value
    else:
        for item in _items(value):
            yield from tensors_in(item)


def arrays_in(value: Any) -> Iterator[Tensor]:
    """Copies of all arrays of numbers that nested inputs have from numpy, but for scalars, as tensors."""
    if isinstance(value, np.ndarray):
        if value.ndim and value.dtype.kind in "biuf":
            yield torch.from_numpy(np.array(value))
    else:
        for item in _items(value):
            yield from arrays_in(item)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | Set):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (getattr(value, field.name, None) for field in dataclasses.fields(value))
    if type(value) in SUPPORTED_NODES:
        return SUPPORTED_NODES[type(value)].flatten_fn(value)[0]
    return ()


def _map_tensors(fn: Callable[[Any], Any], value: Any) -> Any:
    """Apply `fn` to all tensors in a nested value, keeping container types and other objects.

    Containers are rebuilt only if an item changed, because not every container can be built from its items.
    """
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, PackedSequence):  # the indices move with the data, batch_sizes stays on the CPU
        indices = {name: getattr(value, name) for name in ("sorted_indices", "unsorted_indices")}
        moved = {name: item if item is None else fn(item) for name, item in indices.items()}
        return value._replace(data=fn(value.data), **moved)
    # Before dicts: a dataclass may be one too, as the outputs of Hugging Face's models are.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_fields(fn, value)
    if isinstance(value, Mapping):
        changed = {key: new for key, item in value.items() if (new := _map_tensors(fn, item)) is not item}
        return _with_items(value, changed) if changed else value
    if isinstance(value, list | tuple | set | frozenset):
        items = [_map_tensors(fn, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        try:
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        except TypeError as error:
            raise UsageError(
                f"an input has tensors in a {type(value).__name__}, which cannot be rebuilt to cast or move them; pass "
                "them in a tuple, list or dict, or already in the compute dtype and on the compute device"
            ) from error
    return value


def _with_items(value: Mapping[Any, Any], changed: Mapping[Any, Any]) -> Any:
    """A copy of a mapping with some items replaced: of its class if that is a dict, or defines how it is copied, else a dict.

    `copy.copy` of another class shares the items, so that replacing one would change the user's mapping.
    """
    if type(value) is not dict and (isinstance(value, dict) or hasattr(value, "__copy__")):
        with suppress(TypeError):
            made: Any = copy.copy(value)
            for key, item in changed.items():
                made[key] = item
            return made
    return {**value, **changed}


def _map_fields(fn: Callable[[Any], Any], value: Any) -> Any:
    came = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    changed = {name: new for name, item in came.items() if (new := _map_tensors(fn, item)) is not item}
    if not changed:
        return value
    try:
        return dataclasses.replace(value, **changed)
    except ValueError:  # an InitVar, whose value is gone
        made = copy.copy(value)
        for name, item in changed.items():
            object.__setattr__(made, name, item)
        return made
