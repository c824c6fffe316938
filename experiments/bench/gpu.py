"""A model of a billion parameters on GPUs, computed in bfloat16: tokens a second, peak memory, and copies that nothing hides."""

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from experiments.bench.contestants import LAYOUTS, Dtypes, counterpart, mixes_precision, ours, theirs
from experiments.bench.figure import TIMES, Figure, Section, median_figure
from experiments.bench.ranks import NCCL, on_ranks
from experiments.bench.sizes import Sizes
from experiments.bench.timing import WARM_UP, Times, alternate, ratios, slowest
from experiments.bench.training import definition_of, meet, training_steps
from experiments.models.gpt import GPTConfig

TITLE = "A billion parameters on GPUs"
LIMIT = 1.0
APIS = ("FSDP1", *LAYOUTS)
LIMIT_OF = theirs(APIS)[1]
DTYPES = Dtypes(torch.bfloat16, torch.bfloat16)
# What moves data and computes nothing, by parts of kernels' names: torch's concatenations and casts are kernels too.
COPIES = ("copy", "chunk_cat")


def gpu_section(sizes: Sizes) -> Section:
    """Time steps in alternation; then, one contestant at a time in processes of its own, count memory and copies."""
    world_size = torch.cuda.device_count()
    if not world_size:
        return Section(TITLE, "", skipped="skipped: no CUDA device here")
    names = [name for name in (*ours(APIS), *theirs(APIS)) if mixes_precision(name)]
    sized = (sizes.gpu_gpt, sizes.gpu_batch)
    wall = slowest(on_ranks(world_size, NCCL, _times, names, *sized, sizes.gpu_rounds))
    alone = {name: on_ranks(world_size, NCCL, _alone, name, *sized) for name in names}
    how = (
        f"GPT of {definition_of(sizes.gpu_gpt).numel / 1e6:,.0f} million parameters, computed and reduced in bfloat16, a unit a "
        f"block, FULL_SHARD, {sizes.gpu_batch} x {sizes.gpu_gpt.context} tokens a rank, AdamW; {world_size} x "
        f"{torch.cuda.get_device_name(0)}, NCCL; {sizes.gpu_rounds} rounds. Memory by torch's allocator. Exposed copies: "
        "time in which the GPU copies or casts and computes nothing, by the profiler."
    )
    num_tokens = world_size * sizes.gpu_batch * sizes.gpu_gpt.context
    return Section(TITLE, how, gpu_figures(wall, alone, num_tokens))


def gpu_figures(wall: Times, alone: dict[str, list[list[float]]], num_tokens: int) -> tuple[Figure, ...]:
    """Our times to those of torch's FSDP2, with a limit; tokens a second; memory and exposed copies of the worst rank."""
    peaks, exposed = ({name: max(rank[i] for rank in by_rank) for name, by_rank in alone.items()} for i in range(2))
    names = [name for name in ours(APIS) if name in wall]
    return (
        *(median_figure(f"time of {name} to {LIMIT_OF}", ratios(wall, name, LIMIT_OF), TIMES, LIMIT) for name in names),
        *(
            Figure(f"peak memory of {name} to {counterpart(name)}", peaks[name] / peaks[counterpart(name)], TIMES)
            for name in names
        ),
        *(Figure(name, num_tokens / median(taken), "tokens/s") for name, taken in wall.items()),
        *(median_figure(f"{name}: a step", [1e3 * seconds for seconds in taken], "ms") for name, taken in wall.items()),
        *(Figure(f"{name}: peak memory", num_bytes / 1e9, "GB") for name, num_bytes in peaks.items()),
        *(Figure(f"{name}: exposed copies of a step", seconds * 1e3, "ms") for name, seconds in exposed.items()),
    )


def _times(_rank: int, names: list[str], config: GPTConfig, batch_size: int, rounds: int) -> Times:
    steps = training_steps(names, config, batch_size, "cuda", DTYPES)
    return alternate(steps, rounds, lambda: meet("cuda"))["wall"]


def _alone(_rank: int, name: str, config: GPTConfig, batch_size: int) -> tuple[float, float]:
    """Peak bytes of a step on this rank, and seconds of exposed copies in another."""
    [step] = training_steps([name], config, batch_size, "cuda", DTYPES).values()
    for _ in range(WARM_UP):
        step()
    meet("cuda")
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated()
    meet("cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
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
