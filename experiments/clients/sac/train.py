"""Trains soft actor-critic on a small pendulum of its own, as a single-file script in the style of CleanRL.

python train.py [--no-foreach] [--fused] [--separate-backward] [--target-lerp] [--accumulate 2] [--mistake]

The critics, the actor with squashed Gaussian actions, and the temperature have an optimizer each. With --mistake the gradients of
the critics are zeroed after their step instead of before their backward: those of the actor's loss are added to the next ones.
"""

import argparse
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=14, help="Steps in the environment.")
parser.add_argument("--learning-starts", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--tau", type=float, default=0.05)
parser.add_argument("--q-lr", type=float, default=1e-3)
parser.add_argument("--policy-lr", type=float, default=3e-4)
parser.add_argument("--alpha", type=float, default=0.2)
parser.add_argument("--no-autotune", action="store_true", help="A fixed temperature.")
parser.add_argument("--no-foreach", action="store_true", help="One parameter at a time in the optimizers.")
parser.add_argument("--fused", action="store_true", help="The fused Adam.")
parser.add_argument("--separate-backward", action="store_true", help="A backward for the loss of each critic.")
parser.add_argument("--target-lerp", action="store_true", help="Average the targets by torch._foreach_lerp_.")
parser.add_argument("--accumulate", type=int, default=1, help="Parts of a batch in the update of the critics.")
parser.add_argument("--mistake", action="store_true", help="Zero the critics' gradients right after their step.")
args = parser.parse_args()

LOG_STD_MAX, LOG_STD_MIN = 2, -5


class Pendulum:
    """A damped pendulum that is to be swung up; an episode has 6 steps."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def reset(self) -> np.ndarray:
        self.angle, self.speed = self.random.uniform(-np.pi, np.pi), self.random.uniform(-1, 1)
        self.time = 0
        return self._observation()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
        self.speed += 0.05 * (15 * np.sin(self.angle) + 3 * float(action[0]) - 0.1 * self.speed)
        self.angle += 0.05 * self.speed
        self.time += 1
        reward = -((np.cos(self.angle) - 1.0) ** 2) - 0.1 * self.speed**2
        return self._observation(), reward, self.time == 6

    def _observation(self) -> np.ndarray:
        return np.array([np.cos(self.angle), np.sin(self.angle), self.speed], dtype=np.float32)


class SoftQNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(3 + 1, 32)
        self.fc2 = nn.Linear(32, 32)
        self.fc3 = nn.Linear(32, 1)

    def forward(self, x, a):
        x = torch.cat([x, a], 1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(3, 32)
        self.fc2 = nn.Linear(32, 32)
        self.fc_mean = nn.Linear(32, 1)
        self.fc_logstd = nn.Linear(32, 1)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        log_std = torch.tanh(self.fc_logstd(x))
        return self.fc_mean(x), LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std + 1)

    def get_action(self, x):
        mean, log_std = self(x)
        normal = torch.distributions.Normal(mean, log_std.exp())
        x_t = normal.rsample()
        action = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t) - torch.log(1 - action.pow(2) + 1e-6)
        return action, log_prob.sum(1, keepdim=True)


def main() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    env = Pendulum(seed=1)
    actor = Actor()
    qf1, qf2, qf1_target, qf2_target = (SoftQNetwork() for _ in range(4))
    qf1_target.load_state_dict(qf1.state_dict())
    qf2_target.load_state_dict(qf2.state_dict())
    how = {"fused": True} if args.fused else {"foreach": not args.no_foreach}
    q_optimizer = optim.Adam(list(qf1.parameters()) + list(qf2.parameters()), lr=args.q_lr, **how)
    actor_optimizer = optim.Adam(list(actor.parameters()), lr=args.policy_lr, **how)
    target_entropy = -1.0
    log_alpha = torch.zeros(1, requires_grad=True)
    alpha = args.alpha if args.no_autotune else log_alpha.exp().item()
    a_optimizer = optim.Adam([log_alpha], lr=args.q_lr, **how)

    buffer = []
    obs = env.reset()
    for global_step in range(args.iterations):
        # Actions are random throughout, so that the data of two runs are the same.
        actions = np.random.uniform(-1, 1, size=1).astype(np.float32)
        next_obs, reward, done = env.step(actions)
        buffer.append((obs, next_obs, actions, np.float32([reward]), np.float32([done])))
        obs = env.reset() if done else next_obs
        if global_step < args.learning_starts:
            continue

        indices = np.random.randint(len(buffer), size=args.batch_size)
        data = [torch.as_tensor(np.stack(column)) for column in zip(*(buffer[i] for i in indices), strict=True)]
        if not args.mistake:
            q_optimizer.zero_grad()
        qf_loss = 0.0
        for observations, next_observations, acts, rewards, dones in zip(
            *(column.chunk(args.accumulate) for column in data), strict=True
        ):
            with torch.no_grad():
                next_actions, next_log_pi = actor.get_action(next_observations)
                q1_next = qf1_target(next_observations, next_actions)
                q2_next = qf2_target(next_observations, next_actions)
                min_q_next = torch.min(q1_next, q2_next) - alpha * next_log_pi
                next_q = rewards.flatten() + (1 - dones.flatten()) * args.gamma * min_q_next.view(-1)
            qf1_loss = F.mse_loss(qf1(observations, acts).view(-1), next_q) / args.accumulate
            qf2_loss = F.mse_loss(qf2(observations, acts).view(-1), next_q) / args.accumulate
            if args.separate_backward:
                qf1_loss.backward()
                qf2_loss.backward()
            else:
                (qf1_loss + qf2_loss).backward()
            qf_loss += (qf1_loss + qf2_loss).item()
        q_optimizer.step()
        if args.mistake:
            q_optimizer.zero_grad()

        observations = data[0]
        pi, log_pi = actor.get_action(observations)
        min_qf_pi = torch.min(qf1(observations, pi), qf2(observations, pi))
        actor_loss = ((alpha * log_pi) - min_qf_pi).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()

        if not args.no_autotune:
            with torch.no_grad():
                _, log_pi = actor.get_action(observations)
            alpha_loss = (-log_alpha.exp() * (log_pi + target_entropy)).mean()
            a_optimizer.zero_grad()
            alpha_loss.backward()
            a_optimizer.step()
            alpha = log_alpha.exp().item()

        for net, target in ((qf1, qf1_target), (qf2, qf2_target)):
            if args.target_lerp:
                with torch.no_grad():
                    torch._foreach_lerp_(list(target.parameters()), list(net.parameters()), args.tau)
                continue
            for param, target_param in zip(net.parameters(), target.parameters(), strict=True):
                target_param.data.copy_(args.tau * param.data + (1 - args.tau) * target_param.data)
        print(f"step {global_step} qf_loss {qf_loss:.9g} actor_loss {actor_loss.item():.9g} alpha {alpha:.9g}")


if __name__ == "__main__":
    main()
