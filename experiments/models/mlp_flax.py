"""MLP in flax (nnx). Written to be read beside `mlp_torch.py`."""

import jax
from flax import nnx

from experiments.models.mlp import MLPConfig


class Layer(nnx.Module):
    """A linear layer and a SiLU, added to what comes in."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.silu(self.linear(x))


class MLP(nnx.Module):
    """Images (batch, 8, 8) to logits (batch, classes)."""

    def __init__(self, config: MLPConfig) -> None:
        rngs = nnx.Rngs(0)
        self.inp = nnx.Linear(config.num_pixels, config.width, rngs=rngs)
        self.layers = nnx.List([Layer(config.width, rngs) for _ in range(config.num_layers)])
        self.head = nnx.Linear(config.width, config.num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.inp(images.reshape(images.shape[0], -1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
