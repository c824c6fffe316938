"""A training step of a GPT, ready to be timed or watched."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.nn import functional

from experiments.bench.contestants import Dtypes, build
from experiments.models import ModelDefinition, define_gpt
from experiments.models.gpt import GPTConfig

LEARNING_RATE = 1e-4


def definition_of(config: GPTConfig) -> ModelDefinition:
    """The model, by its sizes."""
    return define_gpt("benchmark", config)


def losses(
    name: str, config: GPTConfig, batch_size: int, context: int, device: str, dtypes: Dtypes | None = None
) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """A contestant's model on this rank, and what computes its loss on one batch of its own."""
    torch.manual_seed(0)
    with torch.device(device):
        module, units = definition_of(config).make_torch()
    model = build(name, module, units, dtypes)
    torch.manual_seed(1 + dist.get_rank())
    tokens, targets = torch.randint(config.vocabulary, (2, batch_size, context), device=device)
    return model, lambda: functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def training_steps(
    names: Sequence[str], config: GPTConfig, batch_size: int, device: str, dtypes: Dtypes | None = None
) -> dict[str, Callable[[], None]]:
    """For each contestant a function that takes a step with AdamW together with the other ranks.

    On a GPU the optimizer is fused, since the default depends there on the class of the parameters.
    """
    return {name: _step(*losses(name, config, batch_size, config.context, device, dtypes), device) for name in names}


def _step(model: torch.nn.Module, loss: Callable[[], torch.Tensor], device: str) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True if device == "cuda" else None)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def meet(device: str) -> None:
    """Wait for all ranks, and for what their GPUs were given to do."""
    synchronize(device)
    dist.barrier()
    synchronize(device)


def synchronize(device: str) -> None:
    """Wait for what a GPU was given to do."""
    if device == "cuda":
        torch.cuda.synchronize()
