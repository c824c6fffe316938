"""Small checkpoints, whole or as their writers leave them before the last step."""

import numpy as np

from crossframe.checkpoint import MODEL, begin, write_rank
from crossframe.layout import FlatLayout, Sharding
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec

PARAMS = (ParamSpec("w", (5, 3), "bfloat16"), ParamSpec("b", (7,), "bfloat16", aliases=("tied",)))


def made(kind, world_size):
    layout = FlatLayout(PARAMS, world_size, True, None) if kind == "flat" else kind(PARAMS, world_size)
    return Sharding((("", layout),), MeshSpec(world_size))


def line_of(sharding, rank, padding):
    """Element k of parameter i is 20 * i + k, which bfloat16 holds."""
    ((_, layout),) = sharding.units
    line = np.full(layout.padded_shard_numel, padding, np.float32)
    for piece in layout.pieces(rank):
        i = [spec.name for spec in PARAMS].index(piece.name)
        line[piece.shard_start : piece.shard_stop] = 20 * i + np.arange(piece.param_start, piece.param_stop)
    return line.astype("bfloat16")


def written(path, sharding, values=None, bump=0):
    """The token of a save that is not finished yet; `bump` is added to every element."""
    token = begin(path)
    for rank in range(sharding.mesh.shard):
        lines = {MODEL: [line_of(sharding, rank, padding=42) + np.array(bump, "bfloat16")]}
        write_rank(path, token, rank, {MODEL: sharding}, lines, values if rank == 0 else None)
    return token
