"""Trains a Fourier neural operator of neuraloperator on a synthetic diffusion, by its Trainer or by a loop as in its examples.

python train.py [--loop own [--accumulate 2]] [--tucker [--reconstructed]] [--adamw torch [--no-foreach]] [--no-evaluate]
    [--workers 1] [--mistake]

DefaultDataProcessor normalizes inputs and targets in training. In evaluations it leaves targets as they are, and denormalizes
outputs. With --mistake the loop does not put it back into training mode after the first evaluation, so that losses are those of
denormalized outputs from then on.
"""

import argparse
import warnings

import torch
from neuralop import H1Loss, LpLoss, Trainer
from neuralop.data.transforms.data_processors import DefaultDataProcessor
from neuralop.data.transforms.normalizers import UnitGaussianNormalizer
from neuralop.models import FNO
from neuralop.training import AdamW
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2, help="Each has four steps.")
parser.add_argument("--loop", choices=["trainer", "own"], default="trainer")
parser.add_argument(
    "--accumulate", type=int, default=1, help="Parts of a batch, with a backward each; needs --loop own."
)
parser.add_argument("--tucker", action="store_true", help="Tucker factorization of the spectral weights.")
parser.add_argument("--reconstructed", action="store_true", help="Contract the full weights instead of their factors.")
parser.add_argument(
    "--adamw", choices=["neuralop", "torch"], default="neuralop", help="They treat complex numbers otherwise."
)
parser.add_argument("--no-foreach", action="store_true", help="AdamW of torch, one parameter at a time.")
parser.add_argument("--no-evaluate", action="store_true", help="Evaluate nothing.")
parser.add_argument("--workers", type=int, default=0, help="Processes of the data loader.")
parser.add_argument("--mistake", action="store_true", help="Leave the data processor in evaluation mode.")
args = parser.parse_args()

SIZE, ROWS, BATCH = 16, 32, 8


class Diffusion(Dataset):
    """Random fields, and what a diffusion and an offset make of them."""

    def __init__(self, number: int, seed: int):
        noise = torch.randn(number, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
        frequencies = torch.fft.fftfreq(SIZE, 1 / SIZE)
        squares = frequencies[:, None] ** 2 + frequencies[None, : SIZE // 2 + 1].abs() ** 2

        def smoothed(fields, rate):
            return torch.fft.irfft2(torch.fft.rfft2(fields) * torch.exp(-rate * squares), s=(SIZE, SIZE))

        self.x = 1.5 + 4 * smoothed(noise, 0.02)
        self.y = 3.0 + 0.5 * smoothed(self.x, 0.05) ** 2

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


class PrintingTrainer(Trainer):
    def train_one_batch(self, idx, sample, training_loss):
        loss = super().train_one_batch(idx, sample, training_loss)
        print(f"epoch {self.epoch} batch {idx} loss {loss.item():.9g}")
        return loss


def parts_of(batch):
    """The parts of a batch."""
    chunks = {name: tensor.chunk(args.accumulate) for name, tensor in batch.items()}
    return [dict(zip(chunks, each, strict=True)) for each in zip(*chunks.values(), strict=True)]


def train(model, processor, optimizer, scheduler, loss_fn, loader, test):
    """The loop of Trainer, written out."""
    processor.train()
    for epoch in range(args.epochs):
        model.train()
        if not args.mistake:
            processor.train()
        for number, batch in enumerate(loader):
            optimizer.zero_grad(set_to_none=True)
            total = 0.0
            for part in parts_of(batch):
                sample = processor.preprocess(part)
                out = model(sample["x"])
                out, sample = processor.postprocess(out, sample)
                loss = loss_fn(out, sample["y"])  # of all samples, added up
                loss.backward()
                total += loss.item()
            optimizer.step()
            print(f"epoch {epoch} batch {number} loss {total:.9g}")
        scheduler.step()
        if test is not None:
            model.eval()
            processor.eval()
            with torch.no_grad():
                total = 0.0
                for batch in test:
                    sample = processor.preprocess(batch)
                    out, sample = processor.postprocess(model(sample["x"]), sample)
                    total += loss_fn(out, sample["y"]).item()
            print(f"epoch {epoch} test loss {total / len(test.dataset):.6f}")


def main():
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.manual_seed(0)
    data = Diffusion(ROWS, 1)
    loader = DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(2), num_workers=args.workers)
    test = None if args.no_evaluate else DataLoader(Diffusion(8, 3), 8)
    factors = {"factorization": "tucker", "rank": 0.4} if args.tucker else {}
    model = FNO(
        n_modes=(8, 8),
        in_channels=1,
        out_channels=1,
        hidden_channels=12,
        n_layers=2,
        implementation="reconstructed" if args.reconstructed else "factorized",
        **factors,
    )
    normalizers = [UnitGaussianNormalizer(dim=[0, 2, 3]) for _ in range(2)]
    normalizers[0].fit(data.x)
    normalizers[1].fit(data.y)
    processor = DefaultDataProcessor(*normalizers)
    if args.adamw == "torch":
        foreach = False if args.no_foreach else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-4, foreach=foreach)
    else:
        optimizer = AdamW(model.parameters(), lr=5e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * args.epochs)
    loss_fn = LpLoss(d=2, p=2)
    if args.loop == "own":
        train(model, processor, optimizer, scheduler, loss_fn, loader, test)
        return
    trainer = PrintingTrainer(
        model=model, n_epochs=args.epochs, device="cpu", data_processor=processor, eval_interval=1, verbose=False
    )
    trainer.train(
        train_loader=loader,
        test_loaders={} if test is None else {SIZE: test},
        optimizer=optimizer,
        scheduler=scheduler,
        regularizer=False,
        training_loss=loss_fn,
        eval_losses={"l2": loss_fn, "h1": H1Loss(d=2)},
    )


if __name__ == "__main__":
    main()
