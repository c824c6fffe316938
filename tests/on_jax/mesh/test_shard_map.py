"""Functions on each rank: empty arrays are seen there as any others are."""

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from crossframe import MeshSpec
from jax_backend import make_mesh
from jax_backend.mesh._shard_map import mapped
from tests.on_jax.helpers.small import WIDE


def test_each_rank_has_its_part_of_what_is_empty_too():
    seen = []

    def on_rank(trees, number):
        seen.append(({name: leaf.shape for name, leaf in trees.items() if leaf is not None}, number.shape))
        return trees["full"] * number + trees["wide"].sum()

    mesh = make_mesh(MeshSpec(shard=2, replicate=2))
    trees = {
        "full": jnp.arange(8.0).reshape(4, 2),
        "none": None,
        "wide": jnp.zeros((8, 0), jnp.float32),
        "flat": np.zeros(0, WIDE),
    }
    axes = ("replicate", "shard")
    found = mapped(on_rank, mesh, (P(axes), P()), P(axes))(trees, jnp.asarray(3.0))
    assert seen[0] == ({"full": (1, 2), "wide": (2, 0), "flat": (0,)}, ())
    np.testing.assert_array_equal(found, 3 * np.arange(8.0).reshape(4, 2))
