"""Registrar: the interface between the engine and what a module registers."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

from torch import Tensor, nn

from torch_backend.memory._reshard_group import GroupShard
from torch_backend.mesh._tensor_parallel import Wholes


class Registrar(Protocol):
    """What an engine asks of a face, for one bucket."""

    # Whether the module shows the shards again at the end of a forward after which full memory is kept.
    conceals_after_forward: bool

    # Under tensor parallelism: for each parameter the DTensor that it is this rank's part of, None for a plain one. Else empty.
    wholes: Wholes

    @property
    def registered(self) -> Sequence[tuple[int, nn.Module, str]]:
        """Every place where a parameter is registered under its original name: its index, the module and the attribute."""
        ...

    def show_full(self) -> None:
        """Full parameters are registered."""
        ...

    def show_sharded(self) -> None:
        """What is sharded is registered, and attributes yield it."""
        ...

    def used_params(self, aliases: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the module computes with, made of aliases of the leaves: in a forward, while grad mode is the user's."""
        ...

    def use(self, used: Sequence[Tensor]) -> None:
        """Attributes yield `used`, in the layout's order."""
        ...

    def unuse(self) -> None:
        """Attributes yield what is registered."""
        ...

    def summon(self, full: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> None:
        """Register full parameters under the original names, for the user, and with `grads` these as their gradients."""
        ...

    def dismiss(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """End `summon`. Returns what the user left as full parameters and as their gradients, in the layout's order."""
        ...

    def left(self) -> list[Tensor]:
        """What the user has made of the full parameters so far, in the layout's order."""
        ...

    def write_grads(self, full: Sequence[Tensor | None]) -> None:
        """Take over this rank's slices of full gradients that `dismiss` returned (R22)."""
        ...

    def show_state(self, params: Sequence[nn.Parameter]) -> None:
        """Register these under the original names, for a state dict to be made of or loaded into."""
        ...

    def hide_state(self) -> None:
        """End `show_state`: what is sharded is registered."""
        ...

    def deregister(self) -> None:
        """Let the module have no parameters of this bucket for a while."""
        ...

    def take_leaves(self, leaves: list[nn.Parameter]) -> None:
        """Other unsharded parameters are in use, while the sharded ones are shown."""
        ...

    def follow(self, leaves: list[nn.Parameter], fn: Callable[[Tensor], Tensor]) -> None:
        """End `deregister`. `fn` (of `module.to`) has made another buffer of the store's, and with it other unsharded parameters
        are in use; gradients follow."""
        ...

    def managed(self) -> list[nn.Parameter]:
        """What stands for this bucket's parameters among the module's."""
        ...

    def whole_grads(self) -> list[Tensor]:
        """The reduced gradients as the optimizer reads them; where padding is among them, it is made 0 (R05)."""
        ...

    def adopt(self) -> None:
        """Take over data that the user put in the place of a sharded parameter's (R25)."""
        ...

    def adopt_loaded(self) -> None:
        """Take over what `load_state_dict(assign=True)` has just registered in the place of sharded parameters (R25)."""
        ...

    def put_back(self) -> Mapping[int, nn.Parameter]:
        """Register ours again where a user registered other objects, and return these by index, as they are."""
        ...

    def put_in(self, others: Mapping[int, nn.Parameter]) -> None:
        """End `put_back`."""
        ...

    def show_part(self, part: GroupShard) -> None:
        """A smaller group's shard is held between forward and backward, and may be registered."""
        ...

    def add_grad(self, shard: Tensor, reduced: Sequence[int], unused: Set[int]) -> None:
        """Accumulate a reduced gradient into what the optimizer reads.

        Args:
            shard: laid out as the core's `reduced_layout`.
            reduced: the indices of the parameters in it; all of them where the layout is one line.
            unused: those of them that have no gradient all the same.
        """
        ...

    def grads(self) -> list[Tensor | None]:
        """The reduced gradient of each parameter's piece, 1-D, in the layout's order; None where there is none."""
        ...

    def sync_requires_grad(self) -> None:
        """Let the leaves require a gradient where the user's parameters do."""
        ...
