"""The ragged layout (R09): a line of parameters in which no boundary between shards splits a block. torch has none."""

import math
from dataclasses import dataclass
from functools import cached_property

from crossframe.errors import LayoutError
from crossframe.layout.line import LineLayout
from crossframe.layout.padding import Padding
from crossframe.quoting import quote

# Limits of the search for a shard size: the number of moduli, and for each modulus the number of consecutive multiples that are
# tried, and of further ones, each of which jumps to the size that the last attempt needed.
MODULI, STEPS, LEAPS = 24, 16, 16


@dataclass(frozen=True)
class RaggedLayout(LineLayout):
    """Parameters in one line, padded so that every boundary between shards falls between two blocks.

    Attributes:
        params: the parameters in order (R01), one dtype for all of them (R11).
        world_size: number of shards.
        blocks: for each parameter the number of consecutive elements that stay on one rank, a divisor of its numel. None: one
            row, the numel of `shape[1:]`. Blocks equal to these are stored as None.

    Each parameter is one run of the gathered buffer, so an all-gather needs no copy. Padding lies before parameters (also
    before the first) and at the tail, never inside a parameter. All shards have the same size, the smallest that a bounded
    search finds; `padding_bound` limits the padding, and `wasteful` tells whether there is too much of it.

    Raises:
        LayoutError: no parameters, mixed dtypes, or a block that is not an int of at least 1 or does not divide its parameter.

    >>> from crossframe.params import ParamSpec
    >>> layout = RaggedLayout((ParamSpec("w", (5, 3)), ParamSpec("b", (5,))), world_size=2)
    >>> layout.padded_shard_numel, layout.offsets, layout.padding_numel
    (11, (2, 17), 2)
    >>> [(piece.name, piece.param_start, piece.param_stop) for rank in range(2) for piece in layout.pieces(rank)]
    [('w', 0, 9), ('w', 9, 15), ('b', 0, 5)]
    """

    blocks: tuple[int, ...] | None = None

    kind = "ragged"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks is None:
            return
        if not isinstance(self.blocks, tuple) or len(self.blocks) != len(self.params):
            raise LayoutError(
                f"expected a tuple of {len(self.params)} blocks, one a parameter, got {quote(self.blocks)}"
            )
        for param, block in zip(self.params, self.blocks, strict=True):
            if type(block) is not int or block < 1 or param.numel % block:
                raise LayoutError(
                    f"parameter {param.name!r} of shape {quote(param.shape)}: expected a block of at least 1 element that "
                    f"divides its {param.numel}, got {quote(block)}"
                )
        if self.blocks == self._rows:
            object.__setattr__(self, "blocks", None)

    @property
    def _rows(self) -> tuple[int, ...]:
        """The numel of a row of each parameter; 1 if rows are empty."""
        return tuple(max(1, math.prod(param.shape[1:])) for param in self.params)

    @cached_property
    def block_numels(self) -> tuple[int, ...]:
        """The block size of each parameter, in elements."""
        return self._rows if self.blocks is None else self.blocks

    @property
    def numel(self) -> int:
        """Elements of all parameters together, without padding."""
        return sum(param.numel for param in self.params)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter starts in the gathered buffer, in elements."""
        return self._placed[1]

    @property
    def flat_numel(self) -> int:
        """Elements of the line, padding included: the gathered buffer, since all shards have the same size."""
        return self.gathered_numel

    @property
    def gathered_numel(self) -> int:
        """Elements of the buffer that an all-gather fills: one shard for each of `line_ranks` ranks."""
        return self._placed[0] * self.line_ranks

    @property
    def padding_numel(self) -> int:
        """Elements of the gathered buffer that belong to no parameter."""
        return self.gathered_numel - self.numel

    @property
    def padding_bound(self) -> int:
        """An upper bound of `padding_numel` that needs no search: world_size * min(S_blocks, S_whole) - numel, where

            S_blocks = ceil((numel + sum of (block - 1) over all non-empty parameters but the first) / world_size),
                       rounded up to a multiple of L, the least common multiple of the blocks of all non-empty parameters;
            S_whole = max(largest parameter, ceil(2 * numel / world_size)).

        A placement exists for both shard sizes. If S is a multiple of L, all boundaries k * S are multiples of every block, so
        no block of a parameter that starts at a multiple of its block is split; such a start costs at most block - 1 elements
        of padding, and the first parameter starts at 0. If no parameter is larger than S, no parameter needs to be split: put
        each into the shard in which the previous one ended if it fits, and into the next shard otherwise. Two neighboring
        shards then hold more than S elements together, so fewer than 2 * numel / S + 1 shards are used, and there are that
        many.
        """
        return self.line_ranks * self._sure_shard_numel - self.numel

    @property
    def wasteful(self) -> bool:
        """Whether more than half of the gathered buffer is padding. If so, use a PerParamLayout or smaller blocks."""
        return self.padding_numel > self.numel

    @cached_property
    def _line(self) -> tuple[tuple[int, int], ...]:
        """(numel, block) of the non-empty parameters."""
        return tuple((param.numel, b) for param, b in zip(self.params, self.block_numels, strict=True) if param.numel)

    @cached_property
    def _sure_shard_numel(self) -> int:
        if not self._line:
            return 0
        common = math.lcm(*(block for _, block in self._line))
        aligned = -(-(self.numel + sum(block - 1 for _, block in self._line[1:])) // self.line_ranks)
        whole = max(max(numel for numel, _ in self._line), -(-2 * self.numel // self.line_ranks))
        return min(aligned + -aligned % common, whole)

    @cached_property
    def _placed(self) -> tuple[int, tuple[int, ...]]:
        """The shard size, and where each parameter starts."""
        numel = self._shard_numel()
        placed = place(self._line, numel)
        assert placed is not None and placed[1] <= self.line_ranks * numel
        offsets, starts, at = [], iter(placed[0]), 0
        for param in self.params:
            if param.numel:
                at = next(starts)
            offsets.append(at)
            at += param.numel
        return numel, tuple(offsets)

    def _shard_numel(self) -> int:
        """The smallest shard size among those tried for which a placement exists."""
        least, best = -(-self.numel // self.line_ranks), self._sure_shard_numel
        for modulus in self._moduli(best):
            numel = least + -least % modulus
            for attempt in range(STEPS + LEAPS):
                if numel >= best:
                    break
                placed = place(self._line, numel)
                needed = -(-placed[1] // self.line_ranks) if placed else 0
                if placed and needed <= numel:
                    best = numel
                    break
                # Sizes below `needed` may work too, since another size places parameters elsewhere. So try steps before leaps.
                numel = max(numel + modulus, needed + -needed % modulus if attempt >= STEPS else 0)
        return best

    def _moduli(self, limit: int) -> list[int]:
        """The numbers whose multiples are tried as shard sizes.

        A parameter that crosses two boundaries needs a block that divides the shard size. So these are the least common
        multiple of the blocks of all parameters that cross two boundaries at every size below `limit`; the same with the blocks
        of the other parameters added one by one, larger parameters first; and the same with one other block each.
        """
        by_size = sorted(self._line, reverse=True)
        sure = math.lcm(1, *(block for numel, block in by_size if numel > 2 * limit))
        moduli = [sure]
        for _, block in by_size:
            moduli.append(math.lcm(moduli[-1], block))
            if moduli[-1] >= limit:
                break
        moduli += [math.lcm(sure, block) for _, block in by_size]
        return list(dict.fromkeys(modulus for modulus in moduli if modulus < limit))[:MODULI]

    def padding(self, rank: int) -> tuple[Padding, ...]:
        """The runs of this rank's shard that belong to no parameter, all of kind "block"."""
        return tuple(Padding("block", start, stop) for start, stop in self.gaps(rank))

    def to_json(self) -> dict:
        """What `layout_from_json` needs to build this layout again."""
        return (
            {
                "kind": self.kind,
                "world_size": self.world_size,
                "blocks": list(self.blocks) if self.blocks else None,
            }
            | self._padded_for()
            | {"places": self.places()}
        )


