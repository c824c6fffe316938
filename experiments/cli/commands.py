"""The research commands: parity, train, grid, faults, clean-pairs, goldens, history, kernels, parallelism, untouched, foreign,
clients, devices, fsdp-scripts, jax-scripts, public-scripts, spec, bench, teach, watching.

Exit status: 0 all is well, 1 a bug, a broken rule or a figure over its limit, 2 wrong use; of `parity` that of `compare`.
"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from crossframe.cli.compare import answer
from crossframe.cli.console import TRACEBACK, console, errors, exit_on_error
from crossframe.cli.machine_output import MachineOutput
from crossframe.errors import UsageError
from crossframe.recording.recorded_steps import window_of
from experiments.cli import clients as clients_cli
from experiments.cli import devices as devices_cli
from experiments.cli import foreign as foreign_cli
from experiments.cli import fsdp_scripts as fsdp_scripts_cli
from experiments.cli import goldens as goldens_cli
from experiments.cli import history as history_cli
from experiments.cli import jax_scripts as jax_scripts_cli
from experiments.cli import kernels as kernels_cli
from experiments.cli import parallelism as parallelism_cli
from experiments.cli import public_scripts as public_scripts_cli
from experiments.cli import teach as teach_cli
from experiments.cli import untouched as untouched_cli
from experiments.cli import watching as watching_cli
from experiments.cli.bench import bench
from experiments.cli.faults import add_commands
from experiments.parity.settings import RunSettings, mesh_of

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Research on sharded training: parity runs, known faults, rules, benchmarks, lessons.",
)
app.add_typer(bench, name="bench")
add_commands(app)
untouched_cli.add_commands(app)
devices_cli.add_commands(app)
foreign_cli.add_commands(app)
clients_cli.add_commands(app)
fsdp_scripts_cli.add_commands(app)
goldens_cli.add_commands(app)
history_cli.add_commands(app)
jax_scripts_cli.add_commands(app)
public_scripts_cli.add_commands(app)
kernels_cli.add_commands(app)
parallelism_cli.add_commands(app)
teach_cli.add_commands(app)
watching_cli.add_commands(app)
Model = Annotated[str, typer.Argument(help="Name of a model, for instance gpt.", show_default=False)]
WorldSize = Annotated[
    int | None, typer.Option(help="Number of ranks (torch) and of devices (JAX). Default: 2, or the mesh's")
]
Steps = Annotated[int, typer.Option(help="Optimizer steps.")]
Seed = Annotated[int, typer.Option(help="Seed of initial values and batches.")]
BatchSize = Annotated[int, typer.Option(help="Samples per rank and microbatch.")]
LearningRate = Annotated[float, typer.Option(help="Learning rate of the optimizer.")]
StrategyName = Annotated[
    str, typer.Option(help="full_shard, shard_grad_op; with --mesh hybrid_shard or hybrid_shard_zero2.")
]
MeshSizes = Annotated[
    str, typer.Option(help="Replicas x ranks per shard group, for instance 2x2. Default: one replica")
]
Optimizer = Annotated[str, typer.Option(help="adamw, or sgd with momentum.")]
Clip = Annotated[float | None, typer.Option(help="Maximum gradient norm. Default: no clipping")]
Accumulate = Annotated[int, typer.Option(help="Microbatches per step.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: GPUs if there is one per rank.")]
PerturbedRuns = Annotated[
    int,
    typer.Option("--perturbed-runs", "--twins", help="Further runs that only round otherwise: they measure rounding."),
]
Fault = Annotated[str, typer.Option(help="Inject a known fault, for instance sum_gradients; see faults --list.")]
DEFAULTS = RunSettings("gpt")


@app.command()
def parity(
    model: Model,
    world_size: WorldSize = None,
    steps: Steps = DEFAULTS.steps,
    seed: Seed = DEFAULTS.seed,
    batch_size: BatchSize = DEFAULTS.batch_size,
    learning_rate: LearningRate = DEFAULTS.learning_rate,
    strategy: StrategyName = DEFAULTS.strategy,
    mesh: MeshSizes = "",
    optimizer: Optimizer = DEFAULTS.optimizer,
    clip: Clip = None,
    accumulate: Accumulate = DEFAULTS.accumulate,
    device: Device = DEFAULTS.device,
    dtype: Annotated[
        list[str] | None, typer.Option(help="float64, float32 or bfloat16; may be repeated. Default: the first two")
    ] = None,
    perturbed_runs: PerturbedRuns = 0,
    output: Annotated[Path | None, typer.Option(help="Folder for recordings and report. Default: runs/...")] = None,
    fault: Fault = "",
    fault_in: Annotated[str, typer.Option(help="Which side gets the fault: torch or jax.")] = "jax",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train one model in torch and in JAX, and compare the runs."""
    from experiments.parity.run import run_parity

    with exit_on_error():
        common: dict[str, Any] = {
            "world_size": _world_size(world_size, mesh),
            "steps": steps,
            "seed": seed,
            "batch_size": batch_size,
            "learning_rate": learning_rate,
            "strategy": strategy,
            "device": device,
            "mesh": mesh,
            "optimizer": optimizer,
            "clip": clip,
            "accumulate": accumulate,
        }
        if fault_in not in ("torch", "jax"):
            raise UsageError(f"fault-in: expected torch or jax, got {fault_in!r}")
        ranks = mesh or common["world_size"]
        folder = output or Path("runs", f"parity-{model}-{ranks}-ranks{'-faulty' if fault else ''}")
        dtypes = tuple(dtype or ("float64", "float32"))
        pairs = run_parity(
            model,
            common,
            folder,
            dtypes=dtypes,
            perturbed_runs=perturbed_runs,
            fault=fault,
            fault_in=fault_in,
            console=errors if as_json else console,
        )
        raise typer.Exit(answer(pairs, folder, machine=MachineOutput(as_json), console=console))


