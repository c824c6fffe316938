"""The convolutional net in flax (nnx). Written to be read beside `conv_torch.py`."""

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.models.conv import ConvConfig


class Block(nnx.Module):
    """Convolution, batch norm and SiLU, added to what comes in."""

    def __init__(self, config: ConvConfig, dtype: str, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(config.num_channels, config.num_channels, (3, 3), rngs=rngs)
        # flax keeps 0.99 of its running statistics by default, torch 0.9. The variance as in the layer norms of the GPT. Left to
        # itself it gives what it has normalised in the dtype of its statistics, float32 beside bfloat16.
        self.norm = nnx.BatchNorm(
            config.num_channels,
            momentum=0.9,
            epsilon=config.norm_epsilon,
            dtype=jnp.dtype(dtype),
            use_fast_variance=False,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.silu(self.norm(self.conv(x)))


class ConvNet(nnx.Module):
    """Images (batch, 8, 8) to logits (batch, classes); flax has channels behind height and width."""

    def __init__(self, config: ConvConfig, dtype: str) -> None:
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(1, config.num_channels, (3, 3), rngs=rngs)
        self.blocks = nnx.List([Block(config, dtype, rngs) for _ in range(config.num_blocks)])
        self.head = nnx.Linear(config.num_channels, config.num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.stem(images[..., None])
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))
