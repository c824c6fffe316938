"""FSDP1 with original parameters."""

from collections.abc import Sequence

from torch import Tensor, nn

from torch_backend.exposure.registration import RegisteredParams, add_grad_to, adopt_data, left_by_user, register
from torch_backend.slots import OwnedParam
from torch_backend.store import ShardStore


class OriginalExposure(RegisteredParams):
    """The user's own parameter objects, kept for good: sharded, each is a 1-D view of the piece held here."""

    conceals_after_forward = True

    def __init__(self, owned: Sequence[OwnedParam], store: ShardStore, leaves: list[nn.Parameter]):
        super().__init__(owned, store, leaves, [entry.param for entry in owned])
        self._hidden_grads: list[Tensor | None] = []
        self._point_at_pieces()

    def _point_at_pieces(self) -> None:
        for param, piece in zip(self.params, self._store.pieces, strict=True):
            param.data = piece

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
        self._take_back_places(lambda i, other: None)
        for i, param in enumerate(self.params):
            adopt_data(param, store.pieces[i], store.layout.params[i].name, store.rank)

    def add_grad(self, shard: Tensor) -> None:
        """Each piece gets its part of the reduced shard; a parameter without a piece here gets none."""
        for param, part in zip(self.params, self._store.split(shard), strict=True):
            if part.numel() and param.requires_grad:
                add_grad_to(param, part)

    def grads(self) -> list[Tensor | None]:
        """The gradients of the user's parameters."""
        return [param.grad for param in self.params]
