"""Declares every command of `crossframe` and its options; the module of the same name does the work.

Exit status: 0 equal or rounding, 1 a bug, 2 wrong use, 3 inconclusive, 4 different runs, 5 a different computation.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

import crossframe
from crossframe.cli.compare import answer, equal_as_stated
from crossframe.cli.console import console, errors, exit_on_error
from crossframe.cli.exit_status import ABORT, AGREE, FOUND, WRONG_USE
from crossframe.cli.machine_output import MachineOutput
from crossframe.cli.misplaced_options import CommandWithScript
from crossframe.errors import UsageError
from crossframe.param_map import ParamMap
from crossframe.recording import Recording, Schedule
from crossframe.recording.recorded_steps import window_of

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Two training runs disagree: is it rounding, or a bug, and where?",
)
Run = Annotated[Path, typer.Argument(help="Directory of a recording.", show_default=False)]
Steps = Annotated[int | None, typer.Option(help="Use only this many steps, from the first. Default: all")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
ShapesOf = Annotated[
    str,
    typer.Argument(
        help="gpt, gpt-tiny, llama-3-8b, -70b, -405b, a .safetensors file or a folder of them, a recording, or a .json file of "
        "shapes.",
        show_default=False,
    ),
]
WorldSize = Annotated[int, typer.Option(help="Number of ranks.", show_default=False)]
Dtype = Annotated[str, typer.Option(help="Dtype in which parameters are stored, where MODEL does not state it.")]
Map = Annotated[
    Path | None,
    typer.Option(
        "--map",
        help="Map between the parameters of A and B, as crossframe map writes it. Default: by names, else by values",
    ),
]
Tp = Annotated[int, typer.Option(help="Number of ranks of tensor parallelism.")]
Ep = Annotated[
    int, typer.Option(help="Number of ranks of expert parallelism, which shard the other parameters as well.")
]
Pp = Annotated[int, typer.Option(help="Number of stages of a pipeline.")]
Parallel = Annotated[
    list[str] | None,
    typer.Option(
        help="PATTERN=STYLE: how matching modules are divided: colwise, rowwise, vocab, sequence, experts or replicated. May be "
        "repeated. Default: the styles of common names"
    ),
]
Stage = Annotated[
    list[str] | None,
    typer.Option(help="PATTERN=STAGE: the stage of matching units, or parameters outside of them. Default: in order"),
]
Junit = Annotated[Path | None, typer.Option(help="File for the result as JUnit XML. Default: none")]
Github = Annotated[
    bool,
    typer.Option("--github", help="Print an annotation of GitHub Actions, and append to the summary of the step."),
]
GoldenFile = Annotated[
    Path | None, typer.Option("--golden", help="The golden. Default: baselines/ and the script's name")
]
MaxKb = Annotated[int, typer.Option(help="Maximum size of the golden in kB.")]
Baseline = Annotated[
    Path | None,
    typer.Option(help="A golden, or a recording with perturbed runs, whose spread the watched run must not leave."),
]
Svg = Annotated[Path | None, typer.Option(help="File for a drawing. Default: none")]


def _print_version(asked: bool) -> None:
    if asked:
        console.print(f"crossframe {crossframe.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Two training runs disagree: is it rounding, or a bug, and where?"""


