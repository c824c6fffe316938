"""Trains a policy for CartPole with PPO of stable_baselines3, or with its DQN.

python train.py [--algorithm ppo|dqn] [--subprocesses] [--evaluate] [--mistake]
"""

import argparse

from stable_baselines3 import DQN, PPO
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

parser = argparse.ArgumentParser()
parser.add_argument("--algorithm", choices=["ppo", "dqn"], default="ppo")
parser.add_argument("--subprocesses", action="store_true", help="A process for each environment of PPO.")
parser.add_argument("--evaluate", action="store_true", help="Evaluate the policy of PPO while it is trained.")
parser.add_argument("--mistake", action="store_true", help="Keep DQN's interval between updates of the target network.")
args = parser.parse_args()


def train_ppo() -> PPO:
    env = make_vec_env("CartPole-v1", n_envs=2, seed=0, vec_env_cls=SubprocVecEnv if args.subprocesses else DummyVecEnv)
    callback = None
    if args.evaluate:
        callback = EvalCallback(make_vec_env("CartPole-v1", seed=1), eval_freq=32, n_eval_episodes=2, verbose=1)
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=32,
        batch_size=64,
        n_epochs=2,
        learning_rate=lambda remaining: 1e-3 * remaining,
        policy_kwargs={"net_arch": [16, 16]},
        seed=0,
        device="cpu",
        verbose=1,
    )
    return model.learn(total_timesteps=192, callback=callback)


def train_dqn() -> DQN:
    env = make_vec_env("CartPole-v1", n_envs=1, seed=0)
    model = DQN(
        "MlpPolicy",
        env,
        learning_starts=16,
        batch_size=16,
        train_freq=4,
        learning_rate=3e-3,
        exploration_fraction=0.5,
        policy_kwargs={"net_arch": [16, 16]},
        seed=0,
        device="cpu",
        verbose=1,
        **({} if args.mistake else {"target_update_interval": 8}),
    )
    return model.learn(total_timesteps=40, log_interval=1)


def main() -> None:
    model = train_ppo() if args.algorithm == "ppo" else train_dqn()
    mean, deviation = evaluate_policy(model, make_vec_env("CartPole-v1", seed=2), n_eval_episodes=3)
    print(f"reward {mean:.2f} +- {deviation:.2f}")


if __name__ == "__main__":
    main()
