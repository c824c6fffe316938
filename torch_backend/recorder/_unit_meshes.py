"""The data-parallel ranks of each unit, and the place of this rank among those of all units."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from torch_backend.recorder._model_ranks import Axes


@dataclass(frozen=True, eq=False)
class MeshGroups:
    """The data-parallel ranks of a unit: those of its shards and those of its replicas; None: this rank alone."""

    shards: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return place_in(self.shards)[1] * place_in(self.replicas)[1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshGroups) and self._ranks == other._ranks

    @property
    def _ranks(self) -> list[list[int]]:
        """The ranks of both groups, without groups of one rank."""
        groups = [dist.get_process_group_ranks(group) if group else [] for group in (self.shards, self.replicas)]
        return [ranks if len(ranks) > 1 else [] for ranks in groups]

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Those of more than one rank."""
        return tuple(group for group in (self.shards, self.replicas) if group is not None and group.size() > 1)


def largest(meshes: Sequence[MeshGroups]) -> MeshGroups:
    """The mesh of most ranks, of several that with most shards."""
    return max(meshes, key=lambda mesh: (mesh.size, place_in(mesh.shards)[1]))


@dataclass(frozen=True)
class Place:
    """The place of this rank among the data-parallel ranks.

    Attributes:
        replicas, shards: (the index of this rank, how many there are).
        groups: the process groups of the shards and of the replicas, those of one rank left out.
        axes: this rank's groups along the axes over which parameters are divided and the batch is not; None: the batch is the
            same where the place is. Then the place follows from them.
    """

    replicas: tuple[int, int]
    shards: tuple[int, int]
    groups: tuple[dist.ProcessGroup, ...]
    axes: Axes | None = None

    @classmethod
    def of(cls, meshes: Sequence[MeshGroups], *, is_divided: bool) -> "Place":
        """The place on the largest mesh. Where units have different meshes and none of them has all ranks, each rank is a replica
        of its own.

        Args:
            is_divided: whether ranks with one batch have parts of parameters, so that other ranks have the same place.
        """
        mesh = largest(meshes)
        are_alike = all(each == mesh for each in meshes)
        if not are_alike and not is_divided and mesh.size < dist.get_world_size():
            return cls((0, 1), (0, 1), (), {})
        return cls(place_in(mesh.replicas), place_in(mesh.shards), mesh.groups)


def place_in(group: Any) -> tuple[int, int]:
    """This rank's place in a process group, and its size; of None, a group of this rank alone."""
    return (0, 1) if group is None else (group.rank(), group.size())
