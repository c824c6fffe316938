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
    """The copies by which one rank persists edits of the full parameters. Padding is in none of them; a piece of many
    runs is as many copies."""
    index = {param.name: i for i, param in enumerate(layout.params)}
    return tuple(
        Copy(
            index[piece.name],
            run.param_start,
            run.param_start + run.numel,
            run.shard_start,
            run.shard_start + run.numel,
        )
        for piece in layout.pieces(rank)
        for run in piece.runs()
    )
