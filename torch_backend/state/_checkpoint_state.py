"""Converts the optimizer state of a sharded model to and from crossframe's checkpoints, bucket by bucket (R37).

What has one value an element ("exp_avg") lies like the shards. What has one value a parameter ("step") is one value of the
checkpoint, if all parameters have the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from crossframe.checkpoint import LISTED, STATE, STEP, STEP_DTYPE, CheckpointError, Saved, state_layout
from crossframe.errors import UnsupportedError, UsageError
from crossframe.layout import Layout, PerParamLayout, Sharding
from crossframe.mesh import MeshSpec
from torch_backend.compat._dtypes import dtype_name, to_numpy
from torch_backend.engine._bucket import Bucket
from torch_backend.memory._store import cuts_of
from torch_backend.pieces._piece_tensor import PieceTensor
from torch_backend.registration import FlatRegistrar

Named = Sequence[tuple[str, Bucket, Layout]]


@dataclass(frozen=True)
class _Part:
    """One entry of the state of one bucket's parameters.

    Attributes:
        layout: of the values, under their names in a checkpoint.
        tensors: by index in the layout, what this rank's optimizer has of each parameter; None where it has none of it.
    """

    unit: str
    layout: Layout
    place: int
    tensors: list[Tensor | None]

    def line(self) -> np.ndarray:
        """All of it as a shard lies, padding 0."""
        some = next((tensor for tensor in self.tensors if tensor is not None), None)
        line = torch.zeros(self.layout.padded_shard_numel, dtype=_dtype(self.layout), device=_device(some))
        for into, tensor in zip(self._split(line), self.tensors, strict=True):
            if tensor is not None:
                into.copy_(tensor)
        return to_numpy(line)

    def fill(self, line: np.ndarray) -> None:
        """The inverse."""
        values = torch.from_numpy(line.view(np.uint8)).view(_dtype(self.layout))
        for tensor, value in zip(self.tensors, self._split(values), strict=True):
            if tensor is not None:
                tensor.copy_(value)

    def _split(self, line: Tensor) -> list[Tensor]:
        cuts = cuts_of(self.layout, self.place)
        parts = torch.split_with_sizes(line, cuts.widths)
        return [parts[at] for at in cuts.places]


@dataclass(frozen=True, eq=False)
class _Bucket:
    """A bucket whose parameters an optimizer holds.

    Attributes:
        layout: of those that it holds.
        indices: of them among the bucket's own.
        params: what the optimizer holds of each; of one flat parameter that, several times.
    """

    unit: str
    bucket: Bucket
    layout: Layout
    indices: list[int]
    params: list[nn.Parameter]

    @property
    def is_flat(self) -> bool:
        """Whether one flat parameter stands for all."""
        return isinstance(self.bucket.registrar, FlatRegistrar)

    def elements(self, i: int, value: Tensor) -> Tensor:
        """What a value that lies like parameter i has of it here, 1-D."""
        local = _local(value).reshape(-1)
        return self.bucket.store.split(local)[self.indices[i]] if self.is_flat else local


@dataclass(frozen=True)
class Told:
    """What one rank's optimizer keeps: of each bucket the dtype of each entry that has one value an element; and by entry and
    parameter all others. A rank that holds nothing of a parameter may know nothing of it."""

    entries: list[dict[str, str]]
    scalars: dict[str, dict[str, float]]


class OptimizerState:
    """The state of an optimizer.

    Args:
        named: (unit, bucket, layout under the names of the model) of all buckets.
        fill: it is to be given another state; if it has none yet, it is given some, until `forget`.

    Raises:
        UsageError: no optimizer.
        UnsupportedError: see `torch_backend.checkpoint.save_checkpoint`.
    """

    def __init__(self, optimizer: Optimizer, named: Named, *, fill: bool) -> None:
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"optimizer: expected one of torch.optim, got {type(optimizer).__name__}")
        self.optimizer = optimizer
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self._buckets = [found for each in named if (found := _held(*each, held)) is not None]
        self._was_empty = fill and not optimizer.state
        self._parts: list[_Part] = []
        self._found: list[np.ndarray] = []
        self._values: dict[str, float] = {}
        if self._was_empty:
            prime(optimizer)
        try:
            self.told = Told([self._entries(each) for each in self._buckets], self._scalars())
        except BaseException:
            self.forget()
            raise

    def _entries(self, each: _Bucket) -> dict[str, str]:
        found: dict[str, str] = {}
        for spec, param in zip(each.layout.params, each.params, strict=True):
            for entry, value in self.optimizer.state.get(param, {}).items():
                if not isinstance(value, Tensor) or value.dim() == 0:
                    continue
                if _local(value).numel() != _local(param).numel():
                    raise UnsupportedError(
                        f"parameter {spec.name!r}: its state {entry!r} of shape {tuple(value.shape)} is neither one value an "
                        "element nor one value; save it by state_dict and torch.distributed.checkpoint"
                    )
                found.setdefault(entry, dtype_name(value.dtype))
        return found

    def _scalars(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for each in self._buckets:
            for spec, param in zip(each.layout.params, each.params, strict=True):
                # Of what it has no element of, a rank may or may not count steps.
                state = self.optimizer.state.get(param, {}) if _local(param).numel() else {}
                for entry, value in state.items():
                    if value is not None and (not isinstance(value, Tensor) or value.dim() == 0):
                        found.setdefault(entry, {})[spec.name] = float(value)
        return found

    def settle(self, everyone: Sequence[Told]) -> None:
        """Hear what all ranks of the shard group keep, this one among them.

        Raises:
            UsageError: parameters of which this rank's optimizer lacks state that others have; or none has any.
        """
        missing = []
        for at, each in enumerate(self._buckets):
            for entry, dtype in sorted(
                {entry: d for told in everyone for entry, d in told.entries[at].items()}.items()
            ):
                tensors: list[Tensor | None] = []
                for i, (spec, param) in enumerate(zip(each.layout.params, each.params, strict=True)):
                    value = self.optimizer.state.get(param, {}).get(entry)
                    if value is None and _local(param).numel():
                        missing.append(f"{entry!r} of {spec.name!r}")
                    tensors.append(None if value is None else each.elements(i, value))
                kept = state_layout(each.layout, entry, dtype)
                self._parts.append(_Part(each.unit, kept, each.bucket.store.rank, tensors))
        scalars = [told.scalars for told in everyone]
        self.scalars = {
            entry: {name: value for one in scalars for name, value in one.get(entry, {}).items()}
            for entry in sorted({entry for one in scalars for entry in one})
        }
        if missing or not (self._parts or self.scalars):
            said = ", ".join(missing[:LISTED]) or "of any parameter of the model"
            raise UsageError(
                f"the optimizer has no state {said}: expected one that holds the parameters of the sharded model, and has "
                "stepped with a gradient of each; save without it, or freeze what is not trained"
            )

    @property
    def units(self) -> tuple[tuple[str, Layout], ...]:
        """What has one value an element, as a section of a checkpoint has it."""
        return tuple((part.unit, part.layout) for part in self._parts)

    def lines(self) -> list[np.ndarray]:
        """This rank's lines of that."""
        return [part.line() for part in self._parts]

    def values(self) -> dict[str, np.ndarray]:
        """What is one value for each parameter, as the checkpoint has it.

        Raises:
            UnsupportedError: an entry that differs between parameters.
        """
        for entry, by_name in self.scalars.items():
            low, high = (end(by_name, key=lambda name: by_name[name]) for end in (min, max))
            if by_name[low] != by_name[high]:
                raise UnsupportedError(
                    f"the state {entry!r} is {by_name[low]:g} of parameter {low!r} and {by_name[high]:g} of {high!r}: expected "
                    "one value for all; save it by state_dict and torch.distributed.checkpoint"
                )
        return {
            entry: np.array(next(iter(by_name.values())), STEP_DTYPE if entry == STEP else np.float64)
            for entry, by_name in self.scalars.items()
        }

    def read(self, saved: Saved, mesh: MeshSpec, place: int) -> None:
        """Read a checkpoint, and keep what `fill` gives to the optimizer.

        Raises:
            CheckpointError: it was saved without state, with that of another optimizer, or is damaged.
        """
        if (known := set(self.scalars)) != (got := set(saved.values)):
            raise CheckpointError(
                f"{saved.path}, of which nothing was loaded: expected the state of {type(self.optimizer).__name__} with the "
                f"values {sorted(known)}, got {sorted(got)}; build the optimizer with which it was saved, or load without one"
            )
        self._found = saved.lines(STATE, Sharding(self.units, mesh), place)
        self._values = {entry: float(saved.value(entry)) for entry in sorted(known)}

    def fill(self) -> None:
        """Give the optimizer what was read."""
        with torch.no_grad():
            for part, line in zip(self._parts, self._found, strict=True):
                part.fill(line)
        params = {id(param): param for each in self._buckets for param in each.params}
        for state in (self.optimizer.state[param] for param in params.values() if param in self.optimizer.state):
            for entry in self._values.keys() & state.keys():
                if isinstance(state[entry], Tensor):
                    state[entry].fill_(self._values[entry])
                else:
                    state[entry] = type(state[entry])(self._values[entry])

    def forget(self) -> None:
        """Leave the optimizer as it was, if it had no state."""
        if self._was_empty:
            self.optimizer.state.clear()


