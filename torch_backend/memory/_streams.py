"""The streams of casts, all-gathers and reductions, and their synchronization.

[Note: streams] Three streams are used: the user's stream for computation, `unshard` for casts and all-gathers of shards, and
`reduce` for gradient reductions. The host does not wait for them. Three rules make it safe to use tensors across streams:

- an all-gather waits for writes to the shards (by an optimizer or a user), once per step, when a user asks for parameters, and
  after data that a user assigned was copied into a shard;
- unsharded memory belongs to the unshard stream. When it is freed, the allocator keeps it until the computing stream has passed
  this point, so all-gathers overlap with computation. With `limit_all_gathers` the host blocks (RateLimiter), which bounds the
  memory;
- gradients are copied on the computing stream into a buffer that is kept until this stream has waited for the reduction that
  reads it. One such buffer is kept at a time, or as many as the user allows.

On a CPU there are no streams: gloo's collectives run in separate threads, and `Work.wait` waits for them.
"""

import functools
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torch_backend.memory._rate_limiter import RateLimiter
from torch_backend.ranks._collectives import Done, Work

_HERE: AbstractContextManager[Any] = nullcontext()


class Streams:
    """A device without streams, on which all operations are synchronous.

    Attributes:
        queues: whether waiting for a collective does not block the host.
        max_held: the maximum number of pending reduce-scatter inputs.
    """

    queues = False
    max_held = 1

    def unsharding(self) -> AbstractContextManager[Any]:
        """A context that queues work on the unshard stream."""
        return _HERE

    def reducing(self) -> AbstractContextManager[Any]:
        """A context that queues work on the reduce stream."""
        return _HERE

    def shards_written(self) -> None:
        """Let all-gathers wait for all work queued on the computing stream so far."""

    def moment(self) -> Any:
        """Record the work queued on the computing stream so far, for `gather_after`."""

    def gather_after(self, moment: Any) -> None:
        """Let all-gathers wait for recorded work."""

    def before_gather(self) -> None:
        """Rate limiter: block the host until at most one freed unit is still in use."""

    def settle(self, gather: Work) -> Work:
        """Order the end of an all-gather in the unshard stream.

        Returns:
            A function that makes the computing stream wait for it.
        """
        return gather

    def before_free(self, tensor: Tensor, *, limited: bool) -> None:
        """Called before the computing stream frees a tensor in the unshard stream's memory."""

    def before_collect(self) -> None:
        """Release the oldest pending buffer after the computing stream has waited for its reduction."""

    def begin_reduction(self, source: Tensor) -> None:
        """Let the reduce stream wait for the gradients in `source`, and keep this buffer."""

    def reduction_read(self) -> None:
        """Record the point at which the reduce stream has read the pending buffer."""

    def join_host(self) -> None:
        """Block the host until all reductions so far have finished."""

    def end_reductions(self, *, host: bool) -> None:
        """Let the computing stream, and with `host` also the host, wait for all reductions, and release all buffers."""


class DeviceStreams(Streams):
    """The streams of one accelerator, shared by all units on it.

    With torch.Stream as the context, entering it takes a tenth of the host's time of torch.cuda.stream.
    """

    queues = True

    def __init__(self, device: torch.device) -> None:
        self._computing: Callable[[], torch.Stream] = functools.partial(torch.accelerator.current_stream, device.index)
        # Before the computing stream, which waits for both.
        self._unshard = torch.Stream(device, priority=-1)
        self._reduce = torch.Stream(device, priority=-1)
        self._limiter = RateLimiter()
        self._held: deque[tuple[Tensor, Any]] = deque()

    def unsharding(self) -> AbstractContextManager[Any]:
        return self._unshard

    def reducing(self) -> AbstractContextManager[Any]:
        return self._reduce

    def shards_written(self) -> None:
        self._unshard.wait_stream(self._computing())

    def moment(self) -> Any:
        return self._computing().record_event()

    def gather_after(self, moment: Any) -> None:
        with self._unshard:
            moment.wait()

    def before_gather(self) -> None:
        self._limiter.wait()

    def settle(self, gather: Work) -> Work:
        gather.wait()
        return _Event(self._unshard.record_event(), self._computing)

    def before_free(self, tensor: Tensor, *, limited: bool) -> None:
        computing = self._computing()
        if not tensor.is_meta:  # as the memory of shards on meta is, whatever the device of computation
            tensor.record_stream(computing)
        if limited:
            self._limiter.freed(computing.record_event())

    def before_collect(self) -> None:
        while len(self._held) >= self.max_held:
            self._computing().wait_event(self._held.popleft()[1])

    def begin_reduction(self, source: Tensor) -> None:
        self._reduce.wait_stream(self._computing())
        self._held.append((source, None))

    def reduction_read(self) -> None:
        source, _ = self._held.pop()
        self._held.append((source, self._reduce.record_event()))

    def end_reductions(self, *, host: bool) -> None:
        self._computing().wait_stream(self._reduce)
        self._held.clear()
        if host:
            self.join_host()

    def join_host(self) -> None:
        self._reduce.synchronize()


class _Event(Done):
    """A recorded point of a stream that other streams can wait for."""

    def __init__(self, event: Any, waiting: Callable[[], Any]) -> None:
        self._event, self._waiting = event, waiting

    def wait(self) -> bool:
        """Let the current stream wait for it."""
        self._waiting().wait_event(self._event)
        return True


_CPU = Streams()


@functools.cache
def streams_of(device: torch.device) -> Streams:
    """The streams of a device, created on first use."""
    return _CPU if device.type in ("cpu", "meta") else DeviceStreams(device)


def on_stream(hook: Callable[[Tensor], None], stream: Any) -> Callable[[Tensor], None]:
    """Wrap `hook` to run on the user's stream, for which the current stream waits."""

    def on_stream(reduced: Tensor) -> None:
        module: Any = torch.get_device_module(reduced.device)
        current = module.current_stream()
        stream.wait_stream(current)
        with module.stream(stream):
            hook(reduced)
        current.wait_stream(stream)

    return on_stream
