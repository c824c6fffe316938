"""Time that the host spends on hooks and bookkeeping: a model so small that little else is left, ranks that talk to nobody."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from experiments.bench.contestants import BARE, build, counterpart, ours, theirs
from experiments.bench.figure import TIMES, Figure, Section, median_figure
from experiments.bench.ranks import FAKE, on_ranks
from experiments.bench.sizes import Sizes
from experiments.bench.timing import Times, alternate, fastest, ratios

APIS = ("FSDP1", "FSDP2")
FURTHER = ("FSDP1 flat", "FSDP2 flat", "FSDP2 ragged")
# Ours that is held to the faster of torch's two, and to torch's own.
HELD_TO_FASTER, HELD = "our FSDP1", "our FSDP2"
COLLECTIVES = "collectives alone"
BATCH_SIZE = 8


class SmallBlock(nn.Module):
    """What a transformer does around its attention: six parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.relu(self.up(self.norm(x))))


class SmallModel(nn.Module):
    """Many of them between two linear layers, which are the root's own."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([SmallBlock(width) for _ in range(num_blocks)])
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def host_section(sizes: Sizes) -> Section:
    """Time forward and backward of everyone in alternation, once for each world size."""
    figures: list[Figure] = []
    for world_size, limits in sizes.host_worlds:
        [times] = on_ranks(world_size, FAKE, _times, world_size, sizes.host_width, sizes.host_blocks, sizes.host_rounds)
        figures += host_figures(times, world_size, limits)
    how = (
        f"{sizes.host_blocks} blocks of six parameters, width {sizes.host_width}, a unit each; forward, backward and "
        "zero_grad, in time of the processor, of which the bare model's is taken off on both sides. One rank of torch's fake "
        "process group, whose all-gather makes a copy for every rank of the world: these copies are the same for all, and "
        f"their time is given too; {sizes.host_rounds} rounds."
    )
    return Section("Bookkeeping of the host", how, tuple(figures))


def host_figures(times: Times, world_size: int, limits: tuple[float, float]) -> tuple[Figure, ...]:
    """Ours to the faster of torch's two and to its counterpart, the bare model's time taken off; then all times.

    Args:
        limits: of our FSDP1 to the faster, and of our FSDP2 to torch's.
    """
    best = fastest(times, theirs(APIS))
    where = f"{world_size} ranks: "
    return (
        *(
            median_figure(
                f"{where}{name} to {best}, the faster",
                ratios(times, name, best, BARE),
                TIMES,
                limits[0] if name == HELD_TO_FASTER else None,
            )
            for name in ours(APIS)
            if name == HELD_TO_FASTER or counterpart(name) != best
        ),
        *(
            median_figure(
                f"{where}{name} to {counterpart(name)}",
                ratios(times, name, counterpart(name), BARE),
                TIMES,
                limits[1] if name == HELD else None,
            )
            for name in ours(APIS + FURTHER)
            if name != HELD_TO_FASTER or counterpart(name) != best
        ),
        *(median_figure(where + name, [1e3 * seconds for seconds in taken], "ms") for name, taken in times.items()),
    )


def _times(_rank: int, world_size: int, width: int, num_blocks: int, rounds: int) -> Times:
    steps: dict[str, Callable[[], None]] = {}
    for name in (BARE, *ours(APIS + FURTHER), *theirs(APIS + FURTHER)):
        torch.manual_seed(0)
        model = build(name, SmallModel(width, num_blocks), {SmallBlock})
        steps[name] = _step(model, torch.randn(BATCH_SIZE, width))
    steps[COLLECTIVES] = _collectives(world_size, SmallModel(width, num_blocks))
    return alternate(steps, rounds)["processor"]


def _step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return step


def _collectives(world_size: int, model: SmallModel) -> Callable[[], None]:
    """What a step asks of the process group, without anything around it: a block is gathered twice, the root once."""
    numels = [sum(param.numel() for param in block.parameters()) for block in model.blocks]
    shards = [torch.zeros(-(-numel // world_size)) for numel in numels]
    gathered = [torch.zeros(world_size * shard.numel()) for shard in shards]
    # The names that torch 2.11 has too; 2.13 warns of them once.
    gather, scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor

    def step() -> None:
        for full, shard in zip(gathered, shards, strict=True):
            gather(full, shard, async_op=True).wait()  # type: ignore[union-attr]
            gather(full, shard, async_op=True).wait()  # type: ignore[union-attr]
            scatter(shard, full, async_op=True).wait()  # type: ignore[union-attr]

    return step
