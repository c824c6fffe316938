"""Watching the engine: what it did (a trace), and tensors that exist only in the middle of a step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from crossframe.trace import Event


class Observer:
    """Told by the engine what happens, in order. Override what is of interest."""

    def event(self, event: Event) -> None:
        """A collective was issued, or full memory freed."""

    def local_grads(self, unit: str, grads: Mapping[str, Tensor]) -> None:
        """This rank's own gradients of a unit, in full, about to be reduced: canonical names, original shapes."""


class TraceRecorder(Observer):
    """Keeps all events in `events`."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)


# Who is watching. The engine does nothing for observers while this is empty.
observers: list[Observer] = []


@contextmanager
def observe(observer: Observer) -> Iterator[Observer]:
    """Have `observer` told of everything inside the context, whichever units do it."""
    observers.append(observer)
    try:
        yield observer
    finally:
        observers.remove(observer)


@contextmanager
def record_trace() -> Iterator[list[Event]]:
    """Collect the events of everything inside the context."""
    recorder = TraceRecorder()
    with observe(recorder):
        yield recorder.events
