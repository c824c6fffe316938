"""The user's modules under their own names, without wrappers: FSDP, DistributedDataParallel, torch.compile, checkpointing."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from crossframe import keras_models
from crossframe.errors import UsageError
from crossframe.keras_models import is_keras
from crossframe.state import COMPILED, WRAPPERS, canonical_name
from torch_backend.compat._torch_classes import derives_from_torch

_DDP = "DistributedDataParallel"
_SHARDED = "FSDPModule"
_FABRIC = "_FabricModule"
LARGEST_IN_FULL = 1 << 20
"""The number of elements up to which a buffer is recorded in full, and one of integers at all."""
_NUMBERS = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
)


@dataclass(frozen=True)
class NamedModule:
    """A module by its canonical name.

    Attributes:
        compiled: whether it is inside a compiled module, in which hooks do not run.
    """

    name: str
    module: nn.Module
    compiled: bool


def named_modules(
    model: nn.Module, *, every_name: bool = False, without: Iterable[nn.Module] = ()
) -> Iterator[NamedModule]:
    """All modules by canonical name, outer ones first; a wrapper and its wrapped module share a name.

    Args:
        every_name: modules that are registered several times, each time.
        without: modules that are left out with all that is inside of them.
    """
    yield from _places(model, "", False, None if every_name else set(without))


def _places(module: nn.Module, name: str, compiled: bool, seen: set[nn.Module] | None) -> Iterator[NamedModule]:
    if seen is not None:
        if module in seen:
            return
        seen.add(module)
    yield NamedModule(name, module, compiled)
    compiled = compiled or is_compiled(module)
    for attribute, child in children_of(module).items():
        if child is not None:
            yield from _places(child, child_name(module, name, attribute), compiled, seen)


def inner_modules(module: nn.Module) -> Iterator[nn.Module]:
    """A module and all modules inside of it, each once."""
    return (place.module for place in named_modules(module))


def named_buffers(
    model: nn.Module, *, without: Iterable[nn.Module] = (), params: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """All buffers by canonical name, each once, of a dtype that can be recorded: numbers, and not on the meta device.

    Args:
        without: modules that are left out with all that is inside of them.
        params: parameters too.
    """
    seen: set[int] = set()
    for place in named_modules(model, without=without):
        own = buffers_of(place.module)
        for attribute, value in ({**params_of(place.module), **own} if params else own).items():
            if value is None or id(value) in seen or not _has_values(value):
                continue
            seen.add(id(value))
            is_small = value.is_floating_point() or value.numel() <= LARGEST_IN_FULL  # integers become float64
            if (value.dtype.is_complex or value.dtype in _NUMBERS) and is_small:
                yield (f"{place.name}.{attribute}" if place.name else attribute), value


def children_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """The modules right inside of a module, by attribute; of Keras, which registers only some of them with torch, by name."""
    return keras_models.children_of(module) if is_keras(module) else module._modules


def params_of(module: nn.Module) -> Mapping[str, Tensor | None]:
    """The parameters of a module without those of modules inside of it, by attribute."""
    return _variables_of(module, trained=True) if is_keras(module) else module._parameters


def param_of(module: nn.Module, attribute: str) -> Any:
    """The parameter that a module reads as this attribute, which a wrapper may have made a plain tensor."""
    return params_of(module)[attribute] if is_keras(module) else getattr(module, attribute)


def buffers_of(module: nn.Module) -> Mapping[str, Tensor | None]:
    """The buffers of a module without those of modules inside of it, by attribute."""
    return _variables_of(module, trained=False) if is_keras(module) else module._buffers


def _variables_of(layer: nn.Module, *, trained: bool) -> dict[str, Tensor | None]:
    """The variables of a layer of Keras by name, but for the parameters of a module of torch that it wraps."""
    modules = [child for child in children_of(layer).values() if child is not None and not is_keras(child)]
    wrapped = {id(param) for module in modules for param in module.parameters()}
    variables = keras_models.variables_of(layer, trained=trained)
    found = {name: tensor_of(variable) for name, variable in variables.items()}
    return {name: tensor for name, tensor in found.items() if id(tensor) not in wrapped}


def tensor_of(variable: Any) -> Any:
    """The tensor of a variable of Keras, whose `value` is cast in layers that compute in another dtype."""
    return variable._value


def _has_values(value: Tensor) -> bool:
    """Whether a tensor is dense, in memory, and of a class whose values can be read: not lazy, sparse, nested or quantised."""
    if is_lazy(value) or value.is_meta or value.layout is not torch.strided:
        return False
    if type(value) not in (Tensor, nn.Parameter, nn.Buffer) and not isinstance(value, DTensor):
        return False
    local = value.to_local() if isinstance(value, DTensor) else value
    return value.numel() > 0 and (not local.numel() or local.untyped_storage().nbytes() > 0)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has compiled a module, with all that is inside of it."""
    return COMPILED in module._modules or module._compiled_call_impl is not None


