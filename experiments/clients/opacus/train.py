"""Trains a small convolutional net with differential privacy by Opacus, as its tutorials do: PrivacyEngine and DPOptimizer.

python train.py [--physical 8] [--mode functorch] [--evaluate] [--noise 0 --clip 1000] [--no-poisson] [--no-privacy]
    [--sum] [--mistake]
torchrun --nproc-per-node 2 train.py --no-poisson

Gradients of single samples are clipped and added up, and noise is added to the sum. With --sum the criterion adds up the losses
of a batch, and so does loss_reduction of PrivacyEngine. With --mistake loss_reduction keeps its default, "mean", so that Opacus
multiplies the gradients of samples by the size of the batch before it clips them, and divides their sum by it.
"""

import argparse
import os
import warnings

import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--physical", type=int, default=0, help="Largest batch of a backward, by BatchMemoryManager.")
parser.add_argument("--mode", choices=["hooks", "functorch", "ghost"], default="hooks", help="Gradients of samples.")
parser.add_argument("--evaluate", action="store_true", help="Evaluate after each epoch, and account for the privacy.")
parser.add_argument("--noise", type=float, default=0.3, help="Noise multiplier.")
parser.add_argument("--clip", type=float, default=3.0, help="Largest norm of the gradient of a sample.")
parser.add_argument("--no-poisson", action="store_true", help="Batches of one size instead of Poisson sampling.")
parser.add_argument("--no-privacy", action="store_true", help="Plain SGD; needs --no-poisson.")
parser.add_argument("--sum", action="store_true", help="Add up losses of a batch; the learning rate is divided.")
parser.add_argument("--mistake", action="store_true", help="Leave loss_reduction at its default; needs --sum.")
args = parser.parse_args()

CLASSES, SIZE, ROWS, BATCH, LR = 5, 12, 96, 24, 0.2
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def images(number: int, seed: int) -> TensorDataset:
    """Noisy templates and their classes."""
    generator = torch.Generator().manual_seed(seed)
    templates = torch.randn(CLASSES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(100))
    labels = torch.randint(CLASSES, (number,), generator=generator)
    return TensorDataset(templates[labels] + torch.randn(number, 1, SIZE, SIZE, generator=generator), labels)


def net() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * (SIZE // 4) ** 2, 24),
        nn.Tanh(),
        nn.Linear(24, CLASSES),
    )
    return ModuleValidator.fix(model)  # group norms instead of batch norms, which mix samples


def evaluate(model: nn.Module, data: TensorDataset) -> float:
    model.eval()
    with torch.no_grad():
        inputs, labels = data[:]
        return (model(inputs).argmax(1) == labels).float().mean().item()


def train_epoch(model, optimizer, criterion, loader, epoch: int) -> None:
    model.train()
    for number, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"epoch {epoch} batch {number} of {len(labels)} loss {loss.item():.9g}")


def main() -> None:
    warnings.filterwarnings("ignore", category=UserWarning)
    if RANKS > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = net()
    if RANKS > 1:
        model = DifferentiallyPrivateDistributedDataParallel(model)
    data, test = images(ROWS, 1), images(16, 2)
    if args.no_poisson:
        sampler = DistributedSampler(data, RANKS, dist.get_rank() if RANKS > 1 else 0, seed=3)
        loader = DataLoader(data, BATCH // RANKS, sampler=sampler)
    else:
        loader = DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
    reduction = "sum" if args.sum else "mean"
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR / BATCH if args.sum else LR, momentum=0.9)
    if not args.no_privacy:
        engine = PrivacyEngine(accountant="rdp")
        private = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            criterion=criterion,
            noise_multiplier=args.noise,
            max_grad_norm=args.clip,
            poisson_sampling=not args.no_poisson,
            noise_generator=torch.Generator().manual_seed(4),
            grad_sample_mode=args.mode,
            **({} if args.mistake else {"loss_reduction": reduction}),
        )
        if args.mode == "ghost":
            model, optimizer, criterion, loader = private
        else:
            model, optimizer, loader = private
    for epoch in range(args.epochs):
        if args.no_poisson:
            sampler.set_epoch(epoch)
        if args.physical:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=args.physical, optimizer=optimizer
            ) as split:
                train_epoch(model, optimizer, criterion, split, epoch)
        else:
            train_epoch(model, optimizer, criterion, loader, epoch)
        if args.evaluate:
            print(f"accuracy {evaluate(model, test):.4f} epsilon {engine.get_epsilon(1e-2):.4f}")
    if RANKS > 1:
        dist.barrier()  # lets threads of gloo release their last work: the process can hang otherwise
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
