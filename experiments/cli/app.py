"""The `crossframe` command: parity, grid, record, compare, explain, inspect, layout, plan.

Exit status: 0 equal or rounding, 1 a bug, 2 wrong use, 3 inconclusive, 4 different runs, 5 a different computation.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from crossframe.errors import UsageError
from crossframe.recording import Recording
from crossframe.recording.schedule import window_of
from crossframe.verdict import Verdict
from experiments.cli import kernels as kernels_cli
from experiments.cli import untouched as untouched_cli
from experiments.cli.bench import bench
from experiments.cli.console import TRACEBACK, console, errors, exit_on_error
from experiments.cli.faults import add_commands
from experiments.cli.record_options import RecordCommand
from experiments.parity.settings import RunSettings, mesh_of
from experiments.recordings.compare import equal_as_stated
from experiments.report import print_report, report_of, write_report

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Sharded training in torch and in JAX: is a difference rounding, or a bug, and where?",
)
app.add_typer(bench, name="bench")
add_commands(app)
untouched_cli.add_commands(app)
kernels_cli.add_commands(app)
Model = Annotated[str, typer.Argument(help="Name of a model, for instance gpt.", show_default=False)]
WorldSize = Annotated[
    int | None, typer.Option(help="Number of ranks (torch) and of devices (JAX). Default: 2, or the mesh's")
]
Steps = Annotated[int, typer.Option(help="Optimizer steps.")]
Seed = Annotated[int, typer.Option(help="Where initial values and batches come from.")]
BatchSize = Annotated[int, typer.Option(help="Samples a rank and step.")]
LearningRate = Annotated[float, typer.Option(help="Learning rate of the optimizer.")]
StrategyName = Annotated[str, typer.Option(help="full_shard, shard_grad_op, or over a mesh hybrid_shard(_zero2).")]
MeshSizes = Annotated[
    str, typer.Option(help="Copies of the model x ranks of each, for instance 2x2. Default: one copy")
]
Optimizer = Annotated[str, typer.Option(help="adamw, or sgd with momentum.")]
Clip = Annotated[float | None, typer.Option(help="Largest norm of the gradient. Default: any")]
Accumulate = Annotated[int, typer.Option(help="Microbatches of a step.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: GPUs if there are enough.")]
Twins = Annotated[
    int,
    typer.Option(
        "--perturbed-runs", "--twins", help="Runs beside it that only round otherwise: they measure what rounding does."
    ),
]
Fault = Annotated[
    str, typer.Option(help="Put in a fault on purpose, for instance sum_gradients: see crossframe faults.")
]
ShapesOf = Annotated[
    str, typer.Argument(help="gpt, gpt-tiny, llama-3-8b, llama-3-405b, or a .json of shapes.", show_default=False)
]
RanksOf = Annotated[int, typer.Option(help="Number of ranks.", show_default=False)]
Dtype = Annotated[str, typer.Option(help="Dtype in which parameters are stored.")]
Svg = Annotated[Path | None, typer.Option(help="File for a drawing. Default: none")]
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
    twins: Twins = 0,
    output: Annotated[Path | None, typer.Option(help="Folder for recordings and report. Default: runs/...")] = None,
    fault: Fault = "",
    fault_in: Annotated[str, typer.Option(help="Which side gets the fault: torch or jax.")] = "jax",
) -> None:
    """Train one model in torch and in JAX, and say whether they agree."""
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
            model, common, folder, dtypes=dtypes, twins=twins, fault=fault, fault_in=fault_in, console=console
        )
        _answer(pairs, folder)


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
    """Train models in torch and in JAX over all sizes, strategies and optimizers, and print how far they part."""
    from experiments.parity.grid import run_grid

    with exit_on_error():
        asked = (model or (), ranks or (), strategy or (), optimizer or ())
        raise typer.Exit(run_grid(*asked, steps, dtype=dtype, output=output, console=console))


@app.command(cls=RecordCommand, context_settings={"allow_extra_args": True})
def record(
    context: typer.Context,
    framework: Annotated[str, typer.Argument(help="torch, jax, or a training script of torch.", show_default=False)],
    model: Annotated[str | None, typer.Argument(help="Name of a model. For a script: -- and its arguments.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the recording. A script's default: runs/...")] = None,
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
    twins: Twins = 0,
    dense: Annotated[int, typer.Option(help="So many steps at the beginning are recorded in full.")] = DEFAULTS.dense,
    window: Annotated[
        list[str] | None, typer.Option(help="Further steps that are, as in 500:510. May be repeated.")
    ] = None,
    resume_at: Annotated[
        int | None, typer.Option(help="Go on from a checkpoint before this step. Default: run through")
    ] = None,
    rounding: Annotated[int, typer.Option(help="Torch: another order of sums; 0: its own.")] = DEFAULTS.rounding,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a recording that is there.")] = False,
    top_up: Annotated[
        bool, typer.Option("--top-up", help="Script: keep the recording, and record only perturbed runs that it lacks.")
    ] = False,
    fault: Fault = "",
    nproc_per_node: Annotated[
        int | None, typer.Option(help="Script: processes that torchrun starts. Default: one, without it")
    ] = None,
    every: Annotated[int, typer.Option(help="Script: tensors of every so many steps are recorded.")] = 100,
) -> None:
    """Train one model in one framework and record the run; or run a script of torch, as it is, and record its training."""
    with exit_on_error():
        windows = tuple(window_of(each) for each in window or ())
        if framework.endswith(".py"):
            from experiments.recordings.record_script import record_script

            of_scripts = {"framework", "model", "output", "nproc_per_node", "twins", "overwrite", "top_up"}
            _refuse_other(context, of_scripts | {"every", "dense", "window"})
            record_script(
                Path(framework),
                [*([model] if model is not None else []), *context.args],
                output=output,
                nproc_per_node=nproc_per_node,
                twins=twins,
                every=every,
                dense=dense,
                windows=windows,
                overwrite=overwrite,
                top_up=top_up,
                console=console,
            )
            return
        if model is None or output is None or context.args:
            raise UsageError("record: expected a framework, a model and --output, or a script that ends in .py")
        _refuse_other(context, set(context.params) - {"nproc_per_node", "every", "top_up"})
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
            windows=windows,
            resume_at=resume_at,
            rounding=rounding,
        )
        if framework not in ("torch", "jax"):
            raise UsageError(f"framework: expected torch or jax, got {framework!r}")
        from experiments.parity.progress import bars, watch

        with watch(console, bars(f"{framework} {dtype}", settings, output, twins), settings):
            _record(framework, settings, output, twins, overwrite)
        console.print(f"recorded {steps} steps in {output}", highlight=False)


def _refuse_other(context: typer.Context, known: set[str]) -> None:
    """UsageError for an option that does not go with what is recorded."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in known and source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"--{name.replace('_', '-')}: not with this; options of a script itself stand behind --, as in "
                "record train.py -- --epochs 3"
            )


