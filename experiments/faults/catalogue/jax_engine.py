"""Faults in the JAX engine: gathers, the backward of gathers, accumulation, and what jit keeps."""

from collections.abc import Iterator
from typing import Any

from crossframe.replacing import replacing
from experiments.faults.catalogue.core import GATHERED
from experiments.faults.catalogue.fault import JAX, TELLABLE, Answer, Family
from experiments.faults.catalogue.torch_engine import LOCAL

JAX_ENGINE = Family("JAX engine", JAX)


@JAX_ENGINE.fault(
    "the differentiated function sums the loss over ranks: gradients are too large by the number of ranks",
    Answer(*LOCAL, signature="constant_factor"),
    source="jax-ml/jax#3970",
)
def psum_in_the_loss() -> Iterator[None]:
    import jax
    import optax

    right = optax.softmax_cross_entropy_with_integer_labels

    def loss(*args: Any, **kwargs: Any) -> Any:
        value = right(*args, **kwargs)
        return 2 * value - jax.lax.stop_gradient(value)

    with replacing(optax, "softmax_cross_entropy_with_integer_labels", loss):
        yield


@JAX_ENGINE.fault(
    "the gradient of a square kernel goes back with its axes exchanged",
    Answer(*LOCAL, unit="blocks.0", parameter="blocks.0.attention.query.weight", signature="transposed"),
)
def gradient_transposed() -> Iterator[None]:
    from jax_backend.engine import _gather as gather

    right, path = gather.transposed, "blocks.0.attention.query.kernel"

    def transposed(leaves_of: Any, shapes: Any, grads: dict[str, Any]) -> Any:
        return right(leaves_of, shapes, {name: grad.T if name == path else grad for name, grad in grads.items()})

    with replacing(gather, "transposed", transposed):
        yield


@JAX_ENGINE.fault(
    "square kernels were loaded with their axes as torch has them",
    Answer("parameters", "all_gather", signature="transposed"),
    source="huggingface/transformers#311",
)
def kernels_loaded_transposed() -> Iterator[None]:
    from experiments.models import load_flax

    right = load_flax.nnx_params

    def nnx_params(definition: Any, params: Any, values: Any) -> Any:
        square = {name for name, value in values.items() if value.ndim == 2 and value.shape[0] == value.shape[1]}
        return right(definition, params, {name: value.T if name in square else value for name, value in values.items()})

    with replacing(load_flax, "nnx_params", nnx_params):
        yield


@JAX_ENGINE.fault(
    "the last unit is gathered in bfloat16 to save bandwidth, and computed with so",
    Answer(*GATHERED, unit="blocks.1", signature=None),
    dtypes=TELLABLE,
)
def gathered_in_bfloat16() -> Iterator[None]:
    from jax import numpy as jnp

    from jax_backend.engine import _gather as gather

    right = gather.all_gather

    def all_gather(shard: Any, label: str, placed: Any, dim: int) -> Any:
        if label != "blocks.1":
            return right(shard, label, placed, dim=dim)
        return right(shard.astype(jnp.bfloat16), label, placed, dim=dim).astype(shard.dtype)

    with replacing(gather, "all_gather", all_gather):
        yield


@JAX_ENGINE.fault(
    "of the microbatches that wait, the newer takes the place of the older",
    Answer(*LOCAL, signature=None),
    accumulate=3,
)
def waiting_replaced() -> Iterator[None]:
    from jax_backend.shards._local_grads import LocalGrads

    with replacing(LocalGrads, "__add__", lambda self, other: other):
        yield


@JAX_ENGINE.fault(
    "on one rank alone, what backward hands to the last unit is rounded to bfloat16",
    Answer(*LOCAL, unit="blocks.1", rank=1, signature=None),
    dtypes=TELLABLE,
)
def rank_goes_back_low() -> Iterator[None]:
    import jax
    from jax import numpy as jnp

    from experiments.models import gpt_flax

    @jax.custom_vjp
    def narrowed(x: Any) -> Any:
        return x

    def backward(_: None, grad: Any) -> Any:
        rounded = grad.astype(jnp.bfloat16).astype(grad.dtype)
        return (jnp.where(jax.lax.axis_index("shard") == 1, rounded, grad),)

    narrowed.defvjp(lambda x: (x, None), backward)

    def call(self: Any, tokens: Any) -> Any:
        x = self.token_embedding(tokens) + self.position_embedding(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(narrowed(x)))

    with replacing(gpt_flax.GPT, "__call__", call):
        yield
