"""The modules that a script trains together, each by an optimizer of its own or several by one, as one model: a generator and a
discriminator, or the two generators of a cycle."""

import gc
import sys
from collections.abc import Iterator, Sequence, Set

from torch import nn

from torch_backend.recorder._module_hooks import lacks_forward


class ModelsTogether(nn.Module):
    """Modules that are called one by one, by the names that they have in the script."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def models_together(part: nn.Module, wanted: Set[int], callers: Set[int] = frozenset()) -> nn.Module | None:
    """One model of the modules that have the parameters of all optimizers and no other trained ones.

    Args:
        part: a module that is being called.
        wanted: the ids of the parameters of all optimizers.
        callers: the ids of modules of which a method is being called.

    Returns None if modules do not have all of these parameters, if `part` is in none of the modules, and if it is part of a
    single one that has a forward of its own and does not call the part by a method.
    """
    found = _outermost([each for each in made_modules() if _is_trained(each, wanted)])
    have = {id(param) for each in found for param in each.parameters()}
    if not have >= wanted or not any(one is part for each in found for one in each.modules()):
        return None
    if len(found) == 1:
        return found[0] if lacks_forward(found[0]) or (id(found[0]) in callers and found[0] is not part) else None
    return ModelsTogether(_by_name(found))


def made_modules() -> Iterator[nn.Module]:
    """All modules but those that are being made, or whose __init__ failed, of which nothing can be asked."""
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module) and "_modules" in vars(each):
            yield each


def _is_trained(module: nn.Module, wanted: Set[int]) -> bool:
    """Whether optimizers have parameters of a module, and all that require gradients; frozen ones may be theirs or not."""
    trains = {id(param): param.requires_grad for param in module.parameters()}
    return not wanted.isdisjoint(trains) and wanted >= {each for each, requires_grad in trains.items() if requires_grad}


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that are inside of no other one."""
    inside = {id(one) for each in modules for one in each.modules() if one is not each}
    return [each for each in modules if id(each) not in inside]


def _by_name(modules: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The modules by the variables of the script that hold them, else by their classes; in the order of these names, since that
    in which modules are found is not that in which they were made."""
    variables: dict[int, str] = {}
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        for name, value in frame.f_locals.items():
            held = vars(value) if name == "self" and hasattr(value, "__dict__") else {name: value}
            for inner, module in held.items():
                if isinstance(module, nn.Module) and inner.isidentifier():
                    variables[id(module)] = inner  # of the outermost frame, which is the script's
    found: dict[str, nn.Module] = {}
    for module in modules:
        name = variables.get(id(module), type(module).__name__)
        while name in found:
            name += "_"
        found[name] = module
    return dict(sorted(found.items()))
