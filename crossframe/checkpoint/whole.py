"""Full tensors of a checkpoint, assembled from the shards of all ranks."""

import math

import numpy as np

from crossframe.checkpoint.reading import Saved
from crossframe.layout import Sharding
from crossframe.mesh import MeshSpec


def whole_tensors(saved: Saved, section: str) -> dict[str, np.ndarray]:
    """The tensors of a section by name.

    Raises:
        CheckpointError: no such section, or a damaged file.
    """
    whole = Sharding(tuple((name, layout.over(1)) for name, layout in saved.sections[section].units), MeshSpec(1))
    shapes = {spec.name: spec.shape for _, layout in whole.units for spec in layout.params}
    return {
        piece.name: line[piece.shard_start : piece.shard_start + math.prod(shapes[piece.name])].reshape(
            shapes[piece.name]
        )
        for (_, layout), line in zip(whole.units, saved.lines(section, whole, 0), strict=True)
        for piece in layout.pieces(0)
    }
