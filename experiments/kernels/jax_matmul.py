"""The transformer of `torch_matmul` in JAX, by hand: parameters are nested dicts, and the step is under jit."""

import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.kernels import values
from jax_backend import Recorder

DTYPE = sys.argv[1]
jax.config.update("jax_enable_x64", DTYPE == "float64")
jax.config.update("jax_default_matmul_precision", "highest")


@jax.custom_vjp
def squared_relu(x: jax.Array) -> jax.Array:
    """Squared ReLU."""
    return jnp.maximum(x, 0) ** 2


def squared_relu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """With what backward needs."""
    return squared_relu(x), x


def squared_relu_backward(x: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    """By the chain rule."""
    return (grad * 2.0 * jnp.maximum(x, 0),)


squared_relu.defvjp(squared_relu_forward, squared_relu_backward)


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Divided by its root mean square."""
    squares = jnp.square(x).mean(-1, keepdims=True)
    scale = jax.lax.rsqrt(squares + 1e-5)
    return x * scale * weight


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """Without its mean, divided by its deviation."""
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred / jnp.sqrt(variance + 1e-5) * weight + bias


def rotated(x: jax.Array) -> jax.Array:
    """Each head turned by the angles of its position."""
    cos, sin = (jnp.asarray(each, x.dtype) for each in values.angles(10000.0))
    first, second = jnp.split(x, 2, -1)
    left = first * cos - second * sin
    right = second * cos + first * sin
    return jnp.concatenate([left, right], -1)


def split(x: jax.Array) -> jax.Array:
    """(batch, time, width) to (batch, head, time, width of a head)."""
    return x.reshape(*x.shape[:-1], values.HEADS, -1).swapaxes(1, 2)


def attention(params: Any, x: jax.Array) -> jax.Array:
    """Causal."""
    query = rotated(split(x @ params["query"].T))
    key = rotated(split(x @ params["key"].T))
    value = split(x @ params["value"].T)
    scores = query @ key.swapaxes(-1, -2)
    scores = scores / math.sqrt(query.shape[-1])
    visible = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    scores = jnp.where(visible, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = weights @ value
    return mixed.swapaxes(1, 2).reshape(x.shape) @ params["out"].T


def mlp(params: Any, x: jax.Array) -> jax.Array:
    """Gated by a squared ReLU."""
    hidden = jax.nn.gelu(x @ params["up"].T, approximate=False)
    gate = squared_relu(x @ params["gate"].T)
    return (hidden * gate) @ params["down"].T


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    """The mean loss over tokens that are not padding."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    places = jnp.arange(inputs.shape[1])
    x = params["tokens"][inputs] + params["positions"][places]
    for block in params["blocks"]:
        x = x + attention(block, rms_norm(x, block["norm1"]))
        x = x + mlp(block, rms_norm(x, block["norm2"]))
    logits = layer_norm(x, params["norm"], params["bias"]) @ params["head"].T
    logits = 3.0 * jnp.tanh(logits / 3.0)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    counted = (targets != values.PADDING).astype(losses.dtype)
    return (losses * counted).sum() / counted.sum()


OPTIMIZER = optax.adamw(1e-2, weight_decay=0.01)


@jax.jit
def step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
    """A step of AdamW."""
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss, {"grads": grads}


def main() -> None:
    """Two steps, recorded into a folder."""
    params: Any = {name: jnp.asarray(values.initial(name), DTYPE) for name in values.SHAPES if "." not in name}
    params["blocks"] = [
        {
            name.removeprefix(prefix): jnp.asarray(values.initial(name), DTYPE)
            for name in values.SHAPES
            if name.startswith(prefix)
        }
        for prefix in (f"blocks.{i}." for i in range(values.BLOCKS))
    ]
    settings = {"optimizer": "AdamW", "weight_decay": 0.01}
    about: dict[str, Any] = {"name": "Transformer", "dense": 2, "learning_rate": 1e-2, "settings": settings}
    opt_state = OPTIMIZER.init(params)
    with Recorder(Path(sys.argv[2]), params, steps=2, overwrite=True, **about) as recorder:
        recorded = recorder.wrap(step)
        for number in range(2):
            params, opt_state, *_ = recorded(params, opt_state, values.batch(number))


if __name__ == "__main__":
    main()
