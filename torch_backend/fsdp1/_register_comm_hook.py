"""Registers a communication hook, the user's reduction of gradients, on all units of a model."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.algorithms._comm_hooks import LOW_PRECISION_HOOKS

from crossframe.errors import StateError, UsageError
from torch_backend.engine._unit import Unit
from torch_backend.ranks._comm_hook import CommHook


def set_comm_hook(units: Sequence[Unit], state: object, hook: Callable[..., Any], *, hybrid: bool) -> None:
    """Set the hook that reduces the gradients of all units of a model.

    Args:
        hybrid: whether any unit has a hybrid strategy.

    Raises:
        UsageError: a hook that is not callable.
        StateError: a second hook, or hybrid sharding, as in PyTorch.
    """
    if not callable(hook):
        raise UsageError(f"register_comm_hook: expected a function (state, full, shard), got {hook!r}")
    if hybrid:
        raise StateError(
            "register_comm_hook under hybrid sharding: a hook cannot take part in the all-reduce over replicas; use "
            "another strategy"
        )
    for unit in units:
        if unit.options.comm_hook is not None:
            raise StateError(f"register_comm_hook: unit {unit.name!r} has a hook already; it may be registered once")
    for unit in units:
        unit.options.comm_hook = CommHook(state, hook, casts=hook in LOW_PRECISION_HOOKS)
