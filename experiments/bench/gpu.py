"""A model of a billion parameters on GPUs, computed in bfloat16: tokens a second, peak memory, and copies that nothing hides."""

import gc
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from experiments.bench.contestants import COMPILED, LAYOUTS, Dtypes, counterpart, mixes_precision, ours, theirs
from experiments.bench.figure import TIMES, Figure, Section, median_figure
from experiments.bench.ranks import FAKE, NCCL, on_ranks
from experiments.bench.sizes import Sizes
from experiments.bench.timing import WARM_UP, Times, alternate, ratios, slowest
from experiments.bench.training import definition_of, meet, training_steps
from experiments.models.gpt import GPTConfig

TITLE = "A billion parameters on GPUs"
LIMIT = 1.0
EAGER = ("FSDP1", *LAYOUTS)
APIS = (*EAGER, "FSDP1" + COMPILED, "FSDP2" + COMPILED)
HELD_TO = "FSDP2"
DTYPES = Dtypes(torch.bfloat16, torch.bfloat16)
# Of torch's process group that talks to nobody.
FAKE_RANKS = 8
# What moves data and computes nothing, by parts of kernels' names: torch's concatenations and casts are kernels too.
COPIES = ("copy", "chunk_cat")


@dataclass(frozen=True)
class World:
    """The ranks of a measurement.

    Attributes:
        num_alive: how many contestants find room on a GPU at once.
    """

    what: str
    backend: str
    size: int
    num_alive: int


def gpu_section(sizes: Sizes) -> Section:
    """Time steps in alternation; then count memory and copies, of one contestant at a time."""
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        return Section(TITLE, "", skipped="skipped: no CUDA device here")
    names = [name for name in (*ours(APIS), *theirs(APIS)) if mixes_precision(name)]
    sized = (sizes.gpu_gpt, sizes.gpu_batch)
    figures: list[Figure] = []
    worlds = (
        World(f"{num_gpus} over NCCL", NCCL, num_gpus, 3),
        World(f"one of {FAKE_RANKS} fake ranks", FAKE, FAKE_RANKS, len(names)),
    )
    for world in worlds:
        groups = groups_of(names, world.num_alive)
        timed = [on_ranks(world.size, world.backend, _times, group, *sized, sizes.gpu_rounds) for group in groups]
        walls, issues = ([slowest([by_rank[i] for by_rank in each]) for each in timed] for i in range(2))
        ranks = on_ranks(world.size, world.backend, _alone, names, *sized)
        alone = {name: [rank[name] for rank in ranks] for name in names}
        num_tokens = (world.size if world.backend == NCCL else 1) * sizes.gpu_batch * sizes.gpu_gpt.context
        figures += gpu_figures(world.what, walls, issues, alone, num_tokens)
    how = (
        f"GPT of {definition_of(sizes.gpu_gpt).numel / 1e6:,.0f} million parameters, computed and reduced in bfloat16, a unit a "
        f"block, FULL_SHARD, {sizes.gpu_batch} x {sizes.gpu_gpt.context} tokens a rank, fused AdamW; {num_gpus} x "
        f"{torch.cuda.get_device_name(0)}; {sizes.gpu_rounds} rounds. Over NCCL with one GPU nothing is sharded. The fake "
        f"process group of {FAKE_RANKS} ranks talks to nobody: its rank has an eighth of the model, and what it gathers is its "
        "own shard, copied for every rank. Compiled: torch.compile around each block. Issued: the time until the host has given "
        "all of a step to the GPU, for which it does not wait. Memory by torch's allocator. Exposed copies: time in which the "
        "GPU copies or casts and computes nothing, by the profiler."
    )
    return Section(TITLE, how, tuple(figures))


def held_to(name: str) -> str:
    """torch's contestant that ours is to be as fast as.

    >>> held_to("our FSDP1"), held_to("our FSDP2 compiled")
    ('torch FSDP2', 'torch FSDP2 compiled')
    """
    return counterpart(f"our {HELD_TO}{COMPILED if name.endswith(COMPILED) else ''}")


def groups_of(names: Sequence[str], num_alive: int) -> list[list[str]]:
    """Contestants that take turns, each group with those that they are held to.

    >>> groups_of(["our FSDP1", "our FSDP2", "our FSDP2 flat", "torch FSDP1", "torch FSDP2"], 3)
    [['our FSDP1', 'our FSDP2', 'torch FSDP2'], ['our FSDP2 flat', 'torch FSDP1', 'torch FSDP2']]
    >>> groups_of(["our FSDP1", "our FSDP1 compiled", "torch FSDP2", "torch FSDP2 compiled"], 4)
    [['our FSDP1', 'our FSDP1 compiled', 'torch FSDP2', 'torch FSDP2 compiled']]
    """
    peers = {held_to(name): [] for name in names}
    if len(names) <= num_alive:
        return [list(names)]
    for name in names:
        if name not in peers:
            peers[held_to(name)].append(name)
    step = num_alive - 1
    return [[*those[i : i + step], peer] for peer, those in peers.items() for i in range(0, len(those), step)]


