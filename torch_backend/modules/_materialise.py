"""Prepares a module for sharding: materialises its parameters (`param_init_fn`), moves them, and makes them equal on all ranks.

`torch_backend.engine._deferred_init` initialises units that were sharded on the meta device.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crossframe.errors import InitialisationError, UsageError
from crossframe.state import state_key
from torch_backend.modules._ignored import Ignored, IsUnit
from torch_backend.modules._owned_params import local_of
from torch_backend.ranks._collectives import UnitMesh
from torch_backend.ranks._consensus import agree


def own_modules(root: nn.Module, is_unit: IsUnit, ignored: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The modules whose parameters the unit at `root` owns, breadth first, without inner units and ignored modules."""
    waiting, seen = deque([root]), {root}
    while waiting:
        module = waiting.popleft()
        yield module
        for child in module.children():
            if child not in seen and not is_unit(child) and child not in ignored:
                seen.add(child)
                waiting.append(child)


def prepare(
    root: nn.Module,
    is_unit: IsUnit,
    ignored: Ignored,
    *,
    process_group: dist.ProcessGroup,
    device_id: int | torch.device | None,
    param_init_fn: Callable[[nn.Module], None] | None,
) -> torch.device:
    """Materialize a unit's modules and, with `device_id`, move them there. Returns the compute device."""
    left_out = {id(param) for param in ignored.params}
    modules = own_modules(root, is_unit, ignored.modules)
    params = (param for module in modules for param in module.parameters(recurse=False) if id(param) not in left_out)
    device = compute_device(device_id, next(params, None), process_group)
    materialise(root, is_unit, ignored, param_init_fn=param_init_fn, device=device)
    if device_id is not None:
        move_to(root, is_unit, ignored, device)
    return device


def materialise(
    root: nn.Module,
    is_unit: IsUnit,
    ignored: Ignored,
    *,
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
) -> None:
    """Allocate and initialize a unit's modules if any tensor is on the meta device (R38).

    Args:
        param_init_fn: called with each module of the unit to materialize its own parameters and buffers. None: each such module
            is moved to `device` with `to_empty`, and its `reset_parameters()` is called.

    Raises:
        InitialisationError: tensors that are still on the meta device, by name, or a module without `reset_parameters`.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise UsageError(f"param_init_fn: expected a function of a module, got {param_init_fn!r}")
    modules = list(own_modules(root, is_unit, ignored.modules))
    if not any(_on_meta(module, ignored.params) for module in modules):
        return
    names = {module: name for name, module in root.named_modules()}
    for module in modules:
        if param_init_fn is not None:
            param_init_fn(module)
        elif any(True for _ in _own_tensors(module)):
            _reset(module, names[module], device, ignored.params)
    left = [f"{names[module]}.{name}".lstrip(".") for module in modules for name in _on_meta(module, ignored.params)]
    if left:
        raise InitialisationError(
            f"still on the meta device after {type(root).__name__} was initialised: {', '.join(left)}; param_init_fn "
            "must make every parameter and buffer of the module that it is given real (module.to_empty(device=..., "
            "recurse=False), then set the values)"
        )


def _reset(module: nn.Module, name: str, device: torch.device, ignored: Collection[nn.Parameter]) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise InitialisationError(
            f"module {name!r} ({type(module).__name__}) is on the meta device and has no reset_parameters() to give its "
            f"{', '.join(_on_meta(module, ())) or 'tensors'} values; write one, or pass param_init_fn"
        )
    # to_empty and reset_parameters know no ignored parameters.
    kept = [(param, param.data) for param in module.parameters(recurse=False) if param in ignored and not param.is_meta]
    with torch.no_grad():
        module.to_empty(device=device, recurse=False)
        reset()
    for param, data in kept:
        param.data = data


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _on_meta(module: nn.Module, ignored_params: Collection[nn.Parameter]) -> list[str]:
    left_out = {id(param) for param in ignored_params}
    return [name for name, tensor in _own_tensors(module) if tensor.is_meta and id(tensor) not in left_out]


def move_to(
    root: nn.Module,
    is_unit: IsUnit,
    ignored: Ignored,
    device: torch.device,
) -> None:
    """Move a unit's CPU parameters and buffers to `device`, in place."""
    left_out = {id(param) for param in ignored.params}
    for module in own_modules(root, is_unit, ignored.modules):
        for _, tensor in _own_tensors(module):
            if tensor.device.type == "cpu" != device.type and id(tensor) not in left_out:
                with torch.no_grad():
                    tensor.data = tensor.to(device)
                    if tensor.grad is not None:
                        tensor.grad.data = tensor.grad.to(device)


