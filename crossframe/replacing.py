"""Replaces attributes of modules and classes, and values of context variables, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_MISSING = object()


@contextmanager
def replacing(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A context with another attribute of a module or a class, which may inherit its own, or make it by `__getattr__`.

    >>> import math
    >>> with replacing(math, "pi", 3):
    ...     print(math.pi)
    3
    """
    own = vars(owner).get(name, _MISSING)
    # A metaclass may refuse to set attributes, as that of equinox does.
    set_attribute, delete = (type.__setattr__, type.__delattr__) if isinstance(owner, type) else (setattr, delattr)
    set_attribute(owner, name, value)
    try:
        yield
    finally:
        if own is _MISSING:
            delete(owner, name)
        else:
            set_attribute(owner, name, own)


@contextmanager
def setting(variable: ContextVar, value: Any) -> Iterator[None]:
    """A context in which a context variable has another value.

    >>> depth = ContextVar("depth", default=0)
    >>> with setting(depth, 1):
    ...     print(depth.get())
    1
    >>> depth.get()
    0
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def subclasses_of(kind: type) -> set[type]:
    """A class with all its subclasses.

    >>> bool in subclasses_of(int), int in subclasses_of(int)
    (True, True)
    """
    # A metaclass may have another `__subclasses__`.
    return {kind}.union(*map(subclasses_of, type.__subclasses__(kind)))
