"""What modules are given and give, as the functions that do so tell it while they are traced.

A model tells by `tell`, or by `jax_backend.nnx.watch`, which makes modules of flax do so. Unless someone listens it costs
nothing.
The order is that of Python's calls. jit sorts the keys of dicts, so what was told travels as a tuple, with its names beside it
as static data.
"""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

INPUT, OUTPUT = "input", "output"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Activations:
    """What was told in one forward.

    Attributes:
        values: in the order of forward.
        names: (module, "input" or "output") of each. Static.
    """

    values: tuple[Any, ...]
    names: tuple[tuple[str, str], ...] = field(metadata={"static": True})


_told: ContextVar[dict[tuple[str, str], Any] | None] = ContextVar("told", default=None)


def tell(module: str, use: str, value: Any) -> None:
    """Say what a module is given or gives. Not from inside a scan, checkpoint or vmap of the model's own, whose arrays cannot
    leave it.

    Args:
        module: its canonical name; "" is the model.
        use: "input" as the module begins, "output" as it ends.
        value: the array; of a pytree its first floating one. Without one nothing is said: tokens are the batch's. Where a module
            runs several times in a forward, the first one counts.
    """
    told = _told.get()
    if told is None or (module, use) in told:
        return
    floating = (leaf for leaf in jax.tree.leaves(value) if _is_floating(leaf))
    if (first := next(floating, None)) is not None:
        told[module, use] = first


_SCOPE = re.compile(r"crossframe_module\[([^\]]*)\]")


def module_scope(module: str) -> AbstractContextManager:
    """A context whose operators belong to a module, as the name stack of their equations says, in backward too.

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
    """What is told while the context lasts, by (module, use)."""
    told: dict[tuple[str, str], Any] = {}
    token = _told.set(told)
    try:
        yield told
    finally:
        _told.reset(token)


def is_anyone_listening() -> bool:
    """Whether what is told is kept."""
    return _told.get() is not None


def _is_floating(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
