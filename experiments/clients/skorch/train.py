"""Classifies random rows with skorch's NeuralNetClassifier.

python train.py [--validate] [--batch 8] [--accumulate 2] [--mistake]
"""

import argparse

import numpy as np
import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import EpochScoring, GradientNormClipping, LRScheduler
from skorch.dataset import Dataset
from skorch.helper import predefined_split
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--validate", action="store_true", help="Score other rows after each epoch.")
parser.add_argument("--mistake", action="store_true", help="Misspell the pattern of the parameters with a lower rate.")
args = parser.parse_args()


class Classifier(nn.Module):
    def __init__(self, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.dropout(self.features(x)))


class AccumulatingNet(NeuralNetClassifier):
    """Adds the gradients of some batches before a step, as skorch's documentation shows."""

    def __init__(self, *positional, accumulate: int = 1, **named) -> None:
        super().__init__(*positional, **named)
        self.accumulate = accumulate

    def get_loss(self, *positional, **named):
        return super().get_loss(*positional, **named) / self.accumulate

    def train_step(self, batch, **fit_params):
        index = len(self.history[-1, "batches"]) - 1
        step = self.train_step_single(batch, **fit_params)
        if (index + 1) % self.accumulate == 0:
            self.optimizer_.step()
            self.optimizer_.zero_grad()
        return step


def rows(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((size, 10), dtype="float32"), random.integers(4, size=size)


def main() -> None:
    torch.manual_seed(0)
    callbacks = [LRScheduler(policy="StepLR", step_size=1, gamma=0.5)]
    if args.accumulate == 1:
        callbacks.append(GradientNormClipping(gradient_clip_value=5.0))
    if args.validate:
        callbacks.append(EpochScoring("neg_log_loss", lower_is_better=False, name="valid_score"))
    kind, more = NeuralNetClassifier, {}
    if args.accumulate > 1:
        kind, more = AccumulatingNet, {"accumulate": args.accumulate}
    net = kind(
        Classifier,
        module__dropout=args.dropout,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        optimizer__param_groups=[("feature.*" if args.mistake else "features.*", {"lr": 2e-3})],
        lr=2e-2,
        batch_size=args.batch,
        max_epochs=args.epochs,
        train_split=predefined_split(Dataset(*rows(16, seed=2))) if args.validate else None,
        callbacks=callbacks,
        classes=range(4),
        **more,
    )
    net.fit(*rows(24, seed=1))
    print(f"accuracy {net.score(*rows(16, seed=2)):.3f}")


if __name__ == "__main__":
    main()
