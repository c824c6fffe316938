"""Applies variables of JAX that a script sets in `os.environ` before it imports JAX, which the recorder has imported already."""

import builtins
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

_READ_SETTINGS = frozenset({"jax", "jaxlib", "optax", "flax", "equinox", "chex", "orbax"})
"""Packages that import JAX, which then reads its settings."""
_TRUE, _FALSE = frozenset({"y", "yes", "t", "true", "on", "1"}), frozenset({"n", "no", "f", "false", "off", "0"})


@contextmanager
def settings_of_script() -> Iterator[None]:
    """A context in which the first import of JAX applies the variables that have changed since its beginning."""
    before, own = _variables(), builtins.__import__
    with ExitStack() as stack:

        def imports(name: str, *args: Any, **kwargs: Any) -> Any:
            if name.partition(".")[0] in _READ_SETTINGS and builtins.__import__ is imports:
                stack.close()
                for variable, text in _variables().items():
                    if before.get(variable) != text:
                        _apply(variable.lower(), text)
            return own(name, *args, **kwargs)

        builtins.__import__ = imports
        stack.callback(setattr, builtins, "__import__", own)
        yield


def _variables() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name.startswith("JAX_")}


def _apply(setting: str, text: str) -> None:
    known = getattr(jax.config, setting, None)
    value: Any = text
    if text.lower() in _TRUE | _FALSE and isinstance(known, bool):
        value = text.lower() in _TRUE
    elif isinstance(known, int):
        value = int(text)
    if hasattr(jax.config, setting):
        jax.config.update(setting, value)
