"""PieceRegistrar: FSDP2 with a flat or ragged layout. Sharded parameters are PieceTensors."""

from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torch_backend.memory._store import ShardStore
from torch_backend.modules._owned_params import OwnedParam
from torch_backend.param_registration._registered_params import (
    ShardedParams,
    call_grad_hooks,
    copy_into,
    point_at,
    register,
)
from torch_backend.pieces._piece_location import PieceLocation
from torch_backend.pieces._piece_tensor import check_like, piece_param, piece_tensor
from torch_backend.ranks._collectives import Communicator


class _Sum(NamedTuple):
    """The buffer of [Note: one addition], and the gradients' views of it by index."""

    buffer: Tensor
    views: dict[int, Tensor]


class PieceRegistrar(ShardedParams):
    """Registers PieceTensors while sharded and the leaves while unsharded.

    [Note: one addition] All gradients of a bucket are views of the buffer of its first reduction, unless someone replaced one. So
    another gradient is accumulated with a single addition; the sum of padding between them is never read. The gradients reference
    the buffer, so it is freed with them.

    Attributes:
        locations: the location of each parameter, in the layout's order.
    """

    def __init__(
        self, owned: Sequence[OwnedParam], store: ShardStore, leaves: list[nn.Parameter], mesh: DeviceMesh, rank: int
    ) -> None:
        """
        Args:
            mesh: the mesh of the ranks: (shard,) or (replicate, shard).
            rank: this rank's index in the shard group.
        """
        assert rank == store.rank
        shards = Communicator(mesh.get_group(mesh.ndim - 1))
        self.locations = [PieceLocation(store, i, mesh, shards) for i in range(len(owned))]
        params = [
            piece_param(piece, location, requires_grad=entry.spec.requires_grad)
            for piece, location, entry in zip(store.pieces, self.locations, owned, strict=True)
        ]
        super().__init__(owned, store, leaves, params)
        self.show_sharded()

    def adopt(self) -> bool:
        """Adopt data that was assigned or moved, and parameters that were replaced."""
        writes = False
        self._take_new_objects(self._check_piece)
        for i, (param, piece) in enumerate(zip(self.params, self._store.pieces, strict=True)):
            local = param.local  # type: ignore[attr-defined]
            if local is not piece and (local.data_ptr() != piece.data_ptr() or local.dtype != piece.dtype):
                name = self._store.layout.params[i].name
                copy_into(piece, local, name, self._store.rank, tuple(piece.shape))
                param.data = piece_tensor(piece, self.locations[i])
                writes = True
        return writes

    def adopt_loaded(self) -> None:
        """Copy the data of parameters that load_state_dict(assign=True) registered, and register ours again, since an optimizer
        may have them."""
        self._take_back_places(self._check_piece)
        self.adopt()

    def _check_piece(self, i: int, other: nn.Parameter) -> None:
        check_like(self.params[i], other, "was replaced")  # type: ignore[arg-type]

    def add_grad(self, shard: Tensor, reduced: Sequence[int], unused: Set[int]) -> None:
        """Set each parameter's gradient to a PieceTensor of its part of the reduced shard."""
        params, trained = self.params, [i for i, p in enumerate(self.params) if p.requires_grad and i not in unused]
        whole = self._sum_of(trained)
        if whole is not None and whole.dtype == shard.dtype:
            whole.add_(shard)
        else:
            made, parts = _Sum(shard, {}), self._store.split(shard)
            for i in trained:
                if params[i].grad is None:
                    grad = params[i].grad = piece_tensor(parts[i], self.locations[i])
                    grad.in_sum = made  # type: ignore[attr-defined]
                    made.views[i] = parts[i]
                else:
                    params[i].grad.local.add_(parts[i])  # type: ignore[union-attr]
        for i in trained:
            call_grad_hooks(params[i])

    def _sum_of(self, trained: Sequence[int]) -> Tensor | None:
        """The buffer of which exactly the gradients of `trained` are unchanged views, or None."""
        grads: list[Any] = [self.params[i].grad for i in trained]
        whole = getattr(grads[0], "in_sum", None) if grads else None
        if whole is None or list(whole.views) != list(trained):
            return None
        same = all(
            getattr(grad, "in_sum", None) is whole and grad.local is whole.views[i]
            for i, grad in zip(trained, grads, strict=True)
        )
        return whole.buffer if same else None

    def grads(self) -> list[Tensor | None]:
        """This rank's piece of each gradient."""
        return [None if param.grad is None else param.grad.local for param in self.params]  # type: ignore[union-attr]

    def whole_grads(self) -> list[Tensor]:
        """This rank's pieces of the existing gradients."""
        return [grad for grad in self.grads() if grad is not None]

    def follow(self, leaves: list[nn.Parameter], fn: Callable[[Tensor], Tensor]) -> None:
        """Set each parameter to its piece of the new buffer."""
        self.take_leaves(leaves)
        for i, (param, piece, location) in enumerate(zip(self.params, self._store.pieces, self.locations, strict=True)):
            if param.is_meta != piece.is_meta:  # one object cannot change between meta and real
                self.params[i] = piece_param(piece, location, requires_grad=param.requires_grad)
            else:
                point_at(param, piece_tensor(piece, location), fn)
        register(self._places, self.params)
