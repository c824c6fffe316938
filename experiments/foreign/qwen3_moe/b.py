"""Qwen3 with a mixture of experts, of tunix in flax.nnx: the experts of a layer are stacked."""

import jax.numpy as jnp
import optax
from flax import nnx

from experiments.foreign.shared import options, tokens_of, train_jax, watch_all, without_init
from jax_backend.nnx import split, with_params

without_init("tunix")
from tunix.models.qwen3 import params as conversion  # noqa: E402
from tunix.models.qwen3.model import ModelConfig, Qwen3  # noqa: E402
from tunix.utils.torch_utils import torch_key_to_jax_key  # noqa: E402

given = options()
config = ModelConfig(
    num_layers=2,
    vocab_size=48,
    embed_dim=24,
    hidden_dim=20,
    num_heads=4,
    head_dim=8,
    num_kv_heads=2,
    rope_theta=1_000_000,
    norm_eps=1e-6,
    num_experts=5,
    num_experts_per_tok=2,
)
graphdef, params, state = split(Qwen3(config, rngs=nnx.Rngs(0)))


def convert(arrays):
    """By the table of tunix."""
    table, found = conversion._get_key_and_transform_mapping(config), {}
    for name, array in arrays.items():
        path, transform = torch_key_to_jax_key(table, name)
        if transform is not None:
            permuted, shape = transform
            array = array.transpose(permuted) if permuted else array
            array = array.reshape(shape) if shape else array
        found[path] = array
    return conversion._stack_experts(found)


def loss_fn(params, batch):
    model = with_params(graphdef, params, state)
    watch_all(model)
    tokens = batch["tokens"][:, :-1]
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((12, 12), bool)), (len(tokens), 12, 12))
    logits, _ = model(tokens, jnp.broadcast_to(jnp.arange(12), tokens.shape), None, mask)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


train_jax(
    given,
    params,
    convert,
    lambda step: {"tokens": tokens_of(step, 4, 13, vocabulary=48)},
    loss_fn,
    name="Qwen3MoeForCausalLM",
    samples=lambda batch: batch["tokens"][:, :-1],
)
