"""R09: the ragged layout beside its rule, and its shard size beside the smallest there is; no framework is needed."""

from dataclasses import dataclass
from functools import cache
from itertools import count, product
from math import prod

from crossframe.layout import RaggedLayout
from crossframe.params import ParamSpec
from experiments.spec.cases import SHAPES, WORLD_SIZES, Shapes
from experiments.spec.checks import Scope
from experiments.spec.tally import Tallies, Tally


@dataclass(frozen=True)
class RaggedCase:
    """A unit with the block of each parameter."""

    shapes: Shapes
    blocks: tuple[int, ...]
    world_size: int

    def layout(self) -> RaggedLayout:
        """What the core says of it."""
        params = tuple(ParamSpec(f"p{i}", shape) for i, shape in enumerate(self.shapes))
        return RaggedLayout(params, self.world_size, self.blocks)


@cache
def ragged_cases() -> tuple[RaggedCase, ...]:
    """Every list of up to three shapes, each parameter in blocks of one element, of a row, and of all of it."""
    found = []
    for length in (1, 2, 3):
        for shapes in product(SHAPES, repeat=length):
            choices = [sorted({1, max(1, prod(shape[1:])), max(1, prod(shape))}) for shape in shapes]
            found += [RaggedCase(shapes, blocks, size) for blocks in product(*choices) for size in WORLD_SIZES]
    return tuple(found)


def blocks_stay_whole(tallies: Tallies, scope: Scope) -> None:
    """Every element once and in order, no block cut, no more padding than the bound, and the smallest shard size."""
    tally = tallies["R09"]
    for case in scope.take(ragged_cases(), num_quick=1500):
        layout = case.layout()
        size = layout.padded_shard_numel
        held = [
            (piece.name, at)
            for rank in range(case.world_size)
            for piece in layout.pieces(rank)
            for at in range(piece.param_start, piece.param_stop)
        ]
        tally.compare(held, [(spec.name, at) for spec in layout.params for at in range(spec.numel)], case, "the rule")
        covered = sum(run.stop - run.start for rank in range(case.world_size) for run in layout.padding(rank))
        tally.compare(
            (covered, layout.gathered_numel), (layout.padding_numel, size * case.world_size), case, "the rule"
        )
        cut = [
            (spec.name, boundary)
            for spec, offset, block in zip(layout.params, layout.offsets, case.blocks, strict=True)
            for boundary in range(size, size * case.world_size, max(size, 1))
            if offset < boundary < offset + spec.numel and (boundary - offset) % block
        ]
        tally.compare(cut, [], case, "the rule")
        tally.compare(layout.padding_numel <= layout.padding_bound, True, case, "the rule")
        _compare_size(tally, case, size)


def _compare_size(tally: Tally, case: RaggedCase, size: int) -> None:
    line = [(prod(shape), block) for shape, block in zip(case.shapes, case.blocks, strict=True) if prod(shape)]
    total = sum(numel for numel, _ in line)
    least = -(-total // case.world_size)
    smallest = next(numel for numel in count(least) if numel == 0 or _fits(line, numel, case.world_size))
    tally.compare(size, smallest, case, "the smallest")


def _fits(line: list[tuple[int, int]], shard_numel: int, world_size: int) -> bool:
    """Whether parameters given as (numel, block) fit into shards of this size, each at the first place that splits no block."""
    end = 0
    for numel, block in line:
        while any((at - end) % block for at in range(end - end % shard_numel, end + numel, shard_numel) if at > end):
            end += 1
            if end > world_size * shard_numel:
                return False
        end += numel
    return end <= world_size * shard_numel
