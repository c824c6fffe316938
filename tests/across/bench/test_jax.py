"""`python -m experiments bench jax`: what is compared with what, and that it runs from end to end."""

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from experiments.bench import jax_step
from experiments.bench.command import Bench, jax_machine, run_bench
from experiments.bench.figure import Section
from experiments.bench.jax_step import (
    BY_HAND,
    CONTESTANTS,
    OURS,
    OURS_SCANNED,
    QUICK,
    REPLICATED,
    SCANNED_BY_HAND,
    Compiled,
)
from experiments.cli.commands import app

SECONDS = {REPLICATED: 2.0, BY_HAND: 4.0, SCANNED_BY_HAND: 8.0, **dict.fromkeys((*OURS, *OURS_SCANNED), 1.0)}
TIMES = {name: [seconds, seconds] for name, seconds in SECONDS.items()}
COMPILED = {name: Compiled(int(seconds), 0) for name, seconds in SECONDS.items()}


def found(figures, what):
    [figure] = [figure for figure in figures if figure.what == what]
    return figure.value, figure.limit


def test_a_step_and_its_compilation_are_held_to_named_sharding_in_the_same_form():
    figures, compiled = jax_step._step_figures(TIMES), jax_step._compile_figures(TIMES)
    for name in OURS:
        assert found(figures, f"{name} to {REPLICATED}") == (0.5, None)
        for held in (figures, compiled):
            assert found(held, f"{name} to {BY_HAND}") == (0.25, 1.0)
    for name in OURS_SCANNED:
        for held in (figures, compiled):
            assert found(held, f"{name} to {SCANNED_BY_HAND}") == (0.125, 1.0)


def test_memory_is_held_to_the_better_of_fsdp_by_hand():
    held = jax_step._memory_figures(COMPILED)
    for name in (*OURS, *OURS_SCANNED):
        assert found(held, f"{name} to {BY_HAND}") == (0.25, 1.0)


def test_a_program_that_compiles_too_slowly_is_left_out_with_what_follows(monkeypatch):
    def run(self, work, name, *_, limit=None):
        if work is jax_step._seconds_to_compile:
            return SECONDS[name]
        return COMPILED[name] if name in CONTESTANTS[:5] else None

    monkeypatch.setattr(jax_step._Process, "run", run)
    *_, missing, memory, steps, compiling = jax_step._world_sections(2, QUICK, "")
    assert missing == "our shard_map, scan was not compiled within 600 s; it and what follows it are left out."
    assert missing in compiling.how and missing in memory.how and missing == steps.skipped
    assert found(compiling.figures, "our jit")[0] == found(memory.figures, "our jit")[0] * 1e6 == 1.0


def test_sections_are_printed_and_written_as_they_are_measured(tmp_path):
    seen = []

    def measure(quick):
        yield "2 devices: measured"
        yield Section("One", "so")
        seen.append(json.loads(path.read_text())["sections"][0]["title"] + readable.read_text())
        raise KeyboardInterrupt

    path, readable, console = tmp_path / "a.json", tmp_path / "a.md", Console(record=True)
    with pytest.raises(KeyboardInterrupt):
        run_bench(
            console, Bench("All", jax_machine, measure), output=readable, json_output=path, quick=True, strict=False
        )
    assert seen[0].startswith("One# All") and "## One" in seen[0]
    assert "2 devices: measured" in console.export_text()


@pytest.mark.exhaustive
def test_a_step_in_jax_is_measured_and_written(tmp_path):
    path, readable = tmp_path / "jax.json", tmp_path / "jax.md"
    result = CliRunner().invoke(app, ["bench", "jax", "--quick", "--json", str(path), "--output", str(readable)])
    assert result.exit_code == 0, result.output
    sections = json.loads(path.read_text())["sections"]
    assert [section["title"] for section in sections] == [
        "Memory of the compiled step, 2 devices",
        "Time of a step, 2 devices",
        "Time to compile, 2 devices",
        "Depth",
        "Time that training waits for a checkpoint",
    ]
    assert all(figure["value"] > 0 for section in sections for figure in section["figures"])
    assert readable.read_text().startswith("# jax_backend beside JAX")
