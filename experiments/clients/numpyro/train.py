"""Fits a Bayesian logistic regression with SVI of numpyro and an optimizer of optax.

python train.py [--loop update|run] [--batch 16] [--mode jit|eager] [--mistake]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

parser = argparse.ArgumentParser()
parser.add_argument("--loop", choices=["update", "run"], default="update")
parser.add_argument("--mode", choices=["jit", "eager"], default="jit")
parser.add_argument("--batch", type=int, default=16, help="Rows of a step; of 64 for --loop run.")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--mistake", action="store_true", help="Give the plate no size: a batch counts as all data.")
args = parser.parse_args()

ROWS, FEATURES = 64, 5


def model(x, y, size=None):
    weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([FEATURES]).to_event(1))
    bias = numpyro.sample("bias", dist.Normal(0.0, 3.0))
    with numpyro.plate("rows", size or len(x), subsample_size=len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights + bias), obs=y)


def random_rows():
    random = np.random.default_rng(1)
    x = random.standard_normal((ROWS, FEATURES)).astype(np.float32)
    y = x @ random.standard_normal(FEATURES) + random.standard_normal(ROWS) > 0
    return x, y.astype(np.int32)


def main():
    x, y = random_rows()
    of_rows = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), PartitionSpec("rows"))
    optimizer = optax.chain(
        optax.clip_by_global_norm(10.0), optax.adam(optax.cosine_decay_schedule(0.05, 2 * args.steps))
    )
    size = None if args.mistake else ROWS
    svi = SVI(model, AutoNormal(model), optimizer, Trace_ELBO(num_particles=2), size=size)
    key = jax.random.key(0)
    if args.loop == "run":
        result = svi.run(key, args.steps, jax.device_put(x, of_rows), jax.device_put(y, of_rows), progress_bar=False)
        params, losses = result.params, result.losses
    else:
        state = svi.init(key, x[: args.batch], y[: args.batch])
        update = jax.jit(svi.update) if args.mode == "jit" else svi.update
        losses = []
        for step in range(args.steps):
            rows = np.arange(step * args.batch, (step + 1) * args.batch) % ROWS
            state, loss = update(state, jax.device_put(x[rows], of_rows), jax.device_put(y[rows], of_rows))
            losses.append(loss)
        params = svi.get_params(state)
    for step, loss in enumerate(losses):
        print(f"step {step} loss {loss:.5f}")
    for name, value in sorted(params.items()):
        print(name, jnp.round(value, 5))


if __name__ == "__main__":
    main()
