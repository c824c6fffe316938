"""Finds where parameters are registered in a module tree, and the unit that owns each."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from crossframe.dtypes import FLOATING
from crossframe.errors import LayoutError
from crossframe.params import ParamSpec
from crossframe.state import state_key
from crossframe.units import Order, Slot, assign_units
from torch_backend.compat._dtypes import dtype_name


@dataclass(frozen=True)
class OwnedParam:
    """A parameter of a unit, the object itself, and every (module, attribute) that it is registered under. Of a DTensor (tensor
    parallelism) the spec is that of this rank's part."""

    spec: ParamSpec
    param: nn.Parameter
    registrations: tuple[tuple[nn.Module, str], ...]


def owned_params(
    root: nn.Module,
    is_unit: Callable[[nn.Module], bool],
    order: Order,
    ignored: Collection[nn.Parameter] = (),
    *,
    ignoring: str,
) -> list[OwnedParam]:
    """The parameters that the unit at `root` owns: all below it that no inner unit owns, in the face's order (R01).

    Names are relative to `root`. Parameters in `ignored` belong to no unit.

    Args:
        ignoring: the argument by which a user of this interface passes `ignored`, for messages.

    Raises:
        UnitError: a parameter that an inner unit shares with this one.
        LayoutError: a parameter of a dtype in which nothing can be trained.
    """
    modules: list[str] = []
    units: set[str] = set()
    # Every registration, with the module's name; and the parameters that are registered outside of inner units.
    found: list[tuple[str, nn.Module, str, nn.Parameter]] = []
    own: set[int] = set()
    inner_units: dict[nn.Module, str] = {}
    left_out = {id(param) for param in ignored}
    again: list[str] = []  # further names of inner units, below which everything has been seen
    # The inner unit that the walk is in, and the one that each of their parameters was seen in first: units of several modules
    # may share parameters between these.
    inside, seen_in = "", {}
    for raw_name, module in root.named_modules(remove_duplicate=False):
        name = state_key(raw_name)
        if again and any(name == other or name.startswith(other + ".") for other in again):
            continue
        if module is not root and is_unit(module) and inner_units.setdefault(module, name) != name:
            again.append(name)
            continue
        if not modules or name != modules[-1]:
            modules.append(name)
        if inside and not name.startswith(f"{inside}."):
            inside = ""
        if module in inner_units:
            units.add(name)
            inside = inside or name
        for attribute, param in module._parameters.items():
            if param is None or id(param) in left_out:
                continue
            if not inside:
                own.add(id(param))
            elif seen_in.setdefault(id(param), inside) != inside:
                continue
            found.append((name, module, attribute, param))

    slots: list[Slot] = []
    registrations: dict[int, list[tuple[nn.Module, str]]] = {}
    params: dict[str, nn.Parameter] = {}
    for name, module, attribute, param in found:
        if id(param) not in own:
            continue
        dtype = dtype_name(param.dtype)
        slot = Slot(name, attribute, id(param), tuple(local_of(param).shape), dtype, param.requires_grad)
        if dtype not in FLOATING:
            raise LayoutError(
                f"parameter {slot.name!r} is {dtype!r}: expected one of {', '.join(FLOATING)}; pass it in {ignoring}, or "
                "register it as a buffer"
            )
        slots.append(slot)
        params.setdefault(slot.name, param)
        places = registrations.setdefault(id(param), [])
        if (module, attribute) not in places:
            places.append((module, attribute))
    unit = next((unit for unit in assign_units(modules, slots, units, order) if not unit.name), None)
    return [
        OwnedParam(spec, params[spec.name], tuple(registrations[id(params[spec.name])]))
        for spec in (unit.params if unit else ())
    ]


def local_of(param: Tensor) -> Tensor:
    """What this rank has of a parameter under tensor parallelism; of others, the parameter itself."""
    return param._local_tensor if isinstance(param, DTensor) else param
