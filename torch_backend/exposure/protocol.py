"""What an engine asks of a face."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Exposure(Protocol):
    """What an engine asks of a face, for one bucket."""

    # Whether the module shows the shards again at the end of a forward after which full memory is kept.
    conceals_after_forward: bool

    def show_full(self) -> None:
        """Full parameters are registered."""
        ...

    def show_sharded(self) -> None:
        """What is sharded is registered, and attributes yield it."""
        ...

    def use(self, aliases: Sequence[Tensor]) -> None:
        """Attributes yield `aliases`, in the layout's order."""
        ...

    def unuse(self) -> None:
        """Attributes yield what is registered."""
        ...

    def summon(self) -> None:
        """Register full parameters under the original names, for the user."""
        ...

    def dismiss(self) -> list[Tensor]:
        """End `summon`. Returns what the user left as full parameters, in the layout's order."""
        ...

    def adopt(self) -> None:
        """Take over data that the user put in the place of a sharded parameter's (R25)."""
        ...

    def add_grad(self, shard: Tensor) -> None:
        """Accumulate a reduced gradient, of shape (padded_shard_numel,), into what the optimizer reads."""
        ...

    def grads(self) -> list[Tensor | None]:
        """The reduced gradient of each parameter's piece, 1-D, in the layout's order; None where there is none."""
        ...

    def sync_requires_grad(self) -> None:
        """Let the leaves require a gradient where the user's parameters do."""
        ...
