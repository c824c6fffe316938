"""Looks past modules that a library makes around a model for one call and anew for the next, as torchdiffeq's `odeint` does."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from torch_backend.recorder._module_tree import named_modules


class TemporaryWrappers:
    """Modules of private classes that were made when there was an optimizer."""

    def __init__(self, has_optimizer: Callable[[], bool]) -> None:
        self._has_optimizer = has_optimizer
        # By id: a module may have a __hash__ that its attributes determine.
        self._made: dict[int, weakref.ref[nn.Module]] = {}

    def noting(self, own: Any) -> Any:
        """`nn.Module.__init__`, by which modules are noted."""

        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            own(module, *args, **kwargs)
            cls = type(module)
            if cls.__name__.startswith("_") and cls.__module__ != "__main__" and self._has_optimizer():
                self._made[id(module)] = weakref.ref(module)

        return init

    def model_in(self, module: nn.Module) -> nn.Module:
        """The model in such modules, which have nothing else."""
        while (ref := self._made.get(id(module))) is not None and ref() is module:
            inner = _only_module_in(module)
            if inner is None:
                break
            module = inner
        return module


def _only_module_in(module: nn.Module) -> nn.Module | None:
    """The module whose parameters and buffers are all that another one has; None if that one is a known wrapper, such as DDP, in
    which it has the same name."""
    inner = [*module.children()]
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    if len(inner) != 1 or own or not any(True for _ in inner[0].parameters()):
        return None
    return inner[0] if any(place.module is inner[0] and place.name for place in named_modules(module)) else None
