"""Train a small residual net for some hundred steps, in habits that a monitor could mistake for faults."""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

CLEAN = {
    "base": "AdamW with a warm-up and a cosine",
    "spikes": "SGD with momentum; one step in forty has labels of noise, which make the loss spike",
    "restarts": "AdamW with warm restarts of the learning rate",
    "overfit": "Adam on sixteen samples, until the loss is nearly zero",
    "pure_bfloat16": "parameters, gradients and AdamW's state in bfloat16",
    "zero_init": "the last layer of each block begins with zeros; RMSprop",
    "small_batches": "two samples a step, so that losses are noisy; Adagrad",
    "unfreezing": "blocks are trained from step 100 on, before that only the head; Adamax",
    "random_labels": "labels that nothing predicts: the loss stays where it is; SGD",
    "longer": "from the middle on, twice as many classes occur, so that the loss rises; AdamW",
}
CLASSES, WIDTH, FEATURES = 16, 48, 24


class Block(nn.Module):
    def __init__(self, *, starts_at_zero: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        if starts_at_zero:
            nn.init.zeros_(self.down.weight)
            nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, *, starts_at_zero: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block(starts_at_zero=starts_at_zero) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="base", choices=CLEAN)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    on = options.variant
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    dtype = torch.bfloat16 if on == "pure_bfloat16" else torch.float32
    model = Net(starts_at_zero=on == "zero_init")
    teacher = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    model, steps = model.to(dtype), options.steps
    kinds = {
        "spikes": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9),
        "overfit": lambda params: torch.optim.Adam(params, 2e-3),
        "zero_init": lambda params: torch.optim.RMSprop(params, 1e-3),
        "small_batches": lambda params: torch.optim.Adagrad(params, 1e-2),
        "unfreezing": lambda params: torch.optim.Adamax(params, 2e-3),
        "random_labels": lambda params: torch.optim.SGD(params, 0.01),
    }
    optimizer = kinds.get(on, lambda params: torch.optim.AdamW(params, 2e-3))(model.parameters())

    def share(step: int) -> float:
        if on == "restarts":
            return 0.5 * (1 + math.cos(math.pi * (step % 150) / 150))
        return min(1.0, (step + 1) / 30) * 0.5 * (1 + math.cos(math.pi * step / steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    fixed = torch.randn(16, FEATURES)
    for step in range(steps):
        if on == "unfreezing":
            model.blocks.requires_grad_(step >= 100)
        x = fixed if on == "overfit" else torch.randn(2 if on == "small_batches" else 32, FEATURES)
        y = (3 * teacher(x)).argmax(-1)
        if on == "longer" and step < steps // 2:
            y = y % (CLASSES // 2)
        if on == "random_labels" or (on == "spikes" and step % 40 == 39):
            y = torch.randint(CLASSES, y.shape)
        loss = functional.cross_entropy(model(x.to(dtype)).float(), y)
        loss.backward()
        if on not in ("spikes", "random_labels", "small_batches"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


if __name__ == "__main__":
    main()
