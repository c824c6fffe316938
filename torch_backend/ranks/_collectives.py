"""All collectives of the engine, under the core's names, with a trace of them.

The only file that calls torch.distributed's collectives. torch 2.13 gave two of them new names and warns about the old ones,
which 2.11 alone has.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from crossframe.errors import UsageError
from crossframe.mesh import MeshSpec
from crossframe.trace import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Event
from torch_backend.compat._dtypes import as_real, dtype_name
from torch_backend.compat._fully_shard_api import AllGather, Comm, ReduceScatter
from torch_backend.observe import observers
from torch_backend.ranks._consensus import spans_ranks
from torch_backend.ranks._failure import Pending, issue, rejoin

_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


class _Collective:
    """A function of torch.distributed for asynchronous calls of the step.

    Calls the process group's method as the function does, without its checks of arguments, which take as long again on the
    host. A function that someone has replaced (a mock, a counter) is called itself.
    """

    def __init__(self, function: str, methods: tuple[str, str], options: Any) -> None:
        """
        Args:
            methods: the name of the group's method, and its name in earlier versions.
        """
        self._function, self._original = function, getattr(dist, function)
        self._method = next(method for method in methods if hasattr(dist.ProcessGroup, method))
        self._options = options
        options.asyncOp = True

    def __call__(self, output: Tensor, source: Tensor, *, group: dist.ProcessGroup, async_op: bool) -> Any:
        function = getattr(dist, self._function)
        if function is not self._original:
            return function(output, source, group=group, async_op=async_op)
        return getattr(group, self._method)(as_real(output), as_real(source), self._options)


_all_gather = _Collective(_ALL_GATHER, ("all_gather_single", "_allgather_base"), AllgatherOptions())
_reduce_scatter = _Collective(
    _REDUCE_SCATTER, ("reduce_scatter_single", "_reduce_scatter_base"), ReduceScatterOptions()
)


class Done:
    """The finished work of a collective in a group of one rank, which only copies (R14)."""

    def wait(self) -> bool:
        """Return at once."""
        return True


Work = Pending | Done
"""A pending collective."""


class Communicator:
    """A group of ranks, and the collectives between them.

    Attributes:
        rank, size: this process's rank in the group, and the size of the group.
        ranks: the global ranks of the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.ranks = _ranks_of(group)
        self._spans = spans_ranks(group)
        # The user's replacement of torch.distributed's collective, if any.
        self.custom_all_gather: AllGather | None = None
        self.custom_reduce_scatter: ReduceScatter | None = None
        # Whether buffers come from the group's allocator, if it has one.
        self.allocates = False

    def again(self) -> "Communicator":
        """A copy with separate options for the same ranks."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def allocate_gathered(self, numel: int, like: Tensor) -> Tensor:
        """Allocate the output of an `all_gather`."""
        return self._allocate(self.custom_all_gather, numel, like, like.dtype)

    def allocate_reduced(self, numel: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate an input or output of a `reduce_scatter`."""
        return self._allocate(self.custom_reduce_scatter, numel, like, dtype or like.dtype)

    def _allocate(self, custom: Comm | None, numel: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        if custom is not None:
            return custom.allocate((numel,), dtype=dtype, device=like.device)
        if self.allocates:
            backend: Any = self.group._get_backend(like.device)
            if backend.supports_tensor_alloc(like.device):
                return backend.allocate_tensor(numel, dtype=dtype, device=like.device)
        return torch.empty(numel, dtype=dtype, device=like.device)  # a plain tensor even if `like` is a subclass

    def all_gather(self, gathered: Tensor, shard: Tensor, *, unit: str, phase: str) -> Work:
        """Start an all-gather of `shard` (n elements) into `gathered` (size * n elements), in rank order."""
        if self.size == 1:
            gathered.copy_(shard)
            return Done()
        if phase not in ("forward", "backward"):  # outside of steps, which check this themselves
            rejoin([self.group])
        self._record_event(ALL_GATHER, gathered, unit, phase)
        collective = _all_gather if self.custom_all_gather is None else self.custom_all_gather
        return issue(
            collective, gathered, shard, group=self.group, spans=self._spans, kind=ALL_GATHER, unit=unit, phase=phase
        )

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, unit: str, phase: str) -> Work:
        """Start a reduce-scatter (sum) of `full` (size * n elements) into `shard` (n elements)."""
        if self.size == 1:
            shard.copy_(full)
            return Done()
        self._record_event(REDUCE_SCATTER, full, unit, phase)
        collective: Callable[..., Any] = _reduce_scatter
        if self.custom_reduce_scatter is not None:
            collective = functools.partial(self.custom_reduce_scatter, op=dist.ReduceOp.SUM)
        return issue(
            collective, shard, full, group=self.group, spans=self._spans, kind=REDUCE_SCATTER, unit=unit, phase=phase
        )

    def all_reduce(self, tensor: Tensor, *, unit: str, phase: str) -> Work:
        """Start an all-reduce (sum) of `tensor`, in place."""
        if self.size == 1:
            return Done()
        self._record_event(ALL_REDUCE, tensor, unit, phase)
        return issue(
            dist.all_reduce, tensor, group=self.group, spans=self._spans, kind=ALL_REDUCE, unit=unit, phase=phase
        )

    def _record_event(self, kind: str, unsharded: Tensor, unit: str, phase: str) -> None:
        if observers:
            event = Event(kind, unit, phase, dtype_name(unsharded.dtype), unsharded.nbytes, self.ranks)
            for observer in observers:
                observer.event(event)

    # Synchronous collectives outside of steps. Only `exchange` is traced.

    def gather_all(self, tensor: Tensor) -> Tensor:
        """All-gather tensors of equal shape and dtype, stacked in rank order."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        if self.size == 1:
            gathered[0] = tensor
        else:
            getattr(dist, _ALL_GATHER)(gathered.view(-1), tensor.reshape(-1), group=self.group)
        return gathered

    def sum_all(self, tensor: Tensor) -> None:
        """All-reduce (sum) `tensor`, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Broadcast `tensors` from rank 0; shapes and dtypes must be equal on all ranks."""
        if self.size > 1:
            for tensor in tensors:
                dense = tensor if tensor.is_contiguous() else tensor.contiguous()
                # As bytes, since not every backend moves every dtype.
                dist.broadcast(dense.view(-1).view(torch.uint8), src=self.ranks[0], group=self.group)
                if dense is not tensor:
                    tensor.copy_(dense)

    def gather_objects(self, value: Any) -> list[Any]:
        """All-gather picklable values, in rank order."""
        gathered: list[Any] = [value]
        if self.size > 1:
            gathered = [None] * self.size
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def broadcast_object(self, value: Any) -> Any:
        """Broadcast a picklable value from rank 0."""
        holder = [value]
        if self.size > 1:
            dist.broadcast_object_list(holder, src=self.ranks[0], group=self.group)
        return holder[0]

    def exchange(
        self, sent: Tensor, sent_numels: list[int], received_numels: list[int], *, unit: str, phase: str
    ) -> Tensor:
        """All-to-all. Returns the elements that this rank receives, in rank order.

        Args:
            sent: 1-D and contiguous: the elements for rank 0, then for rank 1, and so on.
            sent_numels, received_numels: the number of elements for and from each rank.
        """
        received = sent.new_empty(sum(received_numels))
        if self.size == 1:
            return received.copy_(sent)
        self._record_event(ALL_TO_ALL, received, unit, phase)
        # As bytes, since not every backend moves every dtype.
        size = sent.itemsize
        splits = [[numel * size for numel in numels] for numels in (received_numels, sent_numels)]
        dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), *splits, group=self.group)
        return received

    def scatter(self, shard: Tensor, full: list[Tensor] | None) -> None:
        """Scatter rank 0's tensors: rank k receives the k-th. None on other ranks."""
        if self.size == 1:
            assert full is not None
            shard.copy_(full[0])
        else:
            dist.scatter(shard, full, src=self.ranks[0], group=self.group)