@app.command(cls=CommandWithScript, context_settings={"allow_extra_args": True})
def record(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A training script. Its own arguments follow --.", show_default=False)],
    module: Annotated[
        bool, typer.Option("--module", "-m", help="The script is the name of a module, as of python -m.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Directory of the recording. Default: runs/ and the script's name")
    ] = None,
    framework: Annotated[
        str | None, typer.Option(help="torch or jax. Default: jax if the script imports JAX and not torch")
    ] = None,
    nproc_per_node: Annotated[
        int | None, typer.Option(help="Processes that torchrun starts. Default: one, without torchrun")
    ] = None,
    perturbed_runs: Annotated[
        int,
        typer.Option(
            "--perturbed-runs", "--twins", help="Further runs that only round otherwise: they measure rounding."
        ),
    ] = 0,
    every: Annotated[int, typer.Option(help="Record the tensors of every so many steps.")] = 100,
    dense: Annotated[
        int | None,
        typer.Option(help="Record this many steps in full, from the first. Default: 2, or 16 with --forward"),
    ] = None,
    window: Annotated[
        list[str] | None, typer.Option(help="Record further steps in full, for instance 500:510. May be repeated.")
    ] = None,
    idle_optimizer: Annotated[
        list[int] | None,
        typer.Option(
            help="An optimizer that the script makes and never uses, by its number in the order in which they are made, from 0. "
            "May be repeated. Default: found by a second run if needed."
        ),
    ] = None,
    by_hand: Annotated[
        bool,
        typer.Option(
            "--by-hand",
            help="The script changes its parameters by itself, without an optimizer of torch. Default: found by a second run if "
            "needed.",
        ),
    ] = False,
    forward: Annotated[
        bool,
        typer.Option(
            "--forward", help="Record each call of a model, in torch with gradients or without. Nothing is trained."
        ),
    ] = False,
    detail: Annotated[
        str,
        typer.Option(
            help="full: all elements; sketch: 2 KB for each tensor; auto: sketch for a model of more than a million parameters."
        ),
    ] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing recording.")] = False,
    top_up: Annotated[
        bool, typer.Option("--top-up", help="Keep the recording, and record only the perturbed runs that it lacks.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Log alarms while it trains, and record densely after one.")
    ] = False,
    baseline: Baseline = None,
) -> None:
    """Run an unchanged training script and record its training."""
    from crossframe.cli.record import record_script
    from crossframe.cli.training_command import TrainingCommand

    with exit_on_error():
        record_script(
            TrainingCommand(script, tuple(context.args), nproc_per_node=nproc_per_node, is_module=module),
            output=output,
            framework=framework,
            perturbed_runs=perturbed_runs,
            every=every,
            dense=dense,
            windows=tuple(window_of(each) for each in window or ()),
            idle_optimizers=tuple(idle_optimizer or ()),
            by_hand=by_hand,
            forward=forward,
            detail=detail,
            overwrite=overwrite,
            top_up=top_up,
            watch=watch,
            baseline=baseline,
            console=console,
        )


@app.command()
def compare(
    a: Run,
    b: Annotated[Path, typer.Argument(help="Directory of another recording.", show_default=False)],
    others: Annotated[
        list[Path] | None,
        typer.Argument(help="Further recordings or checkpoints: all are grouped by agreement.", show_default=False),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for report.json and report.html. Default: none")] = None,
    steps: Steps = None,
    repeat: Annotated[
        list[Path] | None,
        typer.Option(help="Another recording of A or B: shows what is not deterministic. May be repeated."),
    ] = None,
    map_file: Map = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all files, even if checksums state that the recordings are equal.")
    ] = False,
    bitwise: Annotated[
        bool,
        typer.Option(
            "--bitwise", help="Exit with status 5 if the same program computes other bits, even by a few roundings."
        ),
    ] = False,
    as_json: AsJson = False,
    junit: Junit = None,
    github: Github = False,
) -> None:
    """Compare two recordings, or two checkpoints, and say whether their difference is rounding or a bug.

    More than two recordings or checkpoints are grouped by agreement.

    Parameters and modules with different names are matched by their values, or by --map.

    Checkpoints are those of save_checkpoint, safetensors files, torch.distributed.checkpoint, torch.save and orbax.

    Large recordings whose checksums are equal are not read, unless --verify or --output is given.

    Exit status: 0 equal or rounding, 1 a bug, 2 wrong use, 3 inconclusive, 4 different runs, 5 a different computation (one
    program, equal causes, other bits by more than a few roundings).
    """
    from crossframe.cli.checkpoints import are_checkpoints, compare_stored

    with exit_on_error():
        runs = [a, b, *(others or ())]
        for_two = {"--output": output, "--repeat": repeat, "--junit": junit, "--github": github, "--verify": verify}
        for_two |= {"--bitwise": bitwise}
        if are_checkpoints(runs):
            given = for_two | {"--steps": steps, "--map": map_file}
            raise typer.Exit(compare_stored(runs, given=given, as_json=as_json, console=console))
        if others:
            from crossframe.cli.compare_many import compare_many

            if odd := [name for name, value in for_two.items() if value]:
                raise UsageError(f"compare: {', '.join(odd)}: for two recordings, got {len(runs)}")
            param_map = None if map_file is None else ParamMap.load(map_file)
            raise typer.Exit(compare_many(runs, steps=steps, param_map=param_map, as_json=as_json, console=console))
        if (
            output is None
            and steps is None
            and not (repeat or map_file or verify or as_json or junit or github)
            and (statement := equal_as_stated(a, b))
        ):
            console.print(statement)
            raise typer.Exit(AGREE)
        opened = [Recording.open(path) for path in (a, b)]
        first, second = opened if steps is None else [recording.first(steps) for recording in opened]
        repeats = tuple(Recording.open(path) for path in repeat or ())
        param_map = None if map_file is None else ParamMap.load(map_file)
        machine = MachineOutput(as_json, junit, github)
        raise typer.Exit(
            answer(
                [(first, second)],
                output,
                repeats=repeats,
                param_map=param_map,
                bitwise=bitwise or None,
                machine=machine,
                console=console,
            )
        )


