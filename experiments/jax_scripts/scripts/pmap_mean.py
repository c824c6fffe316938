"""Data parallelism by jax.pmap: a replicated TrainState, batches with a leading axis of devices, lax.pmean of gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax import linen as nn
from flax.training import common_utils
from flax.training.train_state import TrainState

jax.config.update("jax_num_cpu_devices", 2)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(12)(x)))


@functools.partial(jax.pmap, axis_name="batch")
def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        return optax.softmax_cross_entropy(logits, common_utils.onehot(batch["y"], 3)).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    grads = jax.lax.pmean(grads, axis_name="batch")
    return state.apply_gradients(grads=grads), jax.lax.pmean({"loss": loss}, axis_name="batch")


def main():
    model = Model()
    params = model.init(jax.random.key(0), jnp.ones((1, 5)))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))
    state = jax_utils.replicate(state)
    rng = np.random.default_rng(0)
    for step in range(6):
        batch = {"x": rng.normal(size=(8, 5)).astype(np.float32), "y": rng.integers(3, size=8)}
        state, metrics = train_step(state, common_utils.shard(batch))
        print(f"step {step} loss {float(jax_utils.unreplicate(metrics)['loss'])}")


if __name__ == "__main__":
    main()
