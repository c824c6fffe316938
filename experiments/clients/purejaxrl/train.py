"""Trains PPO on a cart pole written in JAX: rollouts, advantages and updates in one jitted function, as PureJaxRL does.

python train.py [--loop] [--log] [--gae associative] [--inject] [--vmap] [--mistake]

The whole training is nested lax.scans: over updates, over steps of the environments, backwards over a rollout, over epochs
and over minibatches. Three updates have two epochs of two minibatches each. With --mistake the loss takes its parameters from
the state of the enclosing function instead of the state that the scan carries: all minibatches have the parameters of the
beginning of the update.
"""

import argparse
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

parser = argparse.ArgumentParser()
parser.add_argument("--updates", type=int, default=3)
parser.add_argument("--epochs", type=int, default=2, help="Passes over a rollout.")
parser.add_argument("--minibatches", type=int, default=2)
parser.add_argument("--loop", action="store_true", help="One update per jitted call, in a loop of Python.")
parser.add_argument("--log", action="store_true", help="Print returns out of the scan by jax.debug.callback.")
parser.add_argument("--gae", choices=["scan", "associative"], default="scan", help="Scan that computes advantages.")
parser.add_argument("--inject", action="store_true", help="The schedule in optax.inject_hyperparams.")
parser.add_argument("--vmap", action="store_true", help="jax.vmap over a number of seeds that is one.")
parser.add_argument(
    "--mistake", action="store_true", help="Take gradients at the parameters of the enclosing function."
)
args = parser.parse_args()

ENVIRONMENTS, LENGTH, WIDTH, LR = 4, 32, 32, 2.5e-3
DISCOUNT, DECAY, CLIP, VALUE_WEIGHT, ENTROPY_WEIGHT = 0.99, 0.95, 0.2, 0.5, 0.01


class Pole(NamedTuple):
    """State of one environment: position, velocity, angle and angular velocity, and the number of steps."""

    physics: jax.Array
    time: jax.Array


def reset(key):
    return Pole(jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05), jnp.zeros((), jnp.int32))


def step_environment(key, pole, action):
    """(next state, reward, done); a finished episode continues as a new one."""
    x, speed, angle, turn = pole.physics
    force = jnp.where(action == 1, 10.0, -10.0)
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    push = (force + 0.05 * turn**2 * sine) / 1.1
    turned = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    moved = push - 0.05 * turned * cosine / 1.1
    physics = jnp.stack([x + 0.02 * speed, speed + 0.02 * moved, angle + 0.02 * turn, turn + 0.02 * turned])
    after = Pole(physics, pole.time + 1)
    done = (jnp.abs(physics[0]) > 2.4) | (jnp.abs(physics[2]) > 0.2095) | (after.time >= 200)
    after = jax.tree.map(lambda new, old: jnp.where(done, new, old), reset(key), after)
    return after, jnp.float32(1.0), done


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        def dense(width, scale, name):
            return nn.Dense(width, kernel_init=nn.initializers.orthogonal(scale), name=name)

        actor = nn.tanh(dense(WIDTH, np.sqrt(2), "actor0")(x))
        actor = nn.tanh(dense(WIDTH, np.sqrt(2), "actor1")(actor))
        critic = nn.tanh(dense(WIDTH, np.sqrt(2), "critic0")(x))
        critic = nn.tanh(dense(WIDTH, np.sqrt(2), "critic1")(critic))
        logits = dense(2, 0.01, "policy")(actor)
        return jax.nn.log_softmax(logits), dense(1, 1.0, "value")(critic).squeeze(-1)


class Transition(NamedTuple):
    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array  # the episode ends with this transition


class Runner(NamedTuple):
    """What is carried from update to update."""

    train_state: TrainState
    poles: Pole
    key: jax.Array


net = ActorCritic()
number_of_steps = args.updates * args.epochs * args.minibatches
schedule = optax.linear_schedule(LR, 0.0, number_of_steps)
if args.inject:
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=schedule, eps=1e-5)
else:
    adam = optax.adam(schedule, eps=1e-5)
tx = optax.chain(optax.clip_by_global_norm(0.5), adam)


def init(key):
    of_net, of_poles, key = jax.random.split(key, 3)
    params = net.init(of_net, jnp.zeros((1, 4)))["params"]
    train_state = TrainState.create(apply_fn=net.apply, params=params, tx=tx)
    return Runner(train_state, jax.vmap(reset)(jax.random.split(of_poles, ENVIRONMENTS)), key)


