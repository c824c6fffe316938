"""Lines in and out of JAX; tests/across has those of torch."""

import jax
import numpy as np
import pytest

from crossframe import MeshSpec
from crossframe.errors import LayoutError, MeshError, UsageError
from crossframe.layout import FlatLayout
from jax_backend import from_torch, make_mesh, shard, shards_of, to_torch
from tests.on_jax.helpers.small import UNITS, small_map, small_params


@pytest.mark.parametrize("layout", ["flat", "per_param"])
def test_R05_lines_go_out_and_in_bit_for_bit_and_padding_becomes_0(layout):
    spec = MeshSpec(shard=2, replicate=2)
    sharded = shard(small_params(), make_mesh(spec), units=UNITS, param_map=small_map(), layout=layout, frozen=("inp",))
    lines = {rank: {name: np.array(line) for name, line in to_torch(sharded, rank).items()} for rank in range(4)}
    for rank, own in lines.items():
        jax.tree.map(np.testing.assert_array_equal, own, shards_of(sharded, rank))
        assert {d.id for line in to_torch(sharded, rank).values() for d in line.devices()} == {rank}
        for name, line in own.items():
            for run in sharded.tree.layouts[name].padding(spec.coordinate(rank)[1]):
                line[run.start : run.stop] = np.nan
    back = from_torch(sharded, lines, sharded.tree.layouts)
    assert jax.tree.map(lambda a: a.sharding, back) == jax.tree.map(lambda a: a.sharding, sharded)
    jax.tree.map(np.testing.assert_array_equal, back, sharded)


def test_lines_that_do_not_fit_are_refused():
    sharded = shard({"w": np.ones(5, np.float32)}, make_mesh(MeshSpec(2)), keep_original=False)
    line = np.ones(3, np.float32)
    for lines, message in [
        ({0: {"": line}}, r"expected a mapping of ranks \[0, 1\], got \[0\]"),
        ({0: {"": line}, 1: {}}, "rank 1: expected a line for each of the buckets"),
        ({0: {"": line}, 1: {"": line[:2]}}, r"rank 1: expected a line of shape \(3,\)"),
        ({0: {"": line}, 1: {"": line.astype(np.float64)}}, "and float64"),
    ]:
        with pytest.raises(UsageError, match=message):
            from_torch(sharded, lines)
    other = FlatLayout(sharded.tree.layouts[""].params, 2, keep_original=True)
    with pytest.raises(LayoutError, match="bucket '': expected the layout"):
        from_torch(sharded, {0: {"": line}, 1: {"": line}}, {"": other})
    with pytest.raises(MeshError):
        to_torch(sharded, 2)
