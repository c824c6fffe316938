"""Observers of the engine: a trace of its events, and access to tensors that exist only within a step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from crossframe.trace import Event


class Observer:
    """Callbacks of the engine's events, in order, which do nothing by default."""

    def event(self, event: Event) -> None:
        """A collective was issued, or unsharded memory was freed."""

    def local_grads(self, unit: str, grads: Mapping[str, Tensor]) -> None:
        """Gradients that autograd delivers for one use of a unit, before anything adds them up: by canonical names, in original
        shapes. A backward through several uses delivers as many."""


class TraceRecorder(Observer):
    """Keeps all events in `events`."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, event: Event) -> None:
        self.events.append(event)


# The active observers. The engine does nothing for them while this is empty.
observers: list[Observer] = []


@contextmanager
def observe(observer: Observer) -> Iterator[Observer]:
    """A context in which `observer` receives the events of all units."""
    observers.append(observer)
    try:
        yield observer
    finally:
        observers.remove(observer)


@contextmanager
def record_trace() -> Iterator[list[Event]]:
    """A context that collects the events of all units."""
    recorder = TraceRecorder()
    with observe(recorder):
        yield recorder.events


def tell_local_grads(unit: str, grads: Mapping[str, Tensor]) -> None:
    """Pass gradients of a unit to all observers."""
    for observer in observers:
        observer.local_grads(unit, grads)
