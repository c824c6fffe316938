"""Assigns parameters to units (R01) by their names.

A backend lists its *slots*: every registration of a parameter as (module, attribute), with an identity that is the same for all
registrations of one parameter. A parameter belongs to the nearest enclosing unit of its first slot.
"""

import functools
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from crossframe.errors import UnitError
from crossframe.params import ParamSpec


class Order(Enum):
    """The order of parameters in a unit: PRE_ORDER in FSDP1, POST_ORDER in FSDP2 (R01)."""

    PRE_ORDER = "pre_order"
    POST_ORDER = "post_order"


class Slot(NamedTuple):
    """A registration of a parameter: attribute `attribute` of module `module` ("" for the root)."""

    module: str
    attribute: str
    identity: Hashable
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = True

    @property
    def name(self) -> str:
        """The full name of the parameter in this registration."""
        return f"{self.module}.{self.attribute}" if self.module else self.attribute


@dataclass(frozen=True)
class UnitSpec:
    """A unit: the name of its module and its parameters in order."""

    name: str
    params: tuple[ParamSpec, ...]


def enclosing_unit(module: str, unit_names: Container[str]) -> str:
    """The nearest unit at or above a module; the root "" is always a unit.

    >>> enclosing_unit("blocks.1.mlp", frozenset({"", "blocks.1"}))
    'blocks.1'
    """
    while module and module not in unit_names:
        module = module.rpartition(".")[0]
    return module


def post_order(modules: Sequence[str]) -> list[str]:
    """Sort module names, given in pre-order, into depth-first post-order.

    >>> post_order(["", "a", "a.x", "b"])
    ['a.x', 'a', 'b', '']
    """
    done: list[str] = []
    open_modules: list[str] = []
    for module in modules:
        while open_modules and not _inside(module, open_modules[-1]):
            done.append(open_modules.pop())
        open_modules.append(module)
    return done + open_modules[::-1]


def _inside(module: str, ancestor: str) -> bool:
    return not ancestor or module.startswith(ancestor + ".")


def assign_units(
    modules: Sequence[str], slots: Iterable[Slot], unit_names: Iterable[str], order: Order = Order.PRE_ORDER
) -> tuple[UnitSpec, ...]:
    """The units of a model, in module pre-order, without units that own no parameter.

    Args:
        modules: every module name in pre-order, "" first.
        slots: every registration, in the order of `modules` and of registration in each module.
        unit_names: names of the modules that are units; the root is always a unit.

    Raises:
        UnitError: a unit is not a module, or two units share a parameter.
    """
    known = set(modules)
    units = frozenset(unit_names) | {""}
    if missing := sorted(units - known):
        raise UnitError(f"units {missing} are not modules of this model: expected names among {sorted(known)[:8]} ...")
    walk = {name: i for i, name in enumerate(modules)}
    in_tree = sorted(slots, key=lambda slot: walk[slot.module])
    specs: dict[Hashable, ParamSpec] = {}
    owners: dict[Hashable, str] = {}
    for slot in in_tree:
        owner = enclosing_unit(slot.module, units)
        if slot.identity not in specs:
            specs[slot.identity] = _param_spec(slot.name, slot.shape, slot.dtype, (), slot.requires_grad)
            owners[slot.identity] = owner
            continue
        first = specs[slot.identity]
        if owner != owners[slot.identity]:
            raise UnitError(
                f"parameter {first.name!r} of unit {owners[slot.identity]!r} is shared with {slot.name!r} of unit "
                f"{owner!r}: a parameter lives in one unit; make both modules part of one unit"
            )
        specs[slot.identity] = replace(first, aliases=(*first.aliases, slot.name))
    # A shared parameter has the name of its first registration in pre-order, and the position of its first one in `order`.
    if order is Order.POST_ORDER:
        walk = {name: i for i, name in enumerate(post_order(modules))}
    owned: dict[str, list[ParamSpec]] = {name: [] for name in modules if name in units}
    for identity in dict.fromkeys(slot.identity for slot in sorted(in_tree, key=lambda slot: walk[slot.module])):
        owned[owners[identity]].append(specs[identity])
    return tuple(UnitSpec(name, tuple(params)) for name, params in owned.items() if params)


# The blocks of a large model have parameters of the same relative names and shapes, so their specs are shared.
_param_spec = functools.lru_cache(maxsize=1024, typed=True)(ParamSpec)
