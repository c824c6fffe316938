"""`crossframe layout` and `crossframe plan`, as a user meets them: what they print, what they write, and their exit status."""

import json
import math
import re
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from crossframe.api import Api
from crossframe.cli.commands import app
from crossframe.cli.layout import where_text
from crossframe.cost import step_cost
from crossframe.draw import layout_svg, layout_text, plan_svg, plan_text
from crossframe.layout import PerParamLayout, Sharding
from crossframe.mesh import MeshSpec
from crossframe.plan import Strategy, Sync, plan_units, step_plan
from crossframe.precision import PrecisionPolicy
from crossframe.shapes import model_shapes


def run(*arguments):
    """Exit status and what was printed."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def in_file(tmp_path, content):
    path = tmp_path / "params.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def refused(*arguments):
    """What a refusal says, in its one line."""
    status, said = run(*arguments)
    assert status == 2
    assert said.startswith("crossframe: ") and said.count("\n") == 1 and "Traceback" not in said, said
    return said.removeprefix("crossframe: ").rstrip()


def test_layout_prints_the_table_of_the_model():
    status, said = run("layout", "gpt-tiny", "--world-size", 3)
    sharding = Sharding(model_shapes("gpt-tiny").layouts("flat", 3), MeshSpec(3))
    assert status == 0 and said == layout_text(sharding, width=120) + "\n"
    assert "alike" in said and "2 × 42" in said  # noqa: RUF001


def test_layout_options_reach_the_layout(tmp_path):
    def same(sharding, *options, **drawn):
        status, said = run("layout", "gpt-tiny", "--world-size", 4, *options)
        assert status == 0 and said.rstrip() == layout_text(sharding, width=120, **drawn).rstrip()

    def shards(kind="flat", shard=4, replicate=1, dtype="float32", **options):
        return Sharding(model_shapes("gpt-tiny", dtype).layouts(kind, shard, **options), MeshSpec(shard, replicate))

    same(shards(keep_original=False), "--no-keep-original")
    same(shards(compute_dtype="bfloat16"), "--compute-dtype", "bfloat16")
    same(shards(dtype="bfloat16"), "--dtype", "bfloat16")
    same(shards("per_param"), "--layout", "per_param")
    same(shards("ragged", 2, 2), "--layout", "ragged", "--replicate", 2)
    same(shards(), "--unit", "", "--rank", 3, unit="", rank=3)
    same(shards(), "--unit", "(root)", unit="")
    path = tmp_path / "drawing.svg"
    status, said = run("layout", "gpt-tiny", "--world-size", 4, "--unit", "", "--rank", 3, "--svg", path)
    assert status == 0 and str(path) in said
    assert path.read_text(encoding="utf-8") == layout_svg(shards(), unit="", rank=3)


def test_layout_cuts_on_another_dim(tmp_path):
    path = in_file(tmp_path, {"a.weight": [6, 4], "a.bias": [6], "b.weight": [6, 8]})
    status, said = run(
        "layout", path, "--world-size", 2, "--layout", "per_param", "--dim", "*.weight=1", "--dim", "b*=-2"
    )
    assert status == 0
    layout = PerParamLayout(model_shapes(str(path)).params, 2, (1, 0, 0))
    assert said.rstrip() == layout_text(Sharding((("", layout),), MeshSpec(2)), width=120)


@pytest.mark.parametrize("kind", ["flat", "per_param", "ragged"])
def test_R06_where_agrees_with_the_sharding(kind):
    sharding = Sharding(model_shapes("gpt-tiny").layouts(kind, 3), MeshSpec(3, 2))
    for param in sharding.params:
        for element in (0, param.numel // 2, param.numel - 1):
            places = sharding.where(param.name, element)
            said = where_text(sharding, f"{param.name}[{element}]")
            ranks = ", ".join(str(rank) for rank, _, _ in places)
            assert f"in unit {places[0][1]!r}, on ranks {ranks} at offset {places[0][2]:,} of" in said
            index, rest = [], element
            for size in reversed(param.shape):
                rest, at = divmod(rest, size)
                index.insert(0, str(at))
            full = where_text(sharding, f"{param.name}[{', '.join(index)}]")
            assert full.partition(": ")[2] == said.partition(": ")[2]


def test_where_prints_lines_alone():
    status, said = run(
        "layout", "gpt-tiny", "--world-size", 2, "--where", "head.weight[0,3]", "--where", "norm.bias[1]"
    )
    assert status == 0 and len(said.splitlines()) == 2
    assert said.startswith("head.weight[0,3]: element 3 of 2,560, in unit '', on rank ")


def test_where_as_json():
    status, said = run("layout", "gpt-tiny", "--world-size", 4, "--replicate", 2, "--where", "norm.bias[1]", "--json")
    (place,) = json.loads(said)
    assert status == 0 and (place["element"], place["numel"], place["unit"]) == (1, 10, "")
    sharding = Sharding(model_shapes("gpt-tiny").layouts("flat", 2), MeshSpec(2, 2))
    assert [[rank, place["offset"]] for rank in place["ranks"]] == [
        [rank, offset] for rank, _, offset in sharding.where("norm.bias", 1)
    ]


def test_where_of_a_single_element():
    sharding = Sharding((("", model_of_scalar()),), MeshSpec(2))
    assert "element 0 of 1, in unit '', on rank 0 at offset 0" in where_text(sharding, "s")
    assert where_text(sharding, "s[]").endswith("on rank 0 at offset 0 of its shard")


@pytest.mark.parametrize("kind", ["flat", "per_param", "ragged"])
def test_layout_says_what_torch_refuses(tmp_path, kind):
    path = in_file(tmp_path, {"scale": [], "w": [5, 3]})
    status, said = run("layout", path, "--world-size", 2, "--layout", kind)
    assert status == 0
    assert said.endswith("\ntorch refuses parameters without dims, and only jax_backend shards them: scale\n")


def model_of_scalar():
    from crossframe.layout import FlatLayout
    from crossframe.params import ParamSpec

    return FlatLayout((ParamSpec("s", ()),), 2, True)


def cost_of(world_size=4, strategy=Strategy.FULL_SHARD, shard=None, model="gpt-tiny", kind="flat", api=Api.FSDP1,
            reshards=None, policy=None, tokens=4096, rank=0, **options):  # fmt: skip
    mesh = strategy.mesh(world_size, shard)
    compute = policy.param_dtype if policy else None
    layouts = model_shapes(model).layouts(kind, mesh.shard, compute_dtype=compute)
    units = plan_units(layouts, strategy, api=api, reshard_after_forward=reshards, policy=policy)
    return step_cost(step_plan(units, mesh, rank, **options), units, tokens=tokens)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {}),
        (("--strategy", "shard_grad_op", "--backward-prefetch", "none"),
         {"strategy": Strategy.SHARD_GRAD_OP, "backward_prefetch": None}),
        (("--strategy", "hybrid_shard", "--shard", 2, "--rank", 3),
         {"strategy": Strategy.HYBRID_SHARD, "shard": 2, "rank": 3}),
        (("--strategy", "no_shard"), {"strategy": Strategy.NO_SHARD}),
        (("--api", "fsdp2", "--reshard-after-forward", 2),
         {"kind": "per_param", "api": Api.FSDP2, "reshards": 2}),
        (("--api", "fsdp2", "--reshard-after-forward", "false", "--layout", "ragged"),
         {"kind": "ragged", "api": Api.FSDP2, "reshards": False}),
        (("--api", "fsdp2", "--reshard-after-forward", "true"),
         {"kind": "per_param", "api": Api.FSDP2, "reshards": True}),
        (("--microbatches", 3, "--sync", "last", "--forward-prefetch", 1),
         {"microbatches": 3, "sync": Sync.LAST, "forward_prefetch": 1}),
        (("--param-dtype", "bfloat16", "--reduce-dtype", "float32", "--tokens", 7),
         {"policy": PrecisionPolicy("bfloat16", "float32"), "tokens": 7}),
    ],
)  # fmt: skip
def test_plan_options_reach_the_plan(tmp_path, options, expected):
    path = tmp_path / "drawing.svg"
    status, said = run("plan", "gpt-tiny", "--world-size", 4, *options, "--svg", path)
    cost = cost_of(**expected)
    assert status == 0 and plan_text(cost, width=120) in said
    title = said.partition(":")[0]
    assert title.startswith("gpt-tiny on 4 ranks, ") and path.read_text(encoding="utf-8") == plan_svg(cost, title=title)


def test_plan_hardware_reaches_the_cost():
    _, usual = run("plan", "gpt-tiny", "--world-size", 4)
    for option in (("--bandwidth", "1e6"), ("--latency", "1"), ("--flops", "1e6")):
        status, said = run("plan", "gpt-tiny", "--world-size", 4, *option)
        assert status == 0 and said != usual
    assert run("plan", "gpt-tiny", "--world-size", 4, "--replica-bandwidth", "1e6") == (0, usual)
    hybrid = ("plan", "gpt-tiny", "--world-size", 4, "--strategy", "hybrid_shard", "--shard", 2)
    assert run(*hybrid, "--replica-bandwidth", "5e10") == run(*hybrid)
    status, said = run(*hybrid, "--replica-bandwidth", "1e6")
    assert status == 0 and said != run(*hybrid)[1]
    assert run("plan", "gpt-tiny", "--world-size", 4, "--latency", 0)[0] == 0


def test_plan_prints_every_event_when_asked():
    cost = cost_of()
    _, without = run("plan", "gpt-tiny", "--world-size", 4)
    _, said = run("plan", "gpt-tiny", "--world-size", 4, "--events")
    assert len(said.splitlines()) == len(without.splitlines()) + 2 + len(cost.spans)
    assert re.search(r"0 +forward +all-gather +\(root\)", said)


@pytest.mark.parametrize("command", [("layout",), ("layout", "--layout", "ragged"), ("plan",)], ids=" ".join)
def test_R10_the_largest_model_on_thousands_of_ranks_is_drawn_in_little_room(command, tmp_path):
    path = tmp_path / "drawing.svg"
    status, said = run(command[0], "llama-3-405b", *command[1:], "--world-size", 16384, "--svg", path)
    assert status == 0
    assert len(said.splitlines()) < 100 and path.stat().st_size < 1_000_000
    ElementTree.parse(path)


PLAIN = {"w": [4, 3], "b": [4]}


def test_layout_as_json_lists_every_element_once(tmp_path):
    status, said = run("layout", "gpt-tiny", "--world-size", 3, "--json", "--svg", tmp_path / "drawing.svg")
    assert (tmp_path / "drawing.svg").exists()
    found = json.loads(said)
    assert status == 0 and (found["world_size"], found["replicas"]) == (3, 1)
    expected = model_shapes("gpt-tiny")
    parameters = [param for unit in found["units"] for param in unit["parameters"]]
    assert {param["name"]: tuple(param["shape"]) for param in parameters} == {
        param.name: param.shape for param in expected.params
    }
    for param in parameters:
        held = [i for piece in param["pieces"] for i in range(piece["param_start"], piece["param_stop"])]
        assert sorted(held) == list(range(math.prod(param["shape"])))
    _, said = run("layout", "gpt-tiny", "--world-size", 3, "--json", "--rank", 1, "--unit", "blocks.0")
    assert [unit["unit"] for unit in json.loads(said)["units"]] == ["blocks.0"]
    pieces = [piece for param in json.loads(said)["units"][0]["parameters"] for piece in param["pieces"]]
    assert {piece["rank"] for piece in pieces} == {1}


def test_plan_as_json_has_the_events_and_the_peak():
    status, said = run("plan", "gpt-tiny", "--world-size", 4, "--json")
    found = json.loads(said)
    assert status == 0
    kinds = [event["kind"] for event in found["events"]]
    assert kinds.count("all_gather") == found["collectives"]["all_gather"]["count"] > 0
    assert found["peak_bytes"] == max(event["memory_bytes"] for event in found["events"])
    assert found["seconds"] == max(event["stop_seconds"] for event in found["events"])


@pytest.mark.parametrize("command", ["layout", "plan"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "params.json"),
        ("[]", "expected a mapping"),
        ('"w"', "expected a mapping"),
        ({"params": [{"shape": [3]}]}, "params[0]"),
        ({"params": [{"name": "w", "shape": [3]}, {"name": "b"}]}, "params[1]"),
        ({"w": [3, -1]}, "'w'"),
        ({"w": [3, 1.5]}, "'w'"),
        ({"params": [{"name": "w", "shape": [3], "dtype": "int3"}]}, "int3"),
        ({"params": [{"name": "w", "shape": [3]}, {"name": "w", "shape": [3]}]}, "'w'"),
        ({"params": [{"name": "w", "shape": [3]}], "units": ["x"]}, "'x'"),
    ],
)
def test_a_bad_file_is_refused_by_entry(tmp_path, command, content, expected):
    assert expected in refused(command, in_file(tmp_path, content), "--world-size", 2)


@pytest.mark.parametrize("command", ["layout", "plan"])
def test_what_both_commands_refuse(tmp_path, command):
    good = in_file(tmp_path, PLAIN)
    assert "unknown model 'gpt5'" in refused(command, "gpt5", "--world-size", 2)
    assert "none.json" in refused(command, tmp_path / "none.json", "--world-size", 2)
    assert "expected a world size of at least 1" in refused(command, good, "--world-size", 0)
    assert "expected a rank from 0 to 1, got 2" in refused(command, good, "--world-size", 2, "--rank", 2)
    assert "expected a rank from 0 to 1, got -1" in refused(command, good, "--world-size", 2, "--rank", -1)
    assert "layout: expected one of flat, per_param, ragged, got 'x'" in refused(
        command, good, "--world-size", 2, "--layout", "x"
    )
    assert "unknown dtype 'int3'" in refused(command, good, "--world-size", 2, "--dtype", "int3")
    nowhere = tmp_path / "none" / "drawing.svg"
    assert f"cannot use {nowhere}" in refused(command, good, "--world-size", 2, "--svg", nowhere)
    assert "cannot use" in refused(command, good, "--world-size", 2, "--svg", tmp_path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--replicate", 3), "replicate: expected a divisor of 4 ranks, got 3"),
        (("--replicate", 0), "replicate: expected a divisor of 4 ranks, got 0"),
        (("--replicate", -2), "replicate: expected a divisor of 4 ranks, got -2"),
        (("--layout", "ragged", "--no-keep-original"), "no-keep-original: only the flat layout"),
        (("--layout", "ragged", "--compute-dtype", "bfloat16"), "compute-dtype: only the flat layout"),
        (("--compute-dtype", "x"), "unknown dtype 'x'"),
        (("--dim", "w=1"), "dim: only the per_param layout"),
        (("--layout", "per_param", "--dim", "w"), "dim: expected PATTERN=DIM"),
        (("--layout", "per_param", "--dim", "x=1"), "dim: no parameter matches 'x': expected names like 'w'"),
        (("--layout", "per_param", "--dim", "w=1"), "dim 1 has size 3, which is not a multiple"),
        (("--layout", "per_param", "--dim", "w=7"), "expected a dim from 0 to 1"),
        (("--unit", "nope"), "no unit is named 'nope'"),
        (("--where", "x[0]"), "where: no parameter is named 'x'"),
        (("--where", "w[0,0,0]"), "expected an index for each dim of shape (4, 3)"),
        (("--where", "w[4,0]"), "expected an index for each dim of shape (4, 3)"),
        (("--where", "w[12]"), "or one below 12"),
        (("--where", "w[-1]"), "or one below 12"),
        (("--where", "w[a]"), "expected an index for each dim"),
        (("--where", "w"), "expected an index for each dim"),
        (("--where", ""), "where: no parameter is named ''"),
        (("--where", "w[0,0"), "where: no parameter is named 'w[0,0'"),
    ],
)
def test_what_layout_refuses(tmp_path, options, expected):
    assert expected in refused("layout", in_file(tmp_path, PLAIN), "--world-size", 4, *options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--strategy", "zero"), "strategy: expected one of full_shard, shard_grad_op, no_shard, hybrid_shard"),
        (("--strategy", "hybrid_shard"), "shard: hybrid_shard needs the number of ranks"),
        (("--strategy", "hybrid_shard", "--shard", 3), "divides 4 ranks, got 3"),
        (("--strategy", "hybrid_shard", "--shard", 0), "expected a size of at least 1, got 0"),
        (("--shard", 2), "full_shard: expected no size of a shard group, got 2"),
        (("--api", "fsdp3"), "api: expected one of fsdp1, fsdp2, got 'fsdp3'"),
        (("--reshard-after-forward", "2"), "add --api fsdp2"),
        (("--api", "fsdp2", "--reshard-after-forward", "yes"), "expected true, false or a number of ranks, got 'yes'"),
        (("--api", "fsdp2", "--reshard-after-forward", "0"), "expected true, false or a number of ranks, got '0'"),
        (("--api", "fsdp2", "--reshard-after-forward", "9" * 5000), "expected true, false or a number of ranks"),
        (("--api", "fsdp2", "--reshard-after-forward", "3"), "a group that divides the 4 ranks"),
        (("--backward-prefetch", "x"), "backward-prefetch: expected one of pre, post, none, got 'x'"),
        (("--forward-prefetch", -1), "forward_prefetch: expected a number of at least 0"),
        (("--microbatches", 0), "microbatches: expected a number of at least 1"),
        (("--sync", "never"), "sync: expected one of each, last, all_reduce_last, got 'never'"),
        (("--sync", "all_reduce_last"), "the mesh has one replica"),
        (("--tokens", 0), "tokens: expected a number of at least 1"),
        (("--bandwidth", 0), "bandwidth: expected a finite number above 0, got 0"),
        (("--bandwidth", "nan"), "bandwidth: expected a finite number above 0, got nan"),
        (("--replica-bandwidth", 0), "replica-bandwidth: expected a finite number above 0, got 0"),
        (("--flops", "inf"), "flops: expected a finite number above 0, got inf"),
        (("--latency", -1), "latency: expected a finite number above 0 or 0, got -1"),
        (("--param-dtype", "int3"), "unknown dtype 'int3'"),
        (("--reduce-dtype", "int3"), "unknown dtype 'int3'"),
    ],
)
def test_what_plan_refuses(tmp_path, options, expected):
    assert expected in refused("plan", in_file(tmp_path, PLAIN), "--world-size", 4, *options)
