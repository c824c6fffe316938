"""A model, sharded and plain, and what each holds after some steps."""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from crossframe.errors import CrossframeError
from crossframe.state import state_key
from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers.models import loss_of
from torch_backend import FullyShardedDataParallel as FSDP
from torch_backend import fully_shard

FSDP1, FSDP2 = ("orig", "flat"), ("per_param", "flat layout", "ragged layout")
APIS = (*FSDP1, *FSDP2)
F64 = torch.float64
EVERY_WAY = bool(os.environ.get(EXHAUSTIVE))
# Vector instructions round otherwise than what is left at the end of a row: a few roundings of values of about 1, in few steps.
CLOSE: dict[str, Any] = {"rtol": 1e-13, "atol": 1e-15}


def shard(model: nn.Module, api: str, **options: Any) -> Any:
    """The blocks of a model and itself as units."""
    if api in FSDP1:
        for i, block in enumerate(model.blocks):  # type: ignore[arg-type]
            model.blocks[i] = FSDP(block, use_orig_params=api == "orig", **options)  # type: ignore[operator]
        return FSDP(model, use_orig_params=api == "orig", **options)
    for module in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(module, layout=api.removesuffix(" layout"), **options)  # type: ignore[arg-type]
    return model


def full(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters in full, by the names of the plain model."""

    def named() -> Iterator[tuple[str, Tensor]]:
        for name, param in model.named_parameters():
            yield state_key(name).replace("_orig_mod.", ""), param.detach()

    if any(isinstance(module, FSDP) for module in model.modules()):
        with FSDP.summon_full_params(model, writeback=False):
            return {name: param.clone() for name, param in named()}
    return {name: whole(param).clone() for name, param in named()}


def whole(value: Any) -> Tensor:
    """A tensor in full, whatever it is a shard of."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def train(
    model: nn.Module, optimizer: Any, rank: int, steps: range = range(2), after: Callable[[], None] | None = None
) -> None:
    """Steps of a sharded model on this rank's batches; `after` is called behind each backward."""
    for step in steps:
        loss_of(model, step, rank).backward()
        if after is not None:
            after()
        optimizer.step()
        optimizer.zero_grad()


def backward_of_both(model: nn.Module, step: int) -> None:
    """Backward of the mean of both ranks' losses, in a plain model; halves are exact."""
    for rank in (0, 1):
        (loss_of(model, step, rank) / 2).backward()


def train_plain(model: nn.Module, optimizer: Any, steps: range = range(2)) -> None:
    """The same steps of a plain model."""
    for step in steps:
        backward_of_both(model, step)
        optimizer.step()
        optimizer.zero_grad()


def differing(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> list[str]:
    """The names under which two models do not hold the same."""
    if ours.keys() != plain.keys():
        return sorted(ours.keys() ^ plain.keys())
    return [name for name in plain if not torch.allclose(ours[name], plain[name], **CLOSE)]


def refusal(call: Callable[[], Any], *words: str, kind: type[Exception] = CrossframeError) -> str:
    """What is wrong with how a call is refused: nothing, if it raises a `kind` that says all these words."""
    try:
        call()
    except kind as error:
        return ", ".join(word for word in words if word not in str(error))
    return "went through"


def trained_plain(build: Callable[[], nn.Module], optimizer: Callable) -> dict[str, Tensor]:
    """What a plain model holds after two steps."""
    torch.manual_seed(0)
    model = build()
    train_plain(model, optimizer(model.parameters()))
    return full(model)


def trained(
    build: Callable[[], nn.Module], optimizer: Callable, change: Callable[[nn.Module], nn.Module], rank: int
) -> dict[str, Tensor]:
    """The same of one that `change` shards, and does something else to."""
    torch.manual_seed(0)
    model = change(build())
    train(model, optimizer(model.parameters()), rank)
    return full(model)


SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
