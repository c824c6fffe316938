"""The commands `python -m experiments bench core|torch|state|recorder|compare|scale|jax|compile|own|architectures`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crossframe.cli.console import console, exit_on_error

if TYPE_CHECKING:
    from experiments.bench.command import Bench

bench = typer.Typer(no_args_is_help=True, help="Measure, side by side in one run.")
Json = Annotated[Path | None, typer.Option(help="JSON file for the figures. Default: none")]
Output = Annotated[Path | None, typer.Option(help="Markdown file for the figures. Default: none")]
Quick = Annotated[bool, typer.Option("--quick", help="Tiny models, to see that it works.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 if a figure is over its limit.")]


@bench.command("core")
def bench_core(
    output: Output = None,
) -> None:
    """Time layouts, plans and their cost for a model of 405 billion parameters, and the import of the core."""
    from experiments.bench.command import run_core_bench

    with exit_on_error():
        raise typer.Exit(run_core_bench(console, output))


@bench.command("torch")
def bench_torch(
    json: Json = None,
    output: Output = None,
    section: Annotated[
        list[str] | None, typer.Option(help="Only step, host, memory, wrap, copies or gpu. May be repeated.")
    ] = None,
    quick: Quick = False,
    strict: Strict = False,
) -> None:
    """Measure torch_backend beside torch's FSDP1, FSDP2 and DDP: time of a step, bookkeeping, memory, and GPUs if there are."""
    from experiments.bench.command import torch_bench

    with exit_on_error():
        _run(torch_bench(section or ()), json, output, quick=quick, strict=strict)


@bench.command("state")
def bench_state(
    json: Json = None,
    output: Output = None,
    quick: Quick = False,
    strict: Strict = False,
) -> None:
    """Measure state dicts and checkpoints of torch_backend beside those of torch's FSDP1 and FSDP2: time and memory."""
    from experiments.bench.command import state_bench

    with exit_on_error():
        _run(state_bench(), json, output, quick=quick, strict=strict)


@bench.command("recorder")
def bench_recorder(
    json: Json = None,
    output: Output = None,
    engine: Annotated[list[str] | None, typer.Option(help="Only 'our FSDP1' or 'torch DDP'.")] = None,
    quick: Quick = False,
    strict: Strict = False,
) -> None:
    """Measure what recording costs a training loop of torch: steps with and without it, for our FSDP1 and torch's DDP."""
    from experiments.bench.command import recorder_bench

    with exit_on_error():
        _run(recorder_bench(engine or ()), json, output, quick=quick, strict=strict)


@bench.command("compare")
def bench_compare(
    json: Json = None,
    output: Output = None,
    steps: Annotated[int | None, typer.Option(help="Recorded steps. Default: 1000")] = None,
    quick: Quick = False,
    strict: Strict = False,
) -> None:
    """Measure a comparison of sketch recordings of a billion parameters on 64 ranks: time and memory, and when all is equal."""
    from experiments.bench.command import compare_bench

    with exit_on_error():
        _run(compare_bench(steps), json, output, quick=quick, strict=strict)


@bench.command("scale")
def bench_scale(
    json: Json = None,
    output: Output = None,
    quick: Quick = False,
    strict: Strict = False,
) -> None:
    """Simulate recording a model of eight billion parameters on 64 ranks: time and bytes of a rank, files, and a comparison."""
    from experiments.bench.command import scale_bench

    with exit_on_error():
        _run(scale_bench(), json, output, quick=quick, strict=strict)


@bench.command("jax")
def bench_jax(
    json: Json = None,
    output: Output = None,
    quick: Quick = False,
    strict: Strict = False,
) -> None:
    """Measure jax_backend beside FSDP as JAX users write it, and beside a replicated model: time, compilation, memory."""
    from experiments.bench.command import jax_bench

    with exit_on_error():
        _run(jax_bench(), json, output, quick=quick, strict=strict)


@bench.command("compile")
def bench_compile(
    model: Annotated[
        list[str] | None, typer.Option(help="llama-3-8b or llama-3-70b. May be repeated. Default: both")
    ] = None,
    devices: Annotated[
        list[int] | None, typer.Option(help="Virtual devices. May be repeated. Default: 8, 64 and 256")
    ] = None,
    program: Annotated[
        list[str] | None,
        typer.Option(help="'our shard_map', 'our jit' or NamedSharding. May be repeated. Default: all"),
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a device's batch.")] = 2048,
    limit: Annotated[float, typer.Option(help="Seconds after which a program is given up.")] = 600.0,
    json: Json = None,
    output: Output = None,
) -> None:
    """Compile the step of Llama 3 for many devices without values: collectives next to the plan's, memory, compile time."""
    from experiments.bench.jax_compile import CONTESTANTS, MODELS, cases_of, run_compile

    with exit_on_error():
        cases = list(cases_of(model or tuple(MODELS), devices or (8, 64, 256), program or CONTESTANTS, context))
        raise typer.Exit(run_compile(console, cases, limit=limit, output=output, json_output=json))


@bench.command("own", hidden=True)
@bench.command("fsdp-variants")
def bench_fsdp_variants(
    model: Annotated[list[str] | None, typer.Option(help="Only this model. May be repeated. Default: all")] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="Only on 1, 2, 3 or 4. May be repeated. Default: all")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="float64, float32 or bfloat16. May be repeated. Default: the first two")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option(help="adamw, or 'sgd, clipped, 2 microbatches'. May be repeated. Default: both")
    ] = None,
    steps: Annotated[int, typer.Option(help="How many each run makes, all of them recorded.")] = 6,
    output: Annotated[Path | None, typer.Option(help="Markdown file for the tables, and beside it JSON.")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Folder in which recordings stay. Default: they are deleted")
    ] = None,
    special: Annotated[
        bool,
        typer.Option("--special", help="Not these models, but cases that they do not have: parts unused, frozen ..."),
    ] = False,
) -> None:
    """Hold torch's FSDP1, FSDP2 and DDP and one device against one another, and ours beside them, by their recordings."""
    from experiments.bench.fsdp_variants.run import run_fsdp_variants
    from experiments.bench.fsdp_variants.special_run import run_special

    with exit_on_error():
        if special:
            raise typer.Exit(run_special(console, output=output, keep=keep))
        raise typer.Exit(
            run_fsdp_variants(
                console,
                models=model or (),
                ranks=ranks or (),
                dtypes=dtype or (),
                settings=setting or (),
                steps=steps,
                output=output,
                keep=keep,
            )
        )


@bench.command("architectures")
def bench_architectures(
    names: Annotated[list[str] | None, typer.Argument(help="Types of models, such as llama. Default: all")] = None,
    output: Annotated[Path | None, typer.Option(help="Markdown file for the table, and beside it JSON.")] = None,
) -> None:
    """Train every architecture of transformers, small, under torch's FSDP1 and FSDP2 and under ours: equal in every bit?"""
    from experiments.bench.architectures.run import run_architectures

    with exit_on_error():
        raise typer.Exit(run_architectures(console, names or (), output=output))


def _run(bench: "Bench", json: Path | None, output: Path | None, *, quick: bool, strict: bool) -> None:
    from experiments.bench.command import run_bench

    raise typer.Exit(run_bench(console, bench, output=output, json_output=json, quick=quick, strict=strict))
