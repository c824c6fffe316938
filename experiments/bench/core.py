"""How long the core takes for a model and a world of the largest sizes in use.

Machines differ and are shared, so every figure is a ratio: to a loop of a million Python additions timed right before it, both in
time of the processor, or, for an import, to the import of numpy. Each is the median of repetitions that alternate with what it is
compared with.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import crossframe
from crossframe.cost import step_cost
from crossframe.layout import LAYOUT_KINDS, Layout
from crossframe.mesh import MeshSpec
from crossframe.plan import plan_units, step_plan
from crossframe.processes import run
from crossframe.shapes import model_shapes
from experiments.bench.figure import TIMES, Figure

MODEL = "llama-3-405b"
DTYPE = "bfloat16"
WORLD_SIZES = (8, 1024, 16384)
REPETITIONS = 9
IMPORTS = 15
LOOPS = "loops"  # of a million additions


def loop_seconds() -> float:
    """Time of a million additions in Python, in seconds of the processor."""
    start, total = time.process_time(), 0
    for i in range(1_000_000):
        total += i
    return time.process_time() - start


def in_loops(work: Callable[[], Any]) -> float:
    """Time of some work in loops of a million additions: the median of REPETITIONS ratios, each to a loop of its own."""
    work()
    ratios = []
    for _ in range(REPETITIONS):
        loop = loop_seconds()
        start = time.process_time()
        work()
        ratios.append((time.process_time() - start) / loop)
    return median(ratios)


def import_ratio(name: str, other: str) -> float:
    """How many times longer it takes to import `name` than `other`, each in fresh processes, without their start."""
    root = str(Path(crossframe.__file__).parents[1])
    code = "start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
    code = f"import sys, time; sys.path.append({root!r})\n{code}"
    seconds: dict[str, list[float]] = {name: [], other: []}
    for _ in range(IMPORTS + 1):
        for module, times in seconds.items():
            status, printed = run([sys.executable, "-P", "-c", code.format(module)], captured=True)
            assert not status, printed
            times.append(float(printed))
    # The first of each may compile its modules.
    return median(seconds[name][1:]) / median(seconds[other][1:])


def core_figures() -> Iterator[Figure]:
    """Measure, and yield each figure when it is there."""
    yield Figure(f"the parameter list of {MODEL}", in_loops(lambda: model_shapes(MODEL, DTYPE)), LOOPS)
    shapes = model_shapes(MODEL, DTYPE)
    limits = {"layouts": 20.0, "pieces of one rank": 1.0, "plan and cost": 80.0}
    for kind in LAYOUT_KINDS:
        by_world: dict[str, list[float]] = {what: [] for what in limits}
        for world_size in WORLD_SIZES:
            layouts = laid_out(shapes.layouts(kind, world_size))
            works: dict[str, Callable[[], Any]] = {
                "layouts": lambda kind=kind, size=world_size: laid_out(shapes.layouts(kind, size)),
                "pieces of one rank": lambda layouts=layouts, rank=world_size // 2: pieces(layouts, rank),
                "plan and cost": lambda layouts=layouts, size=world_size: plan_and_cost(layouts, size),
            }
            for what, work in works.items():
                by_world[what].append(in_loops(work))
                yield Figure(f"{kind}, {world_size:,} ranks: {what}", by_world[what][-1], LOOPS, limits[what])
        for what, (few, *_, many) in by_world.items():
            yield Figure(f"{kind}: {what} at {max(WORLD_SIZES):,} ranks to {min(WORLD_SIZES)}", many / few, TIMES, 2.0)
    yield Figure("import of crossframe to import of numpy", import_ratio("crossframe.layout", "numpy"), TIMES, 2.0)


def laid_out(layouts: Sequence[tuple[str, Layout]]) -> Sequence[tuple[str, Layout]]:
    """The same layouts, with what they compute when it is first asked for."""
    for _, layout in layouts:
        assert layout.offsets and layout.padded_shard_numel
    return layouts


def pieces(layouts: Sequence[tuple[str, Layout]], rank: int) -> int:
    """How many pieces of parameters a rank holds."""
    return sum(len(layout.pieces(rank)) for _, layout in layouts)


def plan_and_cost(layouts: Sequence[tuple[str, Layout]], world_size: int) -> float:
    """Seconds that a step is planned to take."""
    units = plan_units(layouts)
    return step_cost(step_plan(units, MeshSpec(shard=world_size)), units).seconds
