"""Deferred initialisation: gives values to units that were sharded on the meta device (R38)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from crossframe.errors import InitialisationError, UnsupportedError
from crossframe.initialise import InitStep, init_plan
from crossframe.state import state_key
from crossframe.units import Slot, UnitSpec
from torch_backend.compat._dtypes import dtype_name
from torch_backend.engine._bucket import Bucket
from torch_backend.engine._unit import Unit
from torch_backend.engine._unit_tree import NamedUnit, named_units
from torch_backend.registration._modules import RegisteredParams


def make_real(unit: Unit) -> None:
    """Take over real parameters that a user, or `load_state_dict(assign=True)`, registered instead of those on meta: of every
    bucket in which all parameters are real."""
    devices = {}
    for bucket in unit.buckets:
        if bucket.store.buffer.is_meta:
            given = _registered(bucket)
            if not any(param.is_meta for param in given):
                devices[bucket.store.buffer] = given[0].device
    if devices:
        _make_real(unit, devices)


def _make_real(unit: Unit, devices: Mapping[Tensor, torch.device]) -> None:
    """Give the shards that are keys here memory on their devices, filled with zeros; all other tensors stay as they are."""
    with unit.converting(
        lambda tensor: torch.zeros_like(tensor, device=devices[tensor]) if tensor in devices else tensor
    ):
        pass


def _registered(bucket: Bucket) -> list[nn.Parameter]:
    """What the module registers for each parameter of a bucket under FSDP2."""
    assert isinstance(bucket.registrar, RegisteredParams)
    return bucket.registrar.registered_params()


def check_real(named: Sequence[NamedUnit]) -> None:
    """Raise InitialisationError if any parameter is still on meta, with the names."""
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
            "torch_backend.initialise_sharded(model) gives them the values that the model built in full has; or "
            "model.to_empty(device=...) and initialise them; or load a state dict with assign=True"
        )


def initialise_sharded(
    model: nn.Module, *, device: torch.device | str | None = None, tied_to: Mapping[str, str] | None = None
) -> None:
    """Give a model that was built and sharded on the meta device the values that it would have if it had been built in full.

    Module by module, in the order of construction, each rank makes the full tensors, lets `reset_parameters` draw them, keeps
    what its shards hold and frees the rest (R38). All ranks must have seeded the random numbers alike; what
    `torch.manual_seed(0); Model()` draws, `torch.manual_seed(0); initialise_sharded(model)` draws too.

    Args:
        model: the outermost FSDPModule. What is not on meta is left alone.
        device: where to draw; that of the mesh if None.
        tied_to: for a parameter that several modules draw, by any of its names, the name whose values it keeps.

    Raises:
        InitialisationError: what cannot be initialised so, with the names of what stays on meta. Nothing has changed then.
        UnsupportedError: parameters of tensor parallelism.
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
    """The modules of a model by name, each once. Of a wrapper and what it wraps, which have one name, the latter: it draws."""
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
                        f"initialise_sharded: {name}.{attribute} is cut by tensor parallelism too; initialise it by hand"
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
    """Let one module draw its tensors in full, and keep what is this rank's."""
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
