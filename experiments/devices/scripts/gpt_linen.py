"""Trains a small GPT in flax's linen, on the platform and with the precision of matrix products that are asked for."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

VOCABULARY, WIDTH, LENGTH, HEADS, BLOCKS = 256, 128, 64, 4, 3


class Block(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS, dtype=self.dtype)(y, mask=mask)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * WIDTH, dtype=self.dtype)(y))
        return x + nn.Dense(WIDTH, dtype=self.dtype)(y)


class GPT(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)(tokens)
        x = x + nn.Embed(LENGTH, WIDTH, dtype=self.dtype, name="positions")(jnp.arange(tokens.shape[1]))
        for _ in range(BLOCKS):
            x = Block(self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(VOCABULARY, dtype=self.dtype, name="head")(x).astype(jnp.float32)


def loss_fn(params, apply_fn, tokens):
    logits = apply_fn({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@jax.jit
def train_step(state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, tokens)
    return state.apply_gradients(grads=grads), loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="default", choices=["default", "highest"])
    parser.add_argument("--dtype", default="float32", help="of computation")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    jax.config.update("jax_platforms", args.platform)
    jax.config.update("jax_default_matmul_precision", args.precision)
    model = GPT(jnp.dtype(args.dtype))
    rng = np.random.default_rng(1)
    table = rng.integers(VOCABULARY, size=(VOCABULARY, 4))
    params = model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 4, 100)
    decayed = jax.tree.map(lambda param: param.ndim > 1, params)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1, mask=decayed))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
    for step in range(args.steps):
        tokens = np.empty((8, LENGTH + 1), np.int32)
        tokens[:, 0] = rng.integers(VOCABULARY, size=8)
        for i in range(LENGTH):
            tokens[:, i + 1] = table[tokens[:, i], rng.integers(4, size=8)]
        state, loss = train_step(state, jnp.asarray(tokens))
        print(f"step {step}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
