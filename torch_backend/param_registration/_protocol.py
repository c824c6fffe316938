"""Registrar: the interface between the engine and what a module registers."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

from torch import Tensor, nn

from torch_backend.memory._reshard_group import ReshardGroupShard
from torch_backend.mesh._tensor_parallel import TensorParallelParams


class Registrar(Protocol):
    """Registers the parameters of one bucket on the user's modules, for one API."""

    # Whether the module shows the shards again at the end of a forward after which full memory is kept.
    conceals_after_forward: bool

    # Under tensor parallelism: for each parameter the DTensor that it is this rank's part of, None for a plain one. Else empty.
    tp_params: TensorParallelParams

    @property
    def registered(self) -> Sequence[tuple[int, nn.Module, str]]:
        """All registrations of parameters under their original names: (index, module, attribute)."""
        ...

    def show_full(self) -> None:
        """Register the unsharded parameters."""
        ...

    def show_sharded(self) -> None:
        """Register the sharded parameters, which attributes then return."""
        ...

    def used_params(self, aliases: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors that the module computes with, from aliases of the leaves. Called in forward, with the user's grad mode."""
        ...

    def use(self, used: Sequence[Tensor]) -> None:
        """Set attributes to `used`, in the layout's order."""
        ...

    def unuse(self) -> None:
        """Reset attributes to the registered parameters."""
        ...

    def summon(self, full: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> None:
        """Register full parameters under the original names for the user, optionally with `grads` as their gradients."""
        ...

    def dismiss(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """End `summon`. Returns the full parameters and their gradients, in the layout's order."""
        ...

    def left(self) -> list[Tensor]:
        """The current full parameters of `summon`, in the layout's order."""
        ...

    def write_grads(self, full: Sequence[Tensor | None]) -> None:
        """Copy this rank's slices of full gradients that `dismiss` returned (R22)."""
        ...

    def show_state(self, params: Sequence[nn.Parameter]) -> None:
        """Register these under the original names, for saving or loading a state dict."""
        ...

    def hide_state(self) -> None:
        """End `show_state` and register the sharded parameters."""
        ...

    def deregister(self) -> None:
        """Temporarily remove the parameters of this bucket from the module."""
        ...

    def take_leaves(self, leaves: list[nn.Parameter]) -> None:
        """Replace the unsharded parameters while the sharded ones are registered."""
        ...

    def follow(self, leaves: list[nn.Parameter], fn: Callable[[Tensor], Tensor]) -> None:
        """End `deregister` after `fn` (of `module.to`) replaced the store's buffer and the unsharded parameters. Applies `fn` to
        gradients."""
        ...

    def managed(self) -> list[nn.Parameter]:
        """The module's parameters for this bucket."""
        ...

    def whole_grads(self) -> list[Tensor]:
        """The reduced gradients that the optimizer reads, with padding set to 0 (R05)."""
        ...

    def adopt(self) -> bool:
        """Adopt data with which the user replaced that of a sharded parameter (R25). Returns whether the shard was written."""
        ...

    def adopt_loaded(self) -> None:
        """Adopt parameters that `load_state_dict(assign=True)` registered instead of sharded parameters (R25)."""
        ...

    def put_back(self) -> Mapping[int, nn.Parameter]:
        """Register our parameters again, and return the user's replacements by index."""
        ...

    def put_in(self, others: Mapping[int, nn.Parameter]) -> None:
        """End `put_back`."""
        ...

    def show_group_shard(self, group_shard: ReshardGroupShard) -> None:
        """Register the reshard group's shard between forward and backward, if the API does."""
        ...

    def add_grad(self, shard: Tensor, reduced: Sequence[int], unused: Set[int]) -> None:
        """Accumulate a reduced gradient into the gradients that the optimizer reads.

        Args:
            shard: with the layout `reduced_layout` of the core.
            reduced: the indices of its parameters; all for a flat layout.
            unused: the indices among them without a gradient.
        """
        ...

    def grads(self) -> list[Tensor | None]:
        """The 1-D reduced gradient of each parameter's piece, in the layout's order; None without a gradient."""
        ...

    def sync_requires_grad(self) -> None:
        """Let leaves require a gradient if the user's parameters do."""
        ...
