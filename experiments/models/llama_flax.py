"""Llama in flax (nnx). Written to be read beside `llama_torch.py`; here heads are dims of their own."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.models.llama import LlamaConfig, rotary


class Attention(nnx.Module):
    """Causal self-attention, whose keys and values groups of query heads share, with rotary positions."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        queries, keys = (config.num_heads, config.head_width), (config.num_kv_heads, config.head_width)
        self.q_proj = nnx.LinearGeneral(config.width, queries, use_bias=False, rngs=rngs)
        self.k_proj = nnx.LinearGeneral(config.width, keys, use_bias=False, rngs=rngs)
        self.v_proj = nnx.LinearGeneral(config.width, keys, use_bias=False, rngs=rngs)
        self.o_proj = nnx.LinearGeneral(queries, config.width, axis=(-2, -1), use_bias=False, rngs=rngs)

    def _turned(self, x: jax.Array) -> jax.Array:
        """Queries or keys (batch, head, time, width of a head), each turned by the angles of its place."""
        cos, sin = (jnp.asarray(each, x.dtype) for each in rotary(self.config, x.shape[-2]))
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = (part(x).swapaxes(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        query, key = self._turned(query), self._turned(key)
        group = self.config.num_heads // self.config.num_kv_heads
        key, value = (jnp.repeat(each, group, axis=1) for each in (key, value))
        scores = query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1])
        visible = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        return self.o_proj((weights @ value).swapaxes(1, 2))


class MLP(nnx.Module):
    """SwiGLU: one projection gates another."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        self.gate_proj = nnx.Linear(config.width, config.mlp_width, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(config.width, config.mlp_width, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(config.mlp_width, config.width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """Attention and MLP, each on normalised input and added to it."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        self.self_attn = Attention(config, rngs)
        self.mlp = MLP(config, rngs)
        self.input_layernorm = nnx.RMSNorm(config.width, epsilon=config.norm_epsilon, rngs=rngs)
        self.post_attention_layernorm = nnx.RMSNorm(config.width, epsilon=config.norm_epsilon, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nnx.Module):
    """Tokens (batch, time) to hidden values (batch, time, width)."""

    def __init__(self, config: LlamaConfig, dtype: str, rngs: nnx.Rngs) -> None:
        self.embed_tokens = nnx.Embed(config.vocabulary, config.width, param_dtype=jnp.dtype(dtype), rngs=rngs)
        self.layers = nnx.List([Block(config, rngs) for _ in range(config.num_blocks)])
        self.norm = nnx.RMSNorm(config.width, epsilon=config.norm_epsilon, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Llama(nnx.Module):
    """Tokens (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, config: LlamaConfig, dtype: str) -> None:
        rngs = nnx.Rngs(0)
        self.model = Body(config, dtype, rngs)
        self.lm_head = nnx.Linear(config.width, config.vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.lm_head(self.model(tokens))
