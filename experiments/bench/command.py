"""The `python -m experiments bench` commands: measure, print tables, write them to files, say how it ended."""

import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from crossframe.errors import UsageError
from experiments.bench.core import core_figures, loop_seconds
from experiments.bench.figure import Figure, Section, markdown_grid, markdown_table, print_grid, print_table

# Of the benchmark of the torch backend.
SECTIONS = ("step", "host", "memory", "wrap", "copies", "gpu")
_BESIDE_TORCH = "torch_backend beside torch"
_IN_TURNS = (
    "All take turns, round after round in an order drawn anew; a ratio is the median of the rounds' ratios, with their "
    "quartiles."
)
_ONCE = "Each figure is measured once. CPU seconds do not count the time in which other processes have the processor."


def run_core_bench(console: Console, output: Path | None = None) -> int:
    """Time the core: layouts, pieces, plans and their cost for llama-3-405b at up to 16,384 ranks, and its import.

    Args:
        output: a Markdown file to write the figures to as well.

    Returns:
        The exit status: 0 if every figure is within its limit, 1 if one is not.
    """
    figures = []
    with console.status("measuring") as status:
        for figure in core_figures():
            figures.append(figure)
            status.update(f"measured {figure.what}")
    print_table(console, figures)
    console.print(f"\n{machine()}", highlight=False)
    if output is not None:
        output.write_text(core_markdown(figures))
        console.print(f"figures: {output}", highlight=False)
    return 0 if all(figure.ok for figure in figures) else 1


def machine() -> str:
    """What the figures of the core were measured on, in one line."""
    return (
        f"one loop of a million additions takes {loop_seconds() * 1e3:.0f} ms here; {os.cpu_count()} {platform.machine()} "
        f"cores, load {os.getloadavg()[0]:.1f}, {platform.system()}, Python {platform.python_version()}, "
        f"numpy {version('numpy')}, ml_dtypes {version('ml_dtypes')}"
    )


def core_markdown(figures: Sequence[Figure]) -> str:
    """The figures of the core as a Markdown table with the machine above it."""
    lines = ["# The core", "", f"`{command_line()}`: {machine()}.", "", *markdown_table(figures)]
    return "\n".join(lines) + "\n"


def command_line() -> str:
    """The command line that this process was started with."""
    return " ".join(["python -m experiments", *sys.argv[1:]])


@dataclass(frozen=True)
class Bench:
    """A benchmark of sections.

    Attributes:
        title: of the report.
        where: what it is measured on, and when.
        note: how the figures are measured, for a report.
        measure: yields the sections, and lines that say how far it is. With True, of tiny models, to see that all works; the
            figures mean nothing then.
    """

    title: str
    where: Callable[[], dict[str, Any]]
    measure: Callable[[bool], Iterable[Section | str]]
    note: str = _IN_TURNS


def run_bench(
    console: Console, bench: Bench, *, output: Path | None, json_output: Path | None, quick: bool, strict: bool
) -> int:
    """Measure, print tables and write them to files, which have the sections so far after each of them.

    Args:
        output: a Markdown file for the figures.
        json_output: a JSON file for them, with the machine, versions and limits.
        quick: see Bench.

    Returns:
        The exit status: 0, or with `strict` 1 if a figure is over its limit.

    Raises:
        UsageError: a rank that failed.
    """
    where, measured, sections = bench.where(), [], iter(bench.measure(quick))
    while True:
        with console.status("measuring"):
            section = next(sections, None)
        if section is None:
            break
        if isinstance(section, str):
            console.print(section, highlight=False)
            continue
        measured.append(section)
        _print_section(console, section)
        if json_output is not None:
            json_output.write_text(json.dumps(torch_report(where, measured, quick=quick), indent=2) + "\n")
        if output is not None:
            output.write_text(torch_markdown(where, measured, bench.title, bench.note))
    console.print(torch_machine_line(where), highlight=False)
    for path in (json_output, output):
        if path is not None:
            console.print(f"figures: {path}", highlight=False)
    return 1 if strict and not all(section.ok for section in measured) else 0


def torch_bench(sections: Sequence[str] = ()) -> Bench:
    """`torch_backend` beside torch's own FSDP1, FSDP2 and DDP: time of a step, bookkeeping, memory, wrapping, copies, GPUs.

    Args:
        sections: some of SECTIONS; all of them if empty.

    Raises:
        UsageError: a section that there is not.
    """
    if unknown := [name for name in sections if name not in SECTIONS]:
        raise UsageError(f"section: expected some of {', '.join(SECTIONS)}, got {', '.join(unknown)}")

    def measure(quick: bool) -> Iterator[Section]:
        from experiments.bench.copies import copies_section
        from experiments.bench.gpu import gpu_section
        from experiments.bench.host import host_section
        from experiments.bench.memory import memory_section
        from experiments.bench.sizes import FULL, QUICK
        from experiments.bench.step import step_section
        from experiments.bench.wrap import wrap_section

        parts = (step_section, host_section, memory_section, wrap_section, copies_section, gpu_section)
        for name, part in zip(SECTIONS, parts, strict=True):
            if name in (sections or SECTIONS):
                yield part(QUICK if quick else FULL)

    return Bench(_BESIDE_TORCH, torch_machine, measure)


