"""The `crossframe` command: parity, record, compare.

Exit status: 0 equal or rounding, 1 a bug, 2 wrong use or no answer.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from crossframe.errors import CrossframeError, UsageError
from crossframe.recording import Recording
from crossframe.verdict import Verdict
from experiments.parity.settings import RunSettings
from experiments.report import print_report, report_of, write_report

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Sharded training in torch and in JAX: is a difference rounding, or a bug, and where?",
)
console = Console(soft_wrap=True)
errors = Console(stderr=True, soft_wrap=True, highlight=False)

Model = Annotated[str, typer.Argument(help="Name of a model, for instance gpt.", show_default=False)]
WorldSize = Annotated[int, typer.Option(help="Number of ranks (torch) and of devices (JAX).")]
Steps = Annotated[int, typer.Option(help="Optimizer steps.")]
Seed = Annotated[int, typer.Option(help="Where initial values and batches come from.")]
BatchSize = Annotated[int, typer.Option(help="Samples a rank and step.")]
LearningRate = Annotated[float, typer.Option(help="Learning rate of AdamW.")]
StrategyName = Annotated[str, typer.Option(help="full_shard or shard_grad_op.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: GPUs if there are enough.")]
Fault = Annotated[str, typer.Option(help="Put in a fault on purpose, for instance sum_gradients.")]
DEFAULTS = RunSettings("gpt")
# Which extra brings a module that may be missing.
EXTRAS = {"torch": "torch", "jax": "jax", "flax": "jax", "optax": "jax"}


@contextmanager
def _exit_on_error() -> Iterator[None]:
    """One clear line and exit status 2 instead of a traceback, for what is the user's to mend."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        extra = EXTRAS.get(name, "all")
        errors.print(f"crossframe: needs {name}: pip install 'crossframe[{extra}]'", markup=False)
        raise typer.Exit(2) from None
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        errors.print(
            f"crossframe: cannot use{where}: {error.strerror or error}; check the path, or the space left", markup=False
        )
        raise typer.Exit(2) from None
    except (CrossframeError, ImportError) as error:
        errors.print(f"crossframe: {error}", markup=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        errors.print("crossframe: interrupted")
        raise typer.Exit(2) from None


@app.command()
def parity(
    model: Model,
    world_size: WorldSize = DEFAULTS.world_size,
    steps: Steps = DEFAULTS.steps,
    seed: Seed = DEFAULTS.seed,
    batch_size: BatchSize = DEFAULTS.batch_size,
    learning_rate: LearningRate = DEFAULTS.learning_rate,
    strategy: StrategyName = DEFAULTS.strategy,
    device: Device = DEFAULTS.device,
    output: Annotated[Path | None, typer.Option(help="Folder for recordings and report. Default: runs/...")] = None,
    fault: Fault = "",
    fault_in: Annotated[str, typer.Option(help="Which side gets the fault: torch or jax.")] = "jax",
) -> None:
    """Train one model in torch and in JAX, in float64 and in float32, and say whether they agree."""
    from experiments.parity.run import run_parity

    common: dict[str, Any] = {
        "world_size": world_size,
        "steps": steps,
        "seed": seed,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "strategy": strategy,
        "device": device,
    }
    with _exit_on_error():
        if fault_in not in ("torch", "jax"):
            raise UsageError(f"fault-in: expected torch or jax, got {fault_in!r}")
        folder = output or Path("runs", f"parity-{model}-{world_size}-ranks{'-faulty' if fault else ''}")
        pairs = run_parity(model, common, folder, fault=fault, fault_in=fault_in, console=console)
        _answer(pairs, folder)


@app.command()
def record(
    framework: Annotated[str, typer.Argument(help="torch or jax.", show_default=False)],
    model: Model,
    output: Annotated[Path, typer.Option(help="Folder of the recording.", show_default=False)],
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = DEFAULTS.dtype,
    world_size: WorldSize = DEFAULTS.world_size,
    steps: Steps = DEFAULTS.steps,
    seed: Seed = DEFAULTS.seed,
    batch_size: BatchSize = DEFAULTS.batch_size,
    learning_rate: LearningRate = DEFAULTS.learning_rate,
    strategy: StrategyName = DEFAULTS.strategy,
    device: Device = DEFAULTS.device,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a recording that is there.")] = False,
    fault: Fault = "",
) -> None:
    """Train one model in one framework and record the run."""
    with _exit_on_error():
        settings = RunSettings(
            model,
            dtype,
            world_size,
            steps,
            seed,
            batch_size,
            learning_rate,
            DEFAULTS.weight_decay,
            strategy,
            device,
            fault,
        )
        if framework not in ("torch", "jax"):
            raise UsageError(f"framework: expected torch or jax, got {framework!r}")
        from experiments.parity.progress import watch

        with watch(console, [(f"{framework} {dtype}", output)], settings):
            _record(framework, settings, output, overwrite)
        console.print(f"recorded {steps} steps in {output}", highlight=False)


def _record(framework: str, settings: RunSettings, output: Path, overwrite: bool) -> None:
    if framework == "torch":
        from torch.multiprocessing.spawn import ProcessException

        from experiments.parity.record_torch import record_torch

        try:
            record_torch(settings, output, overwrite=overwrite)
        except ProcessException as error:
            lines = str(error).strip().splitlines()
            if len(lines) > 1:
                errors.print(str(error), markup=False)
            memory = (
                "; if memory ran out, pass a smaller --batch-size or --world-size" if "SIGKILL" in lines[-1] else ""
            )
            raise UsageError(
                f"rank {error.error_index} failed, and the others were ended: {lines[-1]}{memory}"
            ) from None
    else:
        from experiments.parity.record_jax import record_jax

        record_jax(settings, output, overwrite=overwrite)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A recording.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="Another.", show_default=False)],
    output: Annotated[Path | None, typer.Option(help="Folder for report.json and report.html. Default: none")] = None,
) -> None:
    """Compare two recordings, and say whether their difference is rounding or a bug."""
    with _exit_on_error():
        _answer([(Recording.open(a), Recording.open(b))], output)


def _answer(pairs: list[tuple[Recording, Recording]], output: Path | None) -> None:
    """Print the verdict, write the report, and exit with the verdict's status."""
    report, series = report_of(pairs, command=" ".join(["crossframe", *sys.argv[1:]]))
    print_report(console, report)
    if output is not None:
        console.print(f"report: {write_report(output, report, series)}", highlight=False)
    raise typer.Exit(Verdict(report["verdict"]).exit_status)
