"""Process groups from the DeviceMesh that is passed to `fully_shard` (R10)."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from crossframe.errors import AssertedError, UsageError
from crossframe.layout import post_forward_group
from crossframe.mesh import MeshSpec
from torch_backend.compat._fully_shard_api import DataParallelMeshDims
from torch_backend.ranks._collectives import Alone, Communicator, UnitMesh, default_process_group


@dataclass(frozen=True, eq=False)
class DataMesh:
    """The data parallel ranks of a unit.

    Attributes:
        mesh: one axis (shard); or two (replicate, shard); or, if it only replicates, one.
        shards: whether there is an axis to shard over. It is the last.
        spmd: with `dp_mesh_dims`, the whole mesh, on which parameters are already DTensors.
        dims: the indices of its shard and replicate axes.
        placed: a cache of placements of plain tensors, shared by equal blocks.
    """

    mesh: DeviceMesh
    shards: bool = True
    spmd: DeviceMesh | None = None
    dims: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    placed: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def unit_mesh(self) -> UnitMesh:
        """Communicators of one unit, which it may configure."""
        shards, replicas = self._communicators
        return UnitMesh(shards.again(), replicas.again())

    @functools.cached_property
    def _communicators(self) -> tuple[Communicator, Communicator]:
        group = Communicator(self.mesh.get_group(self.mesh.ndim - 1))
        if not self.shards:
            return Alone(), group
        replicas = Communicator(self.mesh.get_group(0)) if self.mesh.ndim == 2 else Alone()
        return group, replicas

    def group_mesh(self, size: int) -> DeviceMesh:
        """The (replicate, shard) mesh of reshard groups of `size` ranks (R08). All ranks must call it."""
        ranks = self.mesh.mesh.flatten().tolist()
        spec = MeshSpec(shard=self.shard_axis.size(), replicate=len(ranks) // self.shard_axis.size())
        groups = [
            [ranks[r] for r in post_forward_group(spec, first, size)] for first in range(0, spec.world_size, size)
        ]
        return _kept(self.mesh, size, lambda: DeviceMesh(self.mesh.device_type, groups))

    @property
    def shard_axis(self) -> DeviceMesh:
        return self.mesh if self.mesh.ndim == 1 else self.mesh[self.mesh.mesh_dim_names[-1]]  # type: ignore[index]

    @property
    def device(self) -> torch.device:
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.mesh.device_type, torch.get_device_module(self.mesh.device_type).current_device())


def find_mesh(mesh: Any, dims: DataParallelMeshDims | None) -> DataMesh:
    """The arguments `mesh` and `dp_mesh_dims` of `fully_shard`; all ranks if there is no mesh.

    Raises:
        UsageError: a mesh with more than two axes, or two unnamed axes; unknown axes.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise UsageError(f"fully_shard: expected mesh to be a DeviceMesh, got {type(mesh).__name__}")
    if mesh is None:
        default_process_group()
        mesh = _mesh_of_all()
    if dims is not None:
        return _named(mesh, dims)
    if mesh.ndim > 2:
        raise UsageError(
            f"fully_shard: expected a mesh of one axis (shard) or of two (replicate, shard), got one of shape "
            f"{tuple(mesh.shape)}; slice the data parallel axes, mesh['dp'], or name them in dp_mesh_dims"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertedError(
            "fully_shard: a mesh of two axes (replicate, shard) needs names; pass mesh_dim_names to init_device_mesh"
        )
    return _data_mesh(mesh)


def _mesh_of_all() -> DeviceMesh:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    group = default_process_group()
    return _mesh_over(group, "cpu" if accelerator is None else accelerator.type)


@functools.lru_cache(maxsize=8)
def _mesh_over(group: Any, device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (group.size(),))


def _data_mesh(mesh: DeviceMesh) -> DataMesh:
    return _kept(mesh, "data", lambda: DataMesh(mesh))


T = TypeVar("T")


class _Kept(dict[object, Any]):
    """A cache that is not copied or pickled with its mesh, which every DTensor of a state dict contains."""

    def __reduce__(self) -> tuple[type[OrderedDict], tuple[()]]:
        """What any reader of such a file knows, and is told apart from this here."""
        return OrderedDict, ()


def _kept(mesh: DeviceMesh, key: object, make: Callable[[], T]) -> T:
    """A cache on the mesh object, since equal meshes can have different process groups."""
    if type(getattr(mesh, "_crossframe_kept", None)) is not _Kept:
        mesh._crossframe_kept = _Kept()  # type: ignore[attr-defined]
    kept: _Kept = mesh._crossframe_kept  # type: ignore[attr-defined]
    if key not in kept:
        kept[key] = make()
    return kept[key]


def _named(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataMesh:
    names = mesh.mesh_dim_names
    if names is None:
        raise UsageError("fully_shard: dp_mesh_dims names axes of the mesh, which has no mesh_dim_names")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in names:
            raise UsageError(f"fully_shard: dp_mesh_dims names the axis {name!r}; the mesh has {', '.join(names)}")
    shard = _one_axis(mesh, dims.shard_names) if dims.shard_names else None
    replicate = _one_axis(mesh, dims.replicate_names) if dims.replicate_names else None
    data = shard or replicate
    if shard is not None and replicate is not None:
        data = joined(replicate, shard)
    assert data is not None
    indices = tuple(tuple(names.index(name) for name in some) for some in (dims.shard_names, dims.replicate_names))
    return DataMesh(data, shards=shard is not None, spmd=mesh, dims=indices)  # type: ignore[arg-type]


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def joined(first: DeviceMesh, *others: DeviceMesh) -> DeviceMesh:
    """Combine several submeshes of one mesh."""
    # The submeshes are kept alive, so that their ids stay unique.
    made = _kept(first, tuple(map(id, others)), lambda: (DeviceMesh._concatenate([first, *others]), others))
    return made[0]


def has_same_ranks(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Whether two meshes, possibly of different names, have the same ranks in the same order on each axis."""
    return mesh is other or mesh == other or mesh.mesh.tolist() == other.mesh.tolist()
