"""Observers of the engine: a trace of its events, and access to tensors that exist only within a step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from crossframe.layout import Layout
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


def tell_local_grads(unit: str, layout: Layout, grads: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> None:
    """Tell all observers the full gradients of one bucket on this rank, in the layout's order; None counts as zeros."""
    if observers:
        named = {
            spec.name: torch.zeros_like(leaf) if grad is None else grad
            for spec, leaf, grad in zip(layout.params, leaves, grads, strict=True)
        }
        for observer in observers:
            observer.local_grads(unit, named)
