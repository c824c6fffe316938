"""Views of the parameters in a gathered buffer, whose backward is one concatenation.

[Note: split, not slices] The transpose of a slice is a pad to the full buffer, and those of n slices are n pads and as many
sums: n buffers instead of one, and a program that grows with n squared. The transpose of one split is one concatenation.
"""

from collections.abc import Sequence
from itertools import pairwise

import jax

from crossframe.layout import Layout, PerParamLayout


def line_views(layout: Layout, gathered: jax.Array) -> dict[str, jax.Array]:
    """The parameters, by canonical name, in a gathered buffer in which each is one run."""
    bounds = [0]
    for start, spec in zip(layout.offsets, layout.params, strict=True):
        bounds += [start, start + spec.numel]
    runs = _split([*bounds, layout.gathered_numel], gathered, 0)[1::2]
    return {spec.name: run.reshape(spec.shape) for spec, run in zip(layout.params, runs, strict=True)}


def column_views(layout: PerParamLayout, gathered: jax.Array) -> dict[str, jax.Array]:
    """The parameters, by canonical name, in a gathered buffer in which each is a column of the table whose rows are ranks."""
    ranks, found = layout.world_size, {}
    bounds = [0, *(column.start + column.width for column in layout.columns)]
    parts = _split(bounds, gathered.reshape(ranks, layout.padded_shard_numel), 1)
    for i, (spec, column, chunks) in enumerate(zip(layout.params, layout.columns, parts, strict=True)):
        if column.dim:
            chunk = list(spec.shape)
            chunk[column.dim] = layout.chunk_rows(i)
            order = (*range(1, column.dim + 1), 0, *range(column.dim + 1, len(chunk) + 1))
            found[spec.name] = chunks.reshape(ranks, *chunk).transpose(order).reshape(spec.shape)
        else:
            found[spec.name] = chunks.reshape(-1)[: column.numel].reshape(spec.shape)
    return found


def _split(bounds: list[int], array: jax.Array, axis: int) -> Sequence[jax.Array]:
    return jax.lax.split(array, [stop - start for start, stop in pairwise(bounds)], axis)