def move_to_mesh(root: nn.Module, is_unit: IsUnit, ignored: Collection[nn.Parameter], device: torch.device) -> None:
    """Move a unit's parameters and buffers to the device of its mesh, in place, except those on the meta device."""
    left_out = {id(param) for param in ignored}
    for module in own_modules(root, is_unit, ()):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None or tensor.device == device:
                continue
            if not tensor.is_meta and id(tensor) not in left_out:
                with torch.no_grad():
                    tensor.data = tensor.to(device)


def sync_states(root: nn.Module, is_unit: IsUnit, ignored: Ignored, mesh: UnitMesh, synced: Collection[int]) -> None:
    """Broadcast the unit's parameters and all buffers below `root` from the first rank.

    Broadcasts over replicas and then within each shard group. The ranks first check that their tensors agree, because a
    mismatched broadcast would hang.

    Args:
        synced: ids of buffers that inner units have synchronized.

    Raises:
        AgreementError: ranks have different parameters or buffers.
    """
    left_out = {id(tensor) for tensor in ignored.params} | set(synced)
    left_out.update(id(buffer) for module in ignored.modules for buffer in module.buffers(recurse=False))
    own = {id(module) for module in own_modules(root, is_unit, ignored.modules)}
    named: dict[str, Tensor] = {}
    for name, module in root.named_modules():
        tensors = _own_tensors(module) if id(module) in own else module.named_buffers(recurse=False)
        for attribute, tensor in tensors:
            if id(tensor) not in left_out:
                left_out.add(id(tensor))
                named[state_key(f"{name}.{attribute}".lstrip("."))] = local_of(tensor).detach()
    description = [
        (f"tensor {name!r}", {"shape": str(list(tensor.shape)), "dtype": str(tensor.dtype)})
        for name, tensor in named.items()
    ]
    groups = [communicator.group for communicator in (mesh.shards, mesh.replicas) if communicator.size > 1]
    agree(groups, f"sync_module_states of a {type(root).__name__}", description)
    mesh.replicas.broadcast(list(named.values()))
    mesh.shards.broadcast(list(named.values()))


def compute_device(
    device_id: int | torch.device | None, param: nn.Parameter | None, group: dist.ProcessGroup
) -> torch.device:
    """The compute device of a unit: `device_id`, else the device of its parameters. For CPU parameters, the CPU if the process
    group supports it, else the current accelerator.

    Raises:
        UsageError: `device_id` is another device than that of the parameters.
    """
    if device_id is not None:
        device = torch.device(device_id)
        if device.type != "cpu" and device.index is None:
            device = torch.device(device.type, torch.get_device_module(device).current_device())
        if param is not None and param.device.type not in ("cpu", "meta") and param.device != device:
            raise UsageError(
                f"device_id={device_id!r} means {device}, but the module's parameters are on {param.device}; pass the device "
                "that they are on, or leave it out"
            )
        return device
    if param is not None and param.device.type not in ("cpu", "meta"):
        return param.device
    if "cpu" in {device.type for device in getattr(group, "_device_types", [torch.device("cpu")])}:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.get_device_module(accelerator).current_device())
