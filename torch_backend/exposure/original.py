"""FSDP1 with original parameters."""

from collections.abc import Sequence

from torch import Tensor, nn

from torch_backend.exposure.registration import (
    add_grad_to,
    adopt_data,
    left_by_user,
    register,
    registrations,
    shadow,
    sync_requires_grad,
    unshadow,
)
from torch_backend.slots import OwnedParam
from torch_backend.store import ShardStore


class OriginalExposure:
    """The user's own parameter objects, kept for good: sharded, each is a 1-D view of the piece held here."""

    conceals_after_forward = True

    def __init__(self, owned: Sequence[OwnedParam], store: ShardStore, leaves: list[nn.Parameter]):
        self._store, self._leaves = store, leaves
        self._places = list(registrations(owned))
        self.params = [entry.param for entry in owned]
        self._hidden_grads: list[Tensor | None] = []
        self._point_at_pieces()

    def _point_at_pieces(self) -> None:
        for param, piece in zip(self.params, self._store.pieces, strict=True):
            param.data = piece

    def show_full(self) -> None:
        """Register the leaves."""
        register(self._places, self._leaves)

    def show_sharded(self) -> None:
        """Register the user's parameters."""
        self.unuse()
        register(self._places, self.params)

    def use(self, aliases: Sequence[Tensor]) -> None:
        """Attributes yield `aliases`."""
        shadow(self._places, aliases)

    def unuse(self) -> None:
        """Attributes yield what is registered."""
        unshadow(self._places)

    def summon(self) -> None:
        """The user's parameters hold the full values; gradients of pieces are put away meanwhile."""
        self._hidden_grads = [param.grad for param in self.params]
        for param, leaf in zip(self.params, self._leaves, strict=True):
            param.grad = None
            param.data = leaf.data

    def dismiss(self) -> list[Tensor]:
        """The user's parameters are pieces again, with their gradients, and are registered, whatever was put there."""
        current = left_by_user(self._places, self.params)
        register(self._places, self.params)
        self._point_at_pieces()
        for param, grad in zip(self.params, self._hidden_grads, strict=True):
            param.grad = grad
        self._hidden_grads = []
        return current

    def adopt(self) -> None:
        """Any of the parameters may have been moved or assigned, or replaced by another object."""
        store = self._store
        for i, owner, attribute in self._places:
            registered = owner._parameters.get(attribute)
            if registered is not None and registered is not self.params[i]:
                # load_state_dict(assign=True) put another object here; the user's own keeps its identity (R25).
                self.params[i].data = registered.data
                owner._parameters[attribute] = self.params[i]
        for i, param in enumerate(self.params):
            adopt_data(param, store.pieces[i], repr(store.layout.params[i].name))

    def add_grad(self, shard: Tensor) -> None:
        """Each piece gets its part of the reduced shard; a parameter without a piece here gets none."""
        for param, part in zip(self.params, self._store.split(shard), strict=True):
            if part.numel() and param.requires_grad:
                add_grad_to(param, part)

    def grads(self) -> list[Tensor | None]:
        """The gradients of the user's parameters."""
        return [param.grad for param in self.params]

    def sync_requires_grad(self) -> None:
        """One by one."""
        for param, leaf in zip(self.params, self._leaves, strict=True):
            sync_requires_grad(param, (leaf,))

    @property
    def version(self) -> int:
        """All of theirs: assigning `.data` leaves each parameter its own counter."""
        return sum(param._version for param in self.params)
