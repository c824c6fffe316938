"""From a module to a unit: what both faces do alike when they take a module's parameters over."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from crossframe.errors import LayoutError, UsageError
from crossframe.layout import Layout
from crossframe.units import Order
from torch_backend.collectives import Communicator
from torch_backend.exposure import Exposure
from torch_backend.gather import GatherBuffer
from torch_backend.grads import GradStore
from torch_backend.slots import OwnedParam, owned_params
from torch_backend.store import ShardStore
from torch_backend.unit import Bucket, Unit

MakeLayout = Callable[[Sequence[OwnedParam]], Layout]
MakeExposure = Callable[[Sequence[OwnedParam], ShardStore, list[nn.Parameter]], Exposure]


def build_unit(
    module: nn.Module,
    communicator: Communicator,
    *,
    is_unit: Callable[[nn.Module], bool],
    order: Order,
    make_layout: MakeLayout,
    make_exposure: MakeExposure,
    mixes_dtypes: bool,
    divides_once: bool,
    reshard_after_forward: bool,
    keeps_full_unreduced: bool,
) -> Unit:
    """Shard all parameters below `module` that no inner unit owns.

    Args:
        mixes_dtypes: give each dtype a bucket of its own. Otherwise all parameters go to one layout, which refuses a mix (R11).

    Raises:
        LayoutError, UnitError: parameters that cannot be sharded together; the message names them.
        UsageError: parameters on the meta device or on several devices.
    """
    owned = owned_params(module, is_unit, order)
    for entry in owned:
        _check(entry, owned[0], communicator.rank)
    groups: dict[torch.dtype | None, list[OwnedParam]] = {}
    for entry in owned:
        groups.setdefault(entry.param.dtype if mixes_dtypes else None, []).append(entry)
    buckets = [
        _build_bucket(members, communicator, make_layout, make_exposure, divides_once) for members in groups.values()
    ]
    return Unit(
        type(module).__name__,
        buckets,
        communicator,
        reshard_after_forward=reshard_after_forward,
        keeps_full_unreduced=keeps_full_unreduced,
    )


def _build_bucket(
    owned: Sequence[OwnedParam],
    communicator: Communicator,
    make_layout: MakeLayout,
    make_exposure: MakeExposure,
    divides_once: bool,
) -> Bucket:
    layout = make_layout(owned)
    full = [entry.param.detach() for entry in owned]
    store = ShardStore(layout, communicator.rank, full)
    dtype, device = full[0].dtype, full[0].device
    buffer = GatherBuffer(layout, dtype, device, communicator.size)
    grads = GradStore(layout, dtype, dtype, divides_once=divides_once)
    return Bucket(layout, store, buffer, grads, make_exposure(owned, store, buffer.leaves))


def _check(entry: OwnedParam, first: OwnedParam, rank: int) -> None:
    name, param = entry.spec.name, entry.param
    if not param.shape:
        raise LayoutError(
            f"rank {rank}: parameter {name!r} has no dims, so there is nothing to shard; make it shape (1,)"
        )
    if param.device.type == "meta":
        raise UsageError(
            f"rank {rank}: parameter {name!r} is on the meta device and has no values; materialise the module "
            "(to_empty, then initialise) before sharding it"
        )
    if param.device != first.param.device:
        raise LayoutError(
            f"rank {rank}: a unit lives on one device, but {first.spec.name!r} is on {first.param.device} and {name!r} "
            f"on {param.device}; move the module to one device first"
        )


def default_process_group() -> dist.ProcessGroup:
    """The group of all ranks; UsageError if there is none yet."""
    if not dist.is_initialized():
        raise UsageError(
            "there is no process group: call torch.distributed.init_process_group before sharding a module "
            "(backend 'gloo' on CPU, 'nccl' on CUDA)"
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def move_to_device(module: nn.Module, device: int | str | torch.device | None) -> None:
    """Move a module that is not there yet to `device`; None leaves it where it is."""
    if device is not None:
        module.to(torch.device("cuda", device) if isinstance(device, int) else torch.device(device))
