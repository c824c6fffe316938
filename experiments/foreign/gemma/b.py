"""Gemma of tunix in flax.nnx: keys and values of a layer are one array."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.foreign.shared import options, tokens_of, train_jax, watch_all, without_init
from jax_backend.nnx import split, with_params

without_init("tunix")
from tunix.models.gemma.model import AttentionType, Gemma, ModelConfig  # noqa: E402

given = options()
config = ModelConfig(
    num_layers=2,
    num_embed=48,
    embed_dim=24,
    hidden_dim=40,
    num_heads=4,
    head_dim=8,
    num_kv_heads=2,
    final_logit_softcap=None,
    use_post_attn_norm=False,
    use_post_ffw_norm=False,
    attention_types=[AttentionType.GLOBAL] * 2,
)
graphdef, params, state = split(Gemma(config, rngs=nnx.Rngs(0)))


def convert(arrays):
    """By hand: tunix reads checkpoints of Gemma's own format."""
    found = {
        "embedder.input_embedding": arrays["lm_head.weight"],  # tied
        "final_norm.scale": arrays["transformer.ln_f.weight"],
    }
    for i in range(2):
        a, b = f"transformer.h.{i}", f"layers.{i}"
        query, key_value = np.split(arrays[f"{a}.attn.qkv.weight"], [32])
        found |= {
            f"{b}.pre_attention_norm.scale": arrays[f"{a}.norm_1.weight"],
            f"{b}.pre_ffw_norm.scale": arrays[f"{a}.norm_2.weight"],
            f"{b}.attn.q_einsum.w": query.reshape(4, 8, 24).transpose(0, 2, 1),
            f"{b}.attn.kv_einsum.w": key_value.reshape(2, 2, 8, 24).transpose(0, 1, 3, 2),
            f"{b}.attn.attn_vec_einsum.w": arrays[f"{a}.attn.proj.weight"].T.reshape(4, 8, 24),
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
