"""Replaces an attribute of a module or a class for a while."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def replacing(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A context with another attribute of a module or a class; of a module it may be one that its `__getattr__` makes."""
    own = inspect.getattr_static(owner, name, _MISSING)
    type.__setattr__(owner, name, value) if isinstance(owner, type) else setattr(owner, name, value)
    try:
        yield
    finally:
        if own is _MISSING:
            delattr(owner, name)
        else:
            type.__setattr__(owner, name, own) if isinstance(owner, type) else setattr(owner, name, own)
