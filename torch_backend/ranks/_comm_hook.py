"""CommHook: a reduction of gradients that the user supplies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CommHook:
    """The user's reduction of gradients.

    Attributes:
        state: the first argument of the hook.
        hook: `hook(state, full, shard)` fills `shard` with the reduced gradient, including division; under NO_SHARD, `hook(state,
            full)` reduces in place.
        casts: whether the hook chooses the dtype of communication, so that gradients are not cast before.
    """

    state: object
    hook: Callable[..., Any]
    casts: bool