def prime(optimizer: Optimizer) -> None:
    """Give an optimizer that has not stepped the state that a checkpoint is loaded into: a step that changes nothing."""
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    rates, grads = [group["lr"] for group in optimizer.param_groups], [param.grad for param in params]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _held(unit: str, bucket: Bucket, layout: Any, held: set[int]) -> _Bucket | None:
    """The part of a bucket that an optimizer holds; UnsupportedError for a part of a line."""
    params, num = bucket.registrar.managed(), len(layout.params)
    if isinstance(bucket.registrar, FlatRegistrar):
        params = params * num
    indices = [i for i, param in enumerate(params) if id(param) in held and param.requires_grad]
    if not indices:
        return None
    if len(indices) < num:
        if not isinstance(layout, PerParamLayout):
            frozen = [spec.name for i, spec in enumerate(layout.params) if i not in indices]
            raise UnsupportedError(
                f"{frozen[:LISTED]} are not trained and lie in one line with {layout.params[indices[0]].name!r}, which is: "
                "expected a unit trained as a whole or not at all; wrap them apart, or save by state_dict and "
                "torch.distributed.checkpoint"
            )
        some, dims = (tuple(each[i] for i in indices) for each in (layout.params, layout.shard_dims))
        layout = replace(layout, params=some, dims=dims)
    return _Bucket(unit, bucket, layout, indices, [params[i] for i in indices])


def _local(value: Tensor) -> Tensor:
    if isinstance(value, PieceTensor):
        return value.local
    return value.to_local() if isinstance(value, DTensor) else value


def _dtype(layout: Layout) -> torch.dtype:
    return getattr(torch, layout.dtype)


def _device(tensor: Tensor | None) -> torch.device:
    return torch.device("cpu") if tensor is None else tensor.device
