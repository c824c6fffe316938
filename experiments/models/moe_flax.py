"""The mixture of experts in flax (nnx). Written to be read beside `moe_torch.py`."""

import jax
from flax import nnx

from experiments.models.moe import MoEConfig


class Expert(nnx.Module):
    """Two linear layers around a SiLU."""

    def __init__(self, config: MoEConfig, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(config.width, config.expert_width, rngs=rngs)
        self.down = nnx.Linear(config.expert_width, config.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.up(x)))


class Block(nnx.Module):
    """The weighted sum of the chosen experts, added to what comes in. All experts compute; a weight of 0 leaves one out."""

    def __init__(self, config: MoEConfig, rngs: nnx.Rngs) -> None:
        self.num_chosen = config.num_chosen
        self.router = nnx.Linear(config.width, config.num_experts, use_bias=False, rngs=rngs)
        self.experts = nnx.List([Expert(config, rngs) for _ in range(config.num_experts)])

    def __call__(self, x: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(self.router(x), axis=-1)
        chosen = jax.lax.top_k(weights, self.num_chosen)[1]
        weights = weights * jax.nn.one_hot(chosen, weights.shape[-1], dtype=weights.dtype).sum(-2)
        weights = weights / weights.sum(-1, keepdims=True)
        for i, expert in enumerate(self.experts):
            x = x + weights[:, i : i + 1] * expert(x)
        return x


class MoE(nnx.Module):
    """Images (batch, 8, 8) to logits (batch, classes)."""

    def __init__(self, config: MoEConfig) -> None:
        rngs = nnx.Rngs(0)
        self.inp = nnx.Linear(config.num_pixels, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_blocks)])
        self.head = nnx.Linear(config.width, config.num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.inp(images.reshape(images.shape[0], -1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)
