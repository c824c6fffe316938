"""Rejects optimizers that look beyond single elements, which PieceTensors do not allow, by trying them on small tensors.

On a flat or ragged layout a rank has some elements of a parameter. An optimizer under which each element goes its own way (Adam)
does there what it does on the whole. One that looks at a norm of the parameter (LAMB), at rows and columns (Adafactor) or at the
matrix (Muon) would compute something else on each rank. So before the first step of an optimizer that holds PieceTensors, one
like it steps on small plain tensors, and again with one element changed: its gradients, to large numbers or to NaN, or its value.
If any other element then differs in any bit, the optimizer is refused.
"""

import inspect
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from crossframe.errors import UsageError
from torch_backend.pieces._piece_tensor import PieceTensor

# Large enough for what quantizes its state in blocks to do so, which bitsandbytes and torchao begin at 4096 elements.
SHAPES = ((64, 96), (48,))
# Of each shape the element that is changed: neither the first nor the last. By what its gradients and its value are multiplied.
CHANGED = (17 * 96 + 5, 11)
CHANGES = ((-1000.0, 1.0), (math.nan, 1.0), (1.0, 1000.0))
STEPS = 2
SEED = 20

# How many groups of an optimizer have been looked at, and classes with options that have passed.
_looked_at: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()
_passed: set[tuple[Any, ...]] = set()


def check_local(optimizer: Optimizer) -> None:
    """Raise UsageError unless each element that the optimizer updates is its own affair, as far as it holds PieceTensors.

    A group is looked at once, before its first step. Neither the optimizer nor any random generator is touched. An optimizer that
    looks at several elements only above some size that the probe does not have, or only after several steps, is not found.

    Raises:
        UsageError: it looks beyond single elements, cannot be tried (its step needs a closure, its constructor more than the
            options of a group), or has PieceTensors and DTensors in one group that are updated together.
    """
    groups = optimizer.param_groups
    seen = _looked_at.get(optimizer, 0)
    if seen == len(groups):
        return
    for group in groups[seen:]:
        pieces = [param for param in group["params"] if isinstance(param, PieceTensor)]
        if pieces:
            _check_unmixed(optimizer, group, pieces[0])
            _check_group(optimizer, group, pieces)
    _looked_at[optimizer] = len(groups)


def _check_unmixed(optimizer: Optimizer, group: dict[str, Any], piece: PieceTensor) -> None:
    dtensor = any(isinstance(param, DTensor) for param in group["params"])
    together = (
        group.get("foreach") or group.get("fused") or (group.get("foreach") is None and piece.device.type != "cpu")
    )
    if dtensor and together:
        raise UsageError(
            f"{type(optimizer).__name__}: one parameter group holds {piece.place.name!r}, a PieceTensor, and DTensors, which "
            "torch cannot update in one list; give them groups of their own, or pass foreach=False"
        )


def _check_group(optimizer: Optimizer, group: dict[str, Any], pieces: Sequence[PieceTensor]) -> None:
    options = {key: value for key, value in group.items() if key != "params"}
    cls, like = type(optimizer), pieces[0]
    shapes = [i for i, shape in enumerate(SHAPES) if any(min(p.dim(), 2) == len(shape) for p in pieces)]
    known = (
        cls,
        tuple(shapes),
        like.dtype,
        like.device.type,
        tuple(sorted((key, repr(value)) for key, value in options.items())),
    )
    if known in _passed:
        return
    name = like.place.name
    try:
        with torch.random.fork_rng(devices=[like.device] if like.device.type == "cuda" else []):
            plain = _stepped(cls, options, shapes, like)
            others = [_stepped(cls, options, shapes, like, *change) for change in CHANGES]
    except Exception as error:
        raise UsageError(
            f"{cls.__name__} holds parameter {name!r}, a PieceTensor, and could not be tried on small tensors, to tell whether "
            f'it treats each element by itself ({type(error).__name__}: {error}); use layout="per_param", or an optimizer whose '
            "constructor takes the options of its groups and whose step takes no closure"
        ) from error
    for changed in others:
        for i, a, b in zip(shapes, plain, changed, strict=True):
            same = (_bytes(a) == _bytes(b)).all(1)
            same[CHANGED[i]] = True
            if not same.all():
                raise UsageError(
                    f"{cls.__name__} holds parameter {name!r}, a PieceTensor, and looks beyond single elements: a change of "
                    "one element changes others. Each rank would do so with its own part of the parameter, and be wrong; use "
                    'layout="per_param", whose DTensors it may understand, or an optimizer that treats elements one by one'
                )
    _passed.add(known)


def _stepped(
    cls: type[Optimizer],
    options: dict[str, Any],
    shapes: Sequence[int],
    like: Tensor,
    grad_factor: float = 1.0,
    value_factor: float = 1.0,
) -> list[Tensor]:
    """Small parameters after some steps of a new optimizer. One element of each, and its gradients, are multiplied before."""
    torch.default_generator.manual_seed(SEED)
    if like.device.type == "cuda":
        torch.cuda.default_generators[like.device.index].manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)

    def drawn(i: int) -> Tensor:
        return torch.randn(SHAPES[i], generator=generator).to(like.device, like.dtype)

    def changed(i: int, tensor: Tensor, factor: float) -> Tensor:
        tensor.view(-1)[CHANGED[i]] *= factor
        return tensor

    params = [nn.Parameter(changed(i, drawn(i), value_factor)) for i in shapes]
    accepted = inspect.signature(cls).parameters
    optimizer = cls(params, **{key: _copied(value) for key, value in options.items() if key in accepted})
    optimizer.param_groups[0].update({key: _copied(value) for key, value in options.items()})
    # Without the hooks around it, which are for the user's optimizers.
    step = getattr(cls.step, "__wrapped__", cls.step)
    for _ in range(STEPS):
        for i, param in zip(shapes, params, strict=True):
            param.grad = changed(i, drawn(i), grad_factor)
        step(optimizer)
    return [param.detach() for param in params]


def _bytes(tensor: Tensor) -> Tensor:
    """Shape (numel, itemsize)."""
    return tensor.reshape(-1, 1).view(torch.uint8)


def _copied(value: Any) -> Any:
    """Options that are tensors (a learning rate) are not shared."""
    return value.clone() if isinstance(value, Tensor) else value


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    check_local(optimizer)


register_optimizer_step_pre_hook(_before_step)
