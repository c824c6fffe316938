"""Model parallelism: the ranks that compute one replica of the model together are recorded as one rank.

[Note: model ranks] Under tensor and sequence parallelism several ranks compute with one batch, each with a part of the parameters
and of the activations. They gather what a step records: parameters, gradients and optimizer state by the placements of their
DTensors, activations by placements or by what the ranks hold. The first of them writes it, as the one data-parallel rank that
they are. So a recording does not depend on how a replica is divided, and is compared with one of one device like any other.

Gathering is collective: all model ranks record the same tensors in the same order.
"""

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_backend.ranks._collectives import Communicator, default_process_group

_ROWS, _COLUMNS = 0, 1


class ModelRanks:
    """The ranks that compute one replica together.

    Attributes:
        group: a process group of their own.
        axis: the mesh axis along which they lie; of several, their names joined by ", ".
    """

    def __init__(self, replica: int, shard: int, params: Mapping[str, Tensor], axis: str = "") -> None:
        """Find those with this rank's place on the data-parallel mesh and these parameters. All ranks call it.

        Args:
            axis: the name of the axis along which they lie; "": those of meshes of the parameters.
        """
        names = hashlib.sha256("\n".join(sorted(params)).encode()).hexdigest()
        place = (replica, shard, names)
        by_place: dict[tuple[int, int, str], list[int]] = {}
        for rank, each in enumerate(Communicator(default_process_group()).gather_objects(place)):
            by_place.setdefault(each, []).append(rank)
        group, _ = dist.new_subgroups_by_enumeration(list(by_place.values()))
        assert isinstance(group, dist.ProcessGroup)
        self.group, self._ranks = group, Communicator(group)
        meshes = {param.device_mesh for param in params.values() if isinstance(param, DTensor)}
        self.axis = axis or ", ".join(sorted({name for mesh in meshes for name in self._axes_of(mesh)}))
        # The dim on which ranks hold parts of an activation, by its shape on the first one.
        self._dims: dict[tuple[int, ...], int] = {}

    @property
    def is_first(self) -> bool:
        """Whether this rank writes."""
        return self.group.rank() == 0

    def has_all_of(self, mesh: DeviceMesh) -> bool:
        """Whether all ranks of a mesh are among them. If not, data-parallel ranks exchange samples between experts, so no rank
        has the gradient of its own batch."""
        return {*mesh.mesh.flatten().tolist()} <= {*self._ranks.ranks}

    def _axes_of(self, mesh: DeviceMesh) -> list[str]:
        groups = [(axis, dist.get_process_group_ranks(mesh.get_group(axis))) for axis in range(mesh.ndim)]
        own = [axis for axis, ranks in groups if len(ranks) > 1 and {*ranks} <= {*self._ranks.ranks}]
        return [mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else f"dim {axis}" for axis in own]

    def disagreements(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, list[int]]]:
        """Of tensors that are not the same on all model ranks: the largest norm(other - first) / norm(first), and the ranks."""
        if not tensors:
            return {}
        every, found = self._ranks.gather_objects([_hash(each) for each in tensors.values()]), {}
        for i, (name, tensor) in enumerate(tensors.items()):
            others = [j for j, hashes in enumerate(every) if hashes[i] != every[0][i]]
            if others:
                values = self._ranks.gather_all(tensor.detach().double())
                norm = float(values[0].norm()) or 1.0
                differences = [float((values[j] - values[0]).norm()) / norm for j in others]
                found[name] = (max(differences), [self._ranks.ranks[j] for j in others])
        return found

    def whole(self, value: Tensor, module: nn.Module | None) -> Tensor | None:
        """An activation of the replica; None if it is not known how its parts belong together.

        Args:
            module: the module that it is the input or output of.
        """
        if isinstance(value, DTensor):
            return value.full_tensor()
        value = value.contiguous()
        every = self._ranks.gather_objects((tuple(value.shape), _hash(value)))
        if all(each == every[0] for each in every):
            return value
        shapes = [shape for shape, _ in every]
        dim = self._dim(shapes[0], module)
        if dim is None or not all(_fits(shape, shapes[0], dim) for shape in shapes):
            return None
        self._dims[shapes[0]] = dim
        largest = list(value.shape)
        largest[dim] = max(shape[dim] for shape in shapes)
        sent = value.new_zeros(largest)
        sent.narrow(dim, 0, value.shape[dim]).copy_(value)
        parts = zip(self._ranks.gather_all(sent), shapes, strict=True)
        return torch.cat([part.narrow(dim, 0, shape[dim]) for part, shape in parts], dim)

    def _dim(self, shape: tuple[int, ...], module: nn.Module | None) -> int | None:
        """The dim of which each rank has a part: the features behind a weight that is sharded by rows, the positions behind one
        that is sharded by columns and whose sums are scattered; else that of an earlier activation of this shape."""
        weight = None if module is None else module._parameters.get("weight")
        if isinstance(weight, DTensor) and weight.ndim == 2:
            sharded = {each.dim for each in weight.placements if isinstance(each, Shard)}
            rows = _COLUMNS if isinstance(module, nn.Embedding) else _ROWS
            if rows in sharded:
                return len(shape) - 1
            if sharded and len(shape) > 2:
                return 1
        return self._dims.get(shape)


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


def _fits(shape: tuple[int, ...], other: tuple[int, ...], dim: int) -> bool:
    return len(shape) == len(other) and all(
        a == b for d, (a, b) in enumerate(zip(shape, other, strict=True)) if d != dim
    )


def _hash(value: Tensor) -> tuple[int, int]:
    """Equal for equal bits; for others different but by chance."""
    bits = value.detach().reshape(-1).view(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(torch.int64)
    places = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
    return int(bits.sum()), int((bits * places).sum())
