"""The torch operations that PieceTensor supports, and how each is computed on pieces.

torch tags operations as "pointwise" if an element of the result only depends on the elements at the same index. Such an operation
on tensors with equal pieces is the same operation on the pieces.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from crossframe.errors import UsageError
from torch_backend.pieces._piece_tensor import Handler, PieceTensor, handlers, piece_tensor, refusal, same_location

# Pointwise too, though torch does not tag them so; with a trailing "_" or without. What draws random numbers is not among them:
# two ranks would draw the same ones for different elements.
_POINTWISE = {"fill", "zero", "masked_fill", "zeros_like", "ones_like", "full_like", "empty_like", "_to_copy", "copy"}
_ALIASES = {"detach", "alias", "lift_fresh"}
_NEW = {"new_empty", "new_zeros", "new_ones", "new_full"}
_FUSED = {"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"}
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
_FOREACH = "_foreach_"
_FORMATS = (None, torch.preserve_format, torch.contiguous_format)


def handler_of(func: Any) -> Handler:
    """The handler of a torch operation, by its name and tags."""
    name = _name(func)
    if name in _ALIASES:
        return _alias
    if name in _NEW:
        return _new
    if name == "copy_":
        return _copy
    if name == "index_put_":
        return _index_put
    if name == "linalg_vector_norm":
        return _norm
    if name == "_foreach_norm":
        return _foreach_norm
    if name == _UNSCALE:
        return _unscale
    if name in _FUSED:
        return _foreach
    if name.startswith(_FOREACH):
        return _foreach if _base_is_pointwise(name, func._overloadname) else _refuse
    # What gives a number (`equal`) does not mean it of each element, whatever it is tagged.
    to_tensors = all(str(returned.type) == "Tensor" for returned in func._schema.returns)
    tagged = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags and to_tensors
    return _pointwise if tagged or name.removesuffix("_") in _POINTWISE else _refuse


def _name(func: Any) -> str:
    return func._schema.name.removeprefix("aten::")


def _base_is_pointwise(name: str, overload: str) -> bool:
    """Whether an operation on lists is a pointwise operation on each item. With a single list it is the default overload: `max`
    of two tensors is pointwise, of one tensor it is not."""
    base = name.removeprefix(_FOREACH).removesuffix("_")
    if base in _POINTWISE:
        return True
    packet = getattr(torch.ops.aten, base, None)
    if packet is None:
        return False
    bases = ["default"] if overload == "default" else packet.overloads()
    return any(torch.Tag.pointwise in getattr(packet, base).tags for base in bases)


def _first(values: Any) -> PieceTensor:
    """The first PieceTensor among the arguments and lists of arguments, which torch guarantees to exist."""
    for value in values:
        if isinstance(value, PieceTensor):
            return value
        if isinstance(value, list | tuple) and any(isinstance(one, PieceTensor) for one in value):
            return _first(value)
    raise AssertionError("an operation without a PieceTensor")


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **why: str) -> NoReturn:
    raise UsageError(refusal(_first((*args, *kwargs.values())), _name(func), **why))


def _local(func: Any, like: PieceTensor, value: Any) -> Any:
    """This rank's part of an argument.

    Raises:
        UsageError: a tensor with neither the pieces of `like` nor a single element.
    """
    if isinstance(value, PieceTensor):
        if same_location(like.location, value.location):
            return value.local
        raise UsageError(refusal(like, _name(func), why=f"is cut otherwise than {value!r}"))
    if isinstance(value, DTensor) and value.numel() == 1:
        value = value.full_tensor()  # the norm that clipping divides by
    if isinstance(value, Tensor) and (value.numel() != 1 or value.dim() > 1):
        why = (
            f"met a {type(value).__name__} of shape {tuple(value.shape)}, of which other elements belong to other ranks"
        )
        raise UsageError(refusal(like, _name(func), why=why))
    return value


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply the operation to this rank's elements. Returns the written argument of an in-location operation, as torch does."""
    like = _first((*args, *kwargs.values()))
    if kwargs.get("memory_format") not in _FORMATS:
        _refuse(func, args, kwargs, why="has its elements in one row-major line")
    written = None
    if func._schema.is_mutable:
        written = kwargs["out"] if "out" in kwargs else args[0]
        if not isinstance(written, PieceTensor):
            _refuse(func, args, kwargs, why="would be written to a tensor that is not cut")
    result = func(
        *[_local(func, like, value) for value in args],
        **{key: _local(func, like, value) for key, value in kwargs.items()},
    )
    if written is not None:
        return written
    if isinstance(result, tuple | list):
        return type(result)(piece_tensor(one, like.location) for one in result)
    return piece_tensor(result, like.location)


