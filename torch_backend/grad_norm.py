"""Clipping by the norm over all gradients of a model, each element once (R30)."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from crossframe.grad_norm import EPSILON, check_max_norm, check_norm_type, norm_dtype
from torch_backend.collectives import Communicator
from torch_backend.dtypes import dtype_name, torch_dtype
from torch_backend.unit import Unit


def clip_grad_norm(units: Sequence[Unit], others: Iterable[nn.Parameter], max_norm: float, norm_type: float) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`.

    Every rank takes the norm of what it holds; p-th powers are summed over each shard group, which replicas and what is not
    sharded need no collective for. For p = inf the largest are gathered instead: not every backend's maximum keeps a NaN.

    Args:
        units: all of them, in an order that all ranks share.
        others: parameters that are in no unit, and equal on all ranks.
        norm_type: the order p, above 0; inf too.

    Returns:
        The norm before, of shape (), the same on all ranks. It is computed in float32, or in float64 where there are
        gradients of it, and returned in the largest dtype of the gradients.

    Raises:
        UsageError: another order, or a negative `max_norm`.
    """
    order, bound = check_norm_type(norm_type), check_max_norm(max_norm)
    kept = [bucket.precision.kept for unit in units for bucket in unit.buckets]
    loose = [param.grad for param in others if param.grad is not None]
    names = kept + [dtype_name(grad.dtype) for grad in loose]
    dtype = torch_dtype(norm_dtype(names))
    # By the ranks that they are sharded over; what is not sharded is everywhere, and needs no collective.
    groups: dict[tuple[int, ...], tuple[Communicator | None, list[Tensor]]] = {}
    device = torch.device("cpu")
    for unit in units:
        shards = unit.mesh.shards
        entry = groups.setdefault(shards.ranks if shards.size > 1 else (), (shards if shards.size > 1 else None, []))
        for bucket in unit.buckets:
            entry[1].extend(bucket.exposure.whole_grads())
            device = bucket.device
    groups.setdefault((), (None, []))[1].extend(loose)
    total = torch.zeros((), dtype=dtype, device=device)
    for communicator, grads in groups.values():
        part = _norm(grads, order, dtype, device)
        if order == math.inf:
            total = torch.maximum(total, part)
        else:
            part = part**order
            if communicator is not None:
                communicator.sum_all(part)
            total = total + part
    if order == math.inf:
        for communicator, _ in groups.values():
            if communicator is not None:
                total = communicator.gather_all(total).amax(0)
    norm = total if order == math.inf else total ** (1.0 / order)
    coefficient = torch.clamp(bound / (norm + EPSILON), max=1.0)
    for _, grads in groups.values():
        for grad in grads:
            grad.mul_(coefficient.to(grad.device, grad.dtype))
    returned = [torch_dtype(name) for name in names]
    for other in returned[1:]:
        returned[0] = torch.promote_types(returned[0], other)
    return norm.to(returned[0]) if returned else norm


def _norm(grads: Sequence[Tensor], order: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The norm over one rank's gradients."""
    norms = [torch.linalg.vector_norm(grad.detach(), order, dtype=dtype) for grad in grads if grad.numel()]
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.linalg.vector_norm(torch.stack(norms), order, dtype=dtype).to(device)