def _record(framework: str, settings: RunSettings, output: Path, twins: int, overwrite: bool) -> None:
    if framework == "torch":
        from torch.multiprocessing.spawn import ProcessException

        from experiments.parity.record_torch import record_torch

        try:
            record_torch(settings, output, twins=twins, overwrite=overwrite)
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

        record_jax(settings, output, twins=twins, overwrite=overwrite)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A recording.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="Another.", show_default=False)],
    output: Annotated[Path | None, typer.Option(help="Folder for report.json and report.html. Default: none")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Compare only this many steps, from the first. Default: all")
    ] = None,
    repeat: Annotated[
        list[Path] | None,
        typer.Option(help="Another recording of A or B: shows what is not deterministic. May be repeated."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all files, also where checksums say that both are equal.")
    ] = False,
) -> None:
    """Compare two recordings, and say whether their difference is rounding or a bug.

    Large recordings whose checksums are equal are not read, unless --verify or --output is given.

    Exit status: 0 equal or rounding, 1 a bug, 2 wrong use, 3 inconclusive, 4 different runs, 5 a different computation (one
    program, equal causes, other bits).
    """
    with exit_on_error():
        if output is None and steps is None and not repeat and not verify and (said := equal_as_stated(a, b)):
            console.print(said, highlight=False, soft_wrap=True)
            raise typer.Exit(Verdict.EQUAL.exit_status)
        opened = [Recording.open(path) for path in (a, b)]
        first, second = opened if steps is None else [recording.first(steps) for recording in opened]
        _answer([(first, second)], output, tuple(Recording.open(path) for path in repeat or ()))


