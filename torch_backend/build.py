"""From a module to a unit: what both faces do alike when they take a module's parameters over."""

from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn

from crossframe.errors import LayoutError, UsageError
from crossframe.faces import Face
from crossframe.layout import Layout
from crossframe.precision import PrecisionPolicy
from crossframe.units import Order
from torch_backend.bucket import Bucket
from torch_backend.choices import Choices
from torch_backend.collectives import UnitMesh
from torch_backend.exposure import Exposure
from torch_backend.slots import OwnedParam, owned_params
from torch_backend.store import ShardStore
from torch_backend.unit import Unit

MakeLayout = Callable[[Sequence[OwnedParam]], Layout]
MakeExposure = Callable[[Sequence[OwnedParam], ShardStore, list[nn.Parameter]], Exposure]


def build_unit(
    module: nn.Module,
    mesh: UnitMesh,
    choices: Choices,
    *,
    is_unit: Callable[[nn.Module], bool],
    make_layout: MakeLayout,
    make_exposure: MakeExposure,
    policy: PrecisionPolicy,
    device: torch.device | None = None,
    offload: bool = False,
    limited: bool = True,
    ignored: Collection[nn.Parameter] = (),
) -> Unit:
    """Shard all parameters below `module` that no inner unit owns.

    FSDP2 gives each dtype a bucket of its own; FSDP1 gives one layout to all, which refuses a mix (R11).

    Args:
        mesh: the ranks.
        choices: the user's.
        policy: what the user asked for in precision.
        device: where to compute; where the parameters are if None.
        offload: let the shards live on the CPU.
        limited: see `limit_all_gathers` in [Note: streams].
        ignored: parameters that are left to the user.

    Raises:
        LayoutError, UnitError: parameters that cannot be sharded together; the message names them.
        UsageError: parameters on the meta device or on several devices.
    """
    face = choices.face
    order = Order.PRE_ORDER if face is Face.FSDP1 else Order.POST_ORDER
    owned = owned_params(module, is_unit, order, ignored)
    for entry in owned:
        _check(entry, owned[0], mesh.shards.ranks[mesh.shards.rank])
    groups: dict[torch.dtype | None, list[OwnedParam]] = {}
    for entry in owned:
        groups.setdefault(entry.param.dtype if face is Face.FSDP2 else None, []).append(entry)
    buckets = []
    for members in groups.values():
        full = [entry.param.detach() for entry in members]
        home = torch.device("cpu") if offload else full[0].device
        compute = full[0].device if device is None else device
        store = ShardStore(
            make_layout(members), mesh.shards.rank, full, home, pinned=offload and compute.type != home.type
        )
        buckets.append(
            Bucket(
                store,
                mesh,
                compute,
                policy=policy,
                face=face,
                limited=limited,
                make_exposure=lambda store, leaves, members=members: make_exposure(members, store, leaves),
            )
        )
    return Unit(type(module).__name__, buckets, mesh, choices)


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
            f"on {param.device}; move the module to one device first, or pass device_id"
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
