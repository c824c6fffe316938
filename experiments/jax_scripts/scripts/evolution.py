"""An evolution strategy: no gradient is ever taken, updates come from random directions and their fitness."""

import jax
import jax.numpy as jnp


def fitness(params, x):
    return -jnp.mean((jnp.tanh(x @ params) - x[:, 0]) ** 2)


@jax.jit
def generation(params, key):
    noise = jax.random.normal(key, (16, *params.shape))
    x = jax.random.normal(jax.random.fold_in(key, 1), (32, params.shape[0]))
    scores = jax.vmap(lambda n: fitness(params + 0.1 * n, x))(noise)
    scores = (scores - scores.mean()) / (scores.std() + 1e-8)
    return params + 0.05 * jnp.einsum("n,ni->i", scores, noise) / 1.6, scores.max()


def main():
    params, key = jnp.zeros(5), jax.random.key(0)
    for i in range(40):
        key, subkey = jax.random.split(key)
        params, best = generation(params, subkey)
        print("generation", i, float(best), flush=True)


if __name__ == "__main__":
    main()
