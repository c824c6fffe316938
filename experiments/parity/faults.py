"""Faults to put in on purpose, to see that they are found."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from crossframe import reduction
from crossframe.errors import UsageError


@dataclass(frozen=True)
class Fault:
    """A small wrong change: what it is, and a context inside which it is in effect."""

    description: str
    active: Callable[[], "Iterator[None]"]


def _sum_gradients() -> Iterator[None]:
    right = reduction.divide_factors
    reduction.divide_factors = lambda num_ranks: reduction.DivideFactors(1.0, 1.0)
    try:
        yield
    finally:
        reduction.divide_factors = right


FAULTS = {"sum_gradients": Fault("gradients are summed over ranks, not averaged", _sum_gradients)}


def check_fault(name: str) -> None:
    """Raise UsageError unless this is a fault's name or empty."""
    if name and name not in FAULTS:
        known = ", ".join(f"{known} ({fault.description})" for known, fault in sorted(FAULTS.items()))
        raise UsageError(f"unknown fault {name!r}: expected one of {known}")


def fault_in_effect(name: str):
    """A context with that fault in effect; with an empty name, nothing."""
    return contextmanager(FAULTS[name].active)() if name else nullcontext()