baseline = typer.Typer(
    no_args_is_help=True,
    help="Record a golden of a training run to commit, and check later runs against it.",
)
app.add_typer(baseline, name="baseline")
_WITH_COMMAND: dict[str, Any] = {
    "cls": CommandWithScript,
    "context_settings": {"allow_extra_args": True},
    "options_metavar": "[OPTIONS] -- COMMAND",
}


@baseline.command("record", **_WITH_COMMAND)
def record_baseline(
    context: typer.Context,
    golden: GoldenFile = None,
    framework: Annotated[
        str | None, typer.Option(help="torch or jax. Default: jax if the script imports JAX and not torch")
    ] = None,
    every: Annotated[int, typer.Option(help="Record the tensors of every so many steps.")] = 1,
    dense: Annotated[int, typer.Option(help="Record activations in this many steps, from the first.")] = 2,
    forward: Annotated[
        bool, typer.Option("--forward", help="Record each call of a model. Nothing is trained.")
    ] = False,
    perturbed_runs: Annotated[
        int, typer.Option(help="Further runs that only round otherwise: they measure rounding.")
    ] = 8,
    recording: Annotated[
        Path | None,
        typer.Option(help="Make the golden of a recording that has perturbed runs, instead of running a command."),
    ] = None,
    max_kb: MaxKb = 200,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing golden.")] = False,
) -> None:
    """Run a training command and its perturbed runs, and write a golden: sketches, the spread of the runs, and the manifest.

    COMMAND is SCRIPT ARGUMENTS, python SCRIPT ARGUMENTS, or torchrun --nproc-per-node N SCRIPT ARGUMENTS. Variables may stand
    before it, as NAME=VALUE.
    """
    from crossframe.cli.baseline import Options, record_golden

    with exit_on_error():
        record_golden(
            context.args,
            golden=golden,
            recording=recording,
            options=Options(Schedule(dense, every), framework, forward),
            perturbed_runs=perturbed_runs,
            max_kb=max_kb,
            overwrite=overwrite,
            console=console,
            errors=errors,
        )


