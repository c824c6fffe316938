"""FSDP2."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from crossframe.errors import ParamError
from torch_backend.exposure.registration import (
    RegisteredParams,
    call_grad_hooks,
    copy_into,
    full_params,
    left_by_user,
    point_at,
    register,
)
from torch_backend.slots import OwnedParam
from torch_backend.store import ShardStore


class DTensorExposure(RegisteredParams):
    """DTensor parameters while sharded, the leaves themselves while unsharded, both truly registered."""

    conceals_after_forward = False

    def __init__(
        self, owned: Sequence[OwnedParam], store: ShardStore, leaves: list[nn.Parameter], mesh: DeviceMesh, rank: int
    ):
        self._local_shapes = [store.layout.shard_shape(i, rank) for i in range(len(owned))]  # type: ignore[attr-defined]
        self._specs = [
            DTensorSpec(mesh, (Shard(0),), TensorMeta(leaf.shape, leaf.stride(), leaf.dtype)) for leaf in leaves
        ]
        params = [
            nn.Parameter(self._dtensor(i, piece), requires_grad=owned[i].spec.requires_grad)
            for i, piece in enumerate(store.pieces)
        ]
        super().__init__(owned, store, leaves, params)
        self.show_sharded()

    def _dtensor(self, i: int, piece: Tensor) -> DTensor:
        """Parameter i (or its gradient) from the elements that this rank holds of it; they are aliased, not copied."""
        # Without __init__, which does nothing but passes through a wrapper that costs as much as the rest.
        return DTensor.__new__(DTensor, piece.view(self._local_shapes[i]), self._specs[i], requires_grad=False)

    def summon(self, full: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> None:
        """Register full parameters."""
        assert grads is None, "no interface asks for them"
        self._shown = full_params(full, self._leaves)
        register(self._places, self._shown)

    def dismiss(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Register the DTensor parameters again."""
        current = self.left()
        register(self._places, self.params)
        self._shown = []
        return current, []

    def adopt(self) -> None:
        """Local tensors may have been moved or assigned, or parameters replaced by other objects."""
        self._take_back_places(self._check_dtensor)
        for i, param in enumerate(self.params):
            local = param._local_tensor  # type: ignore[attr-defined]
            piece = self._store.pieces[i]
            if local.data_ptr() != piece.data_ptr() and piece.numel():
                name = self._store.layout.params[i].name
                copy_into(piece, local, name, self._store.rank, self._local_shapes[i])
                param.data = self._dtensor(i, piece)

    def _check_dtensor(self, i: int, other: nn.Parameter) -> None:
        if not isinstance(other, DTensor):
            raise ParamError(
                f"parameter {self._store.layout.params[i].name!r} was replaced by a {type(other).__name__}; expected a DTensor "
                "sharded on dim 0 of the same mesh (use distribute_tensor), or copy into the parameter"
            )

    def add_grad(self, shard: Tensor) -> None:
        """Each parameter's gradient is a DTensor over its part of the reduced shard."""
        for i, (param, part) in enumerate(zip(self.params, self._store.split(shard), strict=True)):
            if param.requires_grad:
                if param.grad is None:
                    param.grad = self._dtensor(i, part)
                else:
                    param.grad._local_tensor.add_(part.view(self._local_shapes[i]))  # type: ignore[attr-defined]
                call_grad_hooks(param)

    def grads(self) -> list[Tensor | None]:
        """The local tensors of the DTensor gradients."""
        return [None if p.grad is None else p.grad._local_tensor.flatten() for p in self.params]  # type: ignore[attr-defined]

    def left(self) -> list[Tensor]:
        """What is registered now."""
        return left_by_user(self._places, self._shown)

    def write_grads(self, full: Sequence[Tensor | None]) -> None:
        """None were shown."""

    def follow(self, leaves: list[nn.Parameter], fn: Callable[[Tensor], Tensor]) -> None:
        """Each parameter's local tensor becomes its piece of the new buffer."""
        self._leaves = leaves
        for i, (param, piece) in enumerate(zip(self.params, self._store.pieces, strict=True)):
            point_at(param, self._dtensor(i, piece), fn)
        register(self._places, self.params)

    def whole_grads(self) -> list[Tensor]:
        """The local tensors of the DTensor gradients."""
        return [param.grad._local_tensor for param in self.params if param.grad is not None]  # type: ignore[attr-defined]
