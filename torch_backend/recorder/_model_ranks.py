"""Model parallelism: the ranks that compute one replica of the model together are recorded as one rank.

[Note: model ranks] Under tensor and sequence parallelism several ranks compute with one batch, each with a part of the parameters
and of the activations. They gather what a step records: parameters, gradients and optimizer state by the placements of their
DTensors, activations by placements or by what the ranks hold. The first of them writes it, as the one data-parallel rank that
they are. So a recording does not depend on how a replica is divided, and is compared with one of one device like any other.

Gathering is collective: all model ranks record the same tensors in the same order.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

_ROWS, _COLUMNS = 0, 1


class ModelRanks:
    """The ranks that compute one replica together.

    Attributes:
        group: a process group of their own.
    """

    def __init__(self, replica: int, shard: int) -> None:
        """Find those with this rank's place on the data-parallel mesh. All ranks call it."""
        places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(places, (replica, shard))
        by_place: dict[tuple[int, int], list[int]] = {}
        for rank, place in enumerate(places):
            by_place.setdefault(place, []).append(rank)
        group, _ = dist.new_subgroups_by_enumeration(list(by_place.values()))
        assert isinstance(group, dist.ProcessGroup)
        self.group = group
        # The dim on which ranks hold parts of an activation, by its shape on one rank.
        self._dims: dict[tuple[int, ...], int] = {}

    @property
    def is_first(self) -> bool:
        """Whether this rank writes."""
        return self.group.rank() == 0

    def whole(self, value: Tensor, module: nn.Module | None) -> Tensor | None:
        """An activation of the replica; None if it is not known how its parts belong together.

        Args:
            module: the module that it is the input or output of.
        """
        if isinstance(value, DTensor):
            return value.full_tensor()
        value = value.contiguous()
        shapes: list[Any] = [None] * self.group.size()
        dist.all_gather_object(shapes, (tuple(value.shape), _hash(value)), group=self.group)
        if all(each == shapes[0] for each in shapes):
            return value
        dim = self._dim(value, module)
        if dim is None or any(not _fits(shape, shapes[0][0], dim) for shape, _ in shapes):
            return None
        self._dims[tuple(value.shape)] = dim
        parts = [value.new_empty(shape) for shape, _ in shapes]
        dist.all_gather(parts, value, group=self.group)
        return torch.cat(parts, dim)

    def _dim(self, value: Tensor, module: nn.Module | None) -> int | None:
        """The dim of which each rank has a part: the features behind a weight that is sharded by rows, the positions behind one
        that is sharded by columns and whose sums are scattered; else that of an earlier activation of this shape."""
        weight = None if module is None else module._parameters.get("weight")
        if isinstance(weight, DTensor) and weight.ndim == 2:
            sharded = {each.dim for each in weight.placements if isinstance(each, Shard)}
            rows = _COLUMNS if isinstance(module, nn.Embedding) else _ROWS
            if rows in sharded:
                return value.ndim - 1
            if sharded and value.ndim > 2:
                return 1
        return self._dims.get(tuple(value.shape))


def full(tensor: Tensor) -> Tensor:
    """All elements, gathered over all ranks that have some."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def set_full(param: Tensor, values: Tensor) -> None:
    """Set a parameter, in place, to values that all ranks have in full."""
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        same = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
        param._local_tensor.copy_(same.redistribute(placements=param.placements)._local_tensor)
    else:
        param.copy_(values)


def is_divided(params: Mapping[str, Tensor]) -> bool:
    """Whether any parameter is a DTensor."""
    return any(isinstance(param, DTensor) for param in params.values())


def _fits(shape: tuple[int, ...], other: tuple[int, ...], dim: int) -> bool:
    return len(shape) == len(other) and all(
        a == b for d, (a, b) in enumerate(zip(shape, other, strict=True)) if d != dim
    )


def _hash(value: Tensor) -> tuple[int, int]:
    """Equal for equal bits; for others different but by chance."""
    bits = value.reshape(-1).view(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(torch.int64)
    places = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
    return int(bits.sum()), int((bits * places).sum())
