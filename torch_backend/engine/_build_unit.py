"""Builds a unit from a module's parameters, the same way for both APIs."""

import sys
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from crossframe.api import Api
from crossframe.dtypes import COMPLEX, FLOATING
from crossframe.errors import LayoutError, UnsupportedError, UsageError
from crossframe.layout import Layout
from crossframe.precision import PrecisionPolicy
from crossframe.unit_assignment import Order
from torch_backend.engine._bucket import Bucket
from torch_backend.engine._unit import Unit
from torch_backend.engine._unit_options import UnitOptions
from torch_backend.memory._offload import storage_of_shards
from torch_backend.memory._store import ShardStore
from torch_backend.modules._owned_params import OwnedParam, local_of, owned_params
from torch_backend.param_registration import Registrar
from torch_backend.ranks._collectives import UnitMesh


class Parts(Protocol):
    """Creates the parts of a unit for one API."""

    def bucket_of(self, entry: OwnedParam) -> Hashable:
        """A key; parameters with equal keys share a bucket (R11)."""
        ...

    def layout(self, owned: Sequence[OwnedParam]) -> Layout:
        """The layout of a bucket."""
        ...

    def store(
        self, owned: Sequence[OwnedParam], layout: Layout, full: Sequence[Tensor], device: torch.device, pinned: bool
    ) -> ShardStore:
        """This rank's shard of a bucket."""
        ...

    def registrar(self, owned: Sequence[OwnedParam], store: ShardStore, leaves: list[nn.Parameter]) -> Registrar:
        """The registrar of a bucket."""
        ...


def build_unit(
    modules: Sequence[nn.Module],
    mesh: UnitMesh,
    options: UnitOptions,
    *,
    is_unit: Callable[[nn.Module], bool],
    parts: Parts,
    policy: PrecisionPolicy,
    device: torch.device | None = None,
    offload: bool = False,
    pinned: bool = True,
    limited: bool = True,
    ignored: Collection[nn.Parameter] = (),
) -> Unit:
    """Shard all parameters below some modules that no inner unit owns.

    Args:
        modules: the modules of the unit, whose parameters are all-gathered and reduced together.
        mesh: the ranks.
        options: the user's options.
        parts: creates layouts, shards and registrars.
        policy: the mixed precision policy.
        device: the compute device. None: that of the parameters.
        offload: keep shards on the CPU.
        pinned: with `offload`, use pinned memory.
        limited: see `limit_all_gathers` in [Note: streams].
        ignored: parameters that are not sharded.

    Raises:
        LayoutError, UnitError: parameters that cannot be sharded together; the message names them.
        PlanError: a policy that casts complex parameters or their gradients to real numbers.
        UnsupportedError: parameters that the package spmd_types annotates.
        UsageError: parameters on the meta device or on several devices.
    """
    api = options.api
    order = Order.PRE_ORDER if api is Api.FSDP1 else Order.POST_ORDER
    ignoring = "ignored_states" if api is Api.FSDP1 else "ignored_params"
    dtypes = FLOATING if api is Api.FSDP1 else (*FLOATING, *COMPLEX)
    root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    owned = owned_params(root, is_unit, order, ignored, ignoring=ignoring, dtypes=dtypes)
    for entry in owned:
        _check(entry, owned[0], mesh.shards.ranks[mesh.shards.rank], api)
    groups: dict[Hashable, list[OwnedParam]] = {}
    for entry in owned:
        groups.setdefault(parts.bucket_of(entry), []).append(entry)
    buckets = []
    for members in groups.values():
        full = [local_of(entry.param).detach() for entry in members]
        compute = full[0].device if device is None else device
        store = parts.store(
            members,
            parts.layout(members),
            full,
            *storage_of_shards(full[0], compute, offload=offload, pinned=pinned),
        )
        buckets.append(
            Bucket(
                store,
                mesh,
                compute,
                policy=policy,
                api=api,
                limited=limited,
                make_registrar=lambda store, leaves, members=members: parts.registrar(members, store, leaves),
            )
        )
        buckets[-1].origins = [origin_of(entry.param) for entry in members]
    name = ", ".join(type(module).__name__ for module in modules)
    return Unit(name, buckets, mesh, options, num_modules=len(modules))


def origin_of(param: nn.Parameter) -> object:
    """The identity of a parameter, which detects units that share it after sharding replaced it."""
    if not hasattr(param, "_crossframe_origin"):
        param._crossframe_origin = object()  # type: ignore[attr-defined]
    return param._crossframe_origin  # type: ignore[attr-defined]


def _check(entry: OwnedParam, first: OwnedParam, rank: int, api: Api) -> None:
    name, param = entry.spec.name, entry.param
    if not param.shape:
        raise LayoutError(
            f"rank {rank}: parameter {name!r} has no dims, so there is nothing to shard; make it shape (1,)"
        )
    if param.device.type == "meta" and api is Api.FSDP1:
        raise UsageError(
            f"rank {rank}: parameter {name!r} is on the meta device and has no values; materialise the module "
            "(to_empty, then initialise) before sharding it"
        )
    if param.device != first.param.device:
        instead = ", or pass device_id" if api is Api.FSDP1 else ""
        raise LayoutError(
            f"rank {rank}: a unit lives on one device, but {first.spec.name!r} is on {first.param.device} and {name!r} "
            f"on {param.device}; move the module to one device first{instead}"
        )
    if (spmd_types := sys.modules.get("spmd_types")) is not None and spmd_types.get_local_type(param):
        raise UnsupportedError(
            f"rank {rank}: parameter {name!r} has types of spmd_types, which its shards would lose; shard it with torch's "
            "fully_shard (torch 2.14 or later), or leave the types out"
        )
