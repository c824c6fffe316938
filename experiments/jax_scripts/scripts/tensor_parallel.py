"""Data and tensor parallelism of pure functions on four devices: NamedSharding, sharding constraints, donated arguments."""

import argparse
from functools import partial

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH = 16


def forward(params, x, constrain):
    for i in range(2):
        block = params[f"block{i}"]
        hidden = constrain(jax.nn.silu(x @ block["gate"]) * (x @ block["up"]), P("data", "model"))
        x = constrain(x + hidden @ block["down"], P("data"))
    return x @ params["head"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", type=int, nargs=2, default=[2, 2])
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.mesh[0] * args.mesh[1])
    mesh = jax.make_mesh(tuple(args.mesh), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = {f"block{i}": {"gate": P(None, "model"), "up": P(None, "model"), "down": P("model")} for i in range(2)}
    specs["head"] = P(None, "model")
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
    rng = np.random.default_rng(0)
    draw = lambda n, m: (rng.normal(size=(n, m)) / np.sqrt(n)).astype(np.float32)
    params = {f"block{i}": {"gate": draw(WIDTH, 32), "up": draw(WIDTH, 32), "down": draw(32, WIDTH)} for i in range(2)}
    params["head"] = draw(WIDTH, 8)
    params = jax.device_put(params, shardings)
    optimizer = optax.adamw(1e-2)
    opt_state = jax.jit(optimizer.init)(params)

    def constrain(x, spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    @partial(jax.jit, donate_argnames=("params", "opt_state"))
    def train_step(params, opt_state, batch):
        def loss_fn(params):
            logits = forward(params, batch["x"], constrain)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss, "grad_norm": optax.global_norm(grads)}

    for step in range(6):
        batch = {"x": rng.normal(size=(8, WIDTH)).astype(np.float32), "y": rng.integers(8, size=8)}
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        params, opt_state, metrics = train_step(params, opt_state, batch)
        print(f"step: {step}, loss: {float(metrics['loss'])}, norm: {float(metrics['grad_norm'])}")


if __name__ == "__main__":
    main()
