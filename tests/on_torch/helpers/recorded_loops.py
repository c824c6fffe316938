"""Loops of every kind that the recorder knows, to be run on ranks: one tiny model, one optimizer, the same samples."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import torch_backend as ours
from torch_backend.recorder import Recorder

WIDTH, WORDS, LENGTH, SAMPLES = 8, 13, 5, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding whose weight is the head's too, two blocks, and a scale that no module of its own has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _two_by_half() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def _fsdp1(
    package: Any,
    module: nn.Module,
    *,
    hybrid: bool = False,
    low: bool = False,
    reduce: torch.dtype = torch.float32,
    **options: Any,
) -> nn.Module:
    if hybrid:
        options |= {"device_mesh": _two_by_half(), "sharding_strategy": package.ShardingStrategy.HYBRID_SHARD}
    if low:
        options["mixed_precision"] = package.MixedPrecision(torch.bfloat16, reduce_dtype=reduce)
    policy = ours.ModuleWrapPolicy if package is ours else ModuleWrapPolicy
    return package.FullyShardedDataParallel(
        module, auto_wrap_policy=policy({Block}), device_id=torch.device("cpu"), **options
    )


def _fsdp2(
    package: Any,
    module: Any,
    *,
    hybrid: bool = False,
    low: bool = False,
    reduce: torch.dtype = torch.float32,
    **options: Any,
) -> nn.Module:
    if low:
        options["mp_policy"] = package.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=reduce)
    if hybrid:
        options["mesh"] = _two_by_half()
    for block in module.blocks:
        package.fully_shard(block, **options)
    return package.fully_shard(module, **options)


KINDS: dict[str, Callable[..., nn.Module]] = {
    "one": lambda module: module,
    "ddp": DistributedDataParallel,
    "ours fsdp1": partial(_fsdp1, ours, use_orig_params=True),
    "ours fsdp1 flat": partial(_fsdp1, ours),
    "ours fsdp2": partial(_fsdp2, ours),
    "ours fsdp2 ragged": partial(_fsdp2, ours, layout="ragged"),
    "torch fsdp1": partial(_fsdp1, theirs, use_orig_params=True),
    "torch fsdp1 flat": partial(_fsdp1, theirs),
    "torch fsdp2": partial(_fsdp2, theirs),
}


def batches(step: int, rank: int, world_size: int, microbatches: int = 1) -> list[Tensor]:
    """The same samples a step at any world size."""
    generator = torch.Generator().manual_seed(step)
    every = torch.randint(WORDS, (SAMPLES * microbatches, LENGTH + 1), generator=generator)
    own = every.chunk(world_size)[rank]
    return list(own.chunk(microbatches))


def train(
    rank: int,
    world_size: int,
    kind: str,
    directory: str,
    *,
    steps: int = 3,
    dtype: torch.dtype = torch.float64,
    clip: float | None = None,
    microbatches: int = 1,
    faulty: bool = False,
    checkpointing: bool | None = None,
    recorder: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Record so many steps on this rank."""
    torch.manual_seed(0)
    net = Net().to(dtype)
    if checkpointing is not None:
        kinds = wrapping.CheckpointImpl
        wrapper = partial(
            wrapping.checkpoint_wrapper, checkpoint_impl=kinds.REENTRANT if checkpointing else kinds.NO_REENTRANT
        )
        wrapping.apply_activation_checkpointing(
            net, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, Block)
        )
    model = KINDS[kind](net, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with Recorder(directory, model=model, optimizer=optimizer, name="net", **(recorder or {})) as record:
        for step in range(steps):
            parts = batches(step, rank, world_size, microbatches)
            total = 0.0
            for i, tokens in enumerate(parts):
                with _held_back(model, i == len(parts) - 1):
                    logits = model(tokens[:, :-1])
                    loss = functional.cross_entropy(logits.flatten(0, 1).to(dtype), tokens[:, 1:].flatten()) / len(
                        parts
                    )
                    loss.backward()
                total += loss.item()
            if faulty:
                for param in model.parameters():
                    if param.grad is not None:
                        param.grad.mul_(world_size)
            if clip is not None:
                _clip(model, clip)
            optimizer.step()
            record.step(loss=total)
            optimizer.zero_grad()


def train_and_tell(
    rank: int, world_size: int, kind: str, directory: str, schedule: dict[str, Any] | None
) -> list[list[bytes]]:
    """By step the bits of this rank's loss, gradients and parameters, of a run that is recorded so, or not at all."""
    torch.manual_seed(0)
    model, found = KINDS[kind](Net()), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    made = nullcontext() if schedule is None else Recorder(directory, model=model, optimizer=optimizer, **schedule)
    with made as record:
        for step in range(4):
            (tokens,) = batches(step, rank, world_size)
            loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            if record is not None:
                record.step(loss=loss.item())
            held = [loss, *(each for param in model.parameters() for each in (param, param.grad) if each is not None)]
            found.append([_bits(each.detach()) for each in held])
            optimizer.zero_grad()
    return found


def _bits(tensor: Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.contiguous().view(-1).numpy().tobytes()


def train_with_checkpointing(rank: int, world_size: int, kind: str, directory: str, reentrant: bool) -> None:
    """Each block is computed again in the backward."""
    train(rank, world_size, kind, directory, checkpointing=reentrant, microbatches=2)


def train_without_a_rank(rank: int, world_size: int, kind: str, directory: str) -> str:
    """What each rank says where recording cannot begin."""
    try:
        train(rank, world_size, kind, directory)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it began"


def _clip(model: nn.Module, limit: float) -> None:
    own = getattr(model, "clip_grad_norm_", None)
    if own is not None:
        own(limit)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), limit)


@contextmanager
def _held_back(model: Any, is_last: bool) -> Iterator[None]:
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_last)
        yield
        return
    with nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync():
        yield


def where(folder: Path, *parts: object) -> str:
    """A directory for a run."""
    return str(folder / "-".join(str(part).replace(" ", "_") for part in parts))