def place(line: tuple[tuple[int, int], ...], shard_numel: int) -> tuple[tuple[int, ...], int] | None:
    """Place parameters, given as (numel, block), in shards of this size, each as early as possible.

    Returns:
        The start of each, and the end of the last one; None if one of them fits nowhere.

    Placing each as early as possible is optimal: the valid starts of a parameter do not depend on the previous ones, so an
    earlier end of one is never a disadvantage for the next.
    """
    starts, end = [], 0
    for numel, block in line:
        start = _earliest(end, numel, block, shard_numel)
        if start is None:
            return None
        starts.append(start)
        end = start + numel
    return tuple(starts), end


def _earliest(after: int, numel: int, block: int, shard_numel: int) -> int | None:
    """The least start >= `after` from which no boundary between shards splits a block; None if there is none."""
    boundary = (after // shard_numel + 1) * shard_numel
    if after + numel <= boundary:
        return after
    # It crosses this boundary or starts at it. It may cross the next one too only if the block divides the shard size.
    start = after + (boundary - after) % block
    if shard_numel % block == 0 or start + numel <= boundary + shard_numel:
        return start
    # Start in the next shard, at the first offset that leaves whole blocks up to the end of that shard. In later shards the same
    # offsets are valid, so they need no look.
    start = boundary + shard_numel % block
    return start if start + numel <= boundary + 2 * shard_numel else None
