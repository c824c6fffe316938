"""Follows scripts that change their parameters by themselves, without an optimizer of torch.

[Note: updates by hand] Nothing tells when such a script updates. After each backward the recorder keeps the gradients and copies
of the parameters. If a parameter has changed where the next forward or backward begins, or where the script ends, a step has
ended in between. That a script has no optimizer shows at its end. If it has moved parameters against their gradients, and no
optimizer has stepped, the command records it again with `--by-hand`. Other changes between two gradients are no training: initial
values, checkpoints that are loaded, images that are exchanged.
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from crossframe.errors import UsageError
from torch_backend.recorder._model_view import ModelView
from torch_backend.recorder._models_together import made_modules, models_together, outermost
from torch_backend.recorder._sharding_libraries import REPLICAS

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


class Optimizers(Protocol):
    """What is known of the optimizers of a script."""

    def has_stepped(self) -> bool: ...
    def has_optimizer(self) -> bool: ...
    def record_by_hand(self) -> NoReturn: ...


class SearchByHand:
    """Counts updates of a script that has no optimizer so far, until it is clear that it updates by itself.

    Args:
        enough: updates that make it clear before the script ends.
        optimizers: of the script; records it again.
    """

    def __init__(self, enough: int, optimizers: Optimizers) -> None:
        self._enough, self._optimizers = enough, optimizers
        self._updates, self._count = UpdatesByHand(), 0

    def forget(self) -> None:
        """Forget the gradients that were taken before a recording begins."""
        self._updates.forget()

    def take_gradients(
        self,
        tensors: Iterable[Any],
        inputs: Sequence[Any],
        run: Callable[[], Any],
        *,
        accumulate_grad: bool = True,
        **_: Any,
    ) -> Any:
        """Let autograd compute gradients by `run`, of `inputs` or of all leaves, and keep them."""
        self._look()
        leaves = leaves_of(tensors) if not inputs else [each for each in inputs if isinstance(each, Tensor)]
        found = run()
        if not self._optimizers.has_optimizer():
            self._updates.keep(leaves, [leaf.grad for leaf in leaves] if accumulate_grad else found)
        return found

    def end(self) -> None:
        """The script has ended."""
        self._look()
        if self._count > 0 and not self._optimizers.has_stepped():
            self._optimizers.record_by_hand()

    def _look(self) -> None:
        if self._updates.have_happened() and not self._optimizers.has_optimizer():
            # A change that leads elsewhere is no training.
            self._count += 1 if self._updates.follow_gradients() else -1
            if self._count >= self._enough:
                self._optimizers.record_by_hand()
        self._updates.forget()


class StepsByHand:
    """Ends the steps of a recorded script that changes its parameters by itself.

    Args:
        ends: called once the parameters have changed after a gradient.
    """

    def __init__(self, ends: Callable[[], None]) -> None:
        self._ends, self._updates = ends, UpdatesByHand()
        # Of other tensors that get a gradient, such as inputs.
        self._others = UpdatesByHand()

    def gradients_taken(self, losses: Iterable[Any], views: Sequence[ModelView]) -> None:
        """Gradients of these losses have been computed.

        Raises:
            UsageError: ranks average gradients by themselves.
        """
        if views[0].engine.name == REPLICAS:
            raise UsageError(
                "the script changes parameters by itself on several ranks, and how it averages gradients is not seen; wrap the "
                "model in DistributedDataParallel, use an optimizer of torch, or a Recorder in the script"
            )
        params = [held.param for view in views for held in view.held]
        own = set(map(id, params))
        self._others.keep(leaf for leaf in leaves_of(losses) if id(leaf) not in own)
        self._updates.keep(params)

    def look(self) -> None:
        """End the step if the parameters have changed.

        Raises:
            UsageError: tensors that are no parameters of the model have changed.
        """
        if self._others.have_happened():
            raise UsageError(
                "the script trains by itself tensors that are in no module which it called first; put what is trained together "
                "into one module, use an optimizer of torch, or a Recorder in the script"
            )
        if self._updates.have_happened():
            self._updates.forget()
            self._ends()


@contextmanager
def assigned_grads(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Iterator[None]:
    """A context in which parameters have these gradients."""
    before = [param.grad for param in params]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    try:
        yield
    finally:
        for param, grad in zip(params, before, strict=True):
            param.grad = grad


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
