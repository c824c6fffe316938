"""What a user's edits of full parameters become (R20): each rank copies back the slice that it owns, nothing else."""

from dataclasses import dataclass

from crossframe.layout import Layout


@dataclass(frozen=True)
class Copy:
    """Elements `param_start:param_stop` of parameter `index` go to `shard_start:shard_stop` of the rank's shard."""

    index: int
    param_start: int
    param_stop: int
    shard_start: int
    shard_stop: int


def writeback_copies(layout: Layout, rank: int) -> tuple[Copy, ...]:
    """The copies by which one rank persists edits of the full parameters. Padding is in none of them."""
    index = {param.name: i for i, param in enumerate(layout.params)}
    return tuple(
        Copy(index[p.name], p.param_start, p.param_stop, p.shard_start, p.shard_stop) for p in layout.pieces(rank)
    )
