"""Trains a recurrent actor-critic of haiku on random episodes with the V-trace losses of rlax and optax's RMSprop.

python train.py [--shard shard_map|jit] [--replicas 2] [--mistake]
"""

import argparse

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rlax

parser = argparse.ArgumentParser()
parser.add_argument("--shard", choices=["shard_map", "jit"], help="Shard over all devices; default: plain JAX.")
parser.add_argument("--replicas", type=int, default=1, help="Of a hybrid mesh.")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--mistake", action="store_true", help="Normalize advantages over the episodes of each device.")
args = parser.parse_args()

OBSERVATION, ACTIONS, TIME = 6, 3, 7


def core(observations, resets):
    """Logits and values of one device's episodes, of shape (batch, time, ...)."""
    batch = observations.shape[0]
    x = jax.nn.relu(hk.Linear(16, name="torso")(observations))
    lstm = hk.ResetCore(hk.LSTM(12))
    x, _ = hk.dynamic_unroll(lstm, (x, resets), lstm.initial_state(batch), time_major=False)
    return hk.Linear(ACTIONS, name="policy")(x), hk.Linear(1, name="value")(x)[..., 0]


net = hk.without_apply_rng(hk.transform(core))


def episodes(step):
    random = np.random.default_rng(step)
    lengths = random.integers(3, TIME, size=(args.batch, 1))
    discounts = np.where(random.random((args.batch, TIME)) < 0.1, 0.0, 0.95)
    return {
        "observations": random.standard_normal((args.batch, TIME + 1, OBSERVATION)).astype(np.float32),
        "resets": random.random((args.batch, TIME + 1)) < 0.1,
        "actions": random.integers(ACTIONS, size=(args.batch, TIME)).astype(np.int32),
        "behaviour": random.standard_normal((args.batch, TIME, ACTIONS)).astype(np.float32),
        "rewards": random.standard_normal((args.batch, TIME)).astype(np.float32),
        "discounts": discounts.astype(np.float32),
        "mask": np.arange(TIME) < lengths,
    }


params = net.init(jax.random.key(1), *(episodes(0)[name] for name in ("observations", "resets")))
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(3e-3, decay=0.9, eps=0.1, momentum=0.5))


def sums_and_number(params, batch, over_devices):
    """The loss, summed over the steps of episodes, and their number; `over_devices` adds up what devices have."""
    logits, values = net.apply(params, batch["observations"], batch["resets"])
    logits = logits[:, :-1]
    mask = batch["mask"].astype(jnp.float32)
    rhos = jax.vmap(rlax.categorical_importance_sampling_ratios)(logits, batch["behaviour"], batch["actions"])
    traces = jax.vmap(rlax.vtrace_td_error_and_advantage)(
        values[:, :-1], values[:, 1:], batch["rewards"], batch["discounts"], rhos
    )
    advantages = jax.lax.stop_gradient(traces.pg_advantage)
    number, total, squares = over_devices(
        (mask.sum(), (mask * advantages).sum(), (mask * advantages**2).sum()),
    )
    mean = total / number
    advantages = (advantages - mean) / jnp.sqrt(squares / number - mean**2 + 1e-4)
    log_probs = jax.nn.log_softmax(logits)
    taken = jnp.take_along_axis(log_probs, batch["actions"][..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    losses = -taken * advantages + 0.5 * traces.errors**2 - 0.01 * entropy
    return jnp.sum(mask * losses), mask.sum()


def train_plain():
    trained, opt_state = params, tx.init(params)

    def loss_fn(params, batch):
        total, number = sums_and_number(params, batch, lambda sums: sums)
        return total / number

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for step in range(args.steps):
        trained, opt_state, loss = train_step(trained, opt_state, episodes(step))
        print(f"step {step} loss {loss:.9g}")


def train_sharded():
    from crossframe import MeshSpec
    from jax_backend import LossOutput, apply_updates, make_mesh, shard, sharded_optimizer, value_and_grad

    mesh = make_mesh(MeshSpec(shard=jax.device_count() // args.replicas, replicate=args.replicas))
    trained = shard(params, mesh, units=("torso", "lstm/linear"))
    optimizer = sharded_optimizer(tx)
    opt_state = optimizer.init(trained)

    def loss_fn(params, batch):
        add = (lambda sums: sums) if args.mistake else (lambda sums: jax.lax.psum(sums, mesh.axis_names))
        total, number = sums_and_number(params, batch, add)
        return LossOutput(total / number, weight=number)

    value_and_grads = value_and_grad(loss_fn, mesh, mode=args.shard)

    @jax.jit
    def train_step(params, opt_state, batch):
        result = value_and_grads(params, batch)
        updates, opt_state = optimizer.update(result.grads, opt_state, params)
        return apply_updates(params, updates), opt_state, result.loss

    for step in range(args.steps):
        trained, opt_state, loss = train_step(trained, opt_state, episodes(step))
        print(f"step {step} loss {loss:.9g}")


if __name__ == "__main__":
    train_sharded() if args.shard else train_plain()
