"""Trains PPO of sbx, stable_baselines3 in JAX, on CartPole: flax nets, a TrainState for the actor and one for the critic.

python train.py [--eager] [--schedule] [--evaluate] [--own-adam] [--mistake]

Two rollouts have four updates each. With --mistake the policy is evaluated on the environments of the training: between rollouts
their episodes are reset, while the first observation of the next rollout is the one from before.
"""

import argparse

import gymnasium as gym
import jax
import numpy as np
import optax
from flax import linen as nn
from sbx import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

parser = argparse.ArgumentParser()
parser.add_argument("--rollouts", type=int, default=2)
parser.add_argument("--epochs", type=int, default=2, help="Passes over a rollout.")
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--eager", action="store_true", help="jax.disable_jit.")
parser.add_argument("--schedule", action="store_true", help="The learning rate is a function, which is constant.")
parser.add_argument("--own-adam", action="store_true", help="Chain the parts of Adam.")
parser.add_argument("--evaluate", action="store_true", help="Evaluate after each rollout on other environments.")
parser.add_argument("--mistake", action="store_true", help="Evaluate after each rollout on those of the training.")
args = parser.parse_args()

LR, ENVIRONMENTS, LENGTH = 1e-3, 2, 32


def own_adam(learning_rate, eps=1e-5):
    return optax.chain(optax.scale_by_adam(eps=eps), optax.scale_by_learning_rate(learning_rate))


class Evaluation(BaseCallback):
    """Prints returns of the greedy policy before each rollout but the first."""

    def __init__(self, environments):
        super().__init__()
        self.environments = environments

    def _on_rollout_start(self):
        if self.num_timesteps:
            mean, _ = evaluate_policy(self.model, self.environments, n_eval_episodes=2, deterministic=True)
            print(f"evaluation {mean:.6g}")

    def _on_step(self):
        return True


class Printing(BaseCallback):
    """Prints norms of the parameters before each rollout and at the end."""

    def _on_rollout_start(self):
        states = (self.model.policy.actor_state, self.model.policy.vf_state)
        actor, critic = (float(optax.global_norm(state.params)) for state in states)
        print(f"frames {self.num_timesteps} norms of the actor {actor:.9g} and the critic {critic:.9g}")

    _on_training_end = _on_rollout_start

    def _on_step(self):
        return True


def main():
    environments = make_vec_env(lambda: gym.make("CartPole-v1"), n_envs=ENVIRONMENTS, seed=0)
    model = PPO(
        "MlpPolicy",
        environments,
        learning_rate=(lambda _: LR) if args.schedule else LR,
        n_steps=LENGTH,
        batch_size=args.batch,
        n_epochs=args.epochs,
        gamma=0.98,
        ent_coef=0.01,
        policy_kwargs={
            "net_arch": [32, 32],
            "activation_fn": nn.tanh,
            "optimizer_class": own_adam if args.own_adam else optax.adam,
            "optimizer_kwargs": {"eps": 1e-5},
        },
        seed=0,
    )
    callbacks = [Printing()]
    if args.evaluate or args.mistake:
        others = make_vec_env(lambda: gym.make("CartPole-v1"), n_envs=ENVIRONMENTS, seed=100)
        callbacks.append(Evaluation(environments if args.mistake else others))
    with jax.disable_jit(args.eager):
        model.learn(args.rollouts * ENVIRONMENTS * LENGTH, callback=callbacks)
    states = {"actor": model.policy.actor_state, "critic": model.policy.vf_state}
    buffer = model.rollout_buffer
    print(f"mean return {np.mean(buffer.returns):.9g} of observations {np.mean(np.abs(buffer.observations)):.9g}")
    return {name: state.params for name, state in states.items()}


if __name__ == "__main__":
    main()
