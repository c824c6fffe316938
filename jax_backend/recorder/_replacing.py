"""Replaces an attribute of a module or a class for a while."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replacing(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A context with another attribute of a module or a class."""
    own = inspect.getattr_static(owner, name)
    type.__setattr__(owner, name, value) if isinstance(owner, type) else setattr(owner, name, value)
    try:
        yield
    finally:
        type.__setattr__(owner, name, own) if isinstance(owner, type) else setattr(owner, name, own)