@app.command()
def explain(
    a: Annotated[Path, typer.Argument(help="A recording.", show_default=False)],
    b: Annotated[Path | None, typer.Argument(help="Another. Default: examine the first alone")] = None,
    step: Annotated[int, typer.Option(help="Of one recording: the step whose operators are examined.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder in which the traces are kept. Default: none")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that each run may take.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the finding as JSON.")] = False,
) -> None:
    """Run both sides again up to their first difference, and name the operator and the source line where they part.

    Of one recording: run it again, repeat each operator in float64 on its own inputs, and name those that err by more than
    rounding. Compiled modules are compared with what they were compiled from.
    """
    from experiments.recordings.explain import explain as explain_pair
    from experiments.recordings.explain import explain_one

    options: dict[str, Any] = {"folder": output, "timeout": timeout, "as_json": as_json, "console": console}
    with exit_on_error():
        raise typer.Exit(explain_one(a, step, **options) if b is None else explain_pair((a, b), **options))


@app.command()
def inspect(
    run: Annotated[Path, typer.Argument(help="A recording.", show_default=False)],
    steps: Annotated[
        int | None, typer.Option(help="Examine only this many steps, from the first. Default: all")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Examine one recording: where a NaN appears first, what grows, where ranks disagree, what the optimizer did otherwise."""
    from crossframe.inspection import inspect as inspect_recording
    from experiments.recordings.inspect_run import print_inspection

    with exit_on_error():
        opened = Recording.open(run, partial=True)
        found = inspect_recording(opened if steps is None else opened.first(steps))
        if as_json:
            print(json.dumps(found.to_json(), indent=1))
        else:
            print_inspection(console, found)
        raise typer.Exit(found.exit_status)


@app.command()
def layout(
    model: ShapesOf,
    world_size: RanksOf,
    layout: Annotated[str, typer.Option(help="flat, per_param or ragged.")] = "flat",
    keep_original: Annotated[bool, typer.Option(help="Flat: original parameters stay visible, and aligned.")] = True,
    compute_dtype: Annotated[
        str | None, typer.Option(help="Flat: dtype that is computed with. Default: --dtype")
    ] = None,
    dtype: Dtype = "float32",
    replicate: Annotated[int, typer.Option(help="Copies of the model, each cut over the ranks of its own.")] = 1,
    dim: Annotated[list[str] | None, typer.Option(help="Per parameter: PATTERN=DIM, the dim to cut on.")] = None,
    unit: Annotated[str | None, typer.Option(help="Only this unit; '' or '(root)' is the root.")] = None,
    rank: Annotated[int | None, typer.Option(help="Only this rank.")] = None,
    where: Annotated[list[str] | None, typer.Option(help="NAME[INDEX]: only who holds this element.")] = None,
    svg: Svg = None,
) -> None:
    """Show which rank holds what of a model, and where padding lies."""
    from experiments.show.layout import LayoutOptions, show_layout

    with exit_on_error():
        options = LayoutOptions(world_size, layout, keep_original, compute_dtype, replicate, dim or ())
        show_layout(model, dtype, options, unit=unit, rank=rank, where=where or (), svg=svg, console=console)


@app.command()
def plan(
    model: ShapesOf,
    world_size: RanksOf,
    strategy: Annotated[
        str, typer.Option(help="full_shard, shard_grad_op, no_shard, or a hybrid_shard.")
    ] = "full_shard",
    shard: Annotated[int | None, typer.Option(help="Hybrid: ranks that hold one copy of the model.")] = None,
    face: Annotated[str, typer.Option(help="fsdp1 or fsdp2.")] = "fsdp1",
    reshard_after_forward: Annotated[
        str | None, typer.Option(help="FSDP2: true, false, or the size of a reshard group.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="flat, per_param or ragged. Default: the face's")] = None,
    backward_prefetch: Annotated[str, typer.Option(help="pre, post or none.")] = "pre",
    forward_prefetch: Annotated[int, typer.Option(help="Units that forward gathers ahead.")] = 0,
    dtype: Dtype = "float32",
    param_dtype: Annotated[str | None, typer.Option(help="Gathered and computed with. Default: --dtype")] = None,
    reduce_dtype: Annotated[str | None, typer.Option(help="Of gradients on their way. Default: --param-dtype")] = None,
    microbatches: Annotated[int, typer.Option(help="Forwards and backwards of a step.")] = 1,
    sync: Annotated[str, typer.Option(help="What of them is reduced: each, last or all_reduce_last.")] = "each",
    rank: Annotated[int, typer.Option(help="Whose step.")] = 0,
    tokens: Annotated[int, typer.Option(help="Tokens of a rank and microbatch.")] = 4096,
    bandwidth: Annotated[float | None, typer.Option(help="Bytes a second of a rank. Default: 5e10")] = None,
    replica_bandwidth: Annotated[
        float | None, typer.Option(help="The same between replicas. Default: --bandwidth")
    ] = None,
    latency: Annotated[float | None, typer.Option(help="Seconds of an empty message. Default: 1e-5")] = None,
    flops: Annotated[float | None, typer.Option(help="Operations a second of a rank. Default: 4e14")] = None,
    svg: Svg = None,
    events: Annotated[bool, typer.Option("--events", help="Print every event.")] = False,
) -> None:
    """Show what a training step does when on one rank: what travels, how long it takes, and what memory holds."""
    from experiments.show.plan import PlanOptions, hardware, show_plan

    with exit_on_error():
        options = PlanOptions(
            world_size,
            strategy,
            shard,
            face,
            reshard_after_forward,
            layout,
            backward_prefetch,
            forward_prefetch,
            param_dtype,
            reduce_dtype,
            microbatches,
            sync,
            rank,
            tokens,
            hardware(bandwidth=bandwidth, replica_bandwidth=replica_bandwidth, latency=latency, flops=flops),
        )
        show_plan(model, dtype, options, events=events, svg=svg, console=console)


@app.command()
def spec(
    quick: Annotated[bool, typer.Option("--quick", help="A seeded sample: seconds, not minutes.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Compare this rule only, e.g. R04. May be repeated.")] = None,
    rule: Annotated[
        list[str] | None, typer.Option(help="Print this rule, e.g. R08, and exit. May be repeated.")
    ] = None,
) -> None:
    """Compare every rule of sharding with what torch builds, the reference and closed forms, case by case."""
    with exit_on_error():
        if rule:
            from experiments.spec.rules import print_rules

            print_rules(rule, console)
            return
        from experiments.spec.command import run_spec

        raise typer.Exit(run_spec(quick=quick, rules=tuple(only or ()), console=console))


def _answer(pairs: list[tuple[Recording, Recording]], output: Path | None, repeats: tuple[Recording, ...] = ()) -> None:
    """Print the verdict, write the report, and exit with the verdict's status."""
    report, series = report_of(pairs, command=" ".join(["crossframe", *sys.argv[1:]]), repeats=repeats)
    print_report(console, report, series)
    if output is not None:
        console.print(f"report: {write_report(output, report, series)}", highlight=False)
    raise typer.Exit(Verdict(report["verdict"]).exit_status)