def state_bench() -> Bench:
    """State dicts and checkpoints of `torch_backend` beside those of torch's own FSDP1 and FSDP2: time and memory."""

    def measure(quick: bool) -> Sequence[Section]:
        from experiments.bench.sizes import FULL, QUICK
        from experiments.bench.state import state_sections

        return state_sections(QUICK if quick else FULL)

    return Bench(_BESIDE_TORCH, torch_machine, measure)


def recorder_bench(engines: Sequence[str] = ()) -> Bench:
    """What `torch_backend.recorder` costs a training loop.

    Args:
        engines: what shards the model, some of `experiments.bench.recorder.ENGINES`; all of them if empty.
    """

    def measure(quick: bool) -> Iterator[Section]:
        from experiments.bench.recorder import recorder_section
        from experiments.bench.sizes import FULL, QUICK

        yield recorder_section(QUICK if quick else FULL, engines)

    return Bench("The recorder", torch_machine, measure)


def compare_bench(steps: int | None = None) -> Bench:
    """What `crossframe compare` costs on large recordings.

    Args:
        steps: that each recording has; None: those of the benchmark's sizes. Too few are a UsageError when it is run.
    """

    def measure(quick: bool) -> Iterator[Section]:
        from experiments.bench.verdict_cost import FULL, QUICK, compare_section

        yield compare_section((QUICK if quick else FULL).with_steps(steps))

    return Bench("A comparison", lambda: _where([], {"numpy": version("numpy")}), measure)


def scale_bench() -> Bench:
    """A simulation of recording a model of eight billion parameters on 64 ranks, and what work on such recordings costs."""

    def measure(quick: bool) -> Iterator[Section]:
        from experiments.bench.scale import BLOCKS, FULL, SMALL, scale_sections

        return scale_sections(SMALL if quick else FULL, (1, 2) if quick else BLOCKS)

    return Bench("Scale", torch_machine, measure, _ONCE)


def jax_bench() -> Bench:
    """`jax_backend` beside FSDP as JAX users write it by hand and beside a replicated model: time, compilation, memory."""

    def measure(quick: bool) -> Iterator[Section | str]:
        from experiments.bench.jax_step import FULL, QUICK, jax_sections

        return jax_sections(QUICK if quick else FULL)

    return Bench("jax_backend beside JAX", jax_machine, measure)


def _print_section(console: Console, section: Section) -> None:
    console.print(f"[bold]{section.title}[/bold]\n{section.skipped or section.how}\n", highlight=False)
    if section.figures:
        print_table(console, section.figures)
        console.print()
    if section.grid is not None:
        print_grid(console, section.grid)
        console.print()


def torch_machine() -> dict[str, Any]:
    """What the figures of the torch backend are measured on, and when."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return _where(gpus, {"torch": torch.__version__, "cuda": torch.version.cuda})


def jax_machine() -> dict[str, Any]:
    """What the figures of the JAX backend are measured on, and when. JAX is not started here, but in processes of its own."""
    return _where([], {name: version(name) for name in ("jax", "flax", "optax")})


def _where(gpus: Sequence[str], versions: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "architecture": platform.machine(),
            "system": platform.system(),
            "load": round(os.getloadavg()[0], 2),
            "gpus": list(gpus),
        },
        "versions": {"python": platform.python_version(), **versions},
    }


def _processor() -> str:
    """The name that the system gives its processor, where it gives one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def torch_machine_line(where: dict[str, Any]) -> str:
    """The same in one line."""
    machine, versions = where["machine"], where["versions"]
    return (
        f"{where['date']}, {machine['cores']} cores of {machine['processor']} ({machine['architecture']}), load "
        f"{machine['load']:.1f} at the start, {', '.join(machine['gpus']) or 'no GPU'}, {machine['system']}, "
        + ", ".join(f"{name} {number}" for name, number in versions.items() if number is not None)
    )


def torch_report(where: dict[str, Any], sections: Sequence[Section], *, quick: bool) -> dict[str, Any]:
    """Everything for a JSON file."""
    return {
        "command": command_line(),
        **where,
        "quick": quick,
        "sections": [section.as_json() for section in sections],
        "ok": all(section.ok for section in sections),
    }


def torch_markdown(where: dict[str, Any], sections: Sequence[Section], title: str, note: str) -> str:
    """Everything for a Markdown file."""
    lines = [
        f"# {title}",
        "",
        f"`{command_line()}`: {torch_machine_line(where)}.",
        "",
        note,
    ]
    for section in sections:
        lines += ["", f"## {section.title}", "", section.skipped or section.how]
        if section.figures:
            lines += ["", *markdown_table(section.figures)]
        if section.grid is not None:
            lines += ["", *markdown_grid(section.grid)]
    return "\n".join(lines) + "\n"
