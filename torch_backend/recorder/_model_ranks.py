"""Model parallelism: the ranks that compute one replica of the model together are recorded as one rank.

[Note: model ranks] Under tensor and sequence parallelism several ranks compute with one batch, each with a part of the parameters
and of the activations. They gather what a step records: parameters, gradients and optimizer state by the placements of their
DTensors, activations by placements or by what the ranks hold. The first of them writes it, as the one data-parallel rank that
they are. So a recording does not depend on how a replica is divided, and is compared with one of one device like any other.

Gathering is collective: all model ranks record the same tensors in the same order.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from crossframe.recording.event_format import INPUT, OUTPUT
from torch_backend.ranks._collectives import Communicator, default_process_group

_ROWS, _COLUMNS = 0, 1
_POSITIONS = 1
Others = tuple[float, list[int]]
"""The largest norm(other - first) / norm(first), and the ranks that have others."""


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
        # The dim on which ranks hold parts of an activation, by its shape on the first one; None: they also hold whole ones.
        self._dims: dict[tuple[int, ...], int | None] = {}
        # (samples, positions) of a batch of tokens that all ranks were given; None: another kind of batch, or not the same.
        self._batch: tuple[int, int] | None = None

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

    def disagreements(self, tensors: Mapping[str, Tensor]) -> dict[str, Others]:
        """Those of tensors that are not the same on all model ranks."""
        if not tensors:
            return {}
        every, found = self._ranks.gather_objects([_hash(each) for each in tensors.values()]), {}
        for i, (name, tensor) in enumerate(tensors.items()):
            others = [j for j, hashes in enumerate(every) if hashes[i] != every[0][i]]
            if others:
                found[name] = self._others(tensor, others)
        return found

    def _others(self, tensor: Tensor, others: Sequence[int]) -> Others:
        """Compare a tensor of one shape; `others` are the places in the group of ranks whose values are not the first one's."""
        values = self._ranks.gather_all(tensor.detach().double())
        norm = float(values[0].norm()) or 1.0
        differences = [float((values[j] - values[0]).norm()) / norm for j in others]
        return max(differences), [self._ranks.ranks[j] for j in others]

    def same(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether tensors are the same on all model ranks, but for rounding: summands that are added up later differ by more than
        half of the digits, rounding by less."""
        return all(
            difference < torch.finfo(tensors[name].dtype).eps ** 0.5
            for name, (difference, _) in self.disagreements(tensors).items()
        )

    def fed(self, tensors: Sequence[Tensor]) -> Others | None:
        """Compare the batch that a forward is given, and remember its shape; None if all ranks have the same one."""
        every = self._ranks.gather_objects([(tuple(each.shape), _hash(each)) for each in tensors])
        others = [j for j, own in enumerate(every) if own != every[0]]
        tokens = tensors[0].shape if tensors and tensors[0].ndim == 2 and not others else None
        self._batch = None if tokens is None else (tokens[0], tokens[1])
        return (math.inf, [self._ranks.ranks[j] for j in others]) if others else None

    def whole(self, value: Tensor, module: nn.Module | None, use: str) -> tuple[Tensor | None, Others | None]:
        """(an activation of the replica, those who differ if all ranks must have the same).

        The activation is None if it is not known how its parts belong together.

        Args:
            module: the module that it is the input or output of (`use`).
        """
        if isinstance(value, DTensor):
            return value.full_tensor(), None
        value = value.contiguous()
        every = self._ranks.gather_objects((tuple(value.shape), _hash(value)))
        shapes = [shape for shape, _ in every]
        if all(each == every[0] for each in every):
            self._dims[shapes[0]] = None
            return value, None
        if self._is_whole(shapes, module, use):
            if _is_partial_sum(module, use):
                return None, None
            return value, self._others(value, [j for j, each in enumerate(every) if each != every[0]])
        dim = self._dim(shapes[0], module, use)
        if dim is None or not all(_fits(shape, shapes[0], dim) for shape in shapes):
            return None, None
        self._dims.setdefault(shapes[0], dim)
        largest = list(value.shape)
        largest[dim] = max(shape[dim] for shape in shapes)
        sent = value.new_zeros(largest)
        sent.narrow(dim, 0, value.shape[dim]).copy_(value)
        parts = zip(self._ranks.gather_all(sent), shapes, strict=True)
        return torch.cat([part.narrow(dim, 0, shape[dim]) for part, shape in parts], dim), None

    def _is_whole(self, shapes: Sequence[tuple[int, ...]], module: nn.Module | None, use: str) -> bool:
        """Whether each rank has all samples, positions and features."""
        return (
            len({*shapes}) == 1
            and len(shapes[0]) == 3
            and shapes[0][:2] == self._batch
            and shapes[0][-1] == _num_features(module, use)
        )

    def _dim(self, shape: tuple[int, ...], module: nn.Module | None, use: str) -> int | None:
        """The dim of which each rank has a part: the features if a rank has fewer than the module takes or gives, the positions
        if it has fewer than the batch or gives the scattered sums of a weight that is sharded by columns; else that of all
        activations of this shape."""
        features, last = _num_features(module, use), len(shape) - 1
        if features is not None and isinstance(module, nn.Linear | nn.Embedding) and shape and shape[-1] < features:
            return last
        if len(shape) > 2 and _is_partial_sum(module, use):
            return _POSITIONS
        samples, positions = self._batch or (0, 0)
        if len(shape) == 3 and shape[0] == samples and shape[_POSITIONS] < positions:
            return _POSITIONS
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


def _num_features(module: nn.Module | None, use: str) -> int | None:
    """The last dim of the whole input or output of a module with a known weight; None: not known."""
    weight = None if module is None else module._parameters.get("weight")
    if weight is None or (isinstance(module, nn.Embedding) and use == INPUT):
        return None
    if weight.ndim == 2 and isinstance(module, nn.Linear | nn.Embedding):
        takes = use == INPUT or isinstance(module, nn.Embedding)
        return weight.shape[_COLUMNS if takes else _ROWS]
    return weight.shape[0] if weight.ndim == 1 else None


def _is_partial_sum(module: nn.Module | None, use: str) -> bool:
    """Whether each rank computes a summand of a module's output, which may be summed and scattered inside or outside of it."""
    weight = None if module is None else module._parameters.get("weight")
    if use != OUTPUT or not isinstance(weight, DTensor) or weight.ndim != 2:
        return False
    summed = _ROWS if isinstance(module, nn.Embedding) else _COLUMNS
    return any(isinstance(each, Shard) and each.dim == summed for each in weight.placements)


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