def gpu_figures(
    world: str,
    walls: Sequence[Times],
    issues: Sequence[Times],
    alone: dict[str, list[list[float]]],
    num_tokens: int,
) -> tuple[Figure, ...]:
    """Our times to those of torch's FSDP2, with a limit; tokens a second; memory and exposed copies of the worst rank.

    Args:
        walls, issues: of each group of contestants, by name and round.
        alone: of each contestant, by rank.
    """
    peaks, exposed = ({name: max(rank[i] for rank in by_rank) for name, by_rank in alone.items()} for i in range(2))
    at = f"{world}: "

    def to_theirs(what: str, groups: Sequence[Times]) -> list[Figure]:
        return [
            median_figure(f"{at}{what} of {name} to {held_to(name)}", ratios(times, name, held_to(name)), TIMES, LIMIT)
            for times in groups
            for name in times
            if name in ours(APIS)
        ]

    taken, issued = ({name: times[name] for times in groups for name in times} for groups in (walls, issues))
    return (
        *to_theirs("time", walls),
        *to_theirs("time of the host", issues),
        *(
            Figure(
                f"{at}peak memory of {name} to {counterpart(name)}",
                peaks[name] / peaks[counterpart(name)],
                TIMES,
                LIMIT,
            )
            for name in peaks
            if name in ours(APIS)
        ),
        *(Figure(f"{at}{name}", num_tokens / median(seconds), "tokens/s") for name, seconds in taken.items()),
        *(
            median_figure(f"{at}{name}: a step", [1e3 * each for each in seconds], "ms")
            for name, seconds in taken.items()
        ),
        *(
            median_figure(f"{at}{name}: issued", [1e3 * each for each in seconds], "ms")
            for name, seconds in issued.items()
        ),
        *(Figure(f"{at}{name}: peak memory", num_bytes / 1e9, "GB") for name, num_bytes in peaks.items()),
        *(Figure(f"{at}{name}: exposed copies of a step", seconds * 1e3, "ms") for name, seconds in exposed.items()),
    )


def _times(_rank: int, names: list[str], config: GPTConfig, batch_size: int, rounds: int) -> tuple[Times, Times]:
    """Seconds of whole steps, and of steps until the host has issued them."""
    steps = training_steps(names, config, batch_size, "cuda", DTYPES)
    waiting = {name: partial(_waited, step) for name, step in steps.items()}
    wall = alternate(waiting, rounds, lambda: meet("cuda"))["wall"]
    return wall, alternate(steps, rounds, lambda: meet("cuda"))["wall"]


def _waited(step: Callable[[], None]) -> None:
    step()
    torch.cuda.synchronize()


def _alone(_rank: int, names: list[str], config: GPTConfig, batch_size: int) -> dict[str, tuple[float, float]]:
    """Of each, the peak bytes of a step on this rank, and seconds of exposed copies in another."""
    found = {}
    for name in names:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        peak, copies = _peak_and_copies(name, config, batch_size)
        found[name] = peak - before, copies
    return found


def _peak_and_copies(name: str, config: GPTConfig, batch_size: int) -> tuple[int, float]:
    [step] = training_steps([name], config, batch_size, "cuda", DTYPES).values()
    for _ in range(WARM_UP):
        step()
    meet("cuda")
    torch.cuda.reset_peak_memory_stats()
    step()
    meet("cuda")
    peak = torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return peak, exposed_copies(json.loads(path.read_text())["traceEvents"])


def exposed_copies(events: Iterable[dict[str, Any]]) -> float:
    """Seconds in which a GPU copied or cast and no kernel computed, from the events of a Chrome trace (microseconds).

    What NCCL does is neither, and filling with zeros is neither.

    >>> kernel = {"cat": "kernel", "name": "gemm", "ts": 0, "dur": 3_000_000}
    >>> copy = {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 2_000_000, "dur": 5_000_000}
    >>> exposed_copies([kernel, copy, {"ph": "M", "name": "process_name"}])
    4.0
    """
    copies, computes = [], []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy"):
            continue
        name, span = event["name"].lower(), (event["ts"], event["ts"] + event["dur"])
        if event["cat"] == "gpu_memcpy" or any(part in name for part in COPIES):
            copies.append(span)
        elif "nccl" not in name:
            computes.append(span)
    return (_covered(copies + computes) - _covered(computes)) / 1e6


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals.

    >>> _covered([(0, 2), (1, 3), (5, 6)])
    4
    """
    total, end = 0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
