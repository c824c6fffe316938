"""Recomputation of activations inside a loss function, with and without resharding after forward."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jax_backend import remat, scan, shard, unshard, value_and_grad
from jax_backend.programs._jaxpr import inner_jaxprs, num_scan_operands
from tests.on_jax.helpers.small import ATOL, RTOL, mesh_of_size, small_batch
from tests.on_jax.helpers.stacked import stacked_params

DEPTH = 4


def loss_with(checkpoint):
    """A loss whose blocks have DEPTH hidden activations each; a block closes over a parameter, and takes an integer."""

    def loss(params, batch):
        def block(hidden, own, power):
            for i in range(DEPTH):
                product = checkpoint_name(hidden @ own["kernel"], f"product {i}")
                hidden = jnp.tanh(product + own["bias"]) * params["out"].sum() ** power
            return hidden

        block = checkpoint(block)

        def layer(hidden, own, _):
            return block(hidden, own, jnp.int32(1)), None

        hidden, _ = scan(layer, batch["x"] @ params["inp"], params["blocks"])
        return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)

    return loss


def step_of(checkpoint, **options):
    mesh = mesh_of_size(2)
    sharded = shard(stacked_params(), mesh, stacked=("blocks",), **options)
    return value_and_grad(loss_with(checkpoint), mesh), sharded


def num_saved(checkpoint):
    """The number of activations of a layer that the loop of forward saves for backward."""
    step, sharded = step_of(checkpoint)

    def scans(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "scan":
                yield equation
            for inner in inner_jaxprs(equation):
                yield from scans(inner)

    (first, *_) = scans(jax.make_jaxpr(step)(sharded, small_batch()).jaxpr)
    return sum(var.aval.shape[-2:] == (6, 5) for var in first.outvars[num_scan_operands(first.params)[1] :])


def test_activations_are_computed_again_where_units_are_resharded():
    # Of a layer its input and its products: what is elementwise is computed again in any loop.
    assert num_saved(lambda block: block) == 1 + DEPTH
    assert num_saved(jax.checkpoint) == 1 + DEPTH  # without effect, which is why there is `remat`
    assert num_saved(remat) == 1
    assert num_saved(partial(remat, policy=jax.checkpoint_policies.save_only_these_names("product 2"))) == 2


@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_are_those_without_recomputation(reshard):
    results = []
    for checkpoint in (lambda block: block, remat):
        step, sharded = step_of(checkpoint, reshard_after_forward=reshard)
        result = step(sharded, small_batch())
        results.append((result.loss, unshard(result.grads)))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.any(b)
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=ATOL)
