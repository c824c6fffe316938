"""PieceTensor: a parameter of a flat or ragged layout on one rank.

In a flat or ragged layout, a rank has an arbitrary range of row-major elements of a parameter (R04, R09). DTensor placements only
describe sharding along a dim.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as _clipping_types

from crossframe.errors import ParamError, UsageError
from crossframe.layout import Layout, Piece
from torch_backend.compat._dtypes import dtype_name
from torch_backend.pieces._piece_location import PieceLocation
from torch_backend.pieces._piece_moves import as_sharded


class PieceTensor(Tensor):
    """A tensor of a parameter's global shape, of which this rank holds a run of elements.

    What means the same element by element works, on each rank by itself: arithmetic between tensors that are cut alike, with
    numbers and with tensors of one element; `copy_`, `clone`, `to`, `zeros_like` and their like; the optimizers of torch.optim
    that look at one element at a time, in all their implementations. A vector norm is a DTensor that
    `torch.nn.utils.clip_grad_norm_` reduces once. Whatever else would give each rank a result of its own raises UsageError.

    In one call with `foreach=True` (the default on accelerators) torch takes lists of PieceTensors or lists of DTensors, not of
    both: where a model has both, give them parameter groups of their own, and clip with `foreach=False`.

    Attributes:
        local: shape (numel of the piece,); the elements here, an alias of the unit's shard. It may be empty.
        location: where they lie.
    """

    local: Tensor
    location: PieceLocation

    @staticmethod
    def __new__(cls, local: Tensor, location: PieceLocation) -> "PieceTensor":
        """
        Raises:
            ParamError: no 1-D tensor of the piece's number of elements.
        """
        if not isinstance(local, Tensor) or local.shape != (location.numel,):
            came = tuple(local.shape) if isinstance(local, Tensor) else type(local).__name__
            raise ParamError(
                f"parameter {location.name!r}, rank {location.store.rank}: expected the {location.numel} elements that lie here "
                f"as a tensor of shape ({location.numel},), got {came}"
            )
        return piece_tensor(local, location)

    def data_ptr(self) -> int:
        """Refused: all would answer 0, and accelerate would take them for one parameter.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"parameter {self.location.name!r}: a PieceTensor has no memory of its own; that of its elements here is "
            '.local.data_ptr(). accelerate identifies parameters by their memory: shard with layout="per_param" for it'
        )

    @property
    def layout(self) -> Layout:
        """The layout that it is part of."""
        return self.location.layout

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What this rank holds of the parameter: one piece, or none."""
        return tuple(piece for piece in self.location.pieces if piece.rank == self.location.store.rank)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks."""
        return self.location.mesh

    def full_tensor(self) -> Tensor:
        """The whole tensor, on every rank; all ranks of the shard group must call it. An all-gather of this tensor."""
        return self.location.gather(self.local.detach())

    def to_dtensor(self) -> DTensor:
        """The same values as a DTensor sharded on dim 0, of the same mesh; all ranks of the shard group must call it. Each
        element moves once, to the rank that holds it there."""
        (dtensor,) = dtensors_of([self])
        return dtensor

    @property
    def data(self) -> "PieceTensor":  # type: ignore[override]
        """The tensor without its history. Assigned to: of the same location, in any dtype, on any device."""
        return piece_tensor(self.local.detach(), self.location)

    @data.setter
    def data(self, other: Tensor) -> None:
        check_like(self, other, "assigned to .data")
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.local = other.local  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return handlers[func](func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        location, dtype = self.location, dtype_name(self.dtype)
        here = ", ".join(f"{piece.param_start}:{piece.param_stop}" for piece in self.pieces) or "none"
        kind = "Parameter of PieceTensor" if isinstance(self, nn.Parameter) else "PieceTensor"
        return (
            f"{kind}({location.name!r}, shape={tuple(self.shape)}, dtype={dtype}, {location.layout.kind} layout, elements {here} "
            f"on rank {location.store.rank} of {location.layout.world_size})"
        )

    def __deepcopy__(self, memo: dict) -> "PieceTensor":
        local = self.local.detach().clone()
        if isinstance(self, nn.Parameter):
            copied: Any = piece_param(local, self.location, requires_grad=self.requires_grad)
        else:
            copied = piece_tensor(local, self.location).requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"parameter {self.location.name!r}: a PieceTensor cannot be pickled, since it is one rank's part of a layout "
            "that the file would not describe. Save model.state_dict(), which holds DTensors, with "
            "torch.distributed.checkpoint; for other tensors, such as optimizer state, save to_dtensor() or "
            "full_tensor()"
        )

    def _refuse(self, what: str) -> Any:
        raise UsageError(refusal(self, what))

    def numpy(self, *_: Any, **__: Any) -> Any:
        """Refused: there is no whole tensor here."""
        self._refuse("numpy")

    def __array__(self, *_: Any, **__: Any) -> Any:
        self._refuse("numpy")

    def tolist(self) -> Any:
        """Refused: there is no whole tensor here."""
        self._refuse("tolist")

    def item(self) -> Any:
        """Refused: there is no whole tensor here."""
        self._refuse("item")

    def __bool__(self) -> bool:
        return self._refuse("bool")

    def share_memory_(self) -> Any:
        """Refused: the unit owns the memory."""
        self._refuse("share_memory_")


