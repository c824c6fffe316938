"""`python -m experiments bench compile`: XLA's program next to the plan."""

import json

import jax
import pytest
from typer.testing import CliRunner

from crossframe.shapes.published import LlamaConfig
from crossframe.trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from experiments.bench import jax_compile
from experiments.bench.jax_compile import JIT, SHARD_MAP, Case, compile_case, planned
from experiments.cli.commands import app

TINY = LlamaConfig(3, width=16, mlp_width=32, num_heads=4, num_kv_heads=2, head_width=4, vocabulary=64, context=8)


def test_xla_has_the_collectives_and_bytes_of_the_plan():
    case = Case("tiny", TINY, 2, 2, SHARD_MAP, TINY.context)
    found = compile_case(case, jax.devices()[:4])
    assert found.traffic == planned(case)
    per_layer = {kind: traffic.per_layer for kind, traffic in found.traffic.items()}
    assert per_layer == {ALL_GATHER: 2, REDUCE_SCATTER: 1, ALL_REDUCE: 1}
    block = 4 * (TINY.numel - 2 * 64 * 16 - 16) // 3
    assert found.traffic[ALL_GATHER].num_bytes == 2 * 3 * block + 4 * (2 * 64 * 16 + 16)
    # Parameters and two moments in float32 over two shards, a count, and nine tokens.
    assert found.argument_bytes == 3 * 4 * TINY.numel // 2 + 4 + 4 * 9


def test_a_program_that_differs_from_the_plan_fails_and_one_that_does_not_compile_is_listed(tmp_path, monkeypatch):
    other = jax_compile.Compiled({ALL_GATHER: jax_compile.Traffic(1, 8, 0.0)}, 1, 1, 10**9, 1.0, 1.0)
    monkeypatch.setattr(jax_compile, "_in_time", lambda case, _: "too long" if case.contestant == JIT else other)
    path, readable = tmp_path / "a.json", tmp_path / "a.md"
    command = ["bench", "compile", "--model", "llama-3-8b", "--devices", "8"]
    result = CliRunner().invoke(app, [*command, "--json", str(path), "--output", str(readable)])
    assert result.exit_code == 1, result.output
    cases = json.loads(path.read_text())["cases"]
    assert [(case["replicate"], case["shard"]) for case in cases] == [(1, 8), (2, 4)] * 3
    assert [case.get("error") for case in cases] == [None] * 4 + ["too long"] * 2
    lines = readable.read_text().splitlines()
    assert sum("| too long |" in line for line in lines) == 2 and sum("| 1.00 GB |" in line for line in lines) == 4
    assert "| 8 | the plan | 2 + 1 | 1 + 1 | 0 | 0 | 60.04 GB | 32.12 GB |" in readable.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--model", "gpt"], "--model: expected some of"), (["--devices", "7"], "--devices: expected even numbers")],
)
def test_an_unknown_model_or_mesh_raises(options, message):
    result = CliRunner().invoke(app, ["bench", "compile", *options])
    assert result.exit_code == 2 and message in " ".join(result.output.split())
