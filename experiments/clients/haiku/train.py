"""Trains a Q-network on random transitions with haiku and optax, as DeepMind's examples of reinforcement learning do.

python train.py [--mode jit|eager|pmap] [--mistake]
"""

import argparse
from functools import partial
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=["jit", "eager", "pmap"], default="jit")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--mistake", action="store_true", help="Keep the first target network.")
args = parser.parse_args()

OBSERVATION, ACTIONS, PERIOD = 8, 3, 2


class Transition(NamedTuple):
    observation: jax.Array
    action: jax.Array
    reward: jax.Array
    discount: jax.Array
    next_observation: jax.Array


class State(NamedTuple):
    params: hk.Params
    target_params: hk.Params
    opt_state: optax.OptState
    count: jax.Array


@hk.without_apply_rng
@hk.transform
def network(observation):
    hidden = hk.Sequential([hk.Linear(24), hk.LayerNorm(-1, create_scale=True, create_offset=True), jnp.tanh])(
        observation
    )
    value = hk.nets.MLP([16, 1], name="value")(hidden)
    advantage = hk.nets.MLP([16, ACTIONS], name="advantage")(hidden)
    return value + advantage - advantage.mean(axis=-1, keepdims=True)


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, weight_decay=1e-2))


def transitions(step):
    random = np.random.default_rng(step)
    return Transition(
        random.standard_normal((args.batch, OBSERVATION)).astype(np.float32),
        random.integers(ACTIONS, size=args.batch),
        random.standard_normal(args.batch).astype(np.float32),
        np.where(random.random(args.batch) < 0.1, 0.0, 0.9).astype(np.float32),
        random.standard_normal((args.batch, OBSERVATION)).astype(np.float32),
    )


def loss_fn(params, target_params, batch):
    values = network.apply(params, batch.observation)
    taken = jnp.take_along_axis(values, batch.action[:, None], axis=-1)[:, 0]
    # Double Q-learning: the network chooses the action, and the target network evaluates it.
    chosen = network.apply(params, batch.next_observation).argmax(axis=-1)
    next_values = network.apply(target_params, batch.next_observation)
    bootstrap = jnp.take_along_axis(next_values, chosen[:, None], axis=-1)[:, 0]
    target = jax.lax.stop_gradient(batch.reward + batch.discount * bootstrap)
    return optax.huber_loss(taken, target).mean()


def update(state, batch, axis=None):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.target_params, batch)
    if axis is not None:
        loss, grads = jax.lax.pmean((loss, grads), axis)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    count = state.count + 1
    target_params = optax.periodic_update(params, state.target_params, count, PERIOD)
    if args.mistake:
        target_params = state.target_params
    return State(params, target_params, opt_state, count), loss


def main():
    params = network.init(jax.random.key(0), jnp.zeros((1, OBSERVATION)))
    state = State(params, params, optimizer.init(params), jnp.zeros((), jnp.int32))
    devices = jax.local_device_count()
    if args.mode == "pmap":
        state = jax.tree.map(lambda leaf: jnp.stack([leaf] * devices), state)
        step_fn = jax.pmap(partial(update, axis="devices"), axis_name="devices")
    else:
        step_fn = jax.jit(update) if args.mode == "jit" else update
    for step in range(args.steps):
        batch = transitions(step)
        if args.mode == "pmap":
            batch = jax.tree.map(lambda leaf: leaf.reshape(devices, -1, *leaf.shape[1:]), batch)
        state, loss = step_fn(state, batch)
        print(f"step {step} loss {np.mean(loss):.6f}")
    norm = optax.global_norm(jax.tree.map(lambda leaf: leaf[0] if args.mode == "pmap" else leaf, state.params))
    print(f"norm of the parameters {norm:.6f}")


if __name__ == "__main__":
    main()
