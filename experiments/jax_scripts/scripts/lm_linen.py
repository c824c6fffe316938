"""A language model in linen, data parallel over devices: weighted loss, inverse square root schedule, dropout folded by step."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

VOCAB, WIDTH, LENGTH = 32, 16, 12


class MlpBlock(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic):
        x = nn.relu(nn.Dense(2 * WIDTH)(x))
        x = nn.Dropout(0.1)(x, deterministic=deterministic)
        return nn.Dense(WIDTH)(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask, deterministic):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False, deterministic=deterministic)(y, mask=mask)
        x = x + nn.Dropout(0.1)(y, deterministic=deterministic)
        return x + MlpBlock()(nn.LayerNorm()(x), deterministic)


class TransformerLM(nn.Module):
    @nn.compact
    def __call__(self, inputs, deterministic=False):
        mask = nn.combine_masks(nn.make_attention_mask(inputs > 0, inputs > 0), nn.make_causal_mask(inputs))
        y = jnp.pad(inputs, ((0, 0), (1, 0)))[:, :-1].astype(jnp.int32)
        y = nn.Embed(VOCAB, WIDTH, name="embed")(y)
        y = y + self.param("pos_embedding", nn.initializers.normal(0.02), (1, LENGTH, WIDTH))
        for i in range(2):
            y = Block(name=f"encoderdecoderblock_{i}")(y, mask, deterministic)
        y = nn.LayerNorm(name="encoderdecoder_norm")(y)
        return nn.Dense(VOCAB, name="logitdense")(y)


def compute_weighted_cross_entropy(logits, targets, weights):
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets) * weights
    return loss.sum(), weights.sum()


def train_step(state, batch, learning_rate_fn, dropout_rng):
    inputs = batch["inputs"]
    weights = jnp.where(inputs > 0, 1, 0).astype(jnp.float32)
    dropout_rng = jax.random.fold_in(dropout_rng, state.step)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, inputs, rngs={"dropout": dropout_rng})
        loss, weight_sum = compute_weighted_cross_entropy(logits, inputs, weights)
        return loss / weight_sum, logits

    lr = learning_rate_fn(state.step)
    (_, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    new_state = state.apply_gradients(grads=grads)
    loss, denominator = compute_weighted_cross_entropy(logits, inputs, weights)
    return new_state, {"loss": loss / denominator, "learning_rate": lr, "denominator": denominator}


def rsqrt_schedule(init_value, shift):
    return lambda count: init_value * (1 + count + shift) ** -0.5 * shift**0.5


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    config = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", config.devices)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    data_sharding, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    model = TransformerLM()
    schedule = optax.join_schedules([optax.linear_schedule(0, 1e-2, 4), rsqrt_schedule(1e-2, 4)], [4])
    tx = optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)

    def init(rng):
        params = model.init(rng, jnp.ones((1, LENGTH), jnp.int32), deterministic=True)["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    state = jax.jit(init, out_shardings=replicated)(jax.random.key(0))
    jit_train_step = jax.jit(
        lambda state, batch, rng: train_step(state, batch, schedule, rng),
        in_shardings=(replicated, data_sharding, replicated),
        out_shardings=(replicated, replicated),
        donate_argnums=(0,),
    )
    dropout_rng = jax.random.key(1)
    rng = np.random.default_rng(0)
    for step in range(6):
        tokens = rng.integers(1, VOCAB, size=(8, LENGTH))
        tokens[::3, -3:] = 0
        batch = jax.device_put({"inputs": tokens.astype(np.int32)}, data_sharding)
        state, metrics = jit_train_step(state, batch, dropout_rng)
        metrics = jax.device_get(metrics)
        print(f"step {step} loss {float(metrics['loss'])} lr {float(metrics['learning_rate'])}")


if __name__ == "__main__":
    main()