@baseline.command("check", **_WITH_COMMAND)
def check_baseline(
    context: typer.Context,
    golden: GoldenFile = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the recording and the report. Default: runs/baseline/ and the golden's name"),
    ] = None,
    bitwise: Annotated[
        bool,
        typer.Option(
            "--bitwise", help="Exit with status 5 if the same program computes other bits, even within rounding."
        ),
    ] = False,
    git_bisect: Annotated[
        bool,
        typer.Option(
            "--git-bisect",
            help="Exit statuses for git bisect run: 0 good, 1 bad, 125 undecided or a failed run (skip), 128 wrong use (stop).",
        ),
    ] = False,
    as_json: AsJson = False,
    junit: Junit = None,
    github: Github = False,
) -> None:
    """Run a training command again, and say whether it is the golden's run: equal, rounding, or a bug, and where.

    Without COMMAND, the golden's command is run.

    Exit status: 0 equal or rounding, 1 a bug, 2 wrong use, 3 inconclusive, 4 different settings, 5 (with --bitwise) a different
    computation.
    """
    from crossframe.cli.baseline import check_golden

    with exit_on_error(ABORT if git_bisect else WRONG_USE):
        raise typer.Exit(
            check_golden(
                context.args,
                golden=golden,
                output=output,
                bitwise=bitwise,
                git_bisect=git_bisect,
                machine=MachineOutput(as_json, junit, github),
                console=console,
                errors=errors,
            )
        )


@baseline.command("update", **_WITH_COMMAND)
def update_baseline(
    context: typer.Context,
    golden: GoldenFile = None,
    perturbed_runs: Annotated[
        int | None, typer.Option(help="Number of perturbed runs. Default: as many as the golden has")
    ] = None,
    max_kb: MaxKb = 200,
    yes: Annotated[bool, typer.Option("--yes", help="Write without a question.")] = False,
) -> None:
    """Record a golden again, show what changes and why, and write it after a confirmation."""
    from crossframe.cli.baseline import update_golden

    with exit_on_error():
        raise typer.Exit(
            update_golden(
                context.args,
                golden=golden,
                perturbed_runs=perturbed_runs,
                max_kb=max_kb,
                yes=yes,
                console=console,
                errors=errors,
            )
        )


