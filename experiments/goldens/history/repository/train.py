"""Trains a small GPT: `python train.py`. Its settings are in config.toml."""

import math
import tomllib
from pathlib import Path

import torch
from data import CHARACTERS, IGNORED, steps
from model import GPT
from torch import nn
from torch.nn import functional as F

CONFIG = Path(__file__).with_name("config.toml")


def loss_sum(model, inputs, targets):
    """The cross entropy of all targets, summed."""
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def learning_rate(step, config):
    """Linear warm-up, and a cosine to a tenth of the peak."""
    if step < config["warmup"]:
        return config["lr"] * (step + 1) / config["warmup"]
    done = (step - config["warmup"]) / max(1, config["steps"] - config["warmup"])
    return config["lr"] * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(model, config):
    """AdamW that decays matrices, and neither biases nor norms."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": config["weight_decay"]},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config["lr"], betas=(0.9, 0.95))


def train(config):
    torch.manual_seed(config["seed"])
    model = GPT(len(CHARACTERS), config["width"], config["heads"], config["layers"], config["context"])
    optimizer = make_optimizer(model, config)
    for step, microbatches in enumerate(steps(config)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        num_targets = sum(int((targets != IGNORED).sum()) for _, targets in microbatches)
        total = 0.0
        for inputs, targets in microbatches:
            loss = loss_sum(model, inputs, targets) / num_targets
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config["clip"])
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {total:.4f}, gradient norm {norm:.4f}")


def main():
    torch.set_num_threads(1)
    train(tomllib.loads(CONFIG.read_text()))


if __name__ == "__main__":
    main()
