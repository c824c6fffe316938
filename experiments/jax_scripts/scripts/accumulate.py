"""Gradients that a Python loop accumulates over microbatches of equal size, clipped by hand before the optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

ACCUMULATE = 4


class MLP(nnx.Module):
    def __init__(self, din, dmid, dout, *, rngs):
        self.linear1 = nnx.Linear(din, dmid, rngs=rngs)
        self.bn = nnx.LayerNorm(dmid, rngs=rngs)
        self.linear2 = nnx.Linear(dmid, dout, rngs=rngs)

    def __call__(self, x):
        return self.linear2(nnx.gelu(self.bn(self.linear1(x))))


def main():
    model = MLP(6, 16, 2, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    tx = optax.adamw(1e-2)
    opt_state = tx.init(params)

    @jax.jit
    def grad_fn(params, x, y):
        def loss_fn(params):
            return jnp.mean((nnx.merge(graphdef, params)(x) - y) ** 2)

        return jax.value_and_grad(loss_fn)(params)

    @jax.jit
    def clip_and_apply(params, opt_state, grads):
        norm = optax.global_norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / (norm + 1e-6)), grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, norm

    rng = np.random.default_rng(0)
    for step in range(5):
        total, mean_loss = None, 0.0
        for _ in range(ACCUMULATE):
            x = rng.normal(size=(4, 6)).astype(np.float32)
            y = np.stack([x.sum(1), x.prod(1)], axis=1)
            loss, grads = grad_fn(params, x, y)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
            mean_loss += float(loss) / ACCUMULATE
        grads = jax.tree.map(lambda g: g / ACCUMULATE, total)
        params, opt_state, norm = clip_and_apply(params, opt_state, grads)
        print(f"step {step} loss {mean_loss} norm {float(norm)}")


if __name__ == "__main__":
    main()
