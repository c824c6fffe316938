"""The partition of parameters over the model axes of a mesh, next to the shards of ranks."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec

from crossframe.errors import LayoutError
from crossframe.param_map import ParamMap
from crossframe.params import ParamSpec
from crossframe.quoting import quote
from jax_backend.mesh._device_mesh import axes_of
from jax_backend.shards._bucket import WHOLE, Bucket, PerParamBucket

Chosen = Callable[[ParamSpec], PartitionSpec | None] | None


def divided(bucket: Bucket, chosen: Chosen, axes: Mapping[str, int], param_map: ParamMap) -> Bucket:
    """A bucket with the partitions of its parameters.

    Args:
        chosen: from a parameter to its partition; see `jax_backend.shard`.
        axes: the sizes of the model axes.

    Raises:
        LayoutError: a partition that does not fit its parameter or the mesh, or a layout that cannot be divided.
    """
    if not isinstance(bucket, PerParamBucket):
        if axes:
            raise LayoutError(
                f"unit {bucket.unit!r}: expected layout='per_param' on a mesh with the model axes {list(axes)}, got "
                f"{bucket.layout.kind!r}, whose arrays hold several parameters and cannot be divided over them; pass "
                "layout='per_param', or make the mesh without model_axes"
            )
        return bucket
    given = [chosen(spec) if chosen else None for spec in bucket.layout.params]
    partitions = tuple(
        WHOLE if each is None else _checked(each, spec, bucket.layout.shard_dims[i], axes, param_map)
        for i, (spec, each) in enumerate(zip(bucket.layout.params, given, strict=True))
    )
    return replace(bucket, model_partitions=partitions)


def _checked(
    given: Any, spec: ParamSpec, shard_dim: int, axes: Mapping[str, int], param_map: ParamMap
) -> PartitionSpec:
    where = f"model_partition of parameter {spec.name!r} of shape {spec.shape}"
    if not isinstance(given, PartitionSpec) or len(given) > len(spec.shape):
        raise LayoutError(f"{where}: expected None or a PartitionSpec of at most {len(spec.shape)} dims, got {given!r}")
    entries = [axes_of(entry) for entry in given]
    named = [axis for entry in entries for axis in entry]
    if unknown := [axis for axis in named if axis not in axes]:
        raise LayoutError(
            f"{where}: expected model axes of the mesh, {list(axes)}, got {quote(unknown)}; give the mesh such an axis by "
            "make_mesh(..., model_axes={'tp': 2}), of size 1 to leave parameters whole; the dim over 'shard' is chosen by dims="
        )
    if len(set(named)) < len(named):
        raise LayoutError(f"{where}: expected each axis once, got {given!r}")
    entry = param_map.by_name[spec.name]
    if named and (entry.axes is None or len(entry.paths) > 1):
        raise LayoutError(
            f"{where}: expected a parameter of one leaf with the same dims, but the param_map joins or splits "
            f"{list(entry.paths)}; shard the model under its own names (param_map=None)"
        )
    for dim, over in enumerate(entries):
        parts = math.prod(axes[axis] for axis in over)
        if over and dim == shard_dim:
            raise LayoutError(
                f"{where}: dim {dim} is sharded over the ranks and cannot be divided over {quote(over)} too; shard it on another "
                "dim by dims=, or return None for it"
            )
        if spec.shape[dim] % parts:
            raise LayoutError(
                f"{where}: expected dim {dim} to be a multiple of {parts}, the size of {quote(over)}, got {spec.shape[dim]}; "
                "return None for it"
            )
    return given
