"""Model parallelism: the ranks that compute one replica of the model together are recorded as one rank.

[Note: model ranks] Under tensor and sequence parallelism several ranks compute with one batch, each with a part of the parameters
and of the activations. They gather what a step records: parameters, gradients and optimizer state by the placements of their
DTensors, activations by placements or by what the ranks hold. The first of them writes it, as the one data-parallel rank that
they are. So a recording does not depend on how a replica is divided, and is compared with one of one device like any other.

Gathering is collective: all model ranks record the same tensors in the same order.

A rank that computes its replica alone also gathers parameters, of which it records its part, if units have different meshes or
parameters are sharded on other dims than the first: a recording has one mesh, and runs of elements.
"""

import hashlib
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from crossframe.recording.event_format import INPUT, OUTPUT
from torch_backend.ranks._collectives import Communicator, default_process_group
from torch_backend.recorder._partition import Partition, Pieces, in_forward, joined, set_whole, whole_of

_ROWS, _COLUMNS = 0, 1
_POSITIONS = 1
Others = tuple[float, list[int], str]
"""The largest norm(other - first) / norm(first), the ranks that have others, and the mesh axis along which they lie."""
Axes = Mapping[str, Sequence[int]]
"""The ranks of this rank's group along each axis of a mesh, by name."""


