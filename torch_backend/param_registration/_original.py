"""OriginalRegistrar: FSDP1 with use_orig_params=True. The original parameters stay registered."""

from collections.abc import Callable, Sequence, Set

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from crossframe.errors import ReplacedError
from torch_backend.memory._store import ShardStore
from torch_backend.mesh._tensor_parallel import tensor_parallel_params
from torch_backend.modules._owned_params import OwnedParam
from torch_backend.param_registration._registered_params import (
    RegisteredParams,
    add_grad_to,
    adopt_data,
    left_by_user,
    point_at,
    register,
    set_grad,
)


class OriginalRegistrar(RegisteredParams):
    """Registers the user's parameter objects permanently. While sharded, each is a 1-D view of its piece, or keeps its shape
    under NO_SHARD.

    A DTensor (tensor parallelism) cannot become a piece, so it is replaced by a plain parameter with the piece of this rank's
    local tensor. Such parameters are DTensors only while unsharded.
    """

    conceals_after_forward = True

    def __init__(
        self, owned: Sequence[OwnedParam], store: ShardStore, leaves: list[nn.Parameter], mesh: DeviceMesh | None
    ) -> None:
        """
        Args:
            mesh: the mesh of the ranks, if known.
        """
        tp_params = tensor_parallel_params([entry.param for entry in owned], mesh)
        params = [
            nn.Parameter(piece, requires_grad=entry.spec.requires_grad)
            if isinstance(entry.param, DTensor)
            else entry.param
            for entry, piece in zip(owned, store.pieces, strict=True)
        ]
        super().__init__(owned, store, leaves, params, tp_params)
        # The summoned parameters: our own objects, or DTensors of them.
        self._shown: list[nn.Parameter] = params
        self._hidden_grads: list[Tensor | None] = []
        self._point_at_pieces()
        if tp_params:
            register(self._places, self.params)

    def _shaped(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Each parameter's part of the shard, in the shape that the user sees."""
        if self._store.layout.world_size > 1:
            return list(parts)
        return [part.view(spec.shape) for part, spec in zip(parts, self._store.layout.params, strict=True)]

    def _cut_pieces(self) -> None:
        self._pieces = self._shaped(self._store.pieces)
        self._addresses = [piece.data_ptr() for piece in self._pieces]

    def _point_at_pieces(self) -> None:
        self._cut_pieces()
        for param, piece in zip(self.params, self._pieces, strict=True):
            param.data = piece

    def summon(self, full: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> None:
        """Set the user's parameters to the full values and store the gradients of pieces. Under tensor parallelism, register
        DTensors of the full values."""
        self._hidden_grads = [param.grad for param in self.params]
        sharded = self._store.layout.world_size > 1
        for i, (param, value) in enumerate(zip(self.params, full, strict=True)):
            if sharded:
                param.grad = None
            param.data = value
            if sharded and grads is not None:
                set_grad(param, grads[i])
        if self.tp_params:
            self._shown = [
                param if tp_param is None else tp_param.param(param.data, requires_grad=param.requires_grad)
                for param, tp_param in zip(self.params, self.tp_params, strict=True)
            ]
            for param, shown, tp_param in zip(self.params, self._shown, self.tp_params, strict=True):
                if tp_param is not None and param.grad is not None:
                    shown.grad = tp_param.dtensor(param.grad)
            register(self._places, self._shown)

    def dismiss(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Set the user's parameters to their pieces with their gradients, and register them again."""
        try:
            return self.left(), self._left_grads()
        finally:
            self._shown = self.params
            register(self._places, self.params)
            if self._store.layout.world_size > 1:
                for param in self.params:
                    param.grad = None
            self._point_at_pieces()
            if self._store.layout.world_size > 1:
                for param, grad in zip(self.params, self._hidden_grads, strict=True):
                    set_grad(param, grad)
            self._hidden_grads = []

    def _left_grads(self) -> list[Tensor | None]:
        for i, tp_param in enumerate(self.tp_params):
            if tp_param is not None:
                grad = self._shown[i].grad
                name = self._store.layout.params[i].name
                set_grad(self.params[i], None if grad is None else tp_param.local(grad, f"{name}.grad"))
        return [param.grad for param in self.params]

    def left(self) -> list[Tensor]:
        """What is registered now."""
        return left_by_user(self._places, self._shown, self.tp_params, self._store.layout)

    def write_grads(self, full: Sequence[Tensor | None]) -> None:
        """Copy full gradients into the existing gradients of pieces; a gradient that the user removed becomes zeros."""
        if self._store.layout.world_size == 1:  # the user saw the gradients themselves
            return
        for param, own in zip(self.params, self._store.slices(full), strict=True):
            if param.grad is not None and own is not None:
                param.grad.copy_(own)
            elif param.grad is not None:
                param.grad.zero_()

    def adopt(self) -> bool:
        """Adopt parameters that were moved, assigned or replaced."""
        self._take_back_places(self._check_plain)
        # Almost always nothing was moved or assigned, and this is asked at each all-gather.
        if [param.data_ptr() for param in self.params] == self._addresses:
            return False
        writes = False
        for i, (param, piece) in enumerate(zip(self.params, self._pieces, strict=True)):
            if param.data_ptr() != piece.data_ptr():  # both are 0 without elements
                adopt_data(param, piece, self._store.layout.params[i].name, self._store.rank)
                writes = True
        return writes

    def _check_plain(self, i: int, other: nn.Parameter) -> None:
        if isinstance(other, DTensor):
            spec = self._store.layout.params[i]
            raise ReplacedError(
                f"parameter {spec.name!r}, rank {self._store.rank}: was replaced by a DTensor of shape {tuple(other.shape)}; "
                f"expected a plain tensor of shape {tuple(self.params[i].shape)}, the piece that this rank holds; assign full "
                "values inside summon_full_params, or load a state dict"
            )

    def adopt_loaded(self) -> None:
        self.adopt()

    def follow(self, leaves: list[nn.Parameter], fn: Callable[[Tensor], Tensor]) -> None:
        """Set the user's parameters to pieces of the new buffer."""
        self.take_leaves(leaves)
        self._cut_pieces()
        for param, piece in zip(self.params, self._pieces, strict=True):
            point_at(param, piece, fn)
        register(self._places, self.params)

    def whole_grads(self) -> list[Tensor]:
        """The gradients of the user's parameters."""
        return [param.grad for param in self.params if param.grad is not None]

    def add_grad(self, shard: Tensor, reduced: Sequence[int], unused: Set[int]) -> None:
        """Set the gradient of each piece to its part of the reduced shard; None without a piece on this rank."""
        for param, part in zip(self.params, self._shaped(self._store.split(shard)), strict=True):
            if part.numel() and param.requires_grad:
                add_grad_to(param, part)

    def grads(self) -> list[Tensor | None]:
        """The gradients of the user's parameters, 1-D."""
        return [None if param.grad is None else param.grad.flatten() for param in self.params]
