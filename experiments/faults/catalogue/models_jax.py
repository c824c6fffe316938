"""Faults in models, in JAX."""

import math
from collections.abc import Iterator
from typing import Any

from crossframe.replacing import replacing
from experiments.faults.catalogue.fault import JAX, Answer, Family, each_made, with_method
from experiments.faults.catalogue.models_torch import INPUT, LOCAL, LOSS, OUTPUT

MODELS = Family("model", JAX)


@MODELS.fault(
    "LayerNorm has flax's default epsilon of 1e-6, not torch's of 1e-5",
    Answer(*OUTPUT, unit="blocks.0", parameter="blocks.0.attention_norm", signature="norm_epsilon"),
    source="google/flax#2195",
)
def layer_norm_epsilon() -> Iterator[None]:
    def change(block: Any) -> None:
        block.attention_norm.epsilon = block.mlp_norm.epsilon = 1e-6

    yield from each_made("gpt_flax", "Block", change)


@MODELS.fault(
    "RMSNorm adds its epsilon to the root, not under it",
    Answer(*OUTPUT, unit="model.layers.0", parameter="model.layers.0.input_layernorm", signature="norm_epsilon"),
    model="llama-tiny",
)
def epsilon_outside_the_root() -> Iterator[None]:
    from flax import nnx
    from jax import numpy as jnp

    def call(self: Any, x: Any) -> Any:
        root = jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True))
        return x / (root + jnp.asarray(self.epsilon, x.dtype)) * self.scale[...].astype(x.dtype)

    with replacing(nnx.RMSNorm, "__call__", call):
        yield


@MODELS.fault(
    "the variance of BatchNorm is that of a sample, divided by n - 1",
    Answer(*OUTPUT, unit="blocks.0", parameter="blocks.0.norm", signature=None),
    model="conv",
)
def variance_of_a_sample() -> Iterator[None]:
    from flax.nnx.nn import normalization

    right = normalization._compute_stats

    def stats(x: Any, axes: Any, *args: Any, **kwargs: Any) -> Any:
        mean, variance = right(x, axes, *args, **kwargs)
        n = math.prod(x.shape[axis] for axis in ((axes,) if isinstance(axes, int) else axes))
        return mean, variance * (n / (n - 1))

    with replacing(normalization, "_compute_stats", stats):
        yield


@MODELS.fault(
    "keys and values are repeated in the order of tiles, not each behind itself",
    Answer(*INPUT, unit="model.layers.0", parameter="model.layers.0.self_attn.o_proj", signature=None),
    source="onnx/onnx#7274",
    model="llama-tiny",
)
def heads_tiled() -> Iterator[None]:
    from jax import numpy as jnp

    from experiments.models import llama_flax

    class Tiles:
        """jax.numpy, which repeats as tiles."""

        def __getattr__(self, name: str) -> Any:
            return getattr(jnp, name)

        def repeat(self, x: Any, group: int, axis: int) -> Any:
            return jnp.concatenate([x] * group, axis=axis)

    with replacing(llama_flax, "jnp", Tiles()):
        yield


@MODELS.fault(
    "the weights of the chosen experts are not made to add up to 1",
    Answer(*INPUT, unit="blocks.0", parameter="blocks.0.experts.1.up", signature=None),
    source="pytorch/torchtitan#1448",
    model="moe",
)
def experts_not_normalised() -> Iterator[None]:
    import jax

    def call(self: Any, x: Any) -> Any:
        weights = jax.nn.softmax(self.router(x), axis=-1)
        chosen = jax.lax.top_k(weights, self.num_chosen)[1]
        weights = weights * jax.nn.one_hot(chosen, weights.shape[-1], dtype=weights.dtype).sum(-2)
        for i, expert in enumerate(self.experts):
            x = x + weights[:, i : i + 1] * expert(x)
        return x

    yield from with_method("moe_flax", "Block", "__call__", call)


@MODELS.fault(
    "positions count from 1, as in models that keep the first for padding; the last stands twice",
    # The embedding's input is of whole numbers, which no recording holds.
    Answer(*OUTPUT, unit="", parameter="position_embedding", signature=None),
    source="huggingface/transformers#19240",
)
def positions_from_one() -> Iterator[None]:
    from jax import numpy as jnp

    def call(self: Any, tokens: Any) -> Any:
        positions = jnp.minimum(jnp.arange(tokens.shape[1]) + 1, tokens.shape[1] - 1)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    yield from with_method("gpt_flax", "GPT", "__call__", call)


@MODELS.fault(
    "the patches of an image are numbered down its columns, not along its rows",
    Answer(*INPUT, unit="", parameter="blocks.0", signature=None),
    model="vit",
)
def patches_by_column() -> Iterator[None]:
    def call(self: Any, images: Any) -> Any:
        x = self.patches(images[..., None]).swapaxes(1, 2)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

    yield from with_method("vit_flax", "ViT", "__call__", call)


@MODELS.fault(
    "attention's softmax runs in float32, as jax.nn.dot_product_attention has it, in a run of float64",
    Answer(*INPUT, unit="blocks.0", parameter="blocks.0.mlp_norm", signature=None),
    model="vit",
    dtypes=("float64",),
)
def softmax_in_float32() -> Iterator[None]:
    import jax
    from jax import numpy as jnp

    right = jax.nn.softmax

    def softmax(x: Any, axis: int = -1, **kwargs: Any) -> Any:
        return right(x.astype(jnp.float32), axis=axis, **kwargs).astype(x.dtype)

    with replacing(jax.nn, "softmax", softmax):
        yield


@MODELS.fault(
    "the last block's norm does not multiply by its weight: of ones at the start, so that nothing but its gradient shows it",
    Answer(*LOCAL, unit="blocks.1", parameter="blocks.1.mlp_norm.weight", signature=None),
)
def norm_weight_unused() -> Iterator[None]:
    import jax

    from experiments.models import gpt_flax

    right = gpt_flax.GPT.__call__

    def call(self: Any, tokens: Any) -> Any:
        scale = self.blocks[-1].mlp_norm.scale
        scale[...] = jax.lax.stop_gradient(scale[...])
        return right(self, tokens)

    yield from with_method("gpt_flax", "GPT", "__call__", call)


@MODELS.fault(
    "the loss is not divided by the number of microbatches",
    Answer(*LOSS, signature="constant_factor"),
    source="karpathy/nanoGPT#206",
    accumulate=2,
)
def loss_not_divided() -> Iterator[None]:
    import optax

    right = optax.softmax_cross_entropy_with_integer_labels
    with replacing(optax, "softmax_cross_entropy_with_integer_labels", lambda *args: 2 * right(*args)):
        yield


@MODELS.fault(
    "the embedding that is also the head gets its gradient through the lookup twice",
    Answer(*LOCAL, unit="", parameter="token_embedding.weight", signature="tied_weight"),
    model="gpt-tied",
)
def tied_lookup_twice() -> Iterator[None]:
    import jax
    from flax import nnx

    right = nnx.Embed.__call__

    def call(self: Any, inputs: Any) -> Any:
        x = right(self, inputs)
        # Positions have an embedding too, of fewer rows.
        return 2 * x - jax.lax.stop_gradient(x) if self.num_embeddings == 256 else x

    with replacing(nnx.Embed, "__call__", call):
        yield
