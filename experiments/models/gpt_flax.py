"""GPT in flax (nnx). Written to be read beside `gpt_torch.py`: the same operations in the same order."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.models.gpt import GPTConfig


class Attention(nnx.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        self.num_heads = config.num_heads
        self.query = nnx.Linear(config.width, config.width, rngs=rngs)
        self.key = nnx.Linear(config.width, config.width, rngs=rngs)
        self.value = nnx.Linear(config.width, config.width, rngs=rngs)
        self.out = nnx.Linear(config.width, config.width, rngs=rngs)

    def _split(self, x: jax.Array) -> jax.Array:
        """(batch, time, width) to (batch, head, time, width of a head)."""
        return x.reshape(*x.shape[:-1], self.num_heads, -1).swapaxes(1, 2)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        scores = query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1])
        visible = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        return self.out((weights @ value).swapaxes(1, 2).reshape(x.shape))


class MLP(nnx.Module):
    """Two linear layers around a GELU."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(config.width, 4 * config.width, rngs=rngs)
        self.down = nnx.Linear(4 * config.width, config.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x), approximate=True))


class Block(nnx.Module):
    """Attention and MLP, each on normalised input and added to it."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        # use_fast_variance computes E[x^2] - E[x]^2, which cancels; torch subtracts the mean first.
        norm = {"epsilon": config.norm_epsilon, "use_fast_variance": False, "rngs": rngs}
        self.attention_norm = nnx.LayerNorm(config.width, **norm)
        self.attention = Attention(config, rngs)
        self.mlp_norm = nnx.LayerNorm(config.width, **norm)
        self.mlp = MLP(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nnx.Module):
    """Tokens (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, config: GPTConfig, dtype: str) -> None:
        rngs = nnx.Rngs(0)
        # An embedding computes in the dtype that it was made with, the other layers in that of their input.
        self.token_embedding = nnx.Embed(config.vocabulary, config.width, param_dtype=jnp.dtype(dtype), rngs=rngs)
        self.position_embedding = nnx.Embed(config.context, config.width, param_dtype=jnp.dtype(dtype), rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_blocks)])
        self.norm = nnx.LayerNorm(config.width, epsilon=config.norm_epsilon, use_fast_variance=False, rngs=rngs)
        self.head = None if config.tied else nnx.Linear(config.width, config.vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token_embedding(tokens) + self.position_embedding(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x @ self.token_embedding.embedding[...].T if self.head is None else self.head(x)
