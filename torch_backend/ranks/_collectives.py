"""All collectives of the engine, under the core's names, with a trace of them.

The only file that calls torch.distributed's collectives. torch 2.13 gave two of them new names and warns about the old ones,
which 2.11 alone has.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crossframe.errors import UsageError
from crossframe.mesh import MeshSpec
from crossframe.trace import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Event
from torch_backend.compat._dtypes import dtype_name
from torch_backend.compat._fully_shard_api import AllGather, Comm, ReduceScatter
from torch_backend.observe import observers
from torch_backend.ranks._failure import Pending, issue, rejoin

# Looked up when they are called: who replaces a collective of torch.distributed, to count or to mock, sees ours too.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


class Done:
    """What stands for the work of a collective between no one: a rank alone in its group copies (R14)."""

    def wait(self) -> bool:
        """It is over."""
        return True


Work = Pending | Done
"""What was issued and may be waited for."""


class Communicator:
    """A group of ranks, and the collectives between them.

    Attributes:
        rank, size: this process's place in the group, and the size of the group.
        ranks: the group's ranks in the world.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.ranks = _ranks_of(group)
        # What a user put in the place of torch.distributed's, if anything.
        self.custom_all_gather: AllGather | None = None
        self.custom_reduce_scatter: ReduceScatter | None = None
        # Whether buffers come from the group's own allocator, where it has one.
        self.allocates = False

    def again(self) -> "Communicator":
        """The same ranks, for another user, who may change how they communicate."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def allocate_gathered(self, numel: int, like: Tensor) -> Tensor:
        """A buffer for `all_gather` to fill."""
        return self._allocate(self.custom_all_gather, numel, like, like.dtype)

    def allocate_reduced(self, numel: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer for `reduce_scatter` to sum, or to fill."""
        return self._allocate(self.custom_reduce_scatter, numel, like, dtype or like.dtype)

    def _allocate(self, custom: Comm | None, numel: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        if custom is not None:
            return custom.allocate((numel,), dtype=dtype, device=like.device)
        if self.allocates:
            backend: Any = self.group._get_backend(like.device)
            if backend.supports_tensor_alloc(like.device):
                return backend.allocate_tensor(numel, dtype=dtype, device=like.device)
        return torch.empty(numel, dtype=dtype, device=like.device)  # plain, whatever `like` is

    def all_gather(self, gathered: Tensor, shard: Tensor, *, unit: str, phase: str) -> Work:
        """Start filling `gathered` (size * n elements) with the `shard`s (n elements) of all ranks, in rank order."""
        if self.size == 1:
            gathered.copy_(shard)
            return Done()
        if phase not in ("forward", "backward"):  # outside of steps, so that no step has asked
            rejoin([self.group])
        self._tell(ALL_GATHER, gathered, unit, phase)
        collective = getattr(dist, _ALL_GATHER) if self.custom_all_gather is None else self.custom_all_gather
        return issue(collective, gathered, shard, group=self.group, kind=ALL_GATHER, unit=unit, phase=phase)

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, unit: str, phase: str) -> Work:
        """Start summing the `full`s (size * n elements) of all ranks; this rank's n elements of it arrive in `shard`."""
        if self.size == 1:
            shard.copy_(full)
            return Done()
        self._tell(REDUCE_SCATTER, full, unit, phase)
        collective = getattr(dist, _REDUCE_SCATTER)
        if self.custom_reduce_scatter is not None:
            collective = functools.partial(self.custom_reduce_scatter, op=dist.ReduceOp.SUM)
        return issue(collective, shard, full, group=self.group, kind=REDUCE_SCATTER, unit=unit, phase=phase)

    def all_reduce(self, tensor: Tensor, *, unit: str, phase: str) -> Work:
        """Start replacing `tensor` by the sum over all ranks."""
        if self.size == 1:
            return Done()
        self._tell(ALL_REDUCE, tensor, unit, phase)
        return issue(dist.all_reduce, tensor, group=self.group, kind=ALL_REDUCE, unit=unit, phase=phase)

    def _tell(self, kind: str, unsharded: Tensor, unit: str, phase: str) -> None:
        if observers:
            event = Event(kind, unit, phase, dtype_name(unsharded.dtype), unsharded.nbytes, self.ranks)
            for observer in observers:
                observer.event(event)

    # Outside of steps: these return when they are done. Of them `exchange` alone is in traces.

    def gather_all(self, tensor: Tensor) -> Tensor:
        """The `tensor`s of all ranks, of any one shape and dtype, stacked in rank order."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        if self.size == 1:
            gathered[0] = tensor
        else:
            getattr(dist, _ALL_GATHER)(gathered.view(-1), tensor.reshape(-1), group=self.group)
        return gathered

    def sum_all(self, tensor: Tensor) -> None:
        """Replace `tensor` by the sum over all ranks."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Let every rank have rank 0's `tensors`: the same list of shapes and dtypes everywhere."""
        if self.size > 1:
            for tensor in tensors:
                dense = tensor if tensor.is_contiguous() else tensor.contiguous()
                dist.broadcast(dense, src=self.ranks[0], group=self.group)
                if dense is not tensor:
                    tensor.copy_(dense)

    def gather_objects(self, value: Any) -> list[Any]:
        """The `value`s of all ranks, of anything that can be pickled, in rank order."""
        gathered: list[Any] = [value]
        if self.size > 1:
            gathered = [None] * self.size
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's `value`, of anything that can be pickled."""
        holder = [value]
        if self.size > 1:
            dist.broadcast_object_list(holder, src=self.ranks[0], group=self.group)
        return holder[0]

    def exchange(
        self, sent: Tensor, sent_numels: list[int], received_numels: list[int], *, unit: str, phase: str
    ) -> Tensor:
        """What all ranks send to this one, in rank order.

        Args:
            sent: 1-D, contiguous; the elements for rank 0 first, then those for rank 1, and so on.
            sent_numels, received_numels: how many elements go to each rank, and come from each.
        """
        received = sent.new_empty(sum(received_numels))
        if self.size == 1:
            return received.copy_(sent)
        self._tell(ALL_TO_ALL, received, unit, phase)
        # As bytes, since not every backend moves every dtype.
        size = sent.itemsize
        splits = [[numel * size for numel in numels] for numels in (received_numels, sent_numels)]
        dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), *splits, group=self.group)
        return received

    def scatter(self, shard: Tensor, full: list[Tensor] | None) -> None:
        """Give rank k the k-th of rank 0's tensors, which on the other ranks is None."""
        if self.size == 1:
            assert full is not None
            shard.copy_(full[0])
        else:
            dist.scatter(shard, full, src=self.ranks[0], group=self.group)


