"""Communication hooks: reductions of gradients that the user supplies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.algorithms._comm_hooks import LOW_PRECISION_HOOKS

from crossframe.errors import StateError, UsageError

if TYPE_CHECKING:
    from torch_backend.engine._unit import Unit


@dataclass(frozen=True)
class CommHook:
    """A user's own reduction, in the place of ours.

    Attributes:
        state: what the user wants to be given each time.
        hook: called as `hook(state, full, shard)`, to fill `shard` with the reduced gradient; where nothing is sharded as
            `hook(state, full)`, to reduce in place. It divides too.
        casts: whether it chooses the dtype that gradients travel in, so that they are not cast for it.
    """

    state: object
    hook: Callable[..., Any]
    casts: bool


def set_comm_hook(units: Sequence["Unit"], state: object, hook: Callable[..., Any], *, hybrid: bool) -> None:
    """Let a hook reduce the gradients of all units of a model, from their next reduction on.

    Args:
        hybrid: whether any of them is under a hybrid strategy.

    Raises:
        UsageError: a hook that cannot be called.
        StateError: there is one already; and under hybrid sharding, as in torch.
    """
    if not callable(hook):
        raise UsageError(f"register_comm_hook: expected a function (state, full, shard), got {hook!r}")
    if hybrid:
        raise StateError(
            "register_comm_hook under hybrid sharding: a hook has no part in the sum over replicas; use another strategy"
        )
    for unit in units:
        if unit.choices.comm_hook is not None:
            raise StateError(f"register_comm_hook: unit {unit.name!r} has a hook already; it may be registered once")
    for unit in units:
        unit.choices.comm_hook = CommHook(state, hook, casts=hook in LOW_PRECISION_HOOKS)