def child_name(module: nn.Module, name: str, attribute: str) -> str:
    """The canonical name of a child of the module of that name."""
    if attribute in WRAPPERS or (attribute == "module" and is_ddp(module)):
        return name
    return f"{name}.{attribute}" if name else attribute


def without_fabric(model: nn.Module) -> nn.Module:
    """The module inside the wrapper that lightning's Fabric puts around a whole model; other modules unchanged.

    The wrapper converts inputs and outputs and calls that module once in each forward. Does not import lightning.
    """
    bases = ((base.__name__, base.__module__.partition(".")[0]) for base in type(model).__mro__)
    if any(name == _FABRIC and package in ("lightning", "lightning_fabric") for name, package in bases):
        return model._forward_module  # type: ignore[return-value]
    return model


def is_ddp(module: nn.Module) -> bool:
    """Whether this is PyTorch's DistributedDataParallel or a subclass."""
    return derives_from_torch(type(module), _DDP)


def is_torch_fsdp2(module: nn.Module) -> bool:
    """Whether PyTorch's fully_shard was called on this module. Does not import its package."""
    return derives_from_torch(type(module), _SHARDED)


def is_torch_fsdp1(module: nn.Module) -> bool:
    """Whether this is torch's FullyShardedDataParallel."""
    return derives_from_torch(type(module), "FullyShardedDataParallel")


def reshard(model: nn.Module) -> bool:
    """Let all units of fully_shard, PyTorch's and ours, register their shards; returns whether there are any.

    After an evaluation the root is left unsharded: its parameters are then not those that the optimizer has.
    """
    units: list[Any] = [each for each in model.modules() if any(c.__name__ == _SHARDED for c in type(each).__mro__)]
    for unit in units:
        unit.reshard()
    return bool(units)


def innermost(model: nn.Module) -> nn.Module:
    """The user's model without wrappers."""
    return [place.module for place in named_modules(model) if not place.name][-1]


def class_name(module: nn.Module) -> str:
    """The name of a module's original class, before fully_shard or TorchScript gave it another one."""
    if isinstance(module, torch.jit.ScriptModule):
        return module.original_name
    for cls in type(module).__mro__:
        sharded = any(base.__name__ == _SHARDED for base in cls.__mro__)
        if not sharded:
            return cls.__name__
    return type(module).__name__


def choose_units(model: nn.Module, units: Any) -> set[str]:
    """The names of the modules that are recorded as units of an unsharded model.

    Args:
        units: names, classes, or an auto_wrap_policy. None: the members of the longest list of modules of one class.

    Raises:
        UsageError: unknown names or an invalid type.
    """
    named = {place.name: place.module for place in named_modules(model)}
    if units is None:
        return _repeated(named)
    if hasattr(units, "overrides") or (callable(units) and not isinstance(units, type)):
        return _by_policy(named, units)
    given = [units] if isinstance(units, str | type) else list(units) if isinstance(units, Collection) else [units]
    texts = {each for each in given if isinstance(each, str)}
    classes = tuple(each for each in given if isinstance(each, type) and issubclass(each, nn.Module))
    if len(texts) + len(classes) < len(set(given)):
        raise UsageError(f"units: expected names or classes of modules, or a wrapping policy, got {units!r}")
    names = {canonical_name(each) for each in texts}
    if unknown := sorted(names - set(named)):
        raise UsageError(f"units: no module is called {unknown[0]!r}; expected names among {sorted(named)[:8]} ...")
    return names | {name for name, module in named.items() if isinstance(module, classes)} - {""}


def _repeated(named: dict[str, nn.Module]) -> set[str]:
    """The members of the longest list of modules, most of them of one class."""
    longest: set[str] = set()
    for name, module in named.items():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        common, number = Counter(type(child) for child in module).most_common(1)[0]
        prefix = f"{name}." if name else ""
        members = {f"{prefix}{key}" for key, child in module._modules.items() if type(child) is common}
        weighty = any(True for child in module.children() if type(child) is common for _ in child.parameters())
        if weighty and number >= 2 and len(members & set(named)) > len(longest):
            longest = members & set(named)
    return longest


def _by_policy(named: dict[str, nn.Module], policy: Any) -> set[str]:
    if hasattr(policy, "overrides"):
        return {name for name, module in named.items() if name and policy.overrides(module) is not None}
    sizes = {name: sum(param.numel() for param in module.parameters()) for name, module in named.items()}
    return {
        name
        for name, module in named.items()
        if name and policy(module=module, recurse=False, nonwrapped_numel=sizes[name])
    }


def lacks_forward(module: nn.Module) -> bool:
    """Whether a module only holds others, which are called one by one. A compiled module has the forward of its instance, a
    TorchScript module a descriptor that finds it."""
    return getattr_static(type(module), "forward") is nn.Module.forward and "forward" not in vars(module)
