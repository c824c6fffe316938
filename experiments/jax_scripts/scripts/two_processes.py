"""Data parallelism over processes: jax.distributed, a global batch of each process's own rows, replicated parameters."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.LayerNorm()(nn.gelu(nn.Dense(16)(x))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--num-processes", type=int, default=1)
    parser.add_argument("--process-id", type=int, default=0)
    args = parser.parse_args()
    if args.num_processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    else:
        jax.config.update("jax_num_cpu_devices", 2)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    replicated, by_rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    model = Net()

    def init():
        params = model.init(jax.random.key(0), jnp.ones((1, 10)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))

    state = jax.jit(init, out_shardings=replicated)()

    @jax.jit
    def train_step(state, x, y):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    rng = np.random.default_rng(0)
    for step in range(6):
        x, y = rng.normal(size=(8, 10)).astype(np.float32), rng.integers(4, size=8)
        rows = np.split(np.arange(8), jax.process_count())[jax.process_index()]
        x = jax.make_array_from_process_local_data(by_rows, x[rows])
        y = jax.make_array_from_process_local_data(by_rows, y[rows])
        state, loss = train_step(state, x, y)
        print(f"step {step} loss {float(loss)}", flush=True)


if __name__ == "__main__":
    main()
