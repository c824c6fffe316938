"""Combines the modules and tensors that a script trains, with one optimizer or several, into one model.

Examples are a generator and a discriminator, the two generators of a cycle, and tensors outside of modules: a temperature, an
image, a scene.
"""

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, compress
from traceback import walk_stack
from typing import Any

from torch import Tensor, nn

from crossframe.replacing import subclasses_of
from crossframe.scripts import held_in
from torch_backend.recorder._module_tree import LARGEST_IN_FULL, inner_modules, lacks_forward, named_buffers, reshard

_MOST_BESIDE = 4
"""Modules beside the model are recorded if they have at most this many times its elements."""


class ModelsTogether(nn.Module):
    """Modules that are called one by one, and tensors, by the names that they have in the script."""

    def __init__(self, members: Mapping[str, nn.Module | Tensor]) -> None:
        super().__init__()
        for name, member in members.items():
            if isinstance(member, nn.Module):
                self.add_module(name, member)
            else:
                self._parameters[name] = member  # type: ignore[assignment]  # which is a leaf, and need be no nn.Parameter


def models_together(part: nn.Module | None, wanted: Mapping[int, Tensor], callers: Set[int]) -> nn.Module | None:
    """Combine the modules that have the parameters of all optimizers, and no other trained ones, with the parameters that are in
    no module. If no parameter is in a module, the module that is being called is added.

    Args:
        part: a module that is being called; None: backward begins, and no module has been called.
        wanted: the parameters of all optimizers by their ids.
        callers: the ids of modules of which a method is being called.

    Returns:
        None if a module has some of these parameters and others that no optimizer trains, if `part` is in none of the modules, or
        if it is in a single one that has a forward and does not call it in another method.
    """
    modules = list(made_modules())
    found, loose = _trained_in(modules, wanted)
    if loose and sum(map(reshard, outermost(modules))):  # those that an evaluation has left unsharded
        found, loose = _trained_in(modules, wanted)
    if loose and not _ids_of(modules).isdisjoint(map(id, loose)):
        return None
    if part is not None and not found and next(part.parameters(), None) is not None:
        found = [part]
    if part is not None and not any(one is part for each in found for one in inner_modules(each)):
        return None
    if len(found) == 1 and not loose:
        is_whole = part is None or lacks_forward(found[0]) or (id(found[0]) in callers and found[0] is not part)
        return found[0] if is_whole else None
    return ModelsTogether(_by_name([*found, *loose]))


def _trained_in(modules: Sequence[nn.Module], wanted: Mapping[int, Tensor]) -> tuple[list[nn.Module], list[Tensor]]:
    """The outermost modules that optimizers train, and parameters of optimizers that are in none of these."""
    found = outermost([each for each in modules if _is_trained(each, wanted.keys())])
    have = _ids_of(found)
    return found, [tensor for i, tensor in wanted.items() if i not in have]


def whole_of(part: nn.Module, wanted: Sequence[Set[int]], callers: Set[int]) -> nn.Module | None:
    """The smallest module whose parts the script calls one by one, if this is one of them; None if there is none.

    Modules come first that have no forward of their own, such as an agent with an actor and a critic, or of which a method calls
    the part: another one than forward, or forward itself, as `model.forward(x)`.

    Args:
        wanted: the ids of the parameters of each optimizer, of which the module has all of at least one.
        callers: the ids of modules of which a method is being called.
    """
    found = []
    for each in made_modules():
        if any(one is part for one in each.modules()):
            ids = {id(param) for param in each.parameters()}
            if any(ids >= params for params in wanted):
                found.append((not lacks_forward(each) and id(each) not in callers, len(ids), each))
    return min(found, key=lambda each: each[:2])[2] if found else None


def modules_beside(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The modules that the script's variables hold beside the model, such as a teacher or a loss with state, by variable.

    A module that contains the model is one of them if it has further tensors. Modules much larger than the model, such as a
    frozen backbone, are left out.
    """
    own, variables = [one for model in models for one in inner_modules(model)], _variables()
    most = _MOST_BESIDE * sum(param.numel() for model in models for param in model.parameters())
    named = ((variables[id(each)], each) for each in outermost([*made_modules()]) if id(each) in variables)
    sizes = ((name, each, _numel(named_buffers(each, without=own, params=True))) for name, each in named)
    return dict(sorted((name, each) for name, each, numel in sizes if 0 < numel <= max(most, LARGEST_IN_FULL)))


def _numel(tensors: Iterable[tuple[str, Tensor]]) -> int:
    return sum(tensor.numel() for _, tensor in tensors)


def _ids_of(modules: Sequence[nn.Module]) -> set[int]:
    return {id(param) for each in modules for param in each.parameters()}


def made_modules() -> Iterator[nn.Module]:
    """All modules, except those whose __init__ has not finished or has failed: they have no attributes to read."""
    objects, classes = gc.get_objects(), subclasses_of(nn.Module)
    for each in compress(objects, map(classes.__contains__, map(type, objects))):  # of millions of objects
        if "_modules" in vars(each):
            yield each


def _is_trained(module: nn.Module, wanted: Set[int]) -> bool:
    """Whether optimizers have some parameters of a module, among them all that require gradients. Frozen ones may be missing."""
    trains = {id(param): param.requires_grad for param in module.parameters()}
    return not wanted.isdisjoint(trains) and wanted >= {each for each, requires_grad in trains.items() if requires_grad}


def outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that are inside no other one. Keras keeps a layer's variables in a module that only `modules()` has."""
    inside = {id(one) for each in modules for one in chain(each.modules(), inner_modules(each)) if one is not each}
    return [each for each in modules if id(each) not in inside]


def _by_name(members: Sequence[nn.Module | Tensor]) -> dict[str, nn.Module | Tensor]:
    """Name modules and tensors after the script's variables or attributes that hold them, else modules after their class and
    tensors by number. The names are sorted, since the garbage collector lists modules in any order."""
    variables = _variables()
    found: dict[str, nn.Module | Tensor] = {}
    for i, member in enumerate(members):
        name = variables.get(id(member), type(member).__name__ if isinstance(member, nn.Module) else f"tensor_{i}")
        while name in found:
            name += "_"
        found[name] = member
    return dict(sorted(found.items()))


_OWN = f"{__name__.partition('.')[0]}."


def _variables() -> dict[int, str]:
    """The names of the script's variables and attributes that hold modules or tensors, by the id of the value."""
    variables: dict[int, str] = {}
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_globals.get("__name__", "").startswith(_OWN):
            continue
        for name, value in frame.f_locals.items():
            for inner, held in _held_by(name, value):
                if isinstance(held, nn.Module | Tensor):
                    variables[id(held)] = inner  # of the outermost frame, which is the script's
    return variables


def _held_by(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A variable that is a module or tensor, or else what it holds, with names."""
    if not isinstance(value, nn.Module | Tensor):
        yield from held_in(name, value)
    elif name != "self":
        yield name, value
