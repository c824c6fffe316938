"""The recording of a script as the functions that replace those of JAX and optax see it: a session, and its collector."""

import functools
import types
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from jax_backend.recorder._taps import Collector, Detail, Tap, current, innermost

inside_update: ContextVar[bool] = ContextVar("inside_update", default=False)
"""Whether an update of an optimizer runs, whose own gradients and updates have no taps."""


seen_updates: ContextVar[list[str] | None] = ContextVar("seen_updates", default=None)
"""Functions of optimizers that a trial trace calls; None where none is on."""


class JittedFunction:
    """A jitted or mapped function, with a program for each `Detail`.

    Args:
        fun: the user's function.
        plain: what JAX makes of it.
        donated: the options that name arguments to donate.

    Attributes:
        plans: what a session knows of it.
        donates: whether it may donate arguments.
    """

    def __init__(self, fun: Callable, plain: Any, donated: Iterable[Any]) -> None:
        self._fun, self._plain = fun, plain
        self.plans: dict[Any, Any] = {}
        self.donates = any(each not in (None, ()) for each in donated)
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, as the script does."""
        raise NotImplementedError

    def program(self, detail: Detail) -> Any:
        """A jitted function that returns the user's results and a `Packed`. Only that of the least detail, which the script uses,
        donates arguments."""
        raise NotImplementedError

    def by_rank(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """Those of the flattened arguments that have a leading dim of ranks."""
        return frozenset()

    def results_by_rank(self, result: Any) -> frozenset[int]:
        """Those of the flattened results that have a leading dim of ranks."""
        return frozenset()

    def __get__(self, owner: Any, _: Any = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


class Differentiated(Protocol):
    """A function that is differentiated."""

    @property
    def fun(self) -> Callable:
        """The user's function."""
        ...

    @property
    def is_vjp(self) -> bool:
        """Whether the value of the function may be other than a scalar, so that no gradient is taken."""
        ...

    def takes_gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the value of the function is a scalar."""
        ...

    def plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of JAX, and its tap without the interior; None: no gradient is taken."""

    def with_interior(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same, with the interior."""

    def diff(self, args: tuple[Any, ...]) -> Any:
        """The arguments that are differentiated."""


class Session(Protocol):
    """The recording of a script, which replaced functions call outside of all traces."""

    perturbed_run: int
    forward_only: bool

    @property
    def has_gradients(self) -> bool:
        """Whether gradients were taken so far."""
        ...

    def begins_call(self, params: Mapping[str, Any]) -> Detail:
        """A model with these parameters is called outside of jit; returns what is wanted of it."""
        ...

    def call(self, jitted: JittedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a jitted function."""

    def gradient(self, step: Differentiated, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a differentiated function."""

    def replaced(self, tree: Any) -> Any:
        """The arguments of a call, with other initial parameters in a perturbed run."""

    def shifted(self, updates: Any) -> Any:
        """Updates that lead from a script's own initial parameters to where those of a perturbed run lead, for scripts that add
        them by a function of their own."""

    def follows(self, jitted: JittedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a jitted function takes gradients or updates parameters."""
        ...

    def compiled(self) -> None:
        """Such a function is called that was compiled ahead of time, with static arguments or options of the compiler."""

    def mapped(self) -> None:
        """A function of `jax.pmap` that cannot be followed has been called."""

    def hidden(self, what: str) -> None:
        """A function of an optimizer was traced where its values cannot leave."""

    def first_of(self, num_models: int) -> None:
        """`jax.vmap` trains so many models, of which the first is followed."""

    def tapped(self, taps: list[Tap]) -> None:
        """Taps of the program that runs."""


class Root(Collector):
    """The collector of the program that runs."""

    def __init__(self, session: Session) -> None:
        super().__init__(None, Detail.LOSSES)
        self.session = session

    def add(self, taps: Any) -> None:
        """Pass taps on at once."""
        self.session.tapped(list(taps))


def root() -> Root | None:
    """The collector of the program that runs; None if none is recorded."""
    found: Collector | None = innermost()
    while found is not None and not isinstance(found, Root):
        found = found.above
    return found


def following() -> Collector | None:
    """The collector of the current trace, if functions that are called in it may have taps."""
    collector = current()
    if collector is None or isinstance(collector, Root):
        return None
    return None if collector.in_loss and collector.detail is not Detail.INTERIOR else collector
