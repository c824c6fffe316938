"""Time to wrap a model: from plain modules to sharded ones, before anything is computed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from experiments.bench.contestants import APIS, LAYOUTS, build, counterpart, ours, theirs
from experiments.bench.figure import TIMES, Figure, Section, median_figure
from experiments.bench.host import SmallBlock, SmallModel
from experiments.bench.ranks import FAKE, on_ranks
from experiments.bench.sizes import Sizes
from experiments.bench.timing import Times, alternate, ratios

WORLD_SIZE = 8
# Of each layout of our `fully_shard` to torch's, called without a mesh: each call of torch's makes one then.
LIMIT = 1 / 3
GIVEN_MESH = ", given a mesh"


def wrap_section(sizes: Sizes) -> Section:
    """Time everyone in alternation."""
    [times] = on_ranks(WORLD_SIZE, FAKE, _times, sizes.host_width, sizes.host_blocks, sizes.wrap_rounds)
    how = (
        f"{sizes.host_blocks} blocks of six parameters, width {sizes.host_width}, and the root: {sizes.host_blocks + 1} units "
        "of a model that is built beforehand, in time of the processor. `fully_shard` is called on each unit, without a mesh "
        "and with one that is made beforehand, FSDP1 once with a policy; one rank of "
        f"{WORLD_SIZE} of torch's fake process group; {sizes.wrap_rounds} rounds."
    )
    return Section("Time to wrap a model", how, wrap_figures(times))


def wrap_figures(times: Times) -> tuple[Figure, ...]:
    """Ours to torch's own, `fully_shard` with a limit; then all times."""
    return (
        *(
            median_figure(
                f"{name} to {counterpart(name)}",
                ratios(times, name, counterpart(name)),
                TIMES,
                LIMIT if name in ours(LAYOUTS) else None,
            )
            for name in ours(APIS)
        ),
        *(
            median_figure(
                f"{name} to {counterpart(name)}{GIVEN_MESH}",
                ratios(times, name + GIVEN_MESH, counterpart(name) + GIVEN_MESH),
                TIMES,
            )
            for name in ours(LAYOUTS)
        ),
        *(median_figure(name, [1e3 * seconds for seconds in taken], "ms") for name, taken in times.items()),
    )


def _times(_rank: int, width: int, num_blocks: int, rounds: int) -> Times:
    plain: list[nn.Module] = []
    wrapped: list[nn.Module] = []

    def ready() -> None:
        # What was wrapped last goes here and not in the time of the next.
        wrapped.clear()
        torch.manual_seed(0)
        plain.append(SmallModel(width, num_blocks))

    def wrapping(name: str, **options: Any) -> Callable[[], None]:
        return lambda: wrapped.append(build(name, plain.pop(), {SmallBlock}, **options))

    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    steps = {name: wrapping(name) for name in (*ours(), *theirs())}
    steps |= {name + GIVEN_MESH: wrapping(name, mesh=mesh) for name in (*ours(LAYOUTS), *theirs(LAYOUTS))}
    return alternate(steps, rounds, ready)["processor"]
