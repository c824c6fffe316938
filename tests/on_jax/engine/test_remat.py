"""Recomputation of activations inside a loss function, with and without resharding after forward."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from crossframe.errors import UsageError
from jax_backend import scan, shard, unshard, value_and_grad
from jax_backend.programs._jaxpr import inner_jaxprs, num_scan_operands
from tests.on_jax.helpers.small import ATOL, RTOL, mesh_of_size, small_batch
from tests.on_jax.helpers.stacked import MODES, stacked_params

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


def step_of(checkpoint, mode="shard_map", **options):
    mesh = mesh_of_size(2)
    sharded = shard(stacked_params(), mesh, stacked=("blocks",), **options)
    return value_and_grad(loss_with(checkpoint), mesh, mode=mode), sharded


def loops(checkpoint, mode="shard_map"):
    """The loops of a step, as equations."""

    def scans(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "scan":
                yield equation
            for inner in inner_jaxprs(equation):
                yield from scans(inner)

    step, sharded = step_of(checkpoint, mode)
    return list(scans(jax.make_jaxpr(step)(sharded, small_batch()).jaxpr))


def num_saved(checkpoint):
    """The number of activations of a layer that the loop of forward saves for backward."""
    first, *_ = loops(checkpoint)
    return sum(var.aval.shape[-2:] == (6, 5) for var in first.outvars[num_scan_operands(first.params)[1] :])


def test_activations_are_computed_again_where_units_are_resharded():
    # Of a layer its input and its products: what is elementwise is computed again in any loop.
    assert num_saved(lambda block: block) == 1 + DEPTH
    assert num_saved(jax.checkpoint) == 1
    assert num_saved(partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("product 2"))) == 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("checkpoint", [pytest.param(lambda block: block, id="plain"), jax.checkpoint])
def test_inputs_of_layers_are_saved_and_not_looped_over_again(checkpoint, mode):
    assert len(loops(checkpoint, mode)) == 2  # forward and backward


@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_are_those_without_recomputation(reshard):
    results = []
    for checkpoint in (lambda block: block, jax.checkpoint):
        step, sharded = step_of(checkpoint, reshard_after_forward=reshard)
        result = step(sharded, small_batch())
        results.append((result.loss, unshard(result.grads)))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.any(b)
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=ATOL)


def penalty(params, batch):
    """A loss that contains a gradient of the output of a loop over blocks."""

    def outputs(x):
        hidden, _ = scan(lambda hidden, own, _: (jnp.tanh(hidden @ own["kernel"]), None), x, params["blocks"])
        return (hidden @ params["out"]).sum()

    return jnp.mean(jax.grad(outputs)(batch["x"] @ params["inp"]) ** 2)


@pytest.mark.parametrize(
    "options", [{"frozen": ("blocks",)}, {"reshard_after_forward": False}], ids=["frozen", "not resharded"]
)
@pytest.mark.parametrize("mode", MODES)
def test_a_loss_that_contains_a_gradient_through_a_loop_is_differentiated(mode, options):
    mesh, params, batch = mesh_of_size(2), stacked_params(), small_batch()
    sharded = shard(params, mesh, stacked=("blocks",), **options)
    found = unshard(sharded.with_trainable(value_and_grad(penalty, mesh, mode=mode)(sharded, batch).grads))
    halves = [jax.tree.map(lambda leaf, half=half: np.split(leaf, 2)[half], batch) for half in (0, 1)]
    wanted = jax.grad(lambda params: sum(penalty(params, half) for half in halves) / 2)(params)
    assert np.any(wanted["inp"]) and np.any(wanted["blocks"]["kernel"])
    names = ("inp", "out") if "frozen" in options else wanted
    for a, b in zip(*(jax.tree.leaves({name: each[name] for name in names}) for each in (found, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_are_gathered_again_are_not_differentiated_twice(mode):
    """The second derivative would be a sum over ranks instead of their mean."""
    mesh = mesh_of_size(2)
    sharded = shard(stacked_params(), mesh, stacked=("blocks",))
    with pytest.raises(UsageError, match=r"unit .*blocks.* is differentiated twice.*reshard_after_forward=False"):
        value_and_grad(penalty, mesh, mode=mode)(sharded, small_batch())
