"""Data parallelism by shard_map: each device takes the gradient of its part of the batch, lax.pmean averages them."""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


def predict(params, inputs):
    for w, b in params:
        outputs = jnp.dot(inputs, w) + b
        inputs = jnp.maximum(outputs, 0)
    return outputs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    optimizer = optax.sgd(0.05, momentum=0.9)

    def loss(params, batch):
        inputs, targets = batch
        return jnp.mean(jnp.sum((predict(params, inputs) - targets) ** 2, axis=-1))

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("batch")), out_specs=(P(), P(), P()), check_vma=False
    )
    def update(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        grads = jax.lax.pmean(grads, "batch")
        value = jax.lax.pmean(value, "batch")
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    rng = np.random.default_rng(0)
    sizes = [8, 16, 16, 4]
    params = [
        (jnp.asarray(rng.normal(size=(n, m)) / np.sqrt(n), jnp.float32), jnp.zeros(m))
        for n, m in zip(sizes[:-1], sizes[1:])
    ]
    opt_state = optimizer.init(params)
    for step in range(6):
        x = rng.normal(size=(16, 8)).astype(np.float32)
        y = np.stack([x[:, :2].sum(1), x[:, 2:4].sum(1), x[:, 4] * x[:, 5], x[:, 6]], axis=1)
        params, opt_state, value = update(params, opt_state, (x, y))
        print(f"{step} loss {float(value)}")


if __name__ == "__main__":
    main()