def axis_name(group: dist.ProcessGroup, otherwise: str) -> str:
    """The name of the mesh axis of which this is a process group."""
    prefix, _, name = (group.group_desc or "").partition("_")
    return name if prefix == "mesh" and name else otherwise


def _ranks_of(group: Any) -> tuple[int, ...]:
    """The global ranks of a group; for an object with only a rank and a size, its own ranks."""
    if isinstance(group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(group))
    return tuple(range(group.size()))


class UnitMesh:
    """The process groups of one unit (R10).

    Attributes:
        shards: the shard group: all ranks under plain FSDP, only this rank under NO_SHARD.
        replicas: the ranks with the same shard: only this rank except under hybrid sharding and replication.
        reducing: the shard group for reductions, possibly a separate process group to overlap with all-gathers.
        spec: both sizes.
    """

    def __init__(self, shards: Communicator, replicas: Communicator) -> None:
        self.shards = self.reducing = shards
        self.replicas = replicas
        self.spec = MeshSpec(shard=shards.size, replicate=replicas.size)

    @property
    def group_rank(self) -> int:
        """This rank's index in the group of which the first rank may act alone (R19)."""
        return self.spec.group_rank(self.replicas.rank * self.spec.shard + self.shards.rank)


class Alone(Communicator):
    """A communicator of only this rank, which needs no process group."""

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
