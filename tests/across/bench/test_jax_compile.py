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
    assert (found.traffic, found.model_traffic) == planned(case)
    per_layer = {kind: traffic.per_layer for kind, traffic in found.traffic.items()}
    assert per_layer == {ALL_GATHER: 2, REDUCE_SCATTER: 1, ALL_REDUCE: 1}
    block = 4 * (TINY.numel - 2 * 64 * 16 - 16) // 3
    assert found.traffic[ALL_GATHER].num_bytes == 2 * 3 * block + 4 * (2 * 64 * 16 + 16)
    # Parameters and two moments in float32 over two shards, a count, and nine tokens.
    assert found.argument_bytes == 3 * 4 * TINY.numel // 2 + 4 + 4 * 9


def test_tensor_parallelism_has_the_bytes_of_the_plan_between_ranks():
    case = Case("tiny", TINY, 1, 2, SHARD_MAP, TINY.context, tp=2)
    found = compile_case(case, jax.devices()[:4])
    between, inside = planned(case)
    assert found.traffic == between
    assert {kind: each.per_layer for kind, each in inside.items()} == {ALL_REDUCE: 4}
    # Two outputs, one of them again in backward; and the gradients of the inputs of query, key, value, gate and up, of which the
    # plan adds those of one input first, and XLA does not.
    assert found.model_traffic[ALL_REDUCE].per_layer == 8
    scales = 7 * TINY.width
    parameters = (TINY.numel - scales) // 4 + scales // 2
    assert found.argument_bytes == 3 * 4 * parameters + 4 + 4 * 9


def test_a_program_that_differs_from_the_plan_fails_and_one_that_does_not_compile_is_listed(tmp_path, monkeypatch):
    other = jax_compile.Compiled({ALL_GATHER: jax_compile.Traffic(1, 8, 0.0)}, {}, 1, 1, 10**9, 1.0, 1.0)
    monkeypatch.setattr(jax_compile, "_in_time", lambda case, _: "too long" if case.contestant == JIT else other)
    path, readable = tmp_path / "a.json", tmp_path / "a.md"
    command = ["bench", "compile", "--model", "llama-3-8b", "--devices", "8"]
    result = CliRunner().invoke(app, [*command, "--json", str(path), "--output", str(readable)])
    assert result.exit_code == 1, result.output
    cases = json.loads(path.read_text())["cases"]
    meshes = [(1, 8, 1), (2, 4, 1), (1, 4, 2), (2, 2, 2)]
    assert [(case["replicate"], case["shard"], case["tp"]) for case in cases] == 3 * meshes
    assert [case.get("error") for case in cases] == [None] * 8 + ["too long"] * 4
    lines = readable.read_text().splitlines()
    assert sum("| too long |" in line for line in lines) == 4 and sum("| 1.00 GB |" in line for line in lines) == 8
    assert "| 8 | the plan | 2 + 1 | 1 + 1 | 0 | 0 | 60.04 GB | 32.12 GB |" in readable.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--model", "gpt"], "--model: expected some of"), (["--devices", "7"], "--devices: expected even numbers")],
)
def test_an_unknown_model_or_mesh_raises(options, message):
    result = CliRunner().invoke(app, ["bench", "compile", *options])
    assert result.exit_code == 2 and message in " ".join(result.output.split())
