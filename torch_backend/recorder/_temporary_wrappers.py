"""Looks past modules that are made around a model for one call, as torchdiffeq does in each `odeint`, and anew for the next."""

import sys
import weakref
from collections.abc import Callable
from traceback import walk_stack
from typing import Any

from torch import nn

from torch_backend.recorder._module_tree import named_modules


class TemporaryWrappers:
    """Modules that were made when there was an optimizer."""

    def __init__(self, has_optimizer: Callable[[], bool]) -> None:
        self._has_optimizer = has_optimizer
        self._late = weakref.WeakSet[nn.Module]()

    def noting(self, own: Any) -> Any:
        """`nn.Module.__init__`, by which modules are noted."""

        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            own(module, *args, **kwargs)
            if self._has_optimizer():
                self._late.add(module)

        return init

    def model_in(self, module: nn.Module) -> nn.Module:
        """The model in such modules, which have nothing else, if a function of the script holds it that holds none of them."""
        found = module
        while found in self._late and (inner := _only_module_in(found)) is not None:
            found = inner
        if found is not module:
            frames = _frames_by_value()
            if frames.get(id(found), -1) > frames.get(id(module), -1):
                return found
        return module


def _only_module_in(module: nn.Module) -> nn.Module | None:
    """The module whose parameters and buffers are all that another one has; None if that one is a known wrapper, such as DDP, in
    which it has the same name."""
    inner = [*module.children()]
    if (
        len(inner) != 1
        or any(True for _ in module.parameters(recurse=False))
        or any(True for _ in module.buffers(recurse=False))
    ):
        return None
    names = {place.module: place.name for place in named_modules(module)}
    return inner[0] if names.get(inner[0]) and any(True for _ in inner[0].parameters()) else None


def _frames_by_value() -> dict[int, int]:
    """For the id of each value of the script's variables, the number of the outermost frame that has it."""
    frames = (frame for frame, _ in walk_stack(sys._getframe()) if frame.f_globals.get("__name__") == "__main__")
    return {id(value): i for i, frame in enumerate(frames) for value in frame.f_locals.values()}
