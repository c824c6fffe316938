"""The ranks of a unit from FSDP1's process group or device mesh and its sharding strategy (R10, R14)."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from crossframe.errors import UsageError
from crossframe.strategy import Strategy
from torch_backend.ranks._collectives import Alone, Communicator, UnitMesh, default_process_group

Groups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]


def find_groups(
    strategy: Strategy, process_group: Groups | None, device_mesh: DeviceMesh | None, *, wraps_inside: bool
) -> Groups:
    """The process group to shard over, or the pair (shard group, replicate group) for a hybrid strategy.

    Args:
        process_group: a group, or the pair for a hybrid strategy. None: all ranks; for a hybrid strategy, shard within a machine
            and replicate over machines.
        device_mesh: a mesh with one axis, or two axes (replicate, shard) for a hybrid strategy.
        wraps_inside: whether a policy also wraps inner modules, which then use the same groups.

    Raises:
        UsageError: both are given, or the given one does not fit the strategy.
    """
    if process_group is not None and device_mesh is not None:
        raise UsageError("process_group and device_mesh cannot be combined; pass one of them")
    if device_mesh is not None:
        return _groups_of(strategy, device_mesh)
    if not strategy.is_hybrid:
        if process_group is None:
            return default_process_group()
        if isinstance(process_group, tuple) or not _is_group(process_group):
            raise UsageError(
                f"{strategy.name}: expected process_group to be one process group, got {process_group!r}; "
                "a (shard, replicate) pair is for HYBRID_SHARD"
            )
        return process_group
    if process_group is None:
        if not wraps_inside:
            raise UsageError(
                f"{strategy.name} without auto_wrap_policy: each wrapped module would create its own groups; pass "
                "process_group=(shard, replicate) or a device_mesh of two axes to all of them"
            )
        return groups_by_machine(ranks_per_machine())
    if not (
        isinstance(process_group, tuple)
        and len(process_group) == 2
        and all(_is_group(group) for group in process_group)
    ):
        raise UsageError(
            f"{strategy.name}: expected process_group as a pair (shard, replicate) of process groups, got {process_group!r}"
        )
    return process_group


def _is_group(value: Any) -> bool:
    """A process group or an equivalent object."""
    return isinstance(value, dist.ProcessGroup) or (hasattr(value, "rank") and hasattr(value, "size"))


def _groups_of(strategy: Strategy, mesh: Any) -> Groups:
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(f"device_mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    expected = 2 if strategy.is_hybrid else 1
    if mesh.ndim != expected:
        axes = "two axes (replicate, shard)" if strategy.is_hybrid else "one axis"
        raise UsageError(f"{strategy.name}: expected a device_mesh of {axes}, got one of shape {tuple(mesh.shape)}")
    return (mesh.get_group(1), mesh.get_group(0)) if strategy.is_hybrid else mesh.get_group(0)


def ranks_per_machine() -> int:
    """The number of ranks of a machine: LOCAL_WORLD_SIZE of torchrun, else the number of accelerators.

    Raises:
        UsageError: neither is known.
    """
    size = os.environ.get("LOCAL_WORLD_SIZE")
    if size is not None and size.isdigit() and int(size) > 0:
        return int(size)
    count = torch.accelerator.device_count()
    if not count:
        raise UsageError(
            "hybrid sharding needs to know which ranks share a machine, and there is neither LOCAL_WORLD_SIZE (torchrun sets "
            "it) nor an accelerator to count; pass process_group=(shard, replicate) or a device_mesh of two axes"
        )
    return count


def groups_by_machine(size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's group of `size` consecutive ranks, and its group of ranks with the same index in such groups.

    Raises:
        UsageError: `size` does not divide the world.
    """
    world_size = default_process_group().size()
    if world_size % size:
        raise UsageError(
            f"hybrid sharding: {world_size} ranks cannot be divided into machines of {size}; pass process_group=(shard, "
            "replicate) or a device_mesh of two axes"
        )
    shard, _ = dist.new_subgroups(size)
    places = [list(range(place, world_size, size)) for place in range(size)]
    replicate, _ = dist.new_subgroups_by_enumeration(places)
    assert isinstance(shard, dist.ProcessGroup) and isinstance(replicate, dist.ProcessGroup)
    return shard, replicate


def unit_mesh(strategy: Strategy, groups: Groups) -> UnitMesh:
    """The mesh of a unit from its groups; under NO_SHARD, every rank is a separate shard group."""
    if isinstance(groups, tuple):
        return UnitMesh(Communicator(groups[0]), Communicator(groups[1]))
    if strategy is Strategy.NO_SHARD or groups.size() == 1:
        return UnitMesh(Alone(), Communicator(groups))
    return UnitMesh(Communicator(groups), Alone())
