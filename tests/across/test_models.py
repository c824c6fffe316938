"""Each model in both frameworks, unsharded and in float64: the map fits, the logits and gradients are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.nn import functional

from experiments.data import digits
from experiments.models import MODELS
from experiments.parity.record_jax import nnx_params, split_model
from experiments.parity.record_torch import load_initial
from jax_backend.nnx import with_params
from jax_backend.tree import leaves_by_path

# A gradient of some thousand terms of order 1, each rounded to 1e-16; of what a model gets wrong (an epsilon, the order of
# heads, the exact GELU) the smallest is some 1e-7.
ATOL = 1e-12


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def varied(definition):
    """Values of which no two are alike, where initial biases would all be 0."""
    rng = np.random.default_rng(3)
    return {
        name: value + 0.1 * rng.normal(size=value.shape)
        for name, value in definition.initial_params(3, "float64").items()
    }


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt"])
def test_both_frameworks_compute_the_same_logits_and_gradients(name):
    definition = MODELS[name]
    values, batch = varied(definition), definition.batch(0, 0, 0, 1, 3, "float64")

    module = definition.make_torch()[0].double()
    load_initial(module, values)
    inputs, targets = (torch.from_numpy(part) for part in (batch.inputs, batch.targets))
    logits = module(inputs.long() if definition.context else inputs)
    functional.cross_entropy(logits.flatten(0, -2), targets.long().flatten()).backward()

    graphdef, params, state = split_model(definition, "float64")
    params = nnx_params(definition, params, values)
    definition.param_map.check(values, leaves_by_path(params))

    def loss_of(params):
        logits = with_params(graphdef, params, state)(jnp.asarray(batch.inputs))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets).mean(), logits

    grads, found = jax.jit(jax.grad(loss_of, has_aux=True))(params)
    np.testing.assert_allclose(found, logits.detach().numpy(), rtol=0, atol=ATOL)
    grads, some = leaves_by_path(grads), [name for name, p in module.named_parameters() if p.grad.abs().max() > 1e-3]
    # Not every expert is chosen by some sample, and the biases before batch norm have none by their nature.
    assert len(some) >= 0.6 * len(values), set(values) - set(some)
    for param_name, param in module.named_parameters():
        entry = definition.param_map.by_name[param_name]
        mine = entry.to_canonical(*(grads[path] for path in entry.paths))
        assert mine.shape == definition.shapes[param_name]
        np.testing.assert_allclose(mine, param.grad.numpy(), rtol=0, atol=ATOL, err_msg=param_name)


def test_digits_are_real_images_and_dealt_like_text():
    images, shown = digits()
    assert images.shape == (1797, 8, 8) and images.min() == 0 and images.max() == 1
    assert sorted(set(shown.tolist())) == list(range(10)) and np.bincount(shown).min() > 150
    definition = MODELS["mlp"]
    whole = definition.batch(0, 5, 0, 1, 6, "float32")
    halves = [definition.batch(0, 5, rank, 2, 3, "float32") for rank in range(2)]
    assert whole.sample_ids == halves[0].sample_ids + halves[1].sample_ids
    assert (
        np.array_equal(whole.inputs, np.concatenate([half.inputs for half in halves]))
        and whole.inputs.dtype == np.float32
    )
    assert np.array_equal(whole.targets, shown[list(whole.sample_ids)])
