"""Executes an overlay: copies shards of one sharding to shards of another."""

from collections.abc import Iterable, Sequence

import numpy as np

from crossframe.errors import LayoutError
from crossframe.layout import Transfer

Shards = Sequence[Sequence[np.ndarray]]


def apply_overlay(transfers: Iterable[Transfer], source_shards: Shards, target_shards: Shards) -> None:
    """Execute the transfers of `crossframe.layout.overlay`.

    Each copy goes directly from a source shard to its target shard, so that no rank holds more of a parameter than its own
    pieces. Elements without a transfer, such as padding, do not change.

    Args:
        source_shards, target_shards: `shards[rank][bucket]`, the buffers of every rank of the mesh, each of shape
            (padded_shard_numel,). Those of the target are written in place.

    Raises:
        LayoutError: a transfer exceeds a shard, or is between different dtypes. The transfers before it have been executed.

    >>> shards = [[np.zeros(2)], [np.zeros(2)]]
    >>> apply_overlay([Transfer("w", 0, 0, 1, 1, 0, 0, 2)], [[np.arange(3.0)]], shards)
    >>> shards[1][0]
    array([1., 2.])
    """
    for each in transfers:
        source = _held(
            source_shards, "source", each.name, each.source_rank, each.source_bucket, each.source_start, each.numel
        )
        target = _held(
            target_shards, "target", each.name, each.target_rank, each.target_bucket, each.target_start, each.numel
        )
        if source.dtype != target.dtype:
            raise LayoutError(
                f"parameter {each.name!r}: expected shards of one dtype, got {source.dtype} on source rank {each.source_rank} "
                f"and {target.dtype} on target rank {each.target_rank}; convert before or after"
            )
        target[:] = source


def _held(shards: Shards, side: str, name: str, rank: int, bucket: int, start: int, numel: int) -> np.ndarray:
    """The elements `start:start + numel` of one shard."""
    if not (rank < len(shards) and bucket < len(shards[rank]) and start + numel <= len(shards[rank][bucket])):
        raise LayoutError(
            f"parameter {name!r}: expected {start + numel} elements in bucket {bucket} of {side} rank {rank}, got "
            f"{[[len(shard) for shard in each] for each in shards[rank : rank + 1]]}: give the shards of every rank and bucket"
        )
    return shards[rank][bucket][start : start + numel]