def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return piece_tensor(func(args[0].local), args[0].location)


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Create a PieceTensor for the parameter's shape, and a plain tensor for other shapes."""
    like, shape, *rest = args
    if torch.Size(shape) != like.shape:
        return func(like.local, shape, *rest, **kwargs)
    return piece_tensor(func(like.local, (like.location.numel,), *rest, **kwargs), like.location)


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy from a tensor with equal pieces, a number, or this rank's part of a full tensor."""
    target, source = args[:2]
    is_full = isinstance(source, Tensor) and not isinstance(source, PieceTensor | DTensor)
    if isinstance(target, PieceTensor) and is_full and source.shape == target.shape:
        for piece in target.pieces:
            func(target.local, source.reshape(-1)[piece.param_start : piece.param_stop], *args[2:], **kwargs)
        return target
    return _pointwise(func, args, kwargs)


def _index_put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Only `tensor[mask] = number`, for a mask with equal pieces."""
    target, indices, values = args[:3]
    one_mask = len(indices) == 1 and isinstance(indices[0], PieceTensor) and indices[0].dtype == torch.bool
    if not (isinstance(target, PieceTensor) and one_mask):
        _refuse(func, args, kwargs)
    mask, values = _local(func, target, indices[0]), _local(func, target, values)
    func(target.local, [mask], values, *args[3:], **kwargs)
    return target


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A norm of all elements: a partial DTensor of each rank's norm, which is reduced when used (R30)."""
    defaults: tuple[Any, ...] = (2, None, False)
    tensor, order, dims, keeps = (*args, *defaults[len(args) - 1 :])
    if keeps or (dims and len(dims) != tensor.dim()):
        _refuse(func, args, kwargs)
    _check_order(func, args, kwargs, order)
    return torch.linalg.vector_norm(tensor.location.line(tensor.local), order, **kwargs)


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors: Sequence[PieceTensor] = args[0]
    order = args[1] if len(args) > 1 else 2
    _check_order(func, args, kwargs, order)
    if not all(isinstance(tensor, PieceTensor) for tensor in tensors):
        _refuse(func, args, kwargs, why="stands in one list with other tensors")
    return func([tensor.location.line(tensor.local) for tensor in tensors], order, *args[2:], **kwargs)


def _check_order(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], order: float) -> None:
    if order < 0:
        _refuse(func, args, kwargs, why=f"may be empty on a rank, where a norm of order {order} is not defined")


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operations on lists: the first list contains PieceTensors, and the others correspond to it item by item."""
    likes = args[0]
    if not all(isinstance(tensor, PieceTensor) for tensor in likes):
        _refuse(
            func, args, kwargs, why="stands in one list with other tensors; give them parameter groups of their own"
        )

    def local(value: Any) -> Any:
        if isinstance(value, list | tuple) and any(isinstance(one, Tensor) for one in value):
            return [_local(func, like, one) for like, one in zip(likes, value, strict=True)]
        return _local(func, likes[0], value) if isinstance(value, Tensor) else value

    result = func(*[local(value) for value in args], **{key: local(value) for key, value in kwargs.items()})
    if result is None:
        return None
    return [piece_tensor(one, like.location) for one, like in zip(result, likes, strict=True)]


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients for GradScaler, and detect elements that are not finite on any rank."""
    grads: Sequence[PieceTensor] = args[0]
    found_inf = args[1]
    _foreach(func, args, kwargs)
    groups = {grad.location.shards.ranks: grad.location.shards for grad in grads}
    for ranks in sorted(groups):  # ranks may hold gradients in different orders
        groups[ranks].sum_all(found_inf)
    found_inf.clamp_(max=1)


handlers.handler_of = handler_of
