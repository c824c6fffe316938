"""One unit of a sharded model on all ranks at once."""

from collections.abc import Mapping, Sequence

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.errors import MeshError, ParamError
from crossframe.layout import Layout, views
from crossframe.mesh import check_rank
from crossframe.reduction import DivideFactors
from crossframe.reference.collectives import all_gather, reduce_scatter
from crossframe.writeback import writeback_copies

Params = Mapping[str, np.ndarray]


class ReferenceUnit:
    """The shards of one unit, `shards[rank]` of shape (padded_shard_numel,), and what is done with them."""

    def __init__(self, layout: Layout, params: Params, *, fill: bool = True) -> None:
        """Shard full parameters.

        Args:
            params: every parameter of the layout by name, in full.
            fill: store torch's values in the padding (42 and 0, R05); False stores 0 everywhere, as JAX does.
        """
        self.layout = layout
        self._check([params] * layout.world_size)
        self.shards = [self._shard(params, rank, fill) for rank in range(layout.world_size)]

    def _shard(self, params: Params, rank: int, fill: bool) -> np.ndarray:
        shard = np.zeros(self.layout.padded_shard_numel, numpy_dtype(self.layout.dtype))
        for run in self.layout.padding(rank) if fill else ():
            shard[run.start : run.stop] = run.fill
        self._write(shard, params, rank)
        return shard

    def _write(self, shard: np.ndarray, params: Params, rank: int) -> None:
        for copy in writeback_copies(self.layout, rank):
            full = params[self.layout.params[copy.index].name]
            shard[copy.shard_start : copy.shard_stop] = full.reshape(-1)[copy.param_start : copy.param_stop]

    def _check(self, arrays: Sequence[Params], *, missing: bool = False) -> None:
        """Refuse anything but the arrays of every rank, in the parameters' shapes; some may be missing where that is allowed."""
        if len(arrays) != self.layout.world_size:
            raise MeshError(f"expected the arrays of {self.layout.world_size} ranks, got those of {len(arrays)}")
        for rank, params in enumerate(arrays):
            for spec in self.layout.params:
                array = params.get(spec.name)
                got = "nothing" if array is None else tuple(array.shape)
                if got != spec.shape and not (array is None and missing):
                    raise ParamError(f"parameter {spec.name!r}: expected shape {spec.shape}, got {got} on rank {rank}")

    def gather(self) -> list[np.ndarray]:
        """The gathered buffer of every rank, of shape (gathered_numel,), padding included."""
        return all_gather(self.shards)

    def unshard(self) -> list[dict[str, np.ndarray]]:
        """Every rank's full parameters, by name: copies, which a user may edit."""
        return [{name: value.copy() for name, value in views(self.layout, buffer).items()} for buffer in self.gather()]

    def writeback(self, edited: Sequence[Params]) -> None:
        """Persist what each rank made of its full parameters: the slice that it owns (R20). All of it, or, refused, nothing."""
        self._check(edited)
        for rank, params in enumerate(edited):
            self._write(self.shards[rank], params, rank)

    def reduce(self, grads: Sequence[Params], factors: DivideFactors) -> list[np.ndarray]:
        """Full gradients of every rank to sharded mean gradients, each of shape (padded_shard_numel,) (R26).

        A parameter that a rank has no gradient for counts as zeros there (R29).
        """
        self._check(grads, missing=True)
        buffers = []
        for params in grads:
            buffer = np.zeros(self.layout.gathered_numel, numpy_dtype(self.layout.dtype))
            for rank in range(self.layout.world_size):
                start = rank * self.layout.padded_shard_numel
                for copy in writeback_copies(self.layout, rank):
                    grad = params.get(self.layout.params[copy.index].name)
                    if grad is not None:
                        part = grad.reshape(-1)[copy.param_start : copy.param_stop]
                        buffer[start + copy.shard_start : start + copy.shard_stop] = part
            buffers.append(_divided(buffer, factors.before))
        return [_divided(shard, factors.after) for shard in reduce_scatter(buffers)]

    def pieces(self, shard: np.ndarray, rank: int) -> dict[str, np.ndarray]:
        """What a shard holds of each parameter, as flat runs by name; padding is in none of them."""
        check_rank(rank, self.layout.world_size)
        return {p.name: shard[p.shard_start : p.shard_stop] for p in self.layout.pieces(rank)}


def _divided(array: np.ndarray, factor: float) -> np.ndarray:
    """An array divided in its own dtype; below float32 the quotient is taken in float32 and rounded once, as torch does."""
    return (array.astype(np.promote_types(array.dtype, np.float32)) / factor).astype(array.dtype)
