"""Exchanges: one rank's part in the copies that turn one layout of a bucket into another, between the ranks of one group."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from crossframe.errors import LayoutError
from crossframe.layout.overlay import overlay
from crossframe.layout.pieces import Layout
from crossframe.layout.sharding import Sharding
from crossframe.mesh import MeshSpec


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `start:start + numel` of a rank's shard of parameter `index` under a layout."""

    index: int
    start: int
    numel: int


@dataclass(frozen=True)
class Exchange:
    """What one rank copies, sends and receives, so that it holds under the target what the group holds under the source.

    Attributes:
        kept: what the rank holds under both: (part of the source, part of the target).
        sent: parts of the source, by the rank that they go to.
        received: parts of the target, by the rank that they come from, in the order in which that rank sends them.
        sent_numels, received_numels: how many elements go to each rank and come from it; 0 for the rank itself.
    """

    kept: tuple[tuple[Part, Part], ...]
    sent: tuple[Part, ...]
    received: tuple[Part, ...]
    sent_numels: tuple[int, ...]
    received_numels: tuple[int, ...]


@lru_cache(maxsize=256)
def exchange(source: Layout, target: Layout, rank: int, indices: tuple[int, ...]) -> Exchange:
    """One rank's part in turning the source into the target, by the copies of `overlay`.

    Every element moves once, straight to its place, so that no rank holds more of a parameter than its two pieces and the
    elements that are on their way.

    Args:
        source, target: layouts of the same parameters, in the same order, over the same number of ranks.
        indices: the parameters that move.

    Raises:
        LayoutError: the parameters or the numbers of ranks differ.

    >>> from crossframe.layout import FlatLayout, PerParamLayout
    >>> from crossframe.params import ParamSpec
    >>> params = (ParamSpec("w", (3, 2)),)
    >>> plan = exchange(FlatLayout(params, 2, keep_original=False), PerParamLayout(params, 2), 0, (0,))
    >>> plan.kept, plan.received, plan.received_numels
    (((Part(index=0, start=0, numel=3), Part(index=0, start=0, numel=3)),), (Part(index=0, start=3, numel=1),), (0, 1))
    """
    if source.world_size != target.world_size or [p.name for p in source.params] != [p.name for p in target.params]:
        raise LayoutError(
            f"expected two layouts of the same parameters over the same ranks, got {len(source.params)} parameters over "
            f"{source.world_size} ranks and {len(target.params)} over {target.world_size}"
        )
    # The copies that leave a rank are those that the opposite exchange brings to it.
    incoming = list(_incoming(source, target, rank, indices))
    outgoing = list(_incoming(target, source, rank, indices))
    return Exchange(
        kept=tuple((there, here) for other, here, there in incoming if other == rank),
        sent=tuple(here for other, here, _ in outgoing if other != rank),
        received=tuple(here for other, here, _ in incoming if other != rank),
        sent_numels=_numels(outgoing, rank, source.world_size),
        received_numels=_numels(incoming, rank, source.world_size),
    )


# The other rank, the part on this rank, and the part on the other.
_Copy = tuple[int, Part, Part]


def _incoming(source: Layout, target: Layout, rank: int, indices: tuple[int, ...]) -> Iterator[_Copy]:
    """The copies to one rank of the target, by source rank and then in the order of the target."""
    index = {target.params[i].name: i for i in indices}
    sharding = [Sharding((("", layout),), MeshSpec(layout.world_size)) for layout in (source, target)]
    starts = {piece.name: piece.shard_start for piece in target.pieces(rank)}
    starts_of: dict[int, dict[str, int]] = {}
    found: list[_Copy] = []
    for each in overlay(sharding[0], sharding[1], rank):
        if each.name not in index:
            continue
        if each.source_rank not in starts_of:
            pieces = source.pieces(each.source_rank)
            starts_of[each.source_rank] = {piece.name: piece.shard_start for piece in pieces}
        here = Part(index[each.name], each.target_start - starts[each.name], each.numel)
        there = each.source_start - starts_of[each.source_rank][each.name]
        found.append((each.source_rank, here, Part(here.index, there, each.numel)))
    yield from sorted(found, key=itemgetter(0))


def _numels(copies: list[_Copy], rank: int, world_size: int) -> tuple[int, ...]:
    numels = [0] * world_size
    for other, here, _ in copies:
        numels[other] += here.numel if other != rank else 0
    return tuple(numels)
