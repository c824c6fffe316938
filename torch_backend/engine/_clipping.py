"""Gradient clipping by the norm over all gradients of a model, each element counted once (R30)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from crossframe.grad_norm import EPSILON, check_max_norm, check_norm_type, norm_dtype
from torch_backend.compat._dtypes import dtype_name, torch_dtype
from torch_backend.engine._unit import Unit
from torch_backend.mesh._tensor_parallel import TensorParallelParam
from torch_backend.modules._owned_params import local_of
from torch_backend.ranks._collectives import Communicator


def clip_grad_norm(units: Sequence[Unit], params: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> Tensor:
    """Clip the global gradient norm to `max_norm`.

    Each rank computes the norm of its shards. p-th powers are summed over the shard group and, under tensor parallelism, over the
    ranks with other parts of the same DTensor. Replicas and unsharded parameters need no collective. For p = inf, maxima are
    all-gathered, because not every backend's maximum propagates NaN. Where nothing is sharded, torch.nn.utils computes the norm,
    with other kernels and in another order of the sum, as PyTorch's FSDP does.

    Args:
        units: all units, in the same order on all ranks.
        params: all parameters of the model in its order; those outside of units are equal on all ranks.
        norm_type: the order p, positive or inf.

    Returns:
        The norm before clipping, of shape (), equal on all ranks. It is computed in float32, or float64 if any gradient is
        float64, and returned in the largest dtype of the gradients.

    Raises:
        UsageError: an invalid order, or a negative `max_norm`.
    """
    order, bound = check_norm_type(norm_type), check_max_norm(max_norm)
    buckets = [bucket for unit in units for bucket in unit.buckets]
    kept = [bucket.precision.kept for bucket in buckets]
    managed = {id(param) for bucket in buckets for param in bucket.registrar.managed()}
    loose = [param.grad for param in params if id(param) not in managed and param.grad is not None]
    names = kept + [dtype_name(grad.dtype) for grad in loose]
    dtype = torch_dtype(norm_dtype(names))
    # By the groups whose ranks have different parts.
    groups: dict[tuple[tuple[int, ...], ...], tuple[list[Communicator], list[Tensor]]] = {}
    scaled: list[Tensor] = []

    def gradients_over(communicators: Sequence[Communicator]) -> list[Tensor]:
        spread = [each for each in communicators if each.size > 1]
        return groups.setdefault(tuple(each.ranks for each in spread), (spread, []))[1]

    device = torch.device("cpu")
    for unit in units:
        shards = unit.mesh.shards
        gradients_over([shards])
        for bucket in unit.buckets:
            device, whole_grads = bucket.device, bucket.registrar.whole_grads()
            scaled.extend(whole_grads)
            parts = [() if tp_param is None else tp_param.groups for tp_param in bucket.registrar.tp_params]
            if not any(parts):
                gradients_over([shards]).extend(whole_grads)
                continue
            for grad, over in zip(bucket.registrar.grads(), parts, strict=True):
                found = gradients_over([shards, *map(Communicator, over)])
                if grad is not None:
                    found.append(grad)
    scaled.extend(map(local_of, loose))
    gradients_over([])
    for grad in loose:
        over = TensorParallelParam(grad._spec).groups if isinstance(grad, DTensor) else ()
        gradients_over([*map(Communicator, over)]).append(local_of(grad))
    every = [param.grad for param in params if param.grad is not None]
    if set(groups) == {()} and all(grad.dtype == dtype for grad in every):
        norm = get_total_norm(map(local_of, every), order).to(device)
    else:
        norm = _norm_over(list(groups.values()), order, dtype, device)
    coefficient = torch.clamp(bound / (norm + EPSILON), max=1.0)
    for grad in scaled:
        grad.mul_(coefficient.to(grad.device, grad.dtype))
    # A script may have replaced gradients by wider ones.
    returned = [*map(torch_dtype, names), *(grad.dtype for grad in scaled)]
    for other in returned[1:]:
        returned[0] = torch.promote_types(returned[0], other)
    return norm.to(returned[0]) if returned else norm


def _norm_over(
    groups: Sequence[tuple[Sequence[Communicator], Sequence[Tensor]]],
    order: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The norm over gradients, each with the groups of ranks that have its other parts."""
    total = torch.zeros((), dtype=dtype, device=device)
    for communicators, grads in groups:
        part = _norm(grads, order, dtype, device)
        if order == math.inf:
            total = torch.maximum(total, part)
        else:
            part = part**order
            for communicator in communicators:
                communicator.sum_all(part)
            total = total + part
    if order == math.inf:
        for communicator in {each.ranks: each for some, _ in groups for each in some}.values():
            total = communicator.gather_all(total).amax(0)
    return total if order == math.inf else total ** (1.0 / order)


def _norm(grads: Sequence[Tensor], order: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The norm over one rank's gradients."""
    norms = [torch.linalg.vector_norm(grad.detach(), order, dtype=dtype) for grad in grads if grad.numel()]
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.linalg.vector_norm(torch.stack(norms), order, dtype=dtype).to(device)
