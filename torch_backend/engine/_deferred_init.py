"""Deferred initialisation: gives values to units that were sharded on the meta device (R38).

`torch_backend.modules._materialise` initialises modules before they are sharded.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from crossframe.errors import InitialisationError, UnsupportedError
from crossframe.initialise import InitStep, init_plan
from crossframe.state import state_key
from crossframe.unit_assignment import Slot, UnitSpec
from torch_backend.compat._dtypes import dtype_name
from torch_backend.engine._bucket import Bucket
from torch_backend.engine._unit import Unit
from torch_backend.engine._unit_tree import NamedUnit, named_units
from torch_backend.param_registration._registered_params import RegisteredParams


def make_real(unit: Unit) -> None:
    """Adopt real parameters that a user or `load_state_dict(assign=True)` registered instead of those on the meta device, for
    each bucket whose parameters are all real."""
    devices = {}
    for bucket in unit.buckets:
        if bucket.store.buffer.is_meta:
            given = _registered(bucket)
            if not any(param.is_meta for param in given):
                devices[bucket.store.buffer] = given[0].device
    if devices:
        _make_real(unit, devices)


def _make_real(unit: Unit, devices: Mapping[Tensor, torch.device]) -> None:
    """Allocate zeros for the shards that are keys of the mapping; other tensors are returned unchanged."""
    with unit.converting(
        lambda tensor: torch.zeros_like(tensor, device=devices[tensor]) if tensor in devices else tensor
    ):
        pass


def _registered(bucket: Bucket) -> list[nn.Parameter]:
    """The registered parameters of a bucket under FSDP2."""
    assert isinstance(bucket.registrar, RegisteredParams)
    return bucket.registrar.registered_params()


def check_real(named: Sequence[NamedUnit]) -> None:
    """Raise InitialisationError with the names of parameters that are still on the meta device, if any."""
    names = [
        spec.name
        for unit in named
        for each in unit.buckets
        if each.bucket.store.buffer.is_meta
        for spec, param in zip(each.params, _registered(each.bucket), strict=True)
        if param.is_meta
    ]
    if names:
        raise InitialisationError(
            f"still on the meta device: {', '.join(names)}; make them real before the first forward: "
            "torch_backend.initialise_sharded(model) gives them the values that an unsharded model would have; or call "
            "model.to_empty(device=...) and initialise them; or load a state dict with assign=True"
        )


def initialise_sharded(
    model: nn.Module, *, device: torch.device | str | None = None, tied_to: Mapping[str, str] | None = None
) -> None:
    """Initialize a model that was built and sharded on the meta device with the values of an unsharded initialization.

    For each module in order of construction, each rank allocates the full tensors, calls `reset_parameters`, copies its shards
    and frees the full tensors (R38). All ranks must use the same seed. `torch.manual_seed(0); initialise_sharded(model)` gives
    the values of `torch.manual_seed(0); Model()`.

    Args:
        model: the outermost FSDPModule. Parameters that are not on the meta device do not change.
        device: the device of random initialization. None: that of the mesh.
        tied_to: for a parameter that several modules initialize, maps any of its names to the name whose values are kept.

    Raises:
        InitialisationError: parameters that cannot be initialized in this way; nothing has changed then.
        UnsupportedError: parameters with tensor parallelism.
    """
    named = named_units(model)
    where = {
        spec.name: (each.bucket, i) for unit in named for each in unit.buckets for i, spec in enumerate(each.params)
    }
    specs = [UnitSpec(unit.name, tuple(spec for each in unit.buckets for spec in each.params)) for unit in named]
    modules = _innermost(model)
    tied_to = {state_key(name): state_key(kept) for name, kept in (tied_to or {}).items()}
    plan = _plan(modules, specs, tied_to)
    for unit in (each.unit for each in named):
        shards = [bucket.store.buffer for bucket in unit.buckets if bucket.store.buffer.is_meta]
        if shards:
            to = unit.buckets[0].device if device is None else torch.device(device)
            _make_real(unit, dict.fromkeys(shards, to))
    for step in plan:
        _draw(modules[step.module], step, where, device)


def _innermost(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by name, each once; for a wrapper and its wrapped module with the same name, the wrapped one."""
    return {state_key(path): module for path, module in model.named_modules()}


def _plan(
    modules: Mapping[str, nn.Module], units: Sequence[UnitSpec], tied_to: Mapping[str, str] | None
) -> tuple[InitStep, ...]:
    shapes = {name: spec.shape for unit in units for spec in unit.params for name in (spec.name, *spec.aliases)}
    slots, buffers, meta, initialisers = [], [], set(), set()
    for name, module in modules.items():
        if callable(getattr(module, "reset_parameters", None)):
            initialisers.add(name)
        for found, tensors in ((slots, module._parameters), (buffers, module._buffers)):
            for attribute, tensor in tensors.items():
                if tensor is None:
                    continue
                if isinstance(tensor, DTensor) and tensor.device_mesh.ndim > 2:
                    raise UnsupportedError(
                        f"initialise_sharded: {name}.{attribute} is also sharded by tensor parallelism; initialise it "
                        "by hand"
                    )
                full = shapes.get(f"{name}.{attribute}".lstrip("."), tuple(tensor.shape))
                found.append(Slot(name, attribute, id(tensor), full, dtype_name(tensor.dtype), tensor.requires_grad))
                if tensor.is_meta:
                    meta.add(id(tensor))
    return init_plan(
        list(modules), slots, units, meta=meta, initialisers=initialisers, buffers=buffers, tied_to=tied_to
    )


def _draw(
    module: nn.Module,
    step: InitStep,
    where: Mapping[str, tuple[Bucket, int]],
    device: torch.device | str | None,
) -> None:
    """Initialize the full tensors of one module, and copy this rank's shards."""
    kept = {keep.attribute: where[keep.name] for keep in step.keeps}
    registered = dict(module._parameters)
    try:
        for attribute in step.draws:
            param = registered[attribute]
            assert param is not None
            to = param.device if device is None else torch.device(device)
            module._parameters[attribute] = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device=to))
        for attribute in step.buffers:
            buffer = module._buffers[attribute]
            assert buffer is not None
            to = device or next(iter(kept.values()))[0].device if kept else (device or "cpu")
            module._buffers[attribute] = torch.empty_like(buffer, device=to)
        module.reset_parameters()  # type: ignore[operator]
        for attribute, (bucket, i) in kept.items():
            full = module._parameters[attribute]
            assert full is not None
            bucket.store.write_one(i, full.detach())
    finally:
        module._parameters.update(registered)
