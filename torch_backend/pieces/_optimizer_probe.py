"""Rejects optimizers that are not elementwise, which PieceTensors do not support, by probing them on small tensors.

In a flat or ragged layout, a rank has only some elements of a parameter. An elementwise optimizer (Adam) computes the same on
them. An optimizer that uses a norm of the parameter (LAMB), rows and columns (Adafactor) or the matrix (Muon) would compute
different results on each rank. So before the first step of an optimizer with PieceTensors, a copy steps on small plain tensors,
and again with one element changed: its gradient to a large number or NaN, or its value. If any other element differs in any bit,
the optimizer is rejected.
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

import torch_backend.memory._optimizer_steps  # noqa: F401 - its hook rejects ZeroRedundancyOptimizer, before those here run
from crossframe.errors import UsageError
from torch_backend.pieces._piece_tensor import PieceTensor

# Large enough for block-wise quantized state, which bitsandbytes and torchao use from 4096 elements on.
SHAPES = ((64, 96), (48,))
# The index of the changed element of each shape, neither the first nor the last, and the factors of its gradients and its value.
CHANGED = (17 * 96 + 5, 11)
CHANGES = ((-1000.0, 1.0), (math.nan, 1.0), (1.0, 1000.0))
STEPS = 2
SEED = 20

# The number of probed groups of each optimizer, and the classes with options that passed.
_looked_at: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()
_passed: set[tuple[Any, ...]] = set()


def check_local(optimizer: Optimizer) -> None:
    """Raise UsageError unless the optimizer updates PieceTensors elementwise.

    Each group is probed once, before its first step, without changing the optimizer or random generators. An optimizer that is
    not elementwise only above a size that the probe does not reach, or only after several steps, is not detected.

    Raises:
        UsageError: the optimizer is not elementwise, cannot be probed (its step needs a closure, or its constructor more than the
            options of a group), or updates PieceTensors and DTensors of one group together.
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
            f"{type(optimizer).__name__}: one parameter group holds {piece.location.name!r}, a PieceTensor, and DTensors, which "
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
    name = like.location.name
    try:
        with torch.random.fork_rng(devices=[like.device] if like.device.type == "cuda" else []):
            plain = _stepped(cls, options, shapes, like)
            others = [_stepped(cls, options, shapes, like, *change) for change in CHANGES]
    except Exception as error:
        raise UsageError(
            f"{cls.__name__} holds parameter {name!r}, a PieceTensor, and could not be tested on small tensors for "
            f'being elementwise ({type(error).__name__}: {error}); use layout="per_param", or an optimizer whose '
            "constructor takes the options of its groups and whose step takes no closure"
        ) from error
    for changed in others:
        for i, a, b in zip(shapes, plain, changed, strict=True):
            same = (_bytes(a) == _bytes(b)).all(1)
            same[CHANGED[i]] = True
            if not same.all():
                raise UsageError(
                    f"{cls.__name__} holds parameter {name!r}, a PieceTensor, and is not elementwise: changing one "
                    "element changes the update of others, so each rank would compute a wrong update from its own "
                    'piece; use layout="per_param", whose DTensors it may support, or an elementwise optimizer'
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
    """Small parameters after some steps of a new optimizer, with one element of each and its gradients multiplied before."""
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
    # Without step hooks, which are for the user's optimizers.
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
    """Copy tensor options (a learning rate), so that they are not shared."""
    return value.clone() if isinstance(value, Tensor) else value


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    check_local(optimizer)


register_optimizer_step_pre_hook(_before_step)
