"""Modules and parameters that are not sharded: the arguments `ignored_modules` and `ignored_states`."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from crossframe.errors import UsageError, WrongTypeError

IsUnit = Callable[[nn.Module], bool]
"""Whether a module is already a unit."""


@dataclass(frozen=True)
class Ignored:
    """Modules and parameters that belong to no unit. They are not sharded, moved, cast or synchronized.

    Attributes:
        modules: with their submodules, except units.
        params: parameters of these modules and individually ignored parameters.
    """

    modules: frozenset[nn.Module]
    params: frozenset[nn.Parameter]


def find_ignored(
    root: nn.Module, modules: Iterable[nn.Module] | None, states: Iterable[Any] | None, is_unit: IsUnit
) -> Ignored:
    """Convert the constructor arguments.

    Args:
        modules: the argument `ignored_modules`.
        states: the argument `ignored_states`: modules or parameters.

    Raises:
        UsageError: both are given, a mixture of modules and parameters, other objects, or a unit.
    """
    if modules is not None and states is not None:
        raise UsageError("ignored_modules and ignored_states cannot be combined; pass only ignored_states")
    params: set[nn.Parameter] = set()
    chosen: list[nn.Module] = []
    if states is not None:
        given = _listed("ignored_states", states)
        if all(isinstance(entry, nn.Parameter) for entry in given):
            params.update(given)
        elif all(isinstance(entry, nn.Module) for entry in given):
            chosen = given
        else:
            raise UsageError(
                f"ignored_states: expected parameters alone or modules alone, got {_types(given)}; for both, pass the "
                "parameters of the modules"
            )
    elif modules is not None:
        chosen = _listed("ignored_modules", modules)
        if not all(isinstance(entry, nn.Module) for entry in chosen):
            raise UsageError(f"ignored_modules: expected modules, got {_types(chosen)}")
    for module in chosen:
        if is_unit(module):
            raise UsageError(
                f"ignored_modules: {type(module).__name__} is sharded already; ignore the modules before they are wrapped"
            )
    below = {child for module in chosen for child in module.modules() if not is_unit(child)}
    if root in below:
        warnings.warn(
            f"the module to wrap, a {type(root).__name__}, is itself ignored: none of its parameters will be sharded",
            stacklevel=4,
        )
    # Modules without units below, and parameters that an inner unit ignores, are the user's.
    params.update(param for module in below for param in module.parameters())
    return Ignored(frozenset(below), frozenset(params))


def _listed(name: str, given: Any) -> list[Any]:
    try:
        return list(given)
    except TypeError as error:
        raise WrongTypeError(f"{name}: expected a list of modules, got {type(given).__name__}") from error


def _types(given: list[Any]) -> str:
    return ", ".join(sorted({type(entry).__name__ for entry in given}))