def _world_size(given: int | None, mesh: str) -> int:
    if given is not None or not mesh:
        return DEFAULTS.world_size if given is None else given
    return mesh_of(mesh).world_size


@app.command()
def grid(
    model: Annotated[list[str] | None, typer.Option(help="Only this model. May be repeated.")] = None,
    ranks: Annotated[list[str] | None, typer.Option(help="Only 1, 2, 3, 4 or 2x2. May be repeated.")] = None,
    strategy: Annotated[list[str] | None, typer.Option(help="Only this strategy. May be repeated.")] = None,
    optimizer: Annotated[list[str] | None, typer.Option(help="Only adamw or sgd. May be repeated.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of a cell.")] = 200,
    dtype: Annotated[
        str, typer.Option(help="float64; or float32, bfloat16: compared by perturbed runs of torch's.")
    ] = "float64",
    output: Annotated[Path | None, typer.Option(help="Markdown file for the table. Default: none")] = None,
) -> None:
    """Train models in torch and in JAX over worlds, strategies and optimizers, and print how far they diverge."""
    from experiments.parity.grid import run_grid

    with exit_on_error():
        asked = (model or (), ranks or (), strategy or (), optimizer or ())
        raise typer.Exit(run_grid(*asked, steps, dtype=dtype, output=output, console=console))


@app.command()
def train(
    framework: Annotated[str, typer.Argument(help="torch or jax.", show_default=False)],
    model: Model,
    output: Annotated[Path, typer.Option(help="Folder of the recording.", show_default=False)],
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16.")] = DEFAULTS.dtype,
    world_size: WorldSize = None,
    steps: Steps = DEFAULTS.steps,
    seed: Seed = DEFAULTS.seed,
    batch_size: BatchSize = DEFAULTS.batch_size,
    learning_rate: LearningRate = DEFAULTS.learning_rate,
    strategy: StrategyName = DEFAULTS.strategy,
    mesh: MeshSizes = "",
    optimizer: Optimizer = DEFAULTS.optimizer,
    clip: Clip = None,
    accumulate: Accumulate = DEFAULTS.accumulate,
    device: Device = DEFAULTS.device,
    perturbed_runs: PerturbedRuns = 0,
    dense: Annotated[int, typer.Option(help="Record this many steps in full, from the first.")] = DEFAULTS.dense,
    window: Annotated[
        list[str] | None, typer.Option(help="Record further steps in full, for instance 500:510. May be repeated.")
    ] = None,
    resume_at: Annotated[
        int | None, typer.Option(help="Stop before this step and resume from a checkpoint. Default: run through")
    ] = None,
    rounding: Annotated[int, typer.Option(help="Torch: another order of sums; 0: its own.")] = DEFAULTS.rounding,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing recording.")] = False,
    fault: Fault = "",
) -> None:
    """Train one model of this repository in one framework, and record the run."""
    with exit_on_error():
        settings = RunSettings(
            model,
            dtype,
            _world_size(world_size, mesh),
            steps,
            seed,
            batch_size,
            learning_rate,
            DEFAULTS.weight_decay,
            strategy,
            device,
            fault,
            mesh,
            optimizer,
            clip,
            accumulate,
            dense=dense,
            windows=tuple(window_of(each) for each in window or ()),
            resume_at=resume_at,
            rounding=rounding,
        )
        if framework not in ("torch", "jax"):
            raise UsageError(f"framework: expected torch or jax, got {framework!r}")
        from experiments.parity.progress import bars, watch

        with watch(console, bars(f"{framework} {dtype}", settings, output, perturbed_runs), settings):
            _record(framework, settings, output, perturbed_runs, overwrite)
        console.print(f"recorded {steps} steps in {output}")


def _record(framework: str, settings: RunSettings, output: Path, perturbed_runs: int, overwrite: bool) -> None:
    if framework == "torch":
        from torch.multiprocessing.spawn import ProcessException

        from experiments.parity.record_torch import record_torch

        try:
            record_torch(settings, output, perturbed_runs=perturbed_runs, overwrite=overwrite)
        except ProcessException as error:
            lines = str(error).strip().splitlines()
            if os.environ.get(TRACEBACK):
                errors.print(str(error))
            memory = (
                "; if memory ran out, pass a smaller --batch-size or --world-size" if "SIGKILL" in lines[-1] else ""
            )
            raise UsageError(
                f"rank {error.error_index} failed, and the others were ended: {lines[-1]}{memory}"
            ) from None
    else:
        from experiments.parity.record_jax import record_jax

        record_jax(settings, output, perturbed_runs=perturbed_runs, overwrite=overwrite)


@app.command()
def spec(
    quick: Annotated[bool, typer.Option("--quick", help="A seeded sample: seconds, not minutes.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Compare this rule only, e.g. R04. May be repeated.")] = None,
    rule: Annotated[
        list[str] | None, typer.Option(help="Print this rule, e.g. R08, and exit. May be repeated.")
    ] = None,
) -> None:
    """Compare every rule of sharding with torch, the reference and closed forms, case by case."""
    with exit_on_error():
        if rule:
            from experiments.spec.rules import print_rules

            print_rules(rule, console)
            return
        from experiments.spec.command import run_spec

        raise typer.Exit(run_spec(quick=quick, rules=tuple(only or ()), console=console))
