"""Random parameters and layouts, and what a layout says of a shard, spelled out element by element."""

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from crossframe.dtypes import numpy_dtype
from crossframe.layout import FlatLayout, Layout, PerParamLayout
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
    """Per-parameter layouts."""
    return PerParamLayout(draw(params(min_dims=1)), draw(WORLD_SIZES))


LAYOUTS: st.SearchStrategy[Layout] = flat_layouts() | per_param_layouts()


def elements(layout: Layout, rank: int) -> Elements:
    """The elements of a rank's buffer as the layout's pieces and paddings tell: (name, index) or a kind of padding.

    An element that two of them claim, or that none does, fails here.
    """
    found: Elements = [None] * layout.padded_shard_numel
    for piece in layout.pieces(rank):
        assert piece.rank == rank
        assert piece.numel == piece.param_stop - piece.param_start == piece.shard_stop - piece.shard_start > 0
        for at, index in zip(
            range(piece.shard_start, piece.shard_stop), range(piece.param_start, piece.param_stop), strict=True
        ):
            assert found[at] is None
            found[at] = (piece.name, index)
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