def rollout(runner):
    def one_step(carry, _):
        poles, key = carry
        key, of_action, of_poles = jax.random.split(key, 3)
        observation = poles.physics
        log_probs, value = net.apply({"params": runner.train_state.params}, observation)
        action = jax.random.categorical(of_action, log_probs)
        log_prob = jnp.take_along_axis(log_probs, action[:, None], axis=-1)[:, 0]
        keys = jax.random.split(of_poles, ENVIRONMENTS)
        poles, reward, done = jax.vmap(step_environment)(keys, poles, action)
        return (poles, key), Transition(observation, action, log_prob, value, reward, done)

    (poles, key), transitions = jax.lax.scan(one_step, (runner.poles, runner.key), None, LENGTH)
    return runner._replace(poles=poles, key=key), transitions


def advantages_of(transitions, last_value):
    """Generalized advantage estimates, of the shape (time, environments)."""
    goes_on = 1.0 - transitions.done
    next_values = jnp.concatenate([transitions.value[1:], last_value[None]])
    deltas = transitions.reward + DISCOUNT * goes_on * next_values - transitions.value
    decays = DISCOUNT * DECAY * goes_on
    if args.gae == "associative":

        def combine(later, earlier):
            return earlier[0] * later[0], earlier[1] + earlier[0] * later[1]

        return jax.lax.associative_scan(combine, (decays, deltas), reverse=True)[1]

    def backwards(advantage, here):
        decay, delta = here
        advantage = delta + decay * advantage
        return advantage, advantage

    return jax.lax.scan(backwards, jnp.zeros_like(last_value), (decays, deltas), reverse=True)[1]


def loss_fn(params, transitions, advantages, targets):
    log_probs, value = net.apply({"params": params}, transitions.observation)
    log_prob = jnp.take_along_axis(log_probs, transitions.action[:, None], axis=-1)[:, 0]
    ratio = jnp.exp(log_prob - transitions.log_prob)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages).mean()
    near = transitions.value + jnp.clip(value - transitions.value, -CLIP, CLIP)
    value_loss = 0.5 * jnp.maximum((value - targets) ** 2, (near - targets) ** 2).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    return policy_loss + VALUE_WEIGHT * value_loss - ENTROPY_WEIGHT * entropy


def report(returns, losses):
    print(f"mean return {float(returns):.6f} loss {float(losses):.6f}")


def update(runner, _=None):
    """One rollout and the epochs on it."""
    runner, transitions = rollout(runner)
    train_state = runner.train_state
    _, last_value = net.apply({"params": train_state.params}, runner.poles.physics)
    advantages = advantages_of(transitions, last_value)
    targets = advantages + transitions.value
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (transitions, advantages, targets))

    def epoch(carry, _):
        state, key = carry
        key, of_order = jax.random.split(key)
        order = jax.random.permutation(of_order, ENVIRONMENTS * LENGTH)

        def parts(x):
            return x[order].reshape(args.minibatches, -1, *x.shape[1:])

        def minibatch(state, batch):
            params = train_state.params if args.mistake else state.params
            loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
            return state.apply_gradients(grads=grads), loss

        state, losses = jax.lax.scan(minibatch, state, jax.tree.map(parts, flat))
        return (state, key), losses

    (trained, key), losses = jax.lax.scan(epoch, (train_state, runner.key), None, args.epochs)
    if args.log:
        jax.debug.callback(report, targets.mean(), losses.mean())
    return runner._replace(train_state=trained, key=key), losses


def train(key):
    return jax.lax.scan(update, init(key), None, args.updates)


def main():
    key = jax.random.key(0)
    if args.loop:
        runner = jax.jit(init)(key)
        update_fn = jax.jit(update, donate_argnums=0)
        losses = []
        for _ in range(args.updates):
            runner, of_update = update_fn(runner)
            losses.append(of_update)
    elif args.vmap:
        runner, losses = jax.jit(jax.vmap(train))(key[None])
        runner, losses = jax.tree.map(lambda x: x[0], (runner, losses))
    else:
        runner, losses = jax.jit(train)(key)
    jax.block_until_ready(runner)
    for step, loss in enumerate(np.asarray(losses).reshape(-1)):
        print(f"step {step} loss {loss:.9g}")
    print(f"norm of the parameters {optax.global_norm(runner.train_state.params):.9g}")
    return runner.train_state.params


if __name__ == "__main__":
    main()
