"""Gemma 3 of tunix in flax.nnx: keys and values of a layer are one array."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.foreign.shared import options, tokens_of, train_jax, watch_all, without_init
from jax_backend.nnx import split, with_params

without_init("tunix")
from tunix.models.gemma3.model import Gemma3, ModelConfig  # noqa: E402

given = options()
config = ModelConfig(
    num_layers=6,
    num_embed=48,
    embed_dim=24,
    hidden_dim=40,
    num_heads=4,
    head_dim=8,
    num_kv_heads=2,
    sliding_window_size=5,
    local_base_frequency=10_000,
    global_base_frequency=1_000_000,
    param_dtype=jnp.float32,
)
graphdef, params, state = split(Gemma3(config, rngs=nnx.Rngs(0)))
NORMS = {
    "pre_attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn._query_norm": "self_attn.q_norm",
    "attn._key_norm": "self_attn.k_norm",
}


def convert(arrays):
    """By hand: tunix reads checkpoints of another layout."""
    found = {
        "embedder.input_embedding": arrays["model.embed_tokens.weight"],  # tied
        "final_norm.scale": arrays["model.norm.weight"],
    }
    for i in range(6):
        a, b = f"model.layers.{i}", f"layers.{i}"
        heads = {kind: arrays[f"{a}.self_attn.{kind}_proj.weight"].reshape(-1, 8, 24) for kind in "qkv"}
        heads = {kind: value.transpose(0, 2, 1) for kind, value in heads.items()}
        found |= {f"{b}.{mine}.scale": arrays[f"{a}.{its}.weight"] for mine, its in NORMS.items()}
        found |= {
            f"{b}.attn.q_einsum.w": heads["q"],
            f"{b}.attn.kv_einsum.w": np.stack([heads["k"], heads["v"]]),
            f"{b}.attn.attn_vec_einsum.w": arrays[f"{a}.self_attn.o_proj.weight"].T.reshape(4, 8, 24),
        }
        for linear in ("gate_proj", "up_proj", "down_proj"):
            found[f"{b}.mlp.{linear}.kernel"] = arrays[f"{a}.mlp.{linear}.weight"].T
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
    name="Gemma3ForCausalLM",
    samples=lambda batch: batch["tokens"][:, :-1],
)