def _ranks_of(group: Any) -> tuple[int, ...]:
    """A group's ranks in the world; its own, of an object that stands for a group in a test and knows its rank and size alone."""
    if isinstance(group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(group))
    return tuple(range(group.size()))


class UnitMesh:
    """The ranks of one unit (R10): those that it is sharded over, and those that hold replicas of the same shard.

    Attributes:
        shards: the shard group; all the ranks under plain FSDP, this rank alone where nothing is sharded.
        replicas: the ranks with the same shard; this rank alone but for hybrid sharding and replication.
        reducing: the shard group once more, for sums: by itself, or in a process group of its own, which overlaps gathers.
        spec: both sizes.
    """

    def __init__(self, shards: Communicator, replicas: Communicator) -> None:
        self.shards = self.reducing = shards
        self.replicas = replicas
        self.spec = MeshSpec(shard=shards.size, replicate=replicas.size)

    @property
    def group_rank(self) -> int:
        """This rank's place in the group that one rank may act for (R19)."""
        return self.spec.group_rank(self.replicas.rank * self.spec.shard + self.shards.rank)


class Alone(Communicator):
    """This rank by itself, for which there need be no process group."""

    def __init__(self) -> None:
        self.group = None  # type: ignore[assignment]
        self.custom_all_gather = self.custom_reduce_scatter = None
        self.allocates = False
        self.rank, self.size = 0, 1
        self.ranks = (dist.get_rank() if dist.is_initialized() else 0,)


def default_process_group() -> dist.ProcessGroup:
    """The group of all ranks; UsageError if there is none yet."""
    if not dist.is_initialized():
        raise UsageError(
            "there is no process group: call torch.distributed.init_process_group before sharding a module "
            "(backend 'gloo' on CPU, 'nccl' on CUDA)"
        )
    group = dist.group.WORLD
    assert group is not None
    return group
