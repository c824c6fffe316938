"""Memory of parameters, gradients and gathered buffers over a step, counted by torch's profiler, which sees every allocation.

One rank of torch's fake process group, so that no buffers of a transport and nothing in its threads are counted; an empty batch,
so that there are no activations, but gradients of full size, all zeros. The same code counts the same bytes in every run.
"""

import gc
from collections.abc import Iterable
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from experiments.bench.contestants import LAYOUTS, counterpart, ours, theirs
from experiments.bench.figure import TIMES, Figure, Section
from experiments.bench.ranks import FAKE, on_ranks
from experiments.bench.sizes import Sizes
from experiments.bench.training import definition_of, losses
from experiments.models.gpt import GPTConfig

LIMIT = 1.0
FSDP1 = theirs()[0]
# More than the integers and scalars that a model and a mesh of ranks are served with, less than an eighth of the smallest
# parameter: torch holds the shard of each by itself, and we one buffer of all.
SMALLEST_BYTES = 128
WATCHED = "the watched step"


def memory_section(sizes: Sizes) -> Section:
    """Count for everyone, once for each world size."""
    figures: list[Figure] = []
    for world_size in sizes.memory_worlds:
        [peaks] = on_ranks(world_size, FAKE, _peaks, [*ours(), *theirs()], sizes.gpt)
        figures += memory_figures(peaks, world_size)
    how = (
        f"GPT of {definition_of(sizes.gpt).numel / 1e6:.1f} million parameters in float32, a unit a block, FULL_SHARD: the most "
        "bytes that lived at once in the second forward and backward, on an empty batch and without optimizer: parameters, "
        f"gradients and gathered buffers. Counted from all allocations of at least {SMALLEST_BYTES} bytes since before the "
        "model was built, on one rank of torch's fake process group."
    )
    return Section("Peak memory", how, tuple(figures))


def memory_figures(peaks: dict[str, int], world_size: int) -> tuple[Figure, ...]:
    """Ours to torch's own, with a limit, FSDP1 in both its modes to the first of them; then all peaks."""
    where = f"{world_size} ranks: "
    held_to = {name: counterpart(name) if name in ours(LAYOUTS) else FSDP1 for name in ours()}
    return (
        *(
            Figure(f"{where}{name} to {other}", peaks[name] / peaks[other], TIMES, LIMIT)
            for name, other in held_to.items()
        ),
        *(
            Figure(f"{where}{name} to {counterpart(name)}", peaks[name] / peaks[counterpart(name)], TIMES)
            for name in ours()
            if counterpart(name) != held_to[name]
        ),
        *(Figure(where + name, num_bytes / 1e6, "MB") for name, num_bytes in peaks.items()),
    )


def _peaks(_rank: int, names: list[str], config: GPTConfig) -> dict[str, int]:
    return {name: _peak(name, config) for name in names}


def _peak(name: str, config: GPTConfig) -> int:
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model, loss = losses(name, config, 0, 1, "cpu")
        for watched in (False, True):
            with record_function(WATCHED if watched else "a step"):
                loss().backward()
            model.zero_grad()
    return peak_bytes(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]


def peak_bytes(events: Iterable[Any]) -> int:
    """The most bytes that lived at once within the watched step, of those that the profiler saw allocated in pieces of at least
    SMALLEST_BYTES."""
    events = sorted(events, key=lambda event: event.start_ns())
    [watched] = [event for event in events if event.name() == WATCHED]
    start, stop = watched.start_ns(), watched.start_ns() + watched.duration_ns()
    live = before = peak = 0
    for event in events:
        if event.name() == "[memory]" and abs(event.nbytes()) >= SMALLEST_BYTES:
            live += event.nbytes()
            if event.start_ns() < start:
                before = live
            elif event.start_ns() < stop:
                peak = max(peak, live)
    return max(before, peak)