class ModelRanks:
    """The ranks that compute one replica together.

    Attributes:
        group: a process group of their own. ranks: their numbers.
        axes: those of the mesh axes along which they lie that this rank is in.
    """

    def __init__(
        self,
        replica: int,
        shard: int,
        params: Mapping[str, Tensor],
        axes: Axes | None,
        partitions: Mapping[str, Partition | Pieces],
        unknown: Container[str],
    ) -> None:
        """Find those with this rank's place on the data-parallel mesh and these parameters. All ranks call it.

        Args:
            axes: along which they lie. None: the axes of the parameters' meshes that have no other ranks.
            partitions: of parameters that are divided without DTensors.
            unknown: names of parameters whose division is not known.
        """
        names = hashlib.sha256("\n".join(sorted(params)).encode()).hexdigest()
        place = (replica, shard, names)
        by_place: dict[tuple[int, int, str], list[int]] = {}
        for rank, each in enumerate(Communicator(default_process_group()).gather_objects(place)):
            by_place.setdefault(each, []).append(rank)
        group, _ = dist.new_subgroups_by_enumeration(list(by_place.values()))
        assert isinstance(group, dist.ProcessGroup)
        self.group, self._ranks = group, Communicator(group)
        self.ranks = self._ranks.ranks
        meshes = {param.device_mesh for param in params.values() if isinstance(param, DTensor)}
        specs = [each.spec for each in partitions.values() if isinstance(each, Pieces)]
        meshes |= {spec.mesh for spec in specs if spec is not None}
        own = axes_of(meshes) if axes is None else axes
        self.axes = {name: ranks for name, ranks in own.items() if {*ranks} <= {*self.ranks}}
        # By axis, and by rank, the first rank of its group on that axis.
        self._firsts: dict[str, dict[int, int]] = {}
        for rank, of_rank in zip(self.ranks, self._ranks.gather_objects(self.axes), strict=True):
            for name, ranks in of_rank.items():
                self._firsts.setdefault(name, {})[rank] = ranks[0]
        # By name, since forward reads other tensors than the optimizer has.
        self._partitions = {name: each for name, part in partitions.items() if (each := in_forward(part))}
        self._unknown = unknown
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
        return {*mesh.mesh.flatten().tolist()} <= {*self.ranks}

    def disagreements(self, tensors: Mapping[str, Tensor]) -> dict[str, Others]:
        """Those of tensors that are not the same on all model ranks."""
        if not tensors or len(self.ranks) == 1:
            return {}
        every, found = self._ranks.gather_objects([hash_of(each) for each in tensors.values()]), {}
        for i, (name, tensor) in enumerate(tensors.items()):
            hashes = [each[i] for each in every]
            if len({*hashes}) > 1:
                found[name] = self._others(tensor, hashes)
        return found

    def _others(self, tensor: Tensor, hashes: Sequence[Any]) -> Others:
        """Compare a tensor of one shape, by its hash on each rank."""
        values = self._ranks.gather_all(tensor.detach().double())
        norm = float(values[0].norm()) or 1.0
        return max(float((each - values[0]).norm()) / norm for each in values), *self._along(hashes)

    def _along(self, hashes: Sequence[Any]) -> tuple[list[int], str]:
        """(the ranks whose values are not those of the first one, the axes along which ranks differ)."""
        of_rank = dict(zip(self.ranks, hashes, strict=True))
        differing = sorted(
            axis
            for axis, firsts in self._firsts.items()
            if any(of_rank[rank] != of_rank[first] for rank, first in firsts.items())
        )
        others = [rank for rank in self.ranks if of_rank[rank] != hashes[0]]
        return others, ", ".join(differing or sorted(self._firsts))

    def same(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether tensors are the same on all model ranks, but for rounding: summands that are added up later differ by more than
        half of the digits, rounding by less."""
        return all(
            difference < torch.finfo(tensors[name].dtype).eps ** 0.5
            for name, (difference, _, _) in self.disagreements(tensors).items()
        )

    def fed(self, tensors: Sequence[Tensor]) -> Others | None:
        """Compare the batch that a forward is given, and remember its shape; None if all ranks have the same one."""
        every = self._ranks.gather_objects([(tuple(each.shape), hash_of(each)) for each in tensors])
        differ = any(own != every[0] for own in every)
        tokens = tensors[0].shape if tensors and tensors[0].ndim == 2 and not differ else None
        self._batch = None if tokens is None else (tokens[0], tokens[1])
        return (math.inf, *self._along(every)) if differ else None

    def whole(
        self, value: Tensor, module: nn.Module | None, name: str, use: str
    ) -> tuple[Tensor | None, Others | None]:
        """(an activation of the replica, those who differ if all ranks must have the same).

        The activation is None if it is not known how its parts belong together.

        Args:
            module, name: the module that it is the input or output of (`use`), and its name.
        """
        if isinstance(value, DTensor):
            return self._gathered(value), None
        value = value.contiguous()
        every = self._ranks.gather_objects((tuple(value.shape), hash_of(value)))
        shapes = [shape for shape, _ in every]
        if all(each == every[0] for each in every):
            self._dims[shapes[0]] = None
            return value, None
        weight = self._weight(module, name)
        if self._is_whole(shapes, weight, use):
            if _is_partial_sum(weight, use):
                return None, None
            return value, self._others(value, every)
        dim = self._dim(shapes[0], weight, use)
        if dim is None or not all(_fits(shape, shapes[0], dim) for shape in shapes):
            return None, None
        self._dims.setdefault(shapes[0], dim)
        largest = list(value.shape)
        largest[dim] = max(shape[dim] for shape in shapes)
        sent = value.new_zeros(largest)
        sent.narrow(dim, 0, value.shape[dim]).copy_(value)
        gathered = zip(self._ranks.gather_all(sent), shapes, strict=True)
        parts = [part.narrow(dim, 0, shape[dim]) for part, shape in gathered]
        runs = weight.stride if weight is not None and use == OUTPUT and dim == value.ndim - 1 else 1
        return joined(parts, dim, runs), None

    def _gathered(self, value: DTensor) -> Tensor | None:
        """A DTensor, gathered over the dims of its mesh along which model ranks lie. None if others divide more than samples."""
        mesh = value.device_mesh
        placements = [
            Replicate() if {*dist.get_process_group_ranks(mesh.get_group(dim))} <= {*self.ranks} else placement
            for dim, placement in enumerate(value.placements)
        ]
        if not all(each.is_replicate() or each.is_shard(0) for each in placements):
            return None
        return value.redistribute(placements=placements).to_local()

    def _weight(self, module: nn.Module | None, name: str) -> "_Weight | None":
        # A flat parameter has no parameters in modules, which use views of it.
        weight = None if module is None else module._parameters.get("weight", module.__dict__.get("weight"))
        full_name = f"{name}.weight" if name else "weight"
        if weight is None or module is None or full_name in self._unknown:
            return None
        partition = self._partitions.get(full_name)
        if partition is not None:
            kind = nn.Embedding if "Embedding" in type(module).__name__ else nn.Linear
            return _Weight(partition.full_shape(weight.shape), kind, {partition.dim}, partition.stride)
        kind = next((each for each in (nn.Linear, nn.Embedding) if isinstance(module, each)), None)
        placements = weight.placements if isinstance(weight, DTensor) else ()
        return _Weight(tuple(weight.shape), kind, {each.dim for each in placements if isinstance(each, Shard)})

    def _is_whole(self, shapes: Sequence[tuple[int, ...]], weight: "_Weight | None", use: str) -> bool:
        """Whether each rank has all samples, positions and features."""
        return (
            len({*shapes}) == 1
            and len(shapes[0]) == 3
            and shapes[0][:2] == self._batch
            and shapes[0][-1] == _num_features(weight, use)
        )

    def _dim(self, shape: tuple[int, ...], weight: "_Weight | None", use: str) -> int | None:
        """The dim of which each rank has a part: the features if a rank has fewer than the module takes or gives, the positions
        if it has fewer than the batch or gives the scattered sums of a weight that is sharded by columns; else that of all
        activations of this shape."""
        features, last = _num_features(weight, use), len(shape) - 1
        if features is not None and weight is not None and weight.kind and shape and shape[-1] < features:
            return last
        if len(shape) > 2 and _is_partial_sum(weight, use):
            return _POSITIONS
        samples, positions = self._batch or (0, 0)
        if len(shape) == 3 and shape[0] == samples and shape[_POSITIONS] < positions:
            return _POSITIONS
        return self._dims.get(shape)


def axes_of(
    meshes: Iterable[DeviceMesh], divided: Callable[[DeviceMesh, int], bool] = lambda *_: True
) -> dict[str, list[int]]:
    """This rank's groups along the axes of meshes, if there are several ranks.

    Args:
        divided: whether an axis of a mesh counts.
    """
    found = {}
    for mesh in meshes:
        for axis in range(mesh.ndim):
            ranks = dist.get_process_group_ranks(mesh.get_group(axis))
            if len(ranks) > 1 and divided(mesh, axis):
                found[mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else f"dim {axis}"] = ranks
    return found


def component(groups: Iterable[Sequence[int]], among: Sequence[int]) -> tuple[int, int]:
    """(the number of the set of ranks that groups join this rank with, how many such sets there are). All ranks call it.

    Args:
        groups: this rank's. among: the ranks that are counted.
    """
    every = Communicator(default_process_group()).gather_objects([list(group) for group in groups])
    first = list(range(len(every)))
    for _ in every:  # a chain of groups has at most as many links as there are ranks
        for rank, own in enumerate(every):
            for group in own:
                lowest = min(first[each] for each in (rank, *group))
                for each in (rank, *group):
                    first[each] = lowest
    ordered = sorted({first[rank] for rank in among})
    return ordered.index(first[dist.get_rank()]), len(ordered)


def full(tensor: Tensor, partition: Partition | Pieces | None = None) -> Tensor:
    """All elements, gathered over all ranks that have some.

    Args:
        partition: how ranks divide it without a DTensor.
    """
    return whole_of(tensor) if partition is None else partition.full(tensor)


def set_full(param: Tensor, values: Tensor, partition: Partition | Pieces | None) -> None:
    """Set a parameter, in place, to values that all ranks have in full."""
    if partition is None:
        set_whole(param, values)
    else:
        partition.set(param, values)


@dataclass(frozen=True)
class _Weight:
    """The weight of a module.

    Attributes:
        shape: in full.
        kind: Linear or Embedding; None: another module.
        divided: the dims that ranks divide. stride: in how many runs, one after the other.
    """

    shape: tuple[int, ...]
    kind: type | None
    divided: set[int]
    stride: int = 1


def _num_features(weight: _Weight | None, use: str) -> int | None:
    """The last dim of the whole input or output of a module with a known weight; None: not known."""
    if weight is None or (weight.kind is nn.Embedding and use == INPUT):
        return None
    if len(weight.shape) == 2 and weight.kind:
        takes = use == INPUT or weight.kind is nn.Embedding
        return weight.shape[_COLUMNS if takes else _ROWS]
    return weight.shape[0] if len(weight.shape) == 1 else None


def _is_partial_sum(weight: _Weight | None, use: str) -> bool:
    """Whether each rank computes a summand of a module's output, which may be summed and scattered inside or outside of it."""
    if weight is None or use != OUTPUT or len(weight.shape) != 2:
        return False
    return (_ROWS if weight.kind is nn.Embedding else _COLUMNS) in weight.divided


def _fits(shape: tuple[int, ...], other: tuple[int, ...], dim: int) -> bool:
    return len(shape) == len(other) and all(
        a == b for d, (a, b) in enumerate(zip(shape, other, strict=True)) if d != dim
    )


def hash_of(value: Tensor) -> tuple[int, int]:
    """Equal for equal bits; for others different but by chance."""
    bits = value.detach().reshape(-1).view(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(torch.int64)
    places = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
    return int(bits.sum()), int((bits * places).sum())