@app.command(cls=CommandWithScript, context_settings={"allow_extra_args": True}, options_metavar="[OPTIONS] -- A -- B")
def bisect(
    context: typer.Context,
    settings: Annotated[
        bool,
        typer.Option(
            "--settings", help="Find the settings that make the runs diverge, instead of the step and the operator."
        ),
    ] = False,
    output: Annotated[
        Path, typer.Option(help="Folder of all recordings. Runs that are in it are not repeated.")
    ] = Path("runs/bisect"),
    framework: Annotated[
        str | None, typer.Option(help="torch or jax. Default: jax if the script imports JAX and not torch")
    ] = None,
    every: Annotated[int, typer.Option(help="Record the tensors of every so many steps, at first.")] = 100,
    steps: Annotated[
        int | None, typer.Option(help="Number of steps after which commands are ended. Default: none")
    ] = None,
    perturbed_runs: Annotated[
        int,
        typer.Option(
            help="Further runs of A, for each of its recordings, that only round otherwise: they measure rounding."
        ),
    ] = 0,
    resume: Annotated[
        str,
        typer.Option(
            help="Words that make a command go on from a checkpoint, such as '--resume checkpoints/{side}/{step}.pt': {step} is "
            "the number of steps that are done, {side} a or b. Default: commands run from their start",
            show_default=False,
        ),
    ] = "",
    timeout: Annotated[float, typer.Option(help="Time limit of each run that is traced, in seconds.")] = 600.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the runs of another search.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find the step at which two training commands diverge, and the operator that causes it; or the settings that make them.

    A and B are commands such as train.py --lr 1e-3, or A=1 torchrun --nproc-per-node 2 train.py. Both are recorded, at first a
    few steps, then the steps in which they diverge, and explained.

    With --settings, A is run with some of the environment variables, options and configuration keys of B, until minimal sets
    that make the runs diverge are found.

    Exit status: 0 the runs agree, 1 they diverge, 2 wrong use or a run that fails, 3 undecided, 4 different runs, 5 a different
    computation.
    """
    from crossframe.cli.bisect import Options
    from crossframe.cli.bisect import bisect as bisect_commands

    with exit_on_error():
        raise typer.Exit(
            bisect_commands(
                context.args,
                settings=settings,
                output=output,
                framework=framework,
                options=Options(every, steps, perturbed_runs, resume, timeout),
                overwrite=overwrite,
                as_json=as_json,
                console=console,
                errors=errors,
            )
        )


@app.command()
def explain(
    a: Run,
    b: Annotated[
        Path | None, typer.Argument(help="Directory of another recording. Default: examine only the first")
    ] = None,
    step: Annotated[int, typer.Option(help="The step to examine, if only one recording is given.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder for the traces. Default: none")] = None,
    timeout: Annotated[float, typer.Option(help="Time limit of each run, in seconds.")] = 600.0,
    map_file: Map = None,
    svg: Svg = None,
    as_json: AsJson = False,
) -> None:
    """Run two recorded programs again up to their first difference, and name the operator and the source line that cause it.

    With one recording: run the program again, repeat each operator in float64 on its own inputs, and name those whose error
    exceeds rounding. Compiled modules are compared with their eager code.
    """
    from crossframe.cli.explain import explain as explain_pair
    from crossframe.cli.explain import explain_one

    options: dict[str, Any] = {"folder": output, "timeout": timeout, "as_json": as_json, "console": console}
    with exit_on_error():
        if b is not None:
            param_map = None if map_file is None else ParamMap.load(map_file)
            raise typer.Exit(explain_pair((a, b), param_map=param_map, svg=svg, **options))
        if map_file is not None:
            raise UsageError("explain: --map is for two recordings; pass the second one")
        if svg is not None:
            raise UsageError("explain: --svg draws the difference of two recordings; pass the second one")
        raise typer.Exit(explain_one(a, step, **options))


@app.command()
def inspect(
    run: Run,
    steps: Steps = None,
    as_json: AsJson = False,
) -> None:
    """Examine one recording: the first NaN or infinity, growth, ranks that disagree, updates that break the optimizer's rule."""
    from crossframe.cli.inspection import print_inspection
    from crossframe.inspection import inspect as inspect_recording

    with exit_on_error():
        opened = Recording.open(run, partial=True)
        found = inspect_recording(opened if steps is None else opened.first(steps))
        if as_json:
            print(json.dumps(found.to_json(), indent=1))
        else:
            print_inspection(console, found)
        raise typer.Exit(FOUND if found.is_faulty else AGREE)


@app.command()
def watch(
    run: Run,
    baseline: Baseline = None,
    once: Annotated[bool, typer.Option("--once", help="Show the run as it is now, and exit.")] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Stop if no step has ended for this many seconds. Default: wait")
    ] = None,
    on_alarm: Annotated[
        str | None,
        typer.Option(
            help="Shell command for each alarm, such as 'notify-send \"$CROSSFRAME_ALARM\"'. It also gets CROSSFRAME_RUN, "
            "CROSSFRAME_ALARM_KIND and CROSSFRAME_ALARM_STEP. Default: none",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, when the run has ended.")] = False,
) -> None:
    """Show a run while it is being recorded, with alarms, until it ends.

    Alarms: NaN and infinity, ranks that disagree, a loss that leaves its past, gradients that vanish or explode, parameters that
    moved as the optimizer does not move them, and leaving the spread of a baseline.

    Exit status: 0 no alarm, 1 alarms, 2 wrong use, 3 no alarm, but the run did not end within the timeout.
    """
    from crossframe.cli.watch import watch as watch_run

    with exit_on_error():
        raise typer.Exit(
            watch_run(
                run,
                baseline=baseline,
                once=once,
                timeout=timeout,
                on_alarm=on_alarm,
                as_json=as_json,
                console=console,
                errors=errors,
            )
        )


@app.command()
def check(
    a: Annotated[
        str,
        typer.Argument(
            help="A recording, a command in quotes such as 'train.py --lr 1e-3', or a configuration file.",
            show_default=False,
        ),
    ],
    b: Annotated[
        str | None, typer.Argument(help="The other one. Default: compare the ranks of A", show_default=False)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Number of steps after which commands are stopped. Default: 2")
    ] = None,
    map_file: Map = None,
    as_json: AsJson = False,
) -> None:
    """List what two runs differ in before training, ranked by how likely it changes the numbers; or the ranks that differ.

    Commands are run, and stopped after their first steps. Compared are packages, devices, settings, environment variables,
    sources, command lines, configuration files, modules, parameters, initial values, states of random generators, optimizers
    and batches.

    Exit status: 0 nothing differs that changes numbers, 1 something changes them, 2 wrong use, 3 something may change them.
    """
    from crossframe.cli.check import check as check_runs

    with exit_on_error():
        param_map = None if map_file is None else ParamMap.load(map_file)
        raise typer.Exit(check_runs(a, b, steps=steps, param_map=param_map, as_json=as_json, console=console))


@app.command("map")
def map_models(
    first: Annotated[
        Path,
        typer.Argument(
            help="The model with canonical names: a safetensors file or folder, a checkpoint, or a recording.",
            show_default=False,
        ),
    ],
    second: Annotated[Path, typer.Argument(help="The other model, with the same initial values.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option(help="File for the map, for compare --map and ParamMap.load. Default: none")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find which parameter of one model is which of another, from equal initial values: names, dims and grouping may differ.

    Layers may be stacked in one array, projections joined, a vocabulary padded. Parameters whose values are all equal, such as
    zeros, are told apart by the gradients of two recordings, or by their modules. Every entry is checked on all values; of
    recordings in sketches, those that only differ in names are, and others on a signature of all values and the places of a
    sample. The names are those of the first model, or of the second one if parameters of the first one consist of arrays of
    different dims.

    Exit status: 0 all parameters are decided, 1 some are not; they are listed with what would decide them.
    """
    from crossframe.alignment import align_either_way
    from crossframe.alignment.models import read_models
    from crossframe.cli.alignment import print_alignment

    with exit_on_error():
        (values, gradients), (other_values, other_gradients) = read_models((first, second))
        found, is_swapped = align_either_way(values, other_values, (gradients, other_gradients))
        named = second if is_swapped else first
        if output is not None:
            found.param_map.save(output)
        if as_json:
            print(json.dumps(found.to_json() | {"names_of": str(named)}, indent=1))
        else:
            print_alignment(console, found, output)
            if is_swapped:
                console.print(
                    f"the names are those of {named}, and the paths those of {first}", soft_wrap=True, markup=False
                )
        raise typer.Exit(FOUND if found.undecided else AGREE)


@app.command()
def layout(
    model: ShapesOf,
    world_size: WorldSize,
    layout: Annotated[str, typer.Option(help="flat, per_param or ragged.")] = "flat",
    keep_original: Annotated[
        bool, typer.Option(help="flat: keep original parameters, aligned (use_orig_params).")
    ] = True,
    compute_dtype: Annotated[str | None, typer.Option(help="flat: dtype of compute. Default: --dtype")] = None,
    dtype: Dtype = "float32",
    replicate: Annotated[int, typer.Option(help="Number of replicas (hybrid sharding).")] = 1,
    dim: Annotated[
        list[str] | None, typer.Option(help="per_param: PATTERN=DIM shards the matching parameters on DIM.")
    ] = None,
    tp: Tp = 1,
    ep: Ep = 1,
    pp: Pp = 1,
    parallel: Parallel = None,
    stage: Stage = None,
    unit: Annotated[str | None, typer.Option(help="Only this unit; '' or '(root)' is the root.")] = None,
    rank: Annotated[int | None, typer.Option(help="Only this rank.")] = None,
    where: Annotated[list[str] | None, typer.Option(help="NAME[INDEX]: only the ranks that hold this element.")] = None,
    svg: Svg = None,
    html: Annotated[
        Path | None,
        typer.Option(
            help="File for a page on which the world size, up to --world-size, and the layout can be changed."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which rank holds which elements of a model, and where padding lies."""
    from crossframe.cli.layout import LayoutOptions, show_layout, write_explorer
    from crossframe.cli.parallel import ParallelOptions

    with exit_on_error():
        axes = ParallelOptions(tp, ep, pp, parallel or (), stage or ())
        options = LayoutOptions(world_size, layout, keep_original, compute_dtype, replicate, dim or (), axes)
        if html is not None:
            others = {"unit": unit, "rank": rank, "svg": svg, "json": as_json or None}
            write_explorer(model, dtype, options, html, where=where or (), others=others, console=console)
            return
        show_layout(
            model, dtype, options, unit=unit, rank=rank, where=where or (), svg=svg, as_json=as_json, console=console
        )


@app.command()
def plan(
    model: ShapesOf,
    world_size: WorldSize,
    strategy: Annotated[
        str, typer.Option(help="full_shard, shard_grad_op, no_shard, hybrid_shard or hybrid_shard_zero2.")
    ] = "full_shard",
    shard: Annotated[int | None, typer.Option(help="Hybrid strategies: number of ranks of a shard group.")] = None,
    api: Annotated[str, typer.Option("--api", "--face", help="fsdp1 or fsdp2.")] = "fsdp1",
    reshard_after_forward: Annotated[
        str | None, typer.Option(help="fsdp2: true, false, or the number of ranks to reshard to.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="flat, per_param or ragged. Default: that of the API")] = None,
    backward_prefetch: Annotated[str, typer.Option(help="pre, post or none.")] = "pre",
    forward_prefetch: Annotated[int, typer.Option(help="Number of units that forward prefetches.")] = 0,
    dtype: Dtype = "float32",
    param_dtype: Annotated[str | None, typer.Option(help="Dtype of gathers and compute. Default: --dtype")] = None,
    reduce_dtype: Annotated[str | None, typer.Option(help="Dtype of reductions. Default: --param-dtype")] = None,
    microbatches: Annotated[int, typer.Option(help="Number of microbatches of a step.")] = 1,
    sync: Annotated[
        str, typer.Option(help="Gradient accumulation: each, last or all_reduce_last reduces gradients.")
    ] = "each",
    rank: Annotated[int, typer.Option(help="The rank whose step is shown.")] = 0,
    tokens: Annotated[int, typer.Option(help="Number of tokens per data parallel rank and microbatch.")] = 4096,
    tp: Tp = 1,
    ep: Ep = 1,
    pp: Pp = 1,
    parallel: Parallel = None,
    stage: Stage = None,
    schedule: Annotated[str | None, typer.Option(help="Pipelines: 1f1b or gpipe. Default: 1f1b")] = None,
    experts_per_token: Annotated[
        int | None, typer.Option(help="Expert parallelism: number of experts that process a token.", show_default=False)
    ] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Bandwidth of a rank in bytes/s. Default: 5e10")] = None,
    replica_bandwidth: Annotated[
        float | None, typer.Option(help="Bandwidth between replicas in bytes/s. Default: --bandwidth")
    ] = None,
    latency: Annotated[float | None, typer.Option(help="Time of an empty message in seconds. Default: 1e-5")] = None,
    flops: Annotated[float | None, typer.Option(help="Operations per second of a rank. Default: 4e14")] = None,
    svg: Svg = None,
    events: Annotated[bool, typer.Option("--events", help="Print every event.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a training step of one rank: its collectives, a timeline, and the memory in use."""
    from crossframe.cli.parallel import ParallelOptions
    from crossframe.cli.plan import PlanOptions, hardware, show_plan

    with exit_on_error():
        options = PlanOptions(
            world_size,
            strategy,
            shard,
            api,
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
            ParallelOptions(tp, ep, pp, parallel or (), stage or ()),
            schedule,
            experts_per_token,
        )
        show_plan(model, dtype, options, events=events, svg=svg, as_json=as_json, console=console)
