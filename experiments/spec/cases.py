"""The small worlds that the checks go through: units of a flat layout, and single parameters."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product
from math import prod

from crossframe.layout import FlatLayout, Layout, PerParamLayout, RaggedLayout
from crossframe.params import ParamSpec
from crossframe.unit_assignment import Slot, assign_units
from crossframe.writeback import writeback_copies
from experiments.spec.checks import SEED

Shapes = tuple[tuple[int, ...], ...]

# Empty, single, odd, prime and even sizes, in one and two dims; a multiple of every alignment, and none.
SHAPES = ((0,), (1,), (3,), (5,), (8,), (13,), (0, 2), (2, 3), (1, 7), (4, 4))
WORLD_SIZES = range(1, 9)
PAIRS = tuple(product(("float32", "bfloat16"), repeat=2))
DTYPES = ("float64", "float32", "float16", "bfloat16")
ALL_PAIRS = tuple(product(DTYPES, repeat=2))
KINDS = ("flat", "one flat parameter", "per parameter", "ragged")
NUM_LISTS_OF_FOUR = 3000
# Elements count up from here: none equals a padding value, and bfloat16 holds each exactly.
FIRST_VALUE = 64


def layout_of(kind: str, params: tuple[ParamSpec, ...], num_shards: int) -> Layout:
    """The layout of one of KINDS."""
    match kind:
        case "flat" | "one flat parameter":
            return FlatLayout(params, num_shards, keep_original=kind == "flat")
        case "per parameter":
            return PerParamLayout(params, num_shards)
        case "ragged":
            return RaggedLayout(params, num_shards)
        case _:
            raise AssertionError(f"no such kind of layout: {kind!r}")


@dataclass(frozen=True)
class FlatCase:
    """A unit: its parameters, whether the first has a second name, its dtypes, the interface and the world size."""

    shapes: Shapes
    tied: bool
    stored: str
    computed: str
    keep_original: bool
    world_size: int

    @property
    def slots(self) -> tuple[tuple[str, int], ...]:
        """(name, index of the parameter) in order of registration; the second name of the first comes after the second."""
        slots = [(f"p{i}", i) for i in range(len(self.shapes))]
        return tuple([*slots[:2], ("tied", 0), *slots[2:]] if self.tied else slots)

    def layout(self) -> FlatLayout:
        """What the core says of it."""
        slots = [Slot("", name, i, self.shapes[i], self.stored) for name, i in self.slots]
        (unit,) = assign_units([""], slots, [])
        return FlatLayout(unit.params, self.world_size, self.keep_original, self.computed)


def first_values(shapes: Shapes) -> list[int]:
    """The value of each parameter's first element; further elements count up from it, and so do parameters."""
    return list(accumulate(map(prod, shapes[:-1]), initial=FIRST_VALUE))


def expected_shard(layout: Layout, rank: int) -> list[float | None]:
    """A rank's shard as the layout says, over parameters with `first_values`; None where it says nothing."""
    first = first_values(tuple(spec.shape for spec in layout.params))
    shard: list[float | None] = [None] * layout.padded_shard_numel
    for copy in writeback_copies(layout, rank):
        values = range(first[copy.index] + copy.param_start, first[copy.index] + copy.param_stop)
        shard[copy.shard_start : copy.shard_stop] = map(float, values)
    for run in layout.padding(rank):
        shard[run.start : run.stop] = [float(run.fill)] * (run.stop - run.start)
    return shard


@cache
def flat_cases() -> tuple[FlatCase, ...]:
    """Every list of up to three shapes with every option, and a seeded sample of lists of four."""
    return tuple(_flat_cases())


def _flat_cases() -> Iterator[FlatCase]:
    for length in (1, 2, 3):
        pairs = ALL_PAIRS if length < 3 else PAIRS
        for shapes in product(SHAPES, repeat=length):
            for (stored, computed), keep, tied in product(pairs, (False, True), (False, True)):
                # A second name changes no offset: with three parameters it is tried in one pair of dtypes.
                if length < 3 or not tied or (stored, computed) == PAIRS[1]:
                    yield from (FlatCase(shapes, tied, stored, computed, keep, size) for size in WORLD_SIZES)
    rng = random.Random(SEED)
    for _ in range(NUM_LISTS_OF_FOUR):
        shapes = tuple(rng.choices(SHAPES, k=4))
        stored, computed = rng.choice(PAIRS)
        yield FlatCase(shapes, rng.random() < 0.5, stored, computed, rng.random() < 0.5, rng.choice(WORLD_SIZES))


@dataclass(frozen=True)
class SingleCase:
    """One parameter, sharded on a dim; a negative one counts from the end."""

    shape: tuple[int, ...]
    dim: int
    world_size: int

    def layout(self) -> PerParamLayout:
        """What the core says of it."""
        return PerParamLayout((ParamSpec("p0", self.shape),), self.world_size, (self.dim,))


@cache
def single_cases() -> tuple[SingleCase, ...]:
    """Every shape of one to three dims with sizes from 0, on every dim, uneven ones too."""
    sizes = ((range(19),), (range(10), range(10)), (range(6), range(6), range(6)))
    shapes = [shape for ranges in sizes for shape in product(*ranges)]
    return tuple(
        SingleCase(shape, dim, size)
        for shape in shapes
        for dim in range(-len(shape), len(shape))
        for size in WORLD_SIZES
    )
