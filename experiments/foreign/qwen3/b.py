"""Qwen3 of tunix in flax.nnx."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.foreign.shared import options, tokens_of, train_jax, watch_all, without_init
from jax_backend.nnx import split, with_params

without_init("tunix")
from tunix.models.qwen3.model import ModelConfig, Qwen3  # noqa: E402

given = options()
config = ModelConfig(
    num_layers=2,
    vocab_size=48,
    embed_dim=24,
    hidden_dim=40,
    num_heads=4,
    head_dim=8,
    num_kv_heads=2,
    rope_theta=1_000_000,
    norm_eps=1e-6,
)
graphdef, params, state = split(Qwen3(config, rngs=nnx.Rngs(0)))


def convert(arrays):
    """By hand, since litgpt has one matrix for queries, keys and values."""
    found = {
        "embedder.input_embedding": arrays["transformer.wte.weight"],
        "final_norm.w": arrays["transformer.ln_f.weight"],
        "lm_head.w": arrays["lm_head.weight"].T,
    }
    for i in range(2):
        a, b = f"transformer.h.{i}", f"layers.{i}"
        query, key, value = np.split(arrays[f"{a}.attn.qkv.weight"], [32, 48])
        found |= {
            f"{b}.input_layernorm.w": arrays[f"{a}.norm_1.weight"],
            f"{b}.post_attention_layernorm.w": arrays[f"{a}.norm_2.weight"],
            f"{b}.attn.q_norm.w": arrays[f"{a}.attn.norm_q.weight"],
            f"{b}.attn.k_norm.w": arrays[f"{a}.attn.norm_k.weight"],
            f"{b}.attn.q_proj.w": query.T.reshape(24, 4, 8),
            f"{b}.attn.k_proj.w": key.T.reshape(24, 2, 8),
            f"{b}.attn.v_proj.w": value.T.reshape(24, 2, 8),
            f"{b}.attn.o_proj.w": arrays[f"{a}.attn.proj.weight"].T.reshape(4, 8, 24),
            f"{b}.mlp.gate_proj.kernel": arrays[f"{a}.mlp.fc_1.weight"].T,
            f"{b}.mlp.up_proj.kernel": arrays[f"{a}.mlp.fc_2.weight"].T,
            f"{b}.mlp.down_proj.kernel": arrays[f"{a}.mlp.proj.weight"].T,
        }
    return found


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
    name="GPT",
    samples=lambda batch: batch["tokens"][:, :-1],
)
