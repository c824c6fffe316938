"""The data-parallel ranks of each unit, and the place of this rank among those of all units."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from torch_backend.recorder._model_ranks import Axes

_SECONDS = 30
# By store how often this process has asked for copies of a model.
_exchanges: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


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

    def among_copies(self, names: Iterable[str]) -> "Place":
        """The place where other ranks train a model of these parameters on meshes of their own, as where fully_shard gets one dim
        of a mesh: these are further replicas, between which nothing is reduced.

        The meshes are exchanged through the store, without collectives, since other ranks may do something else. They have
        _SECONDS to come.
        """
        size, world = self.replicas[1] * self.shards[1], dist.group.WORLD
        if world is None or not 1 < size < world.size():
            return self
        digest = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()
        store: Any = dist.distributed_c10d._get_default_store()
        asked = _exchanges.setdefault(store, Counter())
        asked[digest] += 1
        keys = [f"crossframe/copies/{digest}/{asked[digest]}/{rank}" for rank in range(world.size())]
        store.set(keys[world.rank()], json.dumps([dist.get_process_group_ranks(group) for group in self.groups]))
        try:
            store.wait(keys, timedelta(seconds=_SECONDS))
        except dist.DistError:
            return self
        meshes: list[set[int]] = []
        for ranks in [{*group} for each in store.multi_get(keys) for group in json.loads(each)]:
            joined = [mesh for mesh in meshes if mesh & ranks]
            meshes = [mesh for mesh in meshes if not mesh & ranks] + [ranks.union(*joined)]
        meshes.sort(key=min)
        if any(len(mesh) != size for mesh in meshes):
            return self
        (index, of_copy), copy = self.replicas, next(i for i, mesh in enumerate(meshes) if world.rank() in mesh)
        return replace(self, replicas=(copy * of_copy + index, len(meshes) * of_copy), groups=(*self.groups, world))


def place_in(group: Any) -> tuple[int, int]:
    """This rank's place in a process group, and its size; of None, a group of this rank alone."""
    return (0, 1) if group is None else (group.rank(), group.size())
