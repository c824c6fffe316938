"""Converts the optimizer state of a sharded model to and from crossframe's checkpoints, bucket by bucket (R37).

Elementwise state ("exp_avg") is a line for each bucket. A scalar ("step") is one value of the checkpoint, which all parameters
must have in common.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from crossframe.checkpoint import LISTED, STATE, STEP, STEP_DTYPE, CheckpointError, Saved, state_layout
from crossframe.errors import UnsupportedError, UsageError
from crossframe.layout import Layout, PerParamLayout, Sharding
from crossframe.mesh import MeshSpec
from crossframe.state import Role
from torch_backend.compat._dtypes import from_numpy, to_numpy, torch_dtype
from torch_backend.engine._bucket import Bucket
from torch_backend.memory._store import cuts_of
from torch_backend.state._optimized_bucket import Descriptions, OptimizedBucket, StateOf, gather_descriptions

Named = Sequence[tuple[str, Bucket, Layout]]


@dataclass(frozen=True, eq=False)
class _TrainedBucket(OptimizedBucket):
    """The trained parameters of a bucket in an optimizer, with the unit's name."""

    unit: str


@dataclass(frozen=True)
class _Part:
    """One entry of the state of one bucket's parameters.

    Attributes:
        layout: of the values, under their names in a checkpoint.
        pieces: this rank's elements in the optimizer, by index in the layout; without parameters of which it has no state.
    """

    unit: str
    layout: Layout
    rank: int
    pieces: Mapping[int, Tensor]

    def line(self) -> np.ndarray:
        """All of it as one line, with padding 0."""
        device = next((piece.device for piece in self.pieces.values()), None)
        line = torch.empty(self.layout.padded_shard_numel, dtype=torch_dtype(self.layout.dtype), device=device)
        return to_numpy(cuts_of(self.layout, self.rank).join(self.pieces, line))

    def fill(self, line: np.ndarray) -> None:
        """The inverse."""
        values = cuts_of(self.layout, self.rank).split(from_numpy(line))
        for i, piece in self.pieces.items():
            piece.copy_(values[i])


class OptimizerState:
    """The state of an optimizer.

    Args:
        named: (unit name, bucket, layout with the names of the model) of all buckets.
        fill: whether another state will be loaded into it. If it has none, it is given some, which `forget` removes.

    Raises:
        UsageError: no optimizer.
        UnsupportedError: see `torch_backend.checkpoint.save_checkpoint`.
    """

    def __init__(self, optimizer: Optimizer, named: Named, *, fill: bool) -> None:
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"optimizer: expected one of torch.optim, got {type(optimizer).__name__}")
        self.optimizer = optimizer
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self._buckets = [found for each in named if (found := _trained(*each, held)) is not None]
        self._parts: list[_Part] = []
        self._found: list[np.ndarray] = []
        self._values: dict[str, float] = {}
        self._was_empty = fill and not optimizer.state
        if self._was_empty:
            prime(optimizer)

    def descriptions(self) -> list[list[Descriptions]]:
        """The descriptions of all ranks. All ranks of the shard group call it."""
        return gather_descriptions(self._buckets, self._states())

    def _states(self) -> StateOf:
        return {id(param): entries for param, entries in self.optimizer.state.items()}

    def settle(self, everyone: Sequence[Sequence[Descriptions]]) -> None:
        """Decide what a checkpoint of it contains, from the descriptions of all ranks.

        Raises:
            UsageError: a parameter that has no state, or not that of the others of its bucket; or none has any.
            StateDictError: an entry that is neither elementwise nor a scalar, or a scalar that differs between ranks.
        """
        missing, states = [], self._states()
        scalars: dict[str, dict[str, float]] = {}
        for each, by_rank in zip(self._buckets, everyone, strict=True):
            dtypes: dict[str, dict[int, str]] = {}
            for at, entries in enumerate(each.entries(by_rank)):
                for entry, (role, seen, value) in entries.items():
                    for i in each.members(at):
                        if role is Role.ELEMENTWISE:
                            dtypes.setdefault(entry, {})[i] = seen.dtype
                        elif value is not None:
                            scalars.setdefault(entry, {})[each.specs[i].name] = float(value)
            for entry, by_index in sorted(dtypes.items()):
                missing += [f"{entry!r} of {spec.name!r}" for i, spec in enumerate(each.specs) if i not in by_index]
                layout = state_layout(each.layout, entry, next(iter(by_index.values())))
                self._parts.append(_Part(each.unit, layout, each.bucket.store.rank, each.pieces(entry, states)))
        self.scalars = dict(sorted(scalars.items()))
        if missing or not (self._parts or self.scalars):
            of_params = ", ".join(missing[:LISTED]) or "of any parameter of the model"
            raise UsageError(
                f"the optimizer has no state {of_params}: expected one that holds the parameters of the sharded model, and has "
                "stepped with a gradient of each; save without it, or freeze what is not trained"
            )

    @property
    def units(self) -> tuple[tuple[str, Layout], ...]:
        """The layouts of elementwise state, as a section of a checkpoint has them."""
        return tuple((part.unit, part.layout) for part in self._parts)

    def lines(self) -> list[np.ndarray]:
        """This rank's lines of elementwise state."""
        return [part.line() for part in self._parts]

    def values(self) -> dict[str, np.ndarray]:
        """The scalars, as the checkpoint has them.

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
        """Read the state for `fill` from a checkpoint.

        Raises:
            CheckpointError: it was saved without state, with that of another optimizer, or is damaged.
        """
        if (known := set(self.scalars)) != (got := set(saved.values)):
            raise CheckpointError(
                f"{saved.path}, of which nothing was loaded: expected the state of {type(self.optimizer).__name__} with the "
                f"values {sorted(known)}, got {sorted(got)}; build the optimizer that was saved, or load without one"
            )
        self._found = saved.lines(STATE, Sharding(self.units, mesh), place)
        self._values = {entry: float(saved.value(entry)) for entry in sorted(known)}

    def fill(self) -> None:
        """Give the optimizer the state that was read."""
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
        """Remove the state of an optimizer that had none."""
        if self._was_empty:
            self.optimizer.state.clear()


def prime(optimizer: Optimizer) -> None:
    """Let an optimizer that has not stepped make its state, by a step that changes nothing."""
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


def _trained(unit: str, bucket: Bucket, layout: Any, held: set[int]) -> _TrainedBucket | None:
    """The trained parameters of a bucket that an optimizer holds; UnsupportedError for a part of a line."""
    params = bucket.registrar.managed()
    indices = [i for i, param in enumerate(params) if id(param) in held and param.requires_grad]
    if 0 < len(indices) < len(params):
        if not isinstance(layout, PerParamLayout):
            frozen = [spec.name for i, spec in enumerate(layout.params) if i not in indices]
            raise UnsupportedError(
                f"{frozen[:LISTED]} are frozen and share a buffer with {layout.params[indices[0]].name!r}, which is "
                "trained: expected units that are trained or frozen as a whole; wrap them separately, or save by "
                "state_dict and torch.distributed.checkpoint"
            )
        some, dims = (tuple(each[i] for i in indices) for each in (layout.params, layout.shard_dims))
        layout = replace(layout, params=some, dims=dims)
    return _TrainedBucket(bucket, layout, [params[i] for i in indices], unit) if indices else None
