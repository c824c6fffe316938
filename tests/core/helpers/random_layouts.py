"""Random parameters and layouts, and what a layout says of a shard, spelled out element by element."""

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from crossframe.dtypes import numpy_dtype
from crossframe.layout import FlatLayout, Layout, PerParamLayout, RaggedLayout
from crossframe.params import ParamSpec

QUICK = settings(deadline=None, max_examples=60, derandomize=True, database=None)

DTYPES = st.sampled_from(["float64", "float32", "bfloat16"])
WORLD_SIZES = st.integers(1, 9)
# Odd, prime, empty and single sizes; the lists are short so that a shard often ends inside, between and past parameters.
SIZES = st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7, 8, 11, 13])
Elements = list[Any]


def specs(shapes: list[tuple[int, ...]], dtype: str = "float32") -> tuple[ParamSpec, ...]:
    """Parameters p0, p1, ... of these shapes."""
    return tuple(ParamSpec(f"p{i}", shape, dtype) for i, shape in enumerate(shapes))


@st.composite
def params(draw: st.DrawFn, *, min_dims: int = 0) -> tuple[ParamSpec, ...]:
    """One to five parameters of one dtype."""
    shape = st.lists(SIZES, min_size=min_dims, max_size=3).map(tuple)
    return specs(draw(st.lists(shape, min_size=1, max_size=5)), draw(DTYPES))


@st.composite
def flat_layouts(draw: st.DrawFn) -> FlatLayout:
    """Flat layouts with and without original parameters, some of them computing in another dtype."""
    compute = draw(st.none() | DTYPES)
    return FlatLayout(draw(params()), draw(WORLD_SIZES), draw(st.booleans()), compute)


@st.composite
def per_param_layouts(draw: st.DrawFn) -> PerParamLayout:
    """Per-parameter layouts on any dims, the sizes of those above 0 made multiples of the world size."""
    world_size = draw(WORLD_SIZES)
    drawn = draw(params())
    if draw(st.booleans()):
        return PerParamLayout(drawn, world_size)
    shapes, dims = [list(param.shape) for param in drawn], []
    for shape in shapes:
        dims.append(draw(st.integers(-max(1, len(shape)), max(1, len(shape)) - 1)))
        if shape and dims[-1] % len(shape):
            shape[dims[-1]] = draw(st.integers(0, 3)) * world_size
    return PerParamLayout(specs([tuple(shape) for shape in shapes], drawn[0].dtype), world_size, tuple(dims))


@st.composite
def ragged_layouts(draw: st.DrawFn) -> RaggedLayout:
    """Ragged layouts: blocks of a row, of any divisor, of one element and of the whole parameter."""
    drawn = draw(params())
    blocks = tuple(
        draw(st.sampled_from([b for b in range(1, param.numel + 1) if param.numel % b == 0] or [1, 5]))
        for param in drawn
    )
    return RaggedLayout(drawn, draw(WORLD_SIZES), draw(st.sampled_from([None, blocks])))


# The kinds that torch has, and all.
LAYOUTS: st.SearchStrategy[Layout] = flat_layouts() | per_param_layouts()
ALL_LAYOUTS: st.SearchStrategy[Layout] = LAYOUTS | ragged_layouts()


def elements(layout: Layout, rank: int) -> Elements:
    """The elements of a rank's buffer as the layout's pieces and paddings tell: (name, index) or a kind of padding.

    An element that two of them claim, or that none does, fails here.
    """
    found: Elements = [None] * layout.padded_shard_numel
    for piece in layout.pieces(rank):
        assert piece.rank == rank
        runs = list(piece.runs())
        assert len(runs) == piece.num_runs and piece.numel == sum(run.numel for run in runs) > 0
        assert piece.numel == piece.shard_stop - piece.shard_start and piece.run_numel == runs[0].numel
        assert (piece.param_start, piece.param_stop) == (runs[0].param_start, runs[-1].param_start + runs[-1].numel)
        index = [i for run in runs for i in range(run.param_start, run.param_start + run.numel)]
        for at, i in zip(range(piece.shard_start, piece.shard_stop), index, strict=True):
            assert found[at] is None
            found[at] = (piece.name, i)
    for run in layout.padding(rank):
        assert 0 <= run.start < run.stop
        for at in range(run.start, run.stop):
            assert found[at] is None
            found[at] = run.kind
    assert None not in found
    return found


def random_arrays(layout: Layout, seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays of random bits, NaNs and infinities among them: movement is compared bit for bit."""
    rng = np.random.default_rng(seed)
    dtype = numpy_dtype(layout.dtype)
    return {
        spec.name: rng.integers(0, 256, spec.numel * dtype.itemsize, np.uint8).view(dtype).reshape(spec.shape)
        for spec in layout.params
    }


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays agree in shape, dtype and every bit."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def poison(layout: Layout, shards: list[np.ndarray], value: float = np.nan) -> None:
    """Write a value into all padding of all ranks."""
    for rank, shard in enumerate(shards):
        for run in layout.padding(rank):
            shard[run.start : run.stop] = value
