"""Supports tensor subclasses with `fsdp_pre_all_gather` and `fsdp_post_all_gather`, as in PyTorch's FSDP2.

Before each all-gather, the sharded tensor returns the tensors to all-gather (for example quantized values and scales); afterwards
it builds the unsharded tensor from them. It is not called before the first all-gather because the shard may still be on the meta
device. Each such parameter has its own bucket. Its gradient is an ordinary tensor.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from crossframe.errors import AssertedError, CollectiveError
from crossframe.layout import Layout, PerParamLayout
from crossframe.writeback import check_replaced
from torch_backend.compat._dtypes import dtype_name
from torch_backend.memory._store import ShardStore, cuts_of
from torch_backend.memory._streams import Streams
from torch_backend.ranks._collectives import Communicator, Work


def is_extended(tensor: Tensor) -> bool:
    """Whether a tensor implements both methods.

    Raises:
        AssertedError: it implements only one of them.
    """
    methods = [hasattr(tensor, name) for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather")]
    if any(methods) and not all(methods):
        raise AssertedError(
            f"a {type(tensor).__name__} has only one of the methods fsdp_pre_all_gather and fsdp_post_all_gather; "
            "define both, or neither"
        )
    return all(methods)


class ExtendedStore(ShardStore):
    """The shard of one such parameter: this rank's chunk, a tensor of the subclass.

    Attributes:
        buffer: the chunk, in its shape.
        pieces: the chunk as the only piece.
    """

    def __init__(
        self,
        layout: PerParamLayout,
        rank: int,
        full: Tensor,
        device: torch.device,
        *,
        mesh: DeviceMesh,
        module: nn.Module,
        policy: Any,
    ) -> None:
        """
        Args:
            full: the parameter.
            mesh, module, policy: the mesh, module and mixed precision policy, passed to the subclass.
        """
        self.layout, self.rank = layout, rank
        self.mesh, self.module, self.policy = mesh, module, policy
        self._cuts = cuts_of(layout, rank)
        chunks = torch.chunk(full, layout.world_size, dim=layout.shard_dims[0])
        with torch.no_grad():
            own = chunks[rank] if rank < len(chunks) else full.narrow(layout.shard_dims[0], 0, 0)
            self.buffer = own.clone().to(device)
        self.cut()

    def cut(self) -> None:
        """The chunk is the only piece."""
        self.pieces = [self.buffer]

    def check_extended(self, i: int) -> None:
        """Accept: the parameter was sharded as an extension."""

    def holds(self, i: int, local: Tensor) -> bool:
        """Whether `local` is the chunk itself."""
        return local is self.buffer

    def take(self, i: int, value: Tensor, shape: tuple[int, ...]) -> None:
        """Replace the chunk by `value`."""
        check_replaced(
            self.layout.params[i].name,
            self.rank,
            (shape, dtype_name(self.buffer.dtype)),
            (tuple(value.shape), dtype_name(value.dtype)),
        )
        self.buffer = value
        self.cut()

    def gather_buffer(
        self, dtype: torch.dtype, device: torch.device, streams: Streams, *, limited: bool
    ) -> "ExtendedBuffer":
        """The unsharded parameter, in separate memory."""
        return ExtendedBuffer(self, dtype, device, streams, limited=limited)


class ExtendedBuffer:
    """The unsharded parameter and the gathered tensors that back it, allocated while the unit is unsharded.

    The subclass builds the parameter after the first all-gather. Later all-gathers refill the same tensor objects and pass the
    existing parameter to the subclass as `out`.

    Attributes:
        leaves: the unsharded parameter; before the first all-gather, a plain one without memory.
        full: the first gathered tensor.
    """

    is_shard = False

    def __init__(
        self, store: ExtendedStore, dtype: torch.dtype, device: torch.device, streams: Streams, *, limited: bool
    ) -> None:
        self.layout: Layout = store.layout
        self._store, self._dtype, self._device, self._streams, self._limited = store, dtype, device, streams, limited
        self._work: Work | None = None
        self._sent: list[Tensor] = []
        self._landing: Tensor | None = None
        # The gathered tensors, the tensors that back the parameter, and their sizes in bytes.
        self._outputs: list[Tensor] = []
        self._inner: Sequence[Tensor] = ()
        self._num_bytes: list[tuple[Tensor, int]] = []
        (spec,) = store.layout.params
        nothing = torch.empty(spec.shape, dtype=dtype, device=device)
        nothing.untyped_storage().resize_(0)
        self.leaves = [nn.Parameter(nothing, requires_grad=spec.requires_grad)]

    @property
    def full(self) -> Tensor:
        """See the class."""
        return self._outputs[0] if self._outputs else self.leaves[0]

    def _inputs(self) -> tuple[Sequence[Tensor], Any]:
        store, (spec,) = self._store, self._store.layout.params
        shard = store.buffer.to(self._device, non_blocking=True)
        ask = shard.fsdp_pre_all_gather  # type: ignore[attr-defined]
        if len(inspect.signature(ask).parameters) == 1:
            return ask(store.mesh)
        size = torch.Size(spec.shape)
        return ask(store.mesh, size, torch.empty(size, device="meta").stride(), store.module, store.policy)

    @property
    def _put_together(self) -> Callable[..., Any]:
        return self._store.buffer.fsdp_post_all_gather  # type: ignore[attr-defined]

    def _views(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(output.view(-1, *tensor.shape[1:]) for output, tensor in zip(self._outputs, inputs, strict=True))

    def start(
        self, shard: Tensor, communicator: Communicator, *, unit: str, phase: str, layout: Layout | None = None
    ) -> None:
        """Allocate and issue the all-gather of the subclass's tensors; several tensors are concatenated as bytes."""
        with torch.no_grad():
            self._streams.before_gather()
            with self._streams.unsharding():
                inputs, self._metadata = self._inputs()
                self._sent = list(inputs)
                sizes = [tensor.numel() * communicator.size for tensor in inputs]
                if not self._outputs:
                    self._outputs = [
                        torch.empty(numel, dtype=tensor.dtype, device=self._device)
                        for numel, tensor in zip(sizes, inputs, strict=True)
                    ]
                elif sizes != [output.numel() for output in self._outputs]:
                    raise AssertedError(
                        f"unit {unit!r}, parameter {self.layout.params[0].name!r}: fsdp_pre_all_gather returned tensors "
                        f"of shapes {[tuple(tensor.shape) for tensor in inputs]}; expected the same number of elements "
                        "on every rank in every call; pad short chunks to the size of the first"
                    )
                self._allocate()
                if len(inputs) == 1:
                    sent, gathered = inputs[0].reshape(-1), self._outputs[0].data
                    if sent.dtype.itemsize == 1:  # as bytes, since gloo has no float8
                        sent, gathered = sent.view(torch.uint8), gathered.view(torch.uint8)
                else:
                    sent = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in inputs])
                    gathered = self._landing = sent.new_empty(sent.numel() * communicator.size)
                self._sent.append(sent)
                work = communicator.all_gather(gathered, sent, unit=unit, phase=phase)
                self._work = self._streams.settle(work)

    def finish(self) -> bool:
        """Wait and let the subclass build its parameter. Returns whether the leaf is a new object."""
        if self._work is None:
            return False
        self._wait()
        with torch.no_grad():
            if self._landing is not None:
                table, start = self._landing.view(self.layout.world_size, -1), 0
                for output in self._outputs:
                    rows = output.data.view(torch.uint8).view(self.layout.world_size, -1)
                    rows.copy_(table[:, start : start + rows.shape[1]])
                    start += rows.shape[1]
                self._landing = None
            views = self._views(self._sent[: len(self._outputs)])
            is_first = not self._num_bytes
            if is_first:
                self._make(views)
            else:
                self._put_together(views, self._metadata, self._dtype, out=self.leaves[0])
        self._sent = []
        return is_first

    def _make(self, views: tuple[Tensor, ...]) -> None:
        """Let the subclass build its parameter, and cut off the padding."""
        made, self._inner = self._put_together(views, self._metadata, self._dtype)
        (spec,), (dim,) = self._store.layout.params, self._store.layout.shard_dims
        if made.shape[dim] != spec.shape[dim]:
            made = made.narrow(dim, 0, spec.shape[dim])
        self.leaves = [nn.Parameter(made, requires_grad=self.leaves[0].requires_grad)]
        self._num_bytes = [(tensor, tensor.untyped_storage().nbytes()) for tensor in (*self._outputs, *self._inner)]

    def _wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def _allocate(self) -> None:
        for tensor, num_bytes in self._num_bytes:
            tensor.untyped_storage().resize_(num_bytes)

    def free(self) -> None:
        with suppress(CollectiveError):  # already raised where it was waited for
            self._wait()
        self._landing, self._sent = None, []
        for tensor, _ in self._num_bytes:
            self._streams.before_free(tensor, limited=self._limited)
            tensor.untyped_storage().resize_(0)
