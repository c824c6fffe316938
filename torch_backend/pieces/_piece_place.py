"""Place: the position of a PieceTensor's elements in its parameter, its bucket and its group of ranks."""

from collections.abc import Hashable
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from crossframe.layout import Layout, Piece
from torch_backend.memory._store import ShardStore
from torch_backend.mesh._tensor_parallel import Whole
from torch_backend.ranks._collectives import Communicator


class Place:
    """Where one parameter of a bucket lies, which its parameter, gradient and optimizer state have in common.

    Attributes:
        store: the shard that it is a part of.
        index: its index in the layout.
        mesh: the ranks: (shard,) or (replicate, shard). None under FSDP1 without a mesh, where nothing is a DTensor.
        shards: this rank's shard group.
        shape: of the parameter; under tensor parallelism of this rank's part of it.
        whole: the DTensor of tensor parallelism that the parameter is this rank's part of; None of a plain one.
        numel: how many elements this rank holds.
    """

    def __init__(
        self, store: ShardStore, index: int, mesh: DeviceMesh, shards: Communicator, whole: Whole | None = None
    ) -> None:
        self.store, self.index, self.mesh, self.shards, self.whole = store, index, mesh, shards, whole
        self.shape = torch.Size(store.layout.params[index].shape)
        self.numel = store.pieces[index].numel()
        self._line_specs: dict[torch.dtype, DTensorSpec] = {}

    @property
    def full_shape(self) -> torch.Size:
        """The shape of the parameter in a state dict."""
        return self.shape if self.whole is None else torch.Size(self.whole.shape)

    @property
    def layout(self) -> Layout:
        """The layout of the bucket. Its parameters get their full names once the root has run."""
        return self.store.layout

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.layout.params[self.index].name

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Of a DTensor of the parameter on that mesh."""
        return (*[Replicate()] * (self.mesh.ndim - 1), Shard(0))

    @cached_property
    def key(self) -> Hashable:
        """Equal for two places that cut their parameters alike, between the same ranks."""
        layout = self.layout
        return (layout.offsets[self.index], layout.padded_shard_numel, layout.world_size, self.shape, self.shards.ranks)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What each rank of the shard group holds of the parameter, the empty pieces left out, in the order of elements."""
        return tuple(self.layout.find(self.index, 0, self.layout.params[self.index].numel))

    def line(self, local: Tensor) -> DTensor:
        """The elements here as a part of a 1-D DTensor: right for what does not ask in which order they are, such as a norm."""
        if not self.numel:
            local = local.new_zeros(1)  # no norm of infinite order is defined without elements; a zero changes none
        spec = self._line_specs.get(local.dtype)
        if spec is None:
            meta = TensorMeta(torch.Size((max(1, self.shape.numel()),)), (1,), local.dtype)
            spec = self._line_specs[local.dtype] = DTensorSpec(self.mesh, self.placements, meta)
        return DTensor.__new__(DTensor, local, spec, requires_grad=False)

    def gather(self, local: Tensor) -> Tensor:
        """The whole tensor on every rank, from what each holds of it. An all-gather."""
        if not self.pieces:
            return local.new_empty(self.shape)
        padded = local.new_zeros(max(piece.numel for piece in self.pieces))
        padded[: self.numel] = local
        # As bytes, since not every backend moves every dtype.
        gathered = self.shards.gather_all(padded.view(torch.uint8)).view(local.dtype)
        return torch.cat([gathered[piece.rank, : piece.numel] for piece in self.pieces]).view(self.shape)
