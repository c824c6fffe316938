"""ViT in flax (nnx). Written to be read beside `vit_torch.py`."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.models.vit import ViTConfig


def attend(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
    """Attention over (batch, time, head, width of a head).

    jax.nn.dot_product_attention, which flax takes by default, computes its softmax in float32 whatever comes in: two frameworks
    then part by 1e-8 in float64.
    """
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), value)


class Block(nnx.Module):
    """Attention and MLP, each on normalised input and added to it."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs) -> None:
        norm = {"epsilon": config.norm_epsilon, "use_fast_variance": False, "rngs": rngs}
        self.attention_norm = nnx.LayerNorm(config.width, **norm)
        self.attention = nnx.MultiHeadAttention(
            config.num_heads, config.width, use_bias=False, decode=False, attention_fn=attend, rngs=rngs
        )
        self.mlp_norm = nnx.LayerNorm(config.width, **norm)
        self.up = nnx.Linear(config.width, 2 * config.width, rngs=rngs)
        self.down = nnx.Linear(2 * config.width, config.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x)), approximate=True))


class ViT(nnx.Module):
    """Images (batch, 8, 8) to logits (batch, classes)."""

    def __init__(self, config: ViTConfig) -> None:
        rngs, patch = nnx.Rngs(0), (config.patch, config.patch)
        self.positions = nnx.Param(jnp.zeros((config.num_patches, config.width)))
        self.patches = nnx.Conv(1, config.width, patch, strides=patch, padding="VALID", rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_blocks)])
        self.head = nnx.Linear(config.width, config.num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images[..., None])
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))
