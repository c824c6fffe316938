"""Anchor: the autograd node that tells a unit that its backward is complete and hands over all its gradients at once.

[Note: anchors] Before a unit computes, its leaves pass through one autograd node, the anchor, and the module computes with
what comes out: aliases of the leaves' storage. The engine of autograd runs, of the nodes that are ready, the youngest first;
the anchor is older than everything the unit computes, so its turn comes when the unit's backward is through, and no
sooner: also where parameters are frozen, detached or unused, where inputs are integers or are written in place, and
whichever ranks left out whichever parameters. A count of accumulated gradients has none of these properties.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch_backend.engine._unit import Unit


class Use:
    """One use of a unit in a graph of autograd: it lives as long as the graph of the unit's output does, through which its
    backward begins. What checkpointing computes again inside a backward may never be gone through."""


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, unit: "weakref.ref[Unit]", use: Use, indices: tuple[int, ...], *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.unit, ctx.use, ctx.indices = unit, weakref.ref(use), indices
        ctx.set_materialize_grads(False)
        # `.data` gives each alias a version counter of its own: see [Note: version counters] in memory/_gather.py.
        return tuple(leaf.data for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        unit = ctx.unit()
        if unit is not None:
            unit.check_double_backward()
            with torch.no_grad():
                unit.collect(ctx.use(), ctx.indices, grads)
        return (None, None, None, *(None for _ in grads))


def anchored(unit: "Unit", use: Use, leaves: Sequence[Tensor]) -> list[Tensor]:
    """What the module computes with: aliases behind an anchor for the leaves that take a gradient, the others themselves."""
    indices = tuple(i for i, leaf in enumerate(leaves) if leaf.requires_grad)
    if not torch.is_grad_enabled():
        # Not the leaves themselves: autocast would keep copies of them in low precision, and take these for the next step's.
        return [leaf.detach() for leaf in leaves]
    used = list(leaves)
    if indices:
        # The node must not keep the unit alive: a tensor's graph is invisible to the collector of cycles.
        aliases = _Anchor.apply(weakref.ref(unit), use, indices, *(leaves[i] for i in indices))
        for i, alias in zip(indices, aliases, strict=True):  # type: ignore[arg-type]
            used[i] = alias
    return used
