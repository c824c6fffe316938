"""A bucket on all ranks: its shards, and their all-gather, writeback and reduction."""

from collections.abc import Mapping, Sequence
from typing import assert_never

import numpy as np

from crossframe.api import Api
from crossframe.dtypes import numpy_dtype
from crossframe.errors import MeshError, ParamError
from crossframe.layout import Layout, views
from crossframe.mesh import MeshSpec, check_rank
from crossframe.precision import Precision, resolve_precision
from crossframe.reduction import DivideFactors, ReductionStep, reduction_steps
from crossframe.reference.collectives import all_gather, all_reduce, over_groups, reduce_scatter
from crossframe.writeback import writeback_copies

Params = Mapping[str, np.ndarray]


class ReferenceUnit:
    """The shards of a bucket, `shards[rank]` of shape (padded_shard_numel,), and operations on them.

    Attributes:
        layout: the layout of the shards.
        mesh: the ranks; every replica holds all shards.
        precision: dtypes.
        shards: the authoritative storage, by rank.
    """

    def __init__(
        self,
        layout: Layout,
        params: Params,
        *,
        fill: bool = True,
        mesh: MeshSpec | None = None,
        precision: Precision | None = None,
    ) -> None:
        """Shard full parameters.

        Args:
            params: every parameter of the layout by name, in full.
            fill: store torch's values in the padding (42 and 0, R05); False stores 0 everywhere, as JAX does.
            mesh: the ranks; None: one replica.
            precision: the dtypes; None: the stored dtype everywhere.
        """
        self.layout = layout
        self.mesh = mesh or MeshSpec(shard=layout.world_size)
        self.precision = precision or resolve_precision(layout.dtype)
        if self.mesh.shard != layout.world_size:
            raise MeshError(f"the layout is over {layout.world_size} ranks, the mesh shards over {self.mesh.shard}")
        self._check([params] * self.mesh.world_size)
        self.shards = [self._shard(params, rank, fill) for rank in range(self.mesh.world_size)]

    @property
    def world_size(self) -> int:
        """Number of ranks, including replicas."""
        return self.mesh.world_size

    def shard_index(self, rank: int) -> int:
        """The index of a rank's shard."""
        return self.mesh.coordinate(rank)[1]

    def _shard(self, params: Params, rank: int, fill: bool) -> np.ndarray:
        shard = np.zeros(self.layout.padded_shard_numel, numpy_dtype(self.layout.dtype))
        for run in self.layout.padding(self.shard_index(rank)) if fill else ():
            shard[run.start : run.stop] = run.fill
        self.write(shard, params, rank)
        return shard

    def write(self, shard: np.ndarray, params: Params, rank: int) -> None:
        """Copy a rank's slices of full arrays into its shard, except padding (R20)."""
        for copy in writeback_copies(self.layout, self.shard_index(rank)):
            full = params[self.layout.params[copy.index].name]
            shard[copy.shard_start : copy.shard_stop] = full.reshape(-1)[copy.param_start : copy.param_stop]

    def _check(self, arrays: Sequence[Params], *, missing: bool = False) -> None:
        """Raise unless there are arrays of every rank in the parameters' shapes. With `missing`, arrays may be None or absent."""
        if len(arrays) != self.world_size:
            raise MeshError(f"expected the arrays of {self.world_size} ranks, got those of {len(arrays)}")
        for rank, params in enumerate(arrays):
            for spec in self.layout.params:
                array = params.get(spec.name)
                got = "nothing" if array is None else tuple(array.shape)
                if got != spec.shape and not (array is None and missing):
                    raise ParamError(f"parameter {spec.name!r}: expected shape {spec.shape}, got {got} on rank {rank}")

    def shard_groups(self) -> list[range]:
        """The groups of ranks that hold one replica."""
        return [self.mesh.shard_group(replica * self.mesh.shard) for replica in range(self.mesh.replicate)]

    def replicate_groups(self) -> list[range]:
        """The groups of ranks that hold the same shard."""
        return [self.mesh.replicate_group(index) for index in range(self.mesh.shard)]

    def gather(self, shards: Sequence[np.ndarray] | None = None) -> list[np.ndarray]:
        """The gathered buffer of every rank, of shape (gathered_numel,), with padding, from its shard group (R10).

        Args:
            shards: sharded gradients by rank; None: the parameters.
        """
        return over_groups(all_gather, self.shards if shards is None else shards, self.shard_groups())

    def unshard(self) -> list[dict[str, np.ndarray]]:
        """Copies of every rank's full parameters by name, which the user may edit."""
        return [{name: value.copy() for name, value in views(self.layout, buffer).items()} for buffer in self.gather()]

    def writeback(self, edited: Sequence[Params]) -> None:
        """Persist the slice that each rank owns of its edited full parameters (R20). After an error nothing has changed."""
        self._check(edited)
        for rank, params in enumerate(edited):
            self.write(self.shards[rank], params, rank)

    def reduce(self, grads: Sequence[Params], factors: DivideFactors, api: Api = Api.FSDP1) -> list[np.ndarray]:
        """Reduce the full gradients of all ranks to sharded mean gradients of shape (padded_shard_numel,), by the steps of
        `reduction_steps` (R26, R28). A gradient that a rank lacks counts as zeros (R29)."""
        buffers = self.collect(grads)
        for step in reduction_steps(self.mesh, api):
            buffers = self.apply(step, buffers, factors)
        return buffers

    def collect(self, grads: Sequence[Params]) -> list[np.ndarray]:
        """Each rank's full gradients in one buffer of shape (gathered_numel,), in the layout of the gathered parameters."""
        self._check(grads, missing=True)
        buffers = []
        for params in grads:
            given = next(
                (grad.dtype for grad in params.values() if grad is not None), numpy_dtype(self.precision.gathered)
            )
            buffer = np.zeros(self.layout.gathered_numel, given)
            for index in range(self.mesh.shard):
                start = index * self.layout.padded_shard_numel
                for copy in writeback_copies(self.layout, index):
                    grad = params.get(self.layout.params[copy.index].name)
                    if grad is not None:
                        part = grad.reshape(-1)[copy.param_start : copy.param_stop]
                        buffer[start + copy.shard_start : start + copy.shard_stop] = part
            buffers.append(buffer)
        return buffers

    def apply(self, step: ReductionStep, buffers: list[np.ndarray], factors: DivideFactors) -> list[np.ndarray]:
        """Apply one step of a reduction to the buffers of all ranks. Steps that keep or accumulate are left to the caller, and
        have no effect here."""
        match step:
            case ReductionStep.CAST_TO_REDUCED:
                return [buffer.astype(numpy_dtype(self.precision.reduced)) for buffer in buffers]
            case ReductionStep.DIVIDE_BEFORE:
                return [_divided(buffer, factors.before) for buffer in buffers]
            case ReductionStep.REDUCE_SCATTER:
                return over_groups(reduce_scatter, buffers, self.shard_groups())
            case ReductionStep.DIVIDE_BETWEEN:
                return [_divided(buffer, factors.between) for buffer in buffers]
            case ReductionStep.ALL_REDUCE:
                return over_groups(all_reduce, buffers, self.replicate_groups())
            case ReductionStep.DIVIDE_AFTER:
                return [_divided(buffer, factors.after) for buffer in buffers]
            case ReductionStep.CAST_TO_STORED:
                return [buffer.astype(numpy_dtype(self.precision.stored)) for buffer in buffers]
            case ReductionStep.ADD_PARTIAL | ReductionStep.KEEP_PARTIAL | ReductionStep.ACCUMULATE:
                return buffers
            case _:
                assert_never(step)

    def pieces(self, shard: np.ndarray, rank: int) -> dict[str, np.ndarray]:
        """The pieces of a shard as flat arrays by parameter name, without padding."""
        check_rank(rank, self.world_size)
        return {p.name: shard[p.shard_start : p.shard_stop] for p in self.layout.pieces(self.shard_index(rank))}


def _divided(array: np.ndarray, factor: float) -> np.ndarray:
    """An array divided in its own dtype. Below float32 the quotient is computed in float32 and rounded once, as in torch."""
    if factor == 1:
        return array
    return (array.astype(np.promote_types(array.dtype, np.float32)) / factor).astype(array.dtype)
