"""Finds where parameters are registered in a module tree, and the unit that owns each."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from crossframe.errors import LayoutError
from crossframe.params import ParamSpec
from crossframe.state import state_key
from crossframe.unit_assignment import Order, Slot, assign_units
from torch_backend.compat._dtypes import dtype_name


@dataclass(frozen=True)
class OwnedParam:
    """A parameter of a unit with all of its registrations (module, attribute). The spec of a DTensor (tensor parallelism) is that
    of its local tensor."""

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
    dtypes: Sequence[str],
) -> list[OwnedParam]:
    """The parameters that the unit at `root` owns: all parameters below it, except those of inner units, in the order of the API
    (R01).

    Names are relative to `root`. Parameters in `ignored` belong to no unit.

    Args:
        ignoring: the name of the API's argument for `ignored`, for messages.
        dtypes: that parameters may have.

    Raises:
        UnitError: a parameter that is shared with an inner unit.
        LayoutError: a parameter with a dtype that is not trainable.
    """
    modules: list[str] = []
    units: set[str] = set()
    # All registrations with module names, and the parameters that are registered outside of inner units.
    found: list[tuple[str, nn.Module, str, nn.Parameter]] = []
    own: set[int] = set()
    inner_units: dict[nn.Module, str] = {}
    left_out = {id(param) for param in ignored}
    again: list[str] = []  # further names of inner units, whose submodules have been visited
    # The current inner unit, and the first inner unit of each parameter: modules of one unit may share parameters.
    inside: str | None = None
    seen_in: dict[int, str] = {}
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
            inside = None
        if module in inner_units:
            units.add(name)
            inside = name if inside is None else inside  # "" if root only wraps the inner unit
        for attribute, param in module._parameters.items():
            if param is None or id(param) in left_out:
                continue
            if inside is None:
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
        if dtype not in dtypes:
            raise LayoutError(
                f"parameter {slot.name!r} is {dtype!r}: expected one of {', '.join(dtypes)}; pass it in {ignoring}, or "
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
    """The local tensor of a DTensor parameter; other parameters unchanged."""
    return param._local_tensor if isinstance(param, DTensor) else param
