"""The FSDP2 interface: `fully_shard`, which turns a module into an FSDPModule with DTensor parameters."""

import functools
import sys
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from crossframe.errors import UsageError
from crossframe.faces import Face
from crossframe.layout import PerParamLayout
from crossframe.precision import PrecisionPolicy
from torch_backend.build import build_unit, default_process_group
from torch_backend.choices import Choices
from torch_backend.collectives import Alone, Communicator, UnitMesh
from torch_backend.exposure import DTensorExposure
from torch_backend.schedule import Schedule
from torch_backend.unit import UNIT, Unit, unit_of


class UnshardHandle:
    """An all-gather under way. The parameters are full after `wait`."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait for the all-gather and register the full parameters."""
        self._unit.unshard("summon")
        self._unit.expose()


class FSDPModule(nn.Module):
    """What `fully_shard` adds to a module's class."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters and register them in full, until `reshard` or the unit's next forward or backward
        frees them. Inner units are not touched.

        Args:
            async_op: return at once with a handle, on which to `wait` before the parameters are used.
        """
        unit = unit_of(self)
        unit.free_outdated("summon", training=False)
        unit.gather("summon")
        unit.keep()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Register the sharded parameters and free the full ones. Edits of the full ones are lost."""
        unit_of(self).reshard("summon")

    def __deepcopy__(self, memo: dict) -> "FSDPModule":
        """Refused: the copy would share neither hooks nor memory with its unit."""
        raise UsageError("a sharded module cannot be copied; copy it before fully_shard")

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether a backward reduces gradients. Without, they accumulate in full on each rank (R15)."""
        for module in self.modules() if recurse else [self]:
            if isinstance(module, FSDPModule):
                unit_of(module).reduces = requires_gradient_sync


def fully_shard(
    module: nn.Module, *, mesh: DeviceMesh | None = None, reshard_after_forward: bool | None = None
) -> nn.Module:
    """Shard the parameters of `module` that no inner FSDPModule owns, on dim 0, in place. Call it on inner modules first.

    Args:
        mesh: the ranks, as a mesh of one axis; all ranks if None.
        reshard_after_forward: free the full parameters between forward and backward. None means True, except for the
            root, which is kept (R13).

    Returns:
        The same module, now an FSDPModule too.

    Raises:
        UsageError: a mesh of more axes, or a module that is sharded already.
        LayoutError: a parameter without dims, or parameters on several devices.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"fully_shard: expected a module, got {type(module).__name__}")
    if isinstance(module, FSDPModule):
        raise UsageError(f"fully_shard: this {type(module).__name__} is sharded already; shard a module once")
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise UsageError(f"fully_shard: a {type(module).__name__} has no forward; shard the modules inside it")
    if reshard_after_forward is not None and type(reshard_after_forward) is not bool:
        raise UsageError(
            f"fully_shard: expected reshard_after_forward True, False or None, got {reshard_after_forward!r}"
        )
    mesh = _default_mesh(module) if mesh is None else mesh
    if mesh.ndim != 1:
        raise UsageError(f"fully_shard: expected a mesh of one axis, got one of shape {tuple(mesh.shape)}")
    ranks = UnitMesh(Communicator(mesh.get_group()), Alone())
    unit = build_unit(
        module,
        ranks,
        Choices(Face.FSDP2, reshard_after_forward=reshard_after_forward is not False),
        is_unit=lambda inner: isinstance(inner, FSDPModule),
        make_layout=lambda owned: PerParamLayout(tuple(entry.spec for entry in owned), ranks.shards.size),
        make_exposure=lambda owned, store, leaves: DTensorExposure(owned, store, leaves, mesh, ranks.shards.rank),
        policy=PrecisionPolicy(),
    )
    module.__dict__[UNIT] = unit
    keeps_root = reshard_after_forward is None

    def before(inner: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _schedule_of(inner, keeps_root).begin_forward(unit, args, kwargs)

    def after(inner: nn.Module, args: Any, output: Any) -> None:
        # Called always: without an output and with an exception under way, the module has raised, or its first use has.
        if unit.schedule is None:
            return
        if output is None and sys.exc_info()[0] is not None:
            unit.schedule.abandon_forward(unit)
        else:
            unit.schedule.end_forward(unit, output)

    def show_sharded(inner: nn.Module, *_: Any) -> None:
        unit.conceal()

    def adopt(inner: nn.Module, _: Any) -> None:
        for bucket in unit.buckets:
            bucket.exposure.adopt()

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)
    module.register_state_dict_pre_hook(show_sharded)
    module.register_load_state_dict_pre_hook(show_sharded)
    # At once, not at the next gather: an optimizer made in between must get the parameters that stay.
    module.register_load_state_dict_post_hook(adopt)
    module.__class__ = _sharded_class(type(module))
    return module


@functools.cache
def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a sharded `cls`: one for all its instances, so that they stay of one type."""
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


def _schedule_of(module: nn.Module, keeps_root: bool) -> Schedule:
    """The schedule that the module runs under; if it has none, it is a root that is used for the first time."""
    unit = unit_of(module)
    if unit.schedule is None:
        if keeps_root:
            unit.choices.reshard_after_forward = False
        named = [(name, unit_of(inner)) for name, inner in module.named_modules() if isinstance(inner, FSDPModule)]
        return Schedule(named, face="fully_shard")
    return unit.schedule


def _default_mesh(module: nn.Module) -> DeviceMesh:
    world_size = default_process_group().size()
    device = next((param.device.type for param in module.parameters()), "cpu")
    return init_device_mesh(device, (world_size,))
