"""Follows scripts that change their parameters by themselves, without an optimizer of torch.

[Note: updates by hand] Nothing tells when such a script updates. After each backward the recorder keeps the gradients and copies
of the parameters. If a parameter has changed where the next forward or backward begins, or where the script ends, a step has
ended in between. That a script has no optimizer shows at its end. If it has moved parameters against their gradients, and no
optimizer has stepped, the command records it again with `--by-hand`. Other changes between two gradients are no training: initial
values, checkpoints that are loaded, images that are exchanged.
"""

import gc
import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from torch_backend.recorder._models_together import made_modules, models_together, outermost

_LEAST_COSINE = 0.3
"""Between a move and the gradient. Those of n unrelated numbers are about n^-0.5 from 0."""


class UpdatesByHand:
    """Tells whether parameters have changed since gradients were taken of them."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, int, Tensor]] = []
        self._grads: list[Tensor | None] = []

    def keep(self, params: Iterable[Tensor], grads: Sequence[Tensor | None] = ()) -> None:
        """Gradients of these parameters have been taken: `grads`, if it matters where they lead."""
        both = [each for each in zip_longest(params, grads) if _can_be_compared(each[0])]
        self._kept = [(param, param._version, _local(param).clone()) for param, _ in both]
        self._grads = [None if grad is None else _local(grad).clone() for _, grad in both]

    def forget(self) -> None:
        """Forget the parameters."""
        self._kept, self._grads = [], []

    def have_happened(self) -> bool:
        """Whether a parameter was changed. Versions do not count changes of `param.data`, nor values an update by zero."""
        return any(
            param._version != version or not torch.allclose(_local(param), before, rtol=0, atol=0, equal_nan=True)
            for param, version, before in self._kept
        )

    def follow_gradients(self) -> bool:
        """Whether the parameters were moved against their gradients, as far as by chance alone few numbers are."""
        along = moves = grads = 0.0
        for (param, _, before), grad in zip(self._kept, self._grads, strict=True):
            if grad is not None and grad.layout is torch.strided and grad.shape == before.shape:
                move = (_local(param) - before).to(torch.float64)
                along -= float((move * grad).sum())
                moves, grads = moves + float(move.square().sum()), grads + float(grad.to(torch.float64).square().sum())
        return along > _LEAST_COSINE * math.sqrt(moves * grads)


def _local(param: Tensor) -> Tensor:
    """The part of a parameter on this rank."""
    own = param.detach()
    return getattr(own, "_local_tensor", own)


def _can_be_compared(param: Tensor) -> bool:
    local = _local(param)
    return type(local) in (Tensor, nn.Parameter) and local.layout is torch.strided and local.is_floating_point()


def leaves_of(tensors: Iterable[Any]) -> list[Tensor]:
    """The leaves whose gradients backward from these tensors computes.

    >>> w = torch.ones(2, requires_grad=True)
    >>> [leaf is w for leaf in leaves_of([(w * 2).sum()])]
    [True]
    """
    # The edge of a graph can stand for a tensor.
    begins = [each.grad_fn if isinstance(each, Tensor) else getattr(each, "node", None) for each in tensors]
    nodes, seen, found = [node for node in begins if node is not None], set(), []
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            found.append(leaf)
        nodes += [each for each, _ in node.next_functions if each is not None]
    return found


def model_by_hand(part: nn.Module | None, leaves: Sequence[Tensor], callers: frozenset[int]) -> nn.Module | None:
    """What a script trains that has no optimizer: all modules that it has made and that have parameters with gradients, or where
    it calls none, the leaves of its first backward.

    Args:
        part: a module that is being called; None: backward begins.
        leaves: of the backward.
        callers: the ids of modules of which a method is being called.
    """
    if part is None:
        return models_together(None, {id(leaf): leaf for leaf in leaves}, callers) if leaves else None
    if not any(param.requires_grad for param in part.parameters()):
        return None
    gc.collect()  # models that the script has discarded
    found = outermost([each for each in made_modules() if any(param.requires_grad for param in each.parameters())])
    if len(found) == 1:
        return found[0]
    wanted = {id(param): param for each in found for param in each.parameters() if param.requires_grad}
    return models_together(part, wanted, callers)
