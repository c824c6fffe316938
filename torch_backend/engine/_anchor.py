"""Anchor: the autograd node that tells a unit that its backward is complete and hands over all its gradients at once.

[Note: anchors] Before a unit computes, its leaves pass through one autograd node, the anchor, and the module computes with its
outputs, which alias the leaves' storage. Among ready nodes, autograd runs the youngest first. The anchor is older than all nodes
of the unit's computation, so it runs when the unit's backward is complete and not earlier. This also holds with frozen, detached
or unused parameters, with integer or in-place inputs, and if ranks use different parameters. A count of accumulated gradients has
none of these properties. The leaves themselves are no inputs of the anchor in the graph. If they were, autograd would wait for
the anchor before it delivers the gradients of a leaf that is used elsewhere, such as in a part of the unit that the model calls
again after the unit's forward, and they would come too late for the unit's reduction.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_grad(hook: Callable[_P, _R]) -> Callable[_P, _R]:
    """`torch.no_grad()` for hooks of autograd, which find gradients disabled already unless the user asked for `create_graph`."""
    disabled = torch.no_grad()(hook)

    @functools.wraps(hook)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return disabled(*args, **kwargs) if torch.is_grad_enabled() else hook(*args, **kwargs)

    return run


_NEEDS_GRADIENT = torch.zeros((), device="cpu", requires_grad=True)
"""The input of all anchors in the graph, which gets no gradient."""


class Use:
    """One use of a unit in an autograd graph, alive as long as the graph of the unit's output. A graph that checkpointing
    recomputes may never run backward."""


class Owner(Protocol):
    """What an anchor asks of the unit whose parameters pass through it."""

    def check_double_backward(self) -> None:
        """Raise StateError if a graph of the gradients is asked for, where the API refuses that."""

    def collect(self, use: Use | None, indices: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of one use of the unit.

        Args:
            use: None if the graph of the unit's output is gone.
            indices: the leaves that the gradients are of.
        """


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, unit: "weakref.ref[Owner]", use: Use, indices: tuple[int, ...], leaves: Sequence[Tensor], _: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.unit, ctx.use, ctx.indices = unit, weakref.ref(use), indices
        ctx.set_materialize_grads(False)
        # `.data` gives each alias its own version counter: see [Note: version counters] in memory/_gather.py.
        return tuple([leaf.data for leaf in leaves])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        unit = ctx.unit()
        if unit is not None:
            unit.check_double_backward()
            unit.collect(ctx.use(), ctx.indices, grads)
        return (None,) * 5


# `Function.apply` without its pass over all arguments, which serves functorch.
_apply: Any = super(torch.autograd.Function, _Anchor).apply  # type: ignore[attr-defined]


def anchored(unit: Owner, use: Use, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that the module computes with: aliases from an anchor for leaves that require a gradient, and the other
    leaves."""
    if not torch.is_grad_enabled():
        # Not the leaves themselves, because autocast would cache their low-precision copies beyond the step.
        return [leaf.detach() for leaf in leaves]
    used = list(leaves)
    indices = tuple([i for i, leaf in enumerate(leaves) if leaf.requires_grad])
    if indices:
        # The node must not keep the unit alive, because the garbage collector cannot see cycles through autograd graphs.
        apply = _Anchor.apply if torch._C._are_functorch_transforms_active() else _apply
        aliases = apply(weakref.ref(unit), use, indices, [leaves[i] for i in indices], _NEEDS_GRADIENT)
        for i, alias in zip(indices, aliases, strict=True):  # type: ignore[arg-type]
            used[i] = alias
    return used
