"""Reinforcement learning in one jitted function: a scan over updates, each of a rollout and a scan over epochs of minibatches."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.linen.initializers import constant, orthogonal
from flax.training.train_state import TrainState

CONFIG = {"LR": 5e-3, "NUM_ENVS": 4, "NUM_STEPS": 8, "NUM_UPDATES": 3, "UPDATE_EPOCHS": 2, "NUM_MINIBATCHES": 2}


class ActorCritic(nn.Module):
    action_dim: int

    @nn.compact
    def __call__(self, x):
        actor = nn.tanh(nn.Dense(16, kernel_init=orthogonal(np.sqrt(2)), bias_init=constant(0.0))(x))
        logits = nn.Dense(self.action_dim, kernel_init=orthogonal(0.01), bias_init=constant(0.0))(actor)
        critic = nn.tanh(nn.Dense(16, kernel_init=orthogonal(np.sqrt(2)), bias_init=constant(0.0))(x))
        value = nn.Dense(1, kernel_init=orthogonal(1.0), bias_init=constant(0.0))(critic)
        return logits, jnp.squeeze(value, axis=-1)


class Transition(NamedTuple):
    action: Any
    value: Any
    reward: Any
    log_prob: Any
    obs: Any


def env_step(state, action):
    state = 0.9 * state + 0.1 * jnp.where(action[:, None] == 0, 1.0, -1.0) * jnp.array([1.0, -0.5, 0.25])
    return state, -jnp.sum(state**2, axis=-1)


def log_prob_of(logits, action):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1)[..., 0]


def make_train(config):
    def linear_schedule(count):
        frac = 1.0 - (count // (config["NUM_MINIBATCHES"] * config["UPDATE_EPOCHS"])) / config["NUM_UPDATES"]
        return config["LR"] * frac

    def train(rng):
        network = ActorCritic(2)
        rng, _rng = jax.random.split(rng)
        params = network.init(_rng, jnp.zeros(3))
        tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(learning_rate=linear_schedule, eps=1e-5))
        train_state = TrainState.create(apply_fn=network.apply, params=params, tx=tx)
        obs = jax.random.normal(_rng, (config["NUM_ENVS"], 3))

        def _update_step(runner_state, _):
            def _env_step(runner_state, _):
                train_state, last_obs, rng = runner_state
                rng, _rng = jax.random.split(rng)
                logits, value = network.apply(train_state.params, last_obs)
                action = jax.random.categorical(_rng, logits)
                obs, reward = env_step(last_obs, action)
                return (train_state, obs, rng), Transition(action, value, reward, log_prob_of(logits, action), last_obs)

            runner_state, traj_batch = jax.lax.scan(_env_step, runner_state, None, config["NUM_STEPS"])
            train_state, last_obs, rng = runner_state
            _, last_val = network.apply(train_state.params, last_obs)

            def _get_advantages(carry, transition):
                gae, next_value = carry
                delta = transition.reward + 0.99 * next_value - transition.value
                gae = delta + 0.99 * 0.95 * gae
                return (gae, transition.value), gae

            _, advantages = jax.lax.scan(
                _get_advantages, (jnp.zeros_like(last_val), last_val), traj_batch, reverse=True
            )
            targets = advantages + traj_batch.value

            def _update_epoch(update_state, _):
                def _update_minbatch(train_state, batch_info):
                    traj_batch, advantages, targets = batch_info

                    def _loss_fn(params):
                        logits, value = network.apply(params, traj_batch.obs)
                        log_prob = log_prob_of(logits, traj_batch.action)
                        value_loss = 0.5 * jnp.square(value - targets).mean()
                        ratio = jnp.exp(log_prob - traj_batch.log_prob)
                        gae = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
                        actor = -jnp.minimum(ratio * gae, jnp.clip(ratio, 0.8, 1.2) * gae).mean()
                        entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1).mean()
                        return actor + 0.5 * value_loss - 0.01 * entropy, (value_loss, entropy)

                    total_loss, grads = jax.value_and_grad(_loss_fn, has_aux=True)(train_state.params)
                    return train_state.apply_gradients(grads=grads), total_loss

                train_state, traj_batch, advantages, targets, rng = update_state
                rng, _rng = jax.random.split(rng)
                batch_size = config["NUM_STEPS"] * config["NUM_ENVS"]
                permutation = jax.random.permutation(_rng, batch_size)
                batch = jax.tree.map(lambda x: x.reshape((batch_size, *x.shape[2:])), (traj_batch, advantages, targets))
                shuffled = jax.tree.map(lambda x: jnp.take(x, permutation, axis=0), batch)
                minibatches = jax.tree.map(lambda x: x.reshape((config["NUM_MINIBATCHES"], -1, *x.shape[1:])), shuffled)
                train_state, total_loss = jax.lax.scan(_update_minbatch, train_state, minibatches)
                return (train_state, traj_batch, advantages, targets, rng), total_loss

            update_state = (train_state, traj_batch, advantages, targets, rng)
            update_state, loss_info = jax.lax.scan(_update_epoch, update_state, None, config["UPDATE_EPOCHS"])
            metric = {"reward": traj_batch.reward.mean(), "loss": loss_info[0]}
            return (update_state[0], last_obs, update_state[-1]), metric

        runner_state, metric = jax.lax.scan(_update_step, (train_state, obs, rng), None, config["NUM_UPDATES"])
        return {"runner_state": runner_state, "metrics": metric}

    return train


def main():
    out = jax.jit(make_train(CONFIG))(jax.random.PRNGKey(30))
    for loss in np.asarray(out["metrics"]["loss"]).ravel():
        print("loss", float(loss))
    print("rewards", [float(x) for x in out["metrics"]["reward"]])


if __name__ == "__main__":
    main()
