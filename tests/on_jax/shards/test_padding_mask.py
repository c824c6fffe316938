"""Padding of buckets that no memory holds, decided as JAX decides it without 64-bit integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossframe.layout import FlatLayout
from crossframe.params import ParamSpec
from jax_backend.shards._bucket import make_bucket
from jax_backend.shards._padding_mask import MOST_OFFSETS, in_runs, padding_of

HUGE = {
    "many ranks": ((3_000_000_001, 5), 4),
    "a shard above int32": ((5_000_000_003, 7), 2),
    "one rank": ((2**33 + 3, 3), 1),
    "small": ((5, 3), 4),
}


def bucket_of(sizes, ranks):
    params = tuple(ParamSpec(f"p{i}", (size,), "float32") for i, size in enumerate(sizes))
    return make_bucket(FlatLayout(params, ranks, True), name="", unit="")


@pytest.mark.parametrize(("sizes", "ranks"), HUGE.values(), ids=HUGE)
def test_positions_beyond_int32_are_told_apart(sizes, ranks):
    """Around every end of a run of padding, of a rank's chunk and of a part of it, in int32."""
    bucket = bucket_of(sizes, ranks)
    runs, chunk = padding_of(bucket.layout), bucket.layout.padded_shard_numel
    total = ranks * chunk
    edges = {0, total, *(end for run in runs for end in run), *(rank * chunk for rank in range(ranks))}
    edges |= {rank * chunk + first for rank in range(ranks) for first in range(0, chunk, MOST_OFFSETS)}
    places = sorted({place for edge in edges for place in (edge - 1, edge, edge + 1) if 0 <= place < total})
    assert runs
    by_part = {}
    for place in places:
        by_part.setdefault(place % chunk // MOST_OFFSETS * MOST_OFFSETS, []).append(place)
    with jax.enable_x64(False):
        for first, some in by_part.items():
            rank, offset = np.array([divmod(place, chunk) for place in some]).T
            rank, offset = jnp.array(rank, jnp.int32), jnp.array(offset - first, jnp.int32)
            found = in_runs(rank, offset, runs, chunk, first)
            assert found.tolist() == [any(start <= place < stop for start, stop in runs) for place in some]


@pytest.mark.parametrize(("sizes", "ranks"), HUGE.values(), ids=HUGE)
def test_masks_of_huge_buckets_need_no_int64(sizes, ranks):
    """In JAX's default mode, where an int64 that is asked for is an int32, with a warning, which is an error here."""
    bucket = bucket_of(sizes, ranks)
    array = jax.ShapeDtypeStruct((ranks * bucket.layout.padded_shard_numel,), "float32")
    with jax.enable_x64(False):
        program = jax.make_jaxpr(lambda array: bucket.zero_padding(array))(array)
    assert program.out_avals[0].shape == array.shape
    assert "i64" not in str(program)


def test_zeroed_parts_are_put_together(monkeypatch):
    """As of a chunk that is too long to be masked in one part."""
    monkeypatch.setattr("jax_backend.shards._padding_mask.MOST_OFFSETS", 4)
    for layout in ("line", "stacked"):
        bucket = bucket_of((17, 6), 3)
        numel = bucket.layout.gathered_numel
        array = np.arange(1.0, numel + 1, dtype="float32")
        wanted = array.copy()
        for start, stop in padding_of(bucket.layout):
            wanted[start:stop] = 0
        if layout == "stacked":
            array, wanted = np.stack([array, 2 * array]), np.stack([wanted, 2 * wanted])
        np.testing.assert_array_equal(jax.jit(lambda a, bucket=bucket: bucket.zero_padding(a))(array), wanted)
