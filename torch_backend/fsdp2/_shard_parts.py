"""Builds the layout, shard and registrar of a unit of `fully_shard` from the user's options."""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from crossframe.errors import UnsupportedError, UsageError
from crossframe.layout import LAYOUT_KINDS, FlatLayout, Layout, PerParamLayout, RaggedLayout
from crossframe.step import StepSettings
from torch_backend.compat._fully_shard_api import MixedPrecisionPolicy
from torch_backend.compat._torch_classes import as_ours
from torch_backend.memory._extension import ExtendedStore, is_extended
from torch_backend.memory._store import ShardStore
from torch_backend.mesh._device_mesh import DataMesh
from torch_backend.mesh._placement import Placed, PlacementFn, place
from torch_backend.modules._owned_params import OwnedParam, local_of
from torch_backend.param_registration import DTensorRegistrar, PieceRegistrar, Registrar
from torch_backend.ranks._collectives import UnitMesh

BlockFn = Callable[[nn.Parameter], int]


@dataclass(frozen=True, eq=False)
class ShardParts:
    """The parts of one unit.

    Attributes:
        data, ranks: the ranks as a mesh and as process groups.
        policy: the user's policy object, which is passed to tensor subclasses.
        placement_fn, kind, block_fn: the arguments `shard_placement_fn`, `layout` and `block_fn`.
        step: the step settings, which determine the reshard group (R08).

    Raises:
        UsageError: an invalid layout, or `block_fn` for a layout without blocks.
        UnsupportedError: a flat or ragged layout with placements or mesh dims for single parameters.
    """

    data: DataMesh
    ranks: UnitMesh
    policy: MixedPrecisionPolicy
    placement_fn: PlacementFn | None
    kind: str
    block_fn: BlockFn | None
    step: StepSettings
    _placed: dict[str, Placed] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in LAYOUT_KINDS:
            raise UsageError(f"fully_shard: expected layout to be one of {', '.join(LAYOUT_KINDS)}, got {self.kind!r}")
        if self.block_fn is not None and self.kind != "ragged":
            raise UsageError(f"fully_shard: block_fn applies only to layout='ragged', got layout={self.kind!r}")
        cut_otherwise = self.placement_fn is not None or not self.data.shards or self.data.spmd is not None
        if self.kind != "per_param" and cut_otherwise:
            raise UnsupportedError(
                f"fully_shard: layout={self.kind!r} shards all parameters as one buffer, and supports only meshes "
                "(shard) and (replicate, shard); with shard_placement_fn or dp_mesh_dims use layout='per_param'"
            )

    def bucket_of(self, entry: OwnedParam) -> Hashable:
        """One bucket per dtype, and one for each tensor subclass with its own all-gather inputs."""
        if not is_extended(local_of(entry.param)):
            return entry.param.dtype
        if self.step.reshards_to_group:
            raise UnsupportedError(
                f"parameter {entry.spec.name!r} defines fsdp_pre_all_gather, which does not support a reshard group of "
                f"{self.step.reshard_after_forward} ranks; pass reshard_after_forward=True or False"
            )
        return entry.spec.name

    def layout(self, owned: Sequence[OwnedParam]) -> Layout:
        """The layout of a bucket."""
        specs, size = tuple(entry.spec for entry in owned), self.ranks.shards.size
        if self.kind == "per_param" or is_extended(local_of(owned[0].param)):
            return _layout_of(PerParamLayout, specs, size, tuple(self._place(entry).dim for entry in owned))
        for entry in owned:
            if isinstance(entry.param, DTensor):
                raise UnsupportedError(
                    f"parameter {entry.spec.name!r} is a DTensor (tensor parallelism), whose placements "
                    f"layout={self.kind!r} cannot keep; use layout='per_param'"
                )
        if self.kind == "flat":
            policy = as_ours(self.policy, MixedPrecisionPolicy).policy
            return _layout_of(FlatLayout, specs, size, compute_dtype=policy.param_dtype, keep_original=True)
        block = self.block_fn
        blocks = None if block is None else tuple(block(entry.param) for entry in owned)
        return _layout_of(RaggedLayout, specs, size, blocks)

    def store(
        self, owned: Sequence[OwnedParam], layout: Layout, full: Sequence[Tensor], device: torch.device, pinned: bool
    ) -> ShardStore:
        """This rank's shard of a bucket."""
        rank = self.ranks.shards.rank
        if not is_extended(full[0]):
            return ShardStore(layout, rank, full, device, pinned=pinned)
        assert isinstance(layout, PerParamLayout)
        module, _ = owned[0].registrations[0]
        mesh: Any = self.data.shard_axis
        return ExtendedStore(layout, rank, full[0], device, mesh=mesh, module=module, policy=self.policy)

    def registrar(self, owned: Sequence[OwnedParam], store: ShardStore, leaves: list[nn.Parameter]) -> Registrar:
        """The registrar of a bucket."""
        if store.layout.contiguous:
            return PieceRegistrar(owned, store, leaves, self.data.mesh, self.ranks.shards.rank)
        return DTensorRegistrar(owned, store, leaves, [self._place(entry) for entry in owned])

    def _place(self, entry: OwnedParam) -> Placed:
        name = entry.spec.name
        if name not in self._placed:
            self._placed[name] = place(name, entry.param, self.data, self.placement_fn)
        return self._placed[name]


@functools.lru_cache(maxsize=64)
def _layout_of(kind: Callable[..., Layout], *args: Any, **options: Any) -> Layout:
    """Cache layouts, so that equal blocks share one object and its cached properties."""
    return kind(*args, **options)
