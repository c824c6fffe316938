"""Faults in models that were written late, as those of `held_out`."""

import math
from collections.abc import Iterator
from typing import Any

from crossframe.replacing import replacing
from experiments.faults.catalogue.fault import JAX, TORCH, Answer, Family, each_made, with_method
from experiments.faults.catalogue.models_torch import INPUT, LOCAL, OUTPUT

HELD_OUT = Family("held out", TORCH)


@HELD_OUT.fault(
    "heads are put together without bringing time back in front of them",
    Answer(*INPUT, unit="blocks.0", parameter="blocks.0.attention.out", signature=None),
)
def heads_not_brought_back() -> Iterator[None]:
    def forward(self: Any, x: Any) -> Any:
        import torch

        query, key, value = (self._split(part(x)) for part in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
        return self.out((weights @ value).reshape(x.shape))

    yield from with_method("gpt_torch", "Attention", "forward", forward)


@HELD_OUT.fault(
    "GELU by erf, where the other has the tanh formula",
    Answer(*INPUT, unit="blocks.0", parameter="blocks.0.down", signature="tanh_gelu"),
    within=(JAX,),
    model="vit",
)
def gelu_by_erf_in_jax() -> Iterator[None]:
    import jax

    right = jax.nn.gelu
    with replacing(jax.nn, "gelu", lambda x, approximate=True: right(x, approximate=False)):
        yield


@HELD_OUT.fault(
    "a kernel is multiplied by as it lies in torch, transposed",
    Answer(*OUTPUT, unit="blocks.0", parameter="blocks.0.attention.key", signature="transposed"),
    within=(JAX,),
)
def kernel_as_in_torch() -> Iterator[None]:
    from flax import nnx

    right = nnx.Linear.__call__

    def call(self: Any, x: Any) -> Any:
        return x @ self.kernel[...].T + self.bias[...] if getattr(self, "turned", False) else right(self, x)

    with replacing(nnx.Linear, "__call__", call):
        yield from each_made("gpt_flax", "Block", lambda block: setattr(block.attention.key, "turned", True))


@HELD_OUT.fault(
    "dropout was left on behind the embedding",
    Answer(*INPUT, unit="", parameter="blocks.0", signature="dropout"),
    within=(JAX,),
)
def dropout_on_the_embedding() -> Iterator[None]:
    import jax
    from jax import numpy as jnp

    def call(self: Any, tokens: Any) -> Any:
        x = self.token_embedding(tokens) + self.position_embedding(jnp.arange(tokens.shape[1]))
        kept = jax.random.bernoulli(jax.random.key(1), 0.8, x.shape)
        x = jnp.where(kept, x / 0.8, 0)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    yield from with_method("gpt_flax", "GPT", "__call__", call)


@HELD_OUT.fault(
    "RMSNorm has an epsilon of 1e-3",
    Answer(*OUTPUT, unit="model.layers.0", parameter="model.layers.0.input_layernorm", signature="norm_epsilon"),
    within=(JAX,),
    model="llama-tiny",
)
def rms_epsilon_large() -> Iterator[None]:
    def change(block: Any) -> None:
        block.input_layernorm.epsilon = 1e-3

    yield from each_made("llama_flax", "Block", change)


@HELD_OUT.fault(
    "the head's share of the gradient of the embedding is lost",
    Answer(*LOCAL, unit="", parameter="token_embedding.weight", signature="tied_weight"),
    within=(JAX,),
    model="gpt-tied",
)
def tied_head_lost() -> Iterator[None]:
    import jax
    from jax import numpy as jnp

    def call(self: Any, tokens: Any) -> Any:
        x = self.token_embedding(tokens) + self.position_embedding(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ jax.lax.stop_gradient(self.token_embedding.embedding[...]).T

    yield from with_method("gpt_flax", "GPT", "__call__", call)


@HELD_OUT.fault(
    "kernels of convolutions were loaded with channels in and out exchanged",
    Answer("parameters", "all_gather", signature="transposed"),
    within=(JAX,),
    model="conv",
)
def channels_exchanged() -> Iterator[None]:
    from experiments.models import load_flax

    right = load_flax.nnx_params

    def nnx_params(definition: Any, params: Any, values: Any) -> Any:
        square = {name for name, value in values.items() if value.ndim == 4 and value.shape[0] == value.shape[1]}
        turned = {name: value.swapaxes(0, 1) if name in square else value for name, value in values.items()}
        return right(definition, params, turned)

    with replacing(load_flax, "nnx_params", nnx_params):
        yield


@HELD_OUT.fault(
    "logits are divided by a temperature of 2", Answer(*OUTPUT, unit="", parameter="", signature="constant_factor")
)
def logits_halved() -> Iterator[None]:
    from experiments.models import gpt_torch

    right = gpt_torch.GPT.forward
    yield from with_method("gpt_torch", "GPT", "forward", lambda self, tokens: right(self, tokens) / 2)


@HELD_OUT.fault(
    "the embedding of tokens is scaled by the root of its width",
    Answer(*INPUT, unit="", parameter="blocks.0", signature=None),
    within=(JAX,),
)
def embedding_scaled() -> Iterator[None]:
    from jax import numpy as jnp

    def call(self: Any, tokens: Any) -> Any:
        x = self.token_embedding(tokens)
        x = x * math.sqrt(x.shape[-1]) + self.position_embedding(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    yield from with_method("gpt_flax", "GPT", "__call__", call)
