"""Streams of an accelerator: where casts, gathers and reductions are queued, and which of them wait for which.

[Note: streams] An accelerator runs what is queued on one stream in order, and streams beside each other. Three are in use:
the user's own, where the module computes; `unshard`, where shards are cast and gathered; and `reduce`, where gradients are
reduced. The host waits for none of them. What one stream made and another uses is safe by three rules:

- a gather waits for whatever wrote the shards (an optimizer, a user): once a step, and when a user asks for parameters;
- full memory belongs to the unshard stream. When it is freed, the allocator keeps it back until the computing stream has come
  so far, so that gathers need not wait for computation and overlap it. With `limit_all_gathers` the host waits, before it
  issues a gather, until all but the last of the units freed so far are through: else it would run ahead, and memory with it;
- gradients are collected on the computing stream, into a buffer that is held until that stream has waited for the reduction
  that reads it. One such buffer is held at a time, or as many as the user allows.

On a CPU there is one queue, the host itself: gloo's collectives run in threads of their own, and `Work.wait` waits.
"""

import functools
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torch_backend.ranks._collectives import Done, Work

_HERE: AbstractContextManager[Any] = nullcontext()


class Streams:
    """A device without streams. Everything happens where it is asked for.

    Attributes:
        queues: whether waiting for a collective leaves the host free to go on.
        max_held: how many buffers of collected gradients may wait for their reductions.
    """

    queues = False
    max_held = 1

    def unsharding(self) -> AbstractContextManager[Any]:
        """Inside, work is queued on the unshard stream."""
        return _HERE

    def reducing(self) -> AbstractContextManager[Any]:
        """Inside, work is queued on the reduce stream."""
        return _HERE

    def shards_written(self) -> None:
        """Let gathers wait for all that the computing stream was given so far."""

    def moment(self) -> Any:
        """What the computing stream was given so far, for `gather_after`."""

    def gather_after(self, moment: Any) -> None:
        """Let gathers wait for that."""

    def before_gather(self) -> None:
        """A gather is about to be issued: wait until no more is ahead than `before_free` was told to allow."""

    def settle(self, gather: Work) -> Work:
        """Put the end of a gather, issued on the unshard stream, in that stream's order.

        Returns:
            What makes the computing stream wait for it.
        """
        return gather

    def before_free(self, tensor: Tensor, *, limited: bool) -> None:
        """`tensor`, of the unshard stream's memory, is about to be freed by the computing stream."""

    def before_collect(self) -> None:
        """Let go of the buffer that is held, once the computing stream has waited for the reduction that reads it."""

    def begin_reduction(self, source: Tensor) -> None:
        """Let the reduce stream wait for gradients collected in `source`, and hold that buffer."""

    def reduction_read(self) -> None:
        """What is held has been read, once the reduce stream gets here."""

    def join_host(self) -> None:
        """Let the host wait for all reductions so far."""

    def end_reductions(self, *, host: bool) -> None:
        """Let the computing stream, and with `host` the host too, wait for all reductions; let go of what was held."""


class DeviceStreams(Streams):
    """The streams of one accelerator, shared by all units on it."""

    queues = True

    def __init__(self, device: torch.device) -> None:
        module: Any = torch.get_device_module(device)
        self._computing: Callable[[], Any] = functools.partial(module.current_stream, device)
        self._context: Callable[[Any], AbstractContextManager[Any]] = module.stream
        # Ahead of the computing stream, which waits for both.
        self._unshard = module.Stream(device, priority=-1)
        self._reduce = module.Stream(device, priority=-1)
        self._frees: deque[Any] = deque()
        self._held: deque[tuple[Tensor, Any]] = deque()

    def unsharding(self) -> AbstractContextManager[Any]:
        """See Streams."""
        return self._context(self._unshard)

    def reducing(self) -> AbstractContextManager[Any]:
        """See Streams."""
        return self._context(self._reduce)

    def shards_written(self) -> None:
        """See Streams."""
        self._unshard.wait_stream(self._computing())

    def moment(self) -> Any:
        """See Streams."""
        return self._computing().record_event()

    def gather_after(self, moment: Any) -> None:
        """See Streams."""
        self._unshard.wait_event(moment)

    def before_gather(self) -> None:
        """See Streams."""
        while len(self._frees) > 1:
            self._frees.popleft().synchronize()

    def settle(self, gather: Work) -> Work:
        """See Streams."""
        gather.wait()
        return _Event(self._unshard.record_event(), self._computing)

    def before_free(self, tensor: Tensor, *, limited: bool) -> None:
        """See Streams."""
        computing = self._computing()
        tensor.record_stream(computing)
        if limited:
            self._frees.append(computing.record_event())

    def before_collect(self) -> None:
        """See Streams."""
        while len(self._held) >= self.max_held:
            self._computing().wait_event(self._held.popleft()[1])

    def begin_reduction(self, source: Tensor) -> None:
        """See Streams."""
        self._reduce.wait_stream(self._computing())
        self._held.append((source, None))

    def reduction_read(self) -> None:
        """See Streams."""
        source, _ = self._held.pop()
        self._held.append((source, self._reduce.record_event()))

    def end_reductions(self, *, host: bool) -> None:
        """See Streams."""
        self._computing().wait_stream(self._reduce)
        self._held.clear()
        if host:
            self.join_host()

    def join_host(self) -> None:
        """See Streams."""
        self._reduce.synchronize()


class _Event(Done):
    """A moment on one stream that another may wait for."""

    def __init__(self, event: Any, waiting: Callable[[], Any]) -> None:
        self._event, self._waiting = event, waiting

    def wait(self) -> bool:
        """Let the stream that is in use now wait for it."""
        self._waiting().wait_event(self._event)
        return True


_CPU = Streams()


@functools.cache
def streams_of(device: torch.device) -> Streams:
    """The streams of a device, made when first asked for."""
    return _CPU if device.type in ("cpu", "meta") else DeviceStreams(device)


def on_stream(hook: Callable[[Tensor], None], stream: Any) -> Callable[[Tensor], None]:
    """`hook`, called on a stream of the user's, which the current one waits for."""

    def on_stream(reduced: Tensor) -> None:
        module: Any = torch.get_device_module(reduced.device)
        current = module.current_stream()
        stream.wait_stream(current)
        with module.stream(stream):
            hook(reduced)
        current.wait_stream(stream)

    return on_stream
