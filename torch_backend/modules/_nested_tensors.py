"""Finds, moves and casts the tensors in nested inputs and outputs of modules (R35)."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

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
    """All tensors in nested inputs or outputs: dicts, sequences, sets and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | Set):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def _map_tensors(fn: Callable[[Any], Any], value: Any) -> Any:
    """Apply `fn` to all tensors in a nested value, keeping container types and other objects."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, PackedSequence):
        return value._replace(data=fn(value.data))
    if isinstance(value, Mapping):
        changed = {key: _map_tensors(fn, item) for key, item in value.items()}
        # Rebuilt only if an item changed, because not every container can be built from its items.
        if all(changed[key] is item for key, item in value.items()):
            return value
        return OrderedDict(changed) if isinstance(value, OrderedDict) else changed
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
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        came = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        fields = {name: new for name, item in came.items() if (new := _map_tensors(fn, item)) is not item}
        return dataclasses.replace(value, **fields) if fields else value
    return value