def same_location(a: PieceLocation, b: PieceLocation) -> bool:
    """Whether tensors at both locations are cut alike, so that element by element they are on the same ranks."""
    return a is b or a.key == b.key


def check_like(param: PieceTensor, other: Any, what: str) -> None:
    """Raise ParamError unless `other` is a PieceTensor that is cut as `param` is."""
    if isinstance(other, PieceTensor):
        if same_location(param.location, other.location):
            return
        came = f"{other!r}, which is cut otherwise"
    else:
        came = f"{type(other).__name__} of shape {tuple(other.shape)}" if isinstance(other, Tensor) else repr(other)
    raise ParamError(
        f"parameter {param.location.name!r}, rank {param.location.store.rank}: {what}: expected a PieceTensor of the same "
        f"layout, got {came}; copy_ takes a full tensor of shape {tuple(param.shape)} too"
    )


def refusal(
    tensor: PieceTensor, operation: str, why: str = "needs more of it than the elements that this rank holds"
) -> str:
    """What to say of an operation that would be wrong rank by rank."""
    return (
        f"{operation} on {tensor!r}: it {why}. Use full_tensor(), which gathers it on every rank, or to_dtensor(), or shard the "
        'module with layout="per_param"'
    )


def piece_tensor(local: Tensor, location: PieceLocation) -> PieceTensor:
    """A PieceTensor of elements that are known to fit their location. It aliases them."""
    made = Tensor._make_wrapper_subclass(PieceTensor, location.shape, dtype=local.dtype, device=local.device)
    made.local, made.location = local, location  # type: ignore[attr-defined]
    return made  # type: ignore[return-value]


def piece_param(local: Tensor, location: PieceLocation, *, requires_grad: bool) -> nn.Parameter:
    """The same as a parameter: what nn.Parameter makes of a tensor of a class of its own is that tensor, marked."""
    made: Any = piece_tensor(local, location).requires_grad_(requires_grad)
    made._is_param = True
    return made


def dtensors_of(tensors: Sequence[PieceTensor]) -> list[DTensor]:
    """PieceTensors at different locations of one bucket, of one dtype, as DTensors, by one all-to-all."""
    store, dtype = tensors[0].location.store, tensors[0].local.dtype
    with torch.no_grad():
        line = torch.empty_like(store.buffer, dtype=dtype)
        store.join({tensor.location.index: tensor.local for tensor in tensors}, line)
    return as_sharded([tensor.location for tensor in tensors], line)  # type: ignore[return-value]


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Computes an operation of torch on PieceTensors: a function of it, its arguments and its keyword arguments."""


class Handlers(dict[Any, Handler]):
    """The handler of each operation, looked up once. `torch_backend.pieces._piece_ops` sets how."""

    handler_of: Callable[[Any], Handler]

    def __missing__(self, func: Any) -> Handler:
        self[func] = handler = self.handler_of(func)
        return handler


handlers = Handlers()

# As DTensor does: optimizers and clipping then take their foreach implementations where they would for plain tensors.
_optimizer_types.append(PieceTensor)
_clipping_types.append(PieceTensor)  # type: ignore[arg-type]
