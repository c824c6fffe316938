"""Trains PPO of torchrl on its pendulum, in the style of its scripts: TensorDict modules, GAE, a replay buffer, a loss module.

python train.py [--loop-gae] [--one-optimizer] [--not-functional] [--tensor-lr] [--no-normalize [--accumulate 2]] [--mistake]

An episode has 16 steps and never terminates: it is truncated. With --mistake GAE takes truncated episodes for terminated ones, so
that the value of the last state is left out of the targets.
"""

import argparse

import torch
from tensordict.nn import TensorDictModule
from tensordict.nn.distributions import NormalParamExtractor
from torch import nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import SamplerWithoutReplacement
from torchrl.envs import (
    CatTensors,
    Compose,
    DoubleToFloat,
    PendulumEnv,
    StepCounter,
    TransformedEnv,
    UnsqueezeTransform,
)
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, group_optimizers
from torchrl.objectives.value import GAE

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=2, help="Rollouts, each with updates afterwards.")
parser.add_argument("--epochs", type=int, default=2, help="Passes over a rollout.")
parser.add_argument("--updates", type=int, default=12, help="Stop after so many updates.")
parser.add_argument("--minibatch", type=int, default=32)
parser.add_argument("--accumulate", type=int, default=1, help="Parts of a minibatch; needs --no-normalize.")
parser.add_argument("--no-normalize", action="store_true", help="Leave the advantages of a minibatch as they are.")
parser.add_argument("--loop-gae", action="store_true", help="GAE by a loop over time, not by a convolution.")
parser.add_argument("--not-functional", action="store_true", help="The loss module keeps the modules as they are.")
parser.add_argument("--one-optimizer", action="store_true", help="One Adam instead of two that are grouped.")
parser.add_argument("--tensor-lr", action="store_true", help="The learning rate is a tensor.")
parser.add_argument("--mistake", action="store_true", help="Truncated episodes count as terminated.")
args = parser.parse_args()

ENVIRONMENTS, LENGTH, LR, CLIP = 6, 16, 1e-3, 0.2
TOTAL = args.iterations * args.epochs * ENVIRONMENTS * LENGTH // args.minibatch


def make_environment():
    base = PendulumEnv(seed=0)
    transforms = Compose(
        UnsqueezeTransform(dim=-1, in_keys=["th", "thdot"], in_keys_inv=["th", "thdot"]),
        DoubleToFloat(),
        CatTensors(in_keys=["th", "thdot"], out_key="observation", dim=-1, del_keys=False),
        StepCounter(max_steps=LENGTH),
    )
    return TransformedEnv(base, transforms)


def make_modules():
    net = nn.Sequential(
        MLP(in_features=2, out_features=2, num_cells=[32, 32], activation_class=nn.Tanh), NormalParamExtractor()
    )
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        out_keys=["action"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
    )
    critic_net = MLP(in_features=2, out_features=1, num_cells=[32, 32], activation_class=nn.Tanh)
    return actor, ValueOperator(critic_net, in_keys=["observation"])


def make_optimizer(actor, critic, loss_module):
    lr = torch.tensor(LR) if args.tensor_lr else LR
    if args.one_optimizer:
        return torch.optim.Adam(loss_module.parameters(), lr=lr, eps=1e-5)
    return group_optimizers(
        torch.optim.Adam(actor.parameters(), lr=lr, eps=1e-5), torch.optim.Adam(critic.parameters(), lr=lr, eps=1e-5)
    )


def main():
    torch.manual_seed(0)
    environment = make_environment()
    actor, critic = make_modules()
    gae = GAE(gamma=0.95, lmbda=0.9, value_network=critic, average_gae=False, vectorized=not args.loop_gae)
    if args.mistake:
        gae.set_keys(terminated="done")
    loss_module = ClipPPOLoss(
        actor_network=actor,
        critic_network=critic,
        clip_epsilon=CLIP,
        entropy_coeff=0.01,
        critic_coeff=0.5,
        loss_critic_type="smooth_l1",
        normalize_advantage=not args.no_normalize,
        functional=not args.not_functional,
    )
    optimizer = make_optimizer(actor, critic, loss_module)
    frames = ENVIRONMENTS * LENGTH
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(frames), sampler=SamplerWithoutReplacement(), batch_size=args.minibatch
    )
    update = 0
    for _ in range(args.iterations):
        with torch.no_grad():
            start = environment.reset(environment.gen_params(batch_size=[ENVIRONMENTS]))
            data = environment.rollout(LENGTH, actor, auto_reset=False, tensordict=start)
        for _ in range(args.epochs):
            with torch.no_grad():
                gae(data)
            buffer.empty()
            buffer.extend(data.reshape(-1))
            for _ in range(frames // args.minibatch):
                if update == args.updates:
                    return
                batch = buffer.sample()
                for group in optimizer.param_groups:
                    rate = LR * (1 - update / TOTAL)
                    group["lr"] = torch.tensor(rate) if args.tensor_lr else rate
                optimizer.zero_grad(set_to_none=True)
                total = 0.0
                for part in batch.chunk(args.accumulate):
                    losses = loss_module(part)
                    loss = losses["loss_objective"] + losses["loss_entropy"] + losses["loss_critic"]
                    (loss / args.accumulate).backward()
                    total += loss.item() / args.accumulate
                torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                optimizer.step()
                critic_loss = losses["loss_critic"].item()
                print(f"update {update} loss {total:.9g} critic {critic_loss:.6g}")
                update += 1
        print(f"mean reward {data['next', 'reward'].mean().item():.6f}")


if __name__ == "__main__":
    main()
