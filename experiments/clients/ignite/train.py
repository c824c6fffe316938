"""Classifies random sequences with ignite: an Engine with a step of one's own, or the supervised trainer, and an evaluator.

torchrun --nproc-per-node 2 train.py [--supervised] [--batch 8] [--accumulate 2] [--dropout 0] [--mistake]
"""

import argparse
import os

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import LRScheduler
from ignite.metrics import Accuracy, Loss
from torch import nn
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8, help="Samples of all ranks in a microbatch.")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.2)
parser.add_argument("--supervised", action="store_true", help="Use create_supervised_trainer.")
parser.add_argument("--mistake", action="store_true", help="Call model.train() once, before the first epoch.")
args = parser.parse_args()


class Net(nn.Module):
    """Sequences of 3 channels and 20 points to five classes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(3, 16, 5, padding=2)
        self.norm = nn.GroupNorm(4, 16)
        self.conv2 = nn.Conv1d(16, 16, 5, padding=2)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv1(x)))
        x = torch.relu(self.conv2(x))
        return self.head(self.dropout(x.mean(2)))


def dataset(size: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(size, 3, 20, generator=generator), torch.randint(5, (size,), generator=generator))


def training(local_rank: int) -> None:
    torch.manual_seed(0)
    train_loader = idist.auto_dataloader(dataset(24, seed=1), batch_size=args.batch, shuffle=False)
    valid_loader = idist.auto_dataloader(dataset(16, seed=2), batch_size=8, shuffle=False)
    model = idist.auto_model(Net(args.dropout))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3))
    criterion = nn.CrossEntropyLoss()

    def train_step(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        if not args.mistake:
            model.train()
        x, y = batch
        loss = criterion(model(x), y) / args.accumulate
        loss.backward()
        if engine.state.iteration % args.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item() * args.accumulate

    if args.supervised:
        trainer = create_supervised_trainer(
            model,
            optimizer,
            criterion,
            gradient_accumulation_steps=args.accumulate,
            output_transform=lambda x, y, y_pred, loss: loss.item(),
        )
    else:
        trainer = Engine(train_step)
    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy(), "loss": Loss(criterion)})
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, LRScheduler(schedule))

    @trainer.on(Events.ITERATION_COMPLETED)
    @idist.one_rank_only()
    def log_loss(engine: Engine) -> None:
        print(f"epoch {engine.state.epoch} iteration {engine.state.iteration} loss {engine.state.output:.5f}")

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        metrics = evaluator.run(valid_loader).metrics
        if idist.get_rank() == 0:
            print(f"epoch {engine.state.epoch} accuracy {metrics['accuracy']:.3f} loss {metrics['loss']:.5f}")

    model.train()
    trainer.run(train_loader, max_epochs=args.epochs)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None) as parallel:
        parallel.run(training)
