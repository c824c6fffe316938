"""The inputs and outputs of modules, recorded while a model is traced.

A model calls `tell`, or `jax_backend.nnx.watch`, which makes modules of flax call it. It costs nothing unless a recorder listens.
The order is that of Python's calls. jit sorts the keys of dicts, so values are a tuple, with their names as static data.
"""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax

from crossframe.recording.module_calls import next_call
from crossframe.replacing import setting
from jax_backend.tree import is_floating

INPUT, OUTPUT = "input", "output"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Activations:
    """The activations of one forward.

    Attributes:
        values: the arrays in the order of forward.
        names: for each array, (module, "input" or "output"). Static.
    """

    values: tuple[Any, ...]
    names: tuple[tuple[str, str], ...] = field(metadata={"static": True})


_reported: ContextVar[dict[tuple[str, str], Any] | None] = ContextVar("reported", default=None)


def tell(module: str, use: str, value: Any) -> None:
    """Record a module's input or output. Not to be called inside a scan, checkpoint or vmap of the model, whose arrays cannot
    leave it.

    Args:
        module: its canonical name; "" is the model.
        use: "input" as the module begins, "output" as it ends.
        value: an array, or a pytree whose first floating array is recorded; tokens, which have none, are not. A further call of
            the module in a forward has a name of its own (`crossframe.recording.module_calls`).
    """
    if (reported := _reported.get()) is None:
        return
    floating = (leaf for leaf in jax.tree.leaves(value) if is_floating(leaf))
    call = next_call(module, lambda call: (call, use) in reported)
    if (first := next(floating, None)) is not None and call is not None:
        reported[call, use] = first


_SCOPE = re.compile(r"crossframe_module\[([^\]]*)\]")


def module_scope(module: str) -> AbstractContextManager:
    """A context whose operators belong to a module, by the name stack of their equations, in backward too.

    Args:
        module: its canonical name.
    """
    return jax.named_scope(f"crossframe_module[{module}]")


def module_in(scopes: str) -> str:
    """The innermost module in a name stack; "" if there is none.

    >>> module_in("transpose(jvp(crossframe_module[]))/crossframe_module[blocks.0]/mul")
    'blocks.0'
    """
    found = _SCOPE.findall(scopes)
    return found[-1] if found else ""


@contextmanager
def listening() -> Iterator[dict[tuple[str, str], Any]]:
    """The values that are reported inside the context, by (module, use)."""
    reported: dict[tuple[str, str], Any] = {}
    with setting(_reported, reported):
        yield reported


def is_anyone_listening() -> bool:
    """Whether reported values are kept."""
    return _reported.get() is not None
