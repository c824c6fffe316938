"""PieceLocation: the position of a PieceTensor's elements in its parameter, its bucket and its group of ranks."""

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
from torch_backend.mesh._tensor_parallel import TensorParallelParam
from torch_backend.ranks._collectives import Communicator


class PieceLocation:
    """The location of a parameter in a bucket, shared by the parameter, its gradient and its optimizer state.

    Attributes:
        store: the shard that contains it.
        index: its index in the layout.
        mesh: (shard,) or (replicate, shard). None under FSDP1 without a mesh, where there are no DTensors.
        shards: this rank's shard group.
        shape: shape of the parameter; under tensor parallelism, of its local tensor.
        tp_param: the DTensor of tensor parallelism; None for a plain parameter.
        numel: the number of elements on this rank.
    """

    def __init__(
        self,
        store: ShardStore,
        index: int,
        mesh: DeviceMesh,
        shards: Communicator,
        tp_param: TensorParallelParam | None = None,
    ) -> None:
        self.store, self.index, self.mesh, self.shards, self.tp_param = store, index, mesh, shards, tp_param
        self.shape = torch.Size(store.layout.params[index].shape)
        self.numel = store.pieces[index].numel()
        self._line_specs: dict[torch.dtype, DTensorSpec] = {}

    @property
    def full_shape(self) -> torch.Size:
        """The shape of the parameter in a state dict."""
        return self.shape if self.tp_param is None else torch.Size(self.tp_param.shape)

    @property
    def layout(self) -> Layout:
        """The layout of the bucket. Its parameters get their full names once the root has run."""
        return self.store.layout

    @property
    def name(self) -> str:
        return self.layout.params[self.index].name

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements of a DTensor of the parameter on the mesh."""
        return (*[Replicate()] * (self.mesh.ndim - 1), Shard(0))

    @cached_property
    def key(self) -> Hashable:
        """A key that is equal for locations with equal pieces and ranks."""
        layout = self.layout
        return (layout.offsets[self.index], layout.padded_shard_numel, layout.world_size, self.shape, self.shards.ranks)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The nonempty pieces of all ranks of the shard group, in the order of elements."""
        return tuple(self.layout.find(self.index, 0, self.layout.params[self.index].numel))

    def line(self, local: Tensor) -> DTensor:
        """This rank's elements as a shard of a 1-D DTensor, for operations that do not depend on the order of elements, such as a
        norm."""
        if not self.numel:
            local = local.new_zeros(1)  # a norm of order inf needs an element, and a zero does not change it
        spec = self._line_specs.get(local.dtype)
        if spec is None:
            meta = TensorMeta(torch.Size((max(1, self.shape.numel()),)), (1,), local.dtype)
            spec = self._line_specs[local.dtype] = DTensorSpec(self.mesh, self.placements, meta)
        return DTensor.__new__(DTensor, local, spec, requires_grad=False)

    def gather(self, local: Tensor) -> Tensor:
        """All-gather the full tensor from the pieces of all ranks."""
        if not self.pieces:
            return local.new_empty(self.shape)
        padded = local.new_zeros(max(piece.numel for piece in self.pieces))
        padded[: self.numel] = local
        # As bytes, since not every backend moves every dtype.
        gathered = self.shards.gather_all(padded.view(torch.uint8)).view(local.dtype)
        return torch.cat([gathered[piece.rank, : piece.numel] for piece in self.pieces]).view(self.shape)
