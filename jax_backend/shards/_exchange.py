"""Shards from torch and to torch, rank by rank: rank r in torch and device r in JAX have the same shards (R04, R07, R09).

A line is one rank's buffer of a bucket, of shape (padded_shard_numel,): in torch_backend a unit's `bucket.store.buffer`. Nothing
here imports torch: any object with `__dlpack__` is accepted. No full parameter is ever made.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from crossframe.errors import LayoutError, UsageError
from crossframe.layout import Layout
from crossframe.mesh import check_rank
from jax_backend.mesh._device_mesh import device_of, mesh_spec, num_ranks, ranks_here
from jax_backend.mesh._rank_parts import part_of_rank
from jax_backend.shards._bucket import Bucket
from jax_backend.shards._sharded_params import ShardedParams, mesh_of


class SupportsDLPack(Protocol):
    """A tensor of another framework, or an array, whose memory is read without a copy."""

    def __dlpack_device__(self) -> tuple[int, int]: ...


def from_torch(
    like: ShardedParams,
    lines: Mapping[int, Mapping[str, SupportsDLPack]],
    layouts: Mapping[str, Layout] | None = None,
    *,
    copy: bool | None = None,
) -> ShardedParams:
    """Sharded parameters with the values of torch's lines.

    Args:
        like: parameters, gradients or moments with the same layouts and mesh.
        lines: for each rank of this process and each bucket of `like`, a detached tensor or an array of shape
            (padded_shard_numel,), with a leading dim of layers in a stacked unit.
        layouts: torch's layouts by bucket, to be compared with those of `like`. If they differ, pass them to `shard` as
            unit_layouts.
        copy: None: a line on its rank's device without padding shares its memory, and torch must not write into it; True: no
            memory is shared.

    Returns:
        The ranks' shards bit for bit, with 0 in the padding.

    Raises:
        LayoutError: layouts that differ, by bucket.
        UsageError: a missing or unknown rank or bucket, or a line of another shape or dtype.
    """
    mesh = mesh_of(like)
    ranks = ranks_here(mesh)
    buckets = {name: like.tree.by_name[name] for name in like.buckets}
    _check_layouts(buckets, layouts or {})
    if not isinstance(lines, Mapping) or sorted(lines) != ranks:
        got = sorted(lines) if isinstance(lines, Mapping) else type(lines).__name__
        raise UsageError(f"lines: expected a mapping of ranks {ranks}, got {got}")
    for rank in ranks:
        if set(lines[rank]) != set(buckets):
            raise UsageError(
                f"rank {rank}: expected a line for each of the buckets {list(buckets)}, got {list(lines[rank])}"
            )

    def own(bucket: Bucket, rank: int) -> Any:
        line = _received(lines[rank][bucket.name], bucket, rank, device_of(mesh, rank), copy)
        return bucket.from_line(_cleared(line, bucket, mesh_spec(mesh).coordinate(rank)[1]))

    return ShardedParams.of(
        like.tree, {name: bucket.assembled(mesh, partial(own, bucket)) for name, bucket in buckets.items()}
    )


def to_torch(sharded: ShardedParams, rank: int) -> dict[str, jax.Array]:
    """One rank's line of every bucket, on its device, for `torch.from_dlpack(line)`, which does not copy it.

    Its padding holds 0, where torch's may hold 42 (R05): copy it piece by piece, as `bucket.store.split(line)` splits it. Under
    the flat and ragged layouts it shares memory with `sharded`: do not write into it.

    Raises:
        MeshError: a rank that does not exist.
        UsageError: a rank of another process, or a call inside a transformation.
    """
    mesh = mesh_of(sharded)
    check_rank(rank, num_ranks(mesh))

    def here(array: jax.Array) -> jax.Array:
        return jax.device_put(part_of_rank(array, mesh, rank), device_of(mesh, rank))

    return {
        name: sharded.tree.by_name[name].to_line(jax.tree.map(here, arrays)) for name, arrays in sharded.buckets.items()
    }


def _received(line: Any, bucket: Bucket, rank: int, device: Any, copy: bool | None) -> jax.Array:
    expected, got = bucket.line_shape, tuple(getattr(line, "shape", ()))
    # torch writes torch.float32, numpy float32.
    dtype = str(getattr(line, "dtype", type(line).__name__)).removeprefix("torch.")
    if got != expected or dtype != bucket.layout.dtype:
        raise UsageError(
            f"bucket {bucket.name!r}, rank {rank}: expected a line of shape {expected} and dtype {bucket.layout.dtype}, got "
            f"{got} and {dtype}; both sides must have one layout (pass layouts to compare them)"
        )
    if isinstance(line, np.ndarray):  # numpy's DLPack knows no bfloat16
        return jax.device_put(line.copy(), device)
    return jax.device_put(jax.dlpack.from_dlpack(line, copy=copy), device)


def _cleared(line: jax.Array, bucket: Bucket, place: int) -> jax.Array:
    padding = bucket.layout.padding(place)
    if not padding:
        return line
    real = np.ones(line.shape[-1], bool)
    for run in padding:
        real[run.start : run.stop] = False
    return jnp.where(jax.device_put(real, line.device), line, jnp.zeros((), line.dtype))


def _check_layouts(buckets: Mapping[str, Bucket], layouts: Mapping[str, Layout]) -> None:
    def shown(layout: Layout) -> Any:
        return layout.to_json(), [(spec.name, spec.shape, spec.dtype) for spec in layout.params]

    for name, layout in layouts.items():
        if name not in buckets:
            raise LayoutError(f"layouts: {name!r} is not a bucket: expected among {list(buckets)}")
        expected, got = shown(buckets[name].layout), shown(layout)
        if expected != got:
            raise LayoutError(
                f"bucket {name!r}: expected the layout {expected}, got {got}; pass torch's layouts to shard as unit_layouts"
            )
