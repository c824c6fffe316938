"""`python -m experiments grid`: many small runs in both frameworks, and how far the two part, as one table.

A cell is a model on a mesh, under a strategy, with an optimizer. In float64, how far two runs are apart is the largest difference
of a parameter at any recorded step, as `crossframe.verdict` measures it; in lower precision it is the ratio of that difference
to the spread of perturbed runs of torch. All cells of one world size share the processes of torch, so a cell costs seconds.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from crossframe.errors import UsageError
from crossframe.recording import Recording
from crossframe.strategy import Strategy
from crossframe.verdict import Verdict, compare
from experiments.parity.settings import OPTIMIZERS, STRATEGIES, RunSettings, mesh_of

MODELS = ("mlp", "conv", "vit", "llama-tiny", "moe")
RANKS = ("1", "2", "3", "4", "2x2")
LIMIT = 1e-11
# SGD without Adam's division by the size of the gradient needs larger steps to get anywhere.
RATES = {"adamw": 3e-4, "sgd": 1e-2}
CLIP, ACCUMULATE = 0.5, 2
HEAD = "| model | dtype | ranks | strategy | optimizer | clip | microbatches | {} | with a gradient of zero |"
MEASURED = {False: "largest difference", True: "of the limit"}
NUM_PERTURBED_RUNS = 4


@dataclass(frozen=True)
class Cell:
    """One line of the table.

    Attributes:
        settings: of the run in either framework.
        difference: the largest of any parameter at any recorded step, but for those in `apart`; with perturbed runs, the
            largest share of its limit that any quantity uses.
        apart: parameters whose gradient is zero in exact arithmetic (`crossframe.verdict.measure.zero_gradient`).
        within: whether the verdict is rounding or equal, and without perturbed runs the difference within the limit.
        why: the verdict's reason.
    """

    settings: RunSettings
    difference: float
    apart: tuple[str, ...]
    within: bool
    verdict: Verdict
    why: str

    def line(self) -> str:
        """The cell as a line of a Markdown table."""
        s = self.settings
        apart = f"{len(self.apart)}: {self.apart[0]}{' ...' if len(self.apart) > 1 else ''}" if self.apart else ""
        said = f"{self.difference:.1e}" if s.dtype == "float64" else f"{self.difference:.2f}"
        said += "" if self.within else f" **{self.verdict.value}**"
        cells = [
            s.model,
            s.dtype,
            s.mesh or s.world_size,
            s.strategy,
            s.optimizer,
            s.clip or "",
            s.accumulate,
            said,
            apart,
        ]
        return "| " + " | ".join(map(str, cells)) + " |"


def cells(
    models: Sequence[str],
    ranks: Sequence[str],
    strategies: Sequence[str],
    optimizers: Sequence[str],
    steps: int,
    dtype: str = "float64",
) -> list[RunSettings]:
    """The runs of the grid: each combination once, clipped and accumulated under one strategy of two.

    Raises:
        UsageError: unknown models, ranks, strategies or optimizers, or a selection without cells.
    """
    asked = (
        ("ranks", ranks, RANKS),
        ("strategy", strategies, STRATEGIES),
        ("optimizer", optimizers, tuple(OPTIMIZERS)),
    )
    for what, given, known in asked:
        if strange := [each for each in given if each not in known]:
            raise UsageError(f"{what}: expected among {', '.join(known)}, got {', '.join(strange)}")
    found = []
    for size in ranks or RANKS:
        mesh = size if "x" in size else ""
        world_size = mesh_of(mesh).world_size if mesh else int(size)
        both = ("hybrid_shard", "hybrid_shard_zero2") if mesh else ("full_shard", "shard_grad_op")
        for strategy in both[:1] if world_size == 1 else both:
            if strategies and strategy not in strategies:
                continue
            keeps = not Strategy(strategy).reshards_after_forward
            for model in models or MODELS:
                for optimizer in optimizers or OPTIMIZERS:
                    found.append(
                        RunSettings(
                            model,
                            dtype,
                            world_size=world_size,
                            steps=steps,
                            learning_rate=RATES[optimizer],
                            strategy=strategy,
                            device="cpu",
                            mesh=mesh,
                            optimizer=optimizer,
                            clip=CLIP if keeps else None,
                            accumulate=ACCUMULATE if keeps else 1,
                        )
                    )
    if not found:
        raise UsageError("no cell is left: hybrid strategies are of 2x2 ranks, the others of 1 to 4")
    return found


def run_grid(
    models: Sequence[str],
    ranks: Sequence[str],
    strategies: Sequence[str],
    optimizers: Sequence[str],
    steps: int,
    *,
    dtype: str,
    output: Path | None,
    console: Console,
) -> int:
    """Run the grid and print it; 0 if all cells are within the limit, 1 if one is not.

    Args:
        dtype: of all cells; those below float64 are recorded with perturbed runs.
        output: a Markdown file for the table, rewritten as cells end.

    Raises:
        UsageError: as `cells`, or a run that failed.
    """
    runs, done, began = cells(models, ranks, strategies, optimizers, steps, dtype), [], time.monotonic()
    from experiments.parity.grid_runs import JaxRuns, TorchRuns

    perturbed_runs = 0 if dtype == "float64" else NUM_PERTURBED_RUNS
    head = HEAD.format(MEASURED[bool(perturbed_runs)])
    rule = "|" + " --- |" * (head.count("|") - 1)
    console.print(f"{head}\n{rule}", markup=False)
    with tempfile.TemporaryDirectory() as folder, JaxRuns(max(run.world_size for run in runs)) as in_jax:
        for world_size in sorted({run.world_size for run in runs}):
            with TorchRuns(world_size) as in_torch:
                for settings in (run for run in runs if run.world_size == world_size):
                    paths = [Path(folder, framework, str(len(done))) for framework in ("torch", "jax")]
                    in_torch.record(settings, paths[0], perturbed_runs)
                    in_jax.record(settings, paths[1])
                    done.append(_cell(settings, *paths))
                    console.print(done[-1].line(), markup=False, highlight=False)
                    if not done[-1].within:
                        console.print(f"  {done[-1].why}", markup=False, highlight=False)
                    if output is not None:
                        limit = (
                            f"limits are those of {perturbed_runs} perturbed runs of torch"
                            if perturbed_runs
                            else f"the limit is {LIMIT:g}"
                        )
                        said = f"{len(done)} of {len(runs)} cells, {steps} steps each, in {dtype}; {limit}."
                        table = [said, "", head, rule, *(cell.line() for cell in done)]
                        output.parent.mkdir(parents=True, exist_ok=True)
                        output.write_text("\n".join(table) + "\n")
    over = sum(not cell.within for cell in done)
    console.print(f"{len(done)} cells in {time.monotonic() - began:.0f} s, {over} not within", highlight=False)
    return int(over > 0)


def _cell(settings: RunSettings, in_torch: Path, in_jax: Path) -> Cell:
    found = compare(Recording.open(in_torch), Recording.open(in_jax))
    difference = found.max_relative_parameter_difference if found.limit_used is None else found.limit_used
    assert difference is not None, "both recordings have updates"
    within = found.verdict.agrees and (found.limit_used is not None or difference <= LIMIT)
    return Cell(settings, difference, found.zero_gradient_parameters, within, found.verdict, found.reason)
