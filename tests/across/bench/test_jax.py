"""`python -m experiments bench jax`: what is compared with what, and that it runs from end to end."""

import json

import pytest
from typer.testing import CliRunner

from experiments.bench import jax_step
from experiments.bench.jax_step import BY_HAND, OURS, OURS_SCANNED, QUICK, REPLICATED, SCANNED_BY_HAND
from experiments.cli.commands import app

SECONDS = {REPLICATED: 2.0, BY_HAND: 4.0, SCANNED_BY_HAND: 8.0, **dict.fromkeys((*OURS, *OURS_SCANNED), 1.0)}


def found(figures, what):
    [figure] = [figure for figure in figures if figure.what == what]
    return figure.value, figure.limit


def test_a_step_and_its_compilation_are_held_to_named_sharding_in_the_same_form():
    figures = jax_step._step_figures(QUICK, [{"wall": {name: [t, t] for name, t in SECONDS.items()}}])
    compiled = jax_step._compile_figures(QUICK, [{"compile": SECONDS}])
    for name in OURS:
        assert found(figures, f"2 devices: {name} to {REPLICATED}") == (0.5, None)
        for held in (figures, compiled):
            assert found(held, f"2 devices: {name} to {BY_HAND}") == (0.25, 1.0)
    for name in OURS_SCANNED:
        for held in (figures, compiled):
            assert found(held, f"2 devices: {name} to {SCANNED_BY_HAND}") == (0.125, 1.0)


def test_memory_is_held_to_the_better_of_fsdp_by_hand():
    held = jax_step._memory_figures(QUICK, [{"bytes": SECONDS, "temporaries": SECONDS}])
    for name in (*OURS, *OURS_SCANNED):
        assert found(held, f"2 devices: {name} to {BY_HAND}") == (0.25, 1.0)


@pytest.mark.exhaustive
def test_a_step_in_jax_is_measured_and_written(tmp_path):
    path, readable = tmp_path / "jax.json", tmp_path / "jax.md"
    result = CliRunner().invoke(app, ["bench", "jax", "--quick", "--json", str(path), "--output", str(readable)])
    assert result.exit_code == 0, result.output
    sections = json.loads(path.read_text())["sections"]
    assert [section["title"] for section in sections] == [
        "Time of a step",
        "Time to compile",
        "Memory of the compiled step",
        "Depth",
    ]
    assert all(figure["value"] > 0 for section in sections for figure in section["figures"])
    assert readable.read_text().startswith("# jax_backend beside JAX")
