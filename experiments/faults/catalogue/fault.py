"""What a fault is: a small wrong change, and the answer that a comparison must give."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from crossframe.errors import UsageError
from crossframe.replacing import replacing

TORCH, JAX = "torch", "jax"
ALL_DTYPES = ("float64", "float32", "bfloat16")
TELLABLE = ("float64", "float32")
"""For a fault that changes a number by no more than bfloat16 itself rounds it: there nothing can tell the two apart."""


@dataclass(frozen=True)
class Answer:
    """What a comparison must say of a fault. None: whatever it says.

    Attributes:
        phase, event: of the quantity in which the fault shows first, in the order of causes, by the names that the verdict has
            for them (a reduction as a whole is "reduce_scatter"); "" of runs that cannot be compared.
        step: the first step at which it shows.
        unit: where the fault sits in one place, its unit; None where it sits in several at once.
        parameter: the parameter, or of an activation the module.
        rank: where one rank alone is touched.
        signature: what it looks like (`crossframe.verdict.diagnosis`); None where no signature describes it.
        verdict: "bug", or "incomparable".
    """

    phase: str
    event: str
    step: int = 0
    unit: str | None = None
    parameter: str | None = None
    rank: int | None = None
    signature: str | None = None
    verdict: str = "bug"


def other_batches() -> Answer:
    """The answer to runs that were not fed the same."""
    return Answer("", "", signature="other_batches", verdict="incomparable")


@dataclass(frozen=True)
class Fault:
    """A wrong change that can be put into a run.

    Attributes:
        name: what the command line calls it.
        description: what is wrong.
        family: where it lies: "core", "torch engine", "JAX engine", "model", "optimizer", "data", "checkpoint".
        frameworks: in which runs it can be put; the first is the one that the catalogue puts it in.
        answer: what a comparison with a clean run must say.
        active: a context in which the fault is in effect, in the process that trains.
        source: "owner/repo#number" of an issue or pull request that tells of it; "" where none is known.
        run: what the run needs that differs from the catalogue's usual one, fields of RunSettings.
        dtypes: those in which it is more than rounding.
    """

    name: str
    description: str
    family: str
    frameworks: tuple[str, ...]
    answer: Answer
    active: Callable[[], AbstractContextManager[None]]
    source: str = ""
    run: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ALL_DTYPES


class Family:
    """Faults of one kind, in the order in which they are written down."""

    def __init__(self, name: str, *frameworks: str) -> None:
        self.name, self.frameworks = name, frameworks
        self.faults: list[Fault] = []

    def fault(
        self,
        description: str,
        answer: Answer,
        *,
        source: str = "",
        within: tuple[str, ...] = (),
        dtypes: tuple[str, ...] = ALL_DTYPES,
        **run: Any,
    ) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Iterator[None]]]:
        """Make a fault of a function that yields once, with the fault in effect; it is called as the function is.

        Args:
            within: the frameworks, where they are not the family's.
            run: fields of RunSettings.
        """

        def add(function: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
            frameworks = within or self.frameworks
            active = contextmanager(function)
            name = function.__name__
            self.faults.append(
                Fault(name, description, self.name, frameworks, answer, active, source, dict(run), dtypes)
            )
            return function

        return add


def with_method(module: str, name: str, method: str, new: Callable[..., Any]) -> Iterator[None]:
    """A class of a model, of `experiments.models`, has another method: for a fault to yield from."""
    with replacing(getattr(import_module(f"experiments.models.{module}"), name), method, new):
        yield


def each_made(module: str, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """`change` is done to each instance of a class of a model once it is made: for a fault to yield from."""
    right = getattr(import_module(f"experiments.models.{module}"), name).__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        change(self)

    yield from with_method(module, name, "__init__", init)


def check_fault(faults: Mapping[str, Fault], name: str, framework: str = "") -> None:
    """Raise UsageError unless this is a fault's name or empty; one that a run in that framework can have, where it is named."""
    if name and name not in faults:
        close = get_close_matches(name, faults, n=3) or [next(iter(faults))]
        raise UsageError(
            f"fault: unknown fault {name!r}: expected one of {len(faults)}, for instance {', '.join(close)}; "
            "python -m experiments faults --list names all"
        )
    if name and framework and framework not in faults[name].frameworks:
        others = " or ".join(faults[name].frameworks)
        raise UsageError(f"fault: {name} is a fault in {others}, not in {framework}; pass --fault-in {others}")
