"""`crossframe layout` and `crossframe plan` with --tp, --ep and --pp, as a user meets them."""

import json
import math
import re

import pytest

from crossframe.api import Api
from crossframe.cost import step_cost
from crossframe.draw import plan_text
from crossframe.mesh import ParallelMesh
from crossframe.parallel import ParallelModel, ParallelSharding, Style
from crossframe.plan import plan_units, step_plan
from crossframe.shapes import model_shapes
from crossframe.strategy import Schedule, Sync
from tests.core.commands.test_show import in_file, refused, run

GPT = model_shapes("gpt-tiny")
MOE = {
    "params": [
        {"name": "embed.weight", "shape": [12, 4]},
        {"name": "h.0.router.weight", "shape": [4, 4]},
        {"name": "h.0.experts.w", "shape": [4, 4, 3]},
        {"name": "head.weight", "shape": [12, 4]},
    ],
    "units": ["h.0"],
}


def test_layout_lists_the_part_of_each_stage():
    status, said = run("layout", "gpt-tiny", "--world-size", 8, "--tp", 2, "--pp", 2)
    assert status == 0
    assert "tp 2, vocab: 1 parameter, 32.5 % of all elements" in said
    assert "stage 0 of 2 (ranks 0 … 3)" in said and "stage 1 of 2 (ranks 4 … 7)" in said
    assert said.count("token_embedding.weight") == said.count("head.weight") == 1
    assert "rank 0" not in said and "shard 0" in said
    status, said = run("layout", "gpt-tiny", "--world-size", 8, "--tp", 2, "--pp", 2, "--rank", 5, "--unit", "blocks.1")
    assert status == 0 and "rank 5: pp 1, dp 0, tp 1" in said and "stage" not in said
    assert "blocks.1.mlp.down.weight         (10, 40)  [:, 20:40]" in said


@pytest.mark.parametrize("kind", ["flat", "per_param"])
def test_R39_layout_as_json_lists_every_element_for_each_of_its_ranks(kind):
    status, said = run("layout", "gpt-tiny", "--world-size", 12, "--tp", 2, "--pp", 2, "--layout", kind, "--json")
    found = json.loads(said)
    assert status == 0 and found["axes"] == {"pp": 2, "replicate": 1, "dp": 3, "ep": 1, "tp": 2}
    held = {param.name: [0] * param.numel for param in GPT.params}
    for rank in found["ranks"]:
        for param in (param for unit in rank["units"] for param in unit["parameters"]):
            for piece in param["pieces"]:
                assert piece["rank"] == rank["rank"]
                run_numel = (piece["shard_stop"] - piece["shard_start"]) // piece["num_runs"]
                for k in range(piece["num_runs"]):
                    start = piece["param_start"] + k * piece["stride"]
                    held[param["name"]][start : start + run_numel] = [
                        count + 1 for count in held[param["name"]][start : start + run_numel]
                    ]
    for param in GPT.params:
        times = set(held[param.name])
        replicated = "norm" in param.name or "position" in param.name or param.name.endswith(("out.bias", "down.bias"))
        assert times == ({2} if replicated else {1}), param.name
    status, said = run(
        "layout", "gpt-tiny", "--world-size", 12, "--tp", 2, "--pp", 2, "--rank", 7, "--unit", "", "--json"
    )
    (only,) = json.loads(said)["ranks"]
    assert only["coordinate"] == {"pp": 1, "replicate": 0, "dp": 0, "ep": 0, "tp": 1}
    assert [param["part"] for param in only["units"][0]["parameters"]] == [[10], [10], [128, 10]]


def test_R39_where_names_the_ranks_of_all_axes():
    status, said = run(
        "layout", "gpt-tiny", "--world-size", 8, "--tp", 2, "--pp", 2, "--where", "norm.bias[1]", "--where",
        "head.weight[255, 9]",
    )  # fmt: skip
    lines = said.splitlines()
    assert status == 0 and "in unit '', on ranks 4, 5 at offset" in lines[0] and "on rank 7 at offset" in lines[1]


def test_plan_of_a_rank_is_that_of_its_part():
    options = ("--api", "fsdp2", "--microbatches", 3, "--sync", "last", "--schedule", "gpipe", "--rank", 6)
    status, said = run("plan", "gpt-tiny", "--world-size", 8, "--tp", 2, "--pp", 2, *options)
    model = ParallelModel(GPT, ParallelMesh.of(pp=2, replicate=1, dp=2, ep=1, tp=2))
    units = plan_units(ParallelSharding(model, "per_param").layouts(6), api=Api.FSDP2)
    plan = step_plan(units, model.mesh, 6, microbatches=3, sync=Sync.LAST, schedule=Schedule.GPIPE)
    assert status == 0 and plan_text(step_cost(plan, units, tokens=4096), width=120) in said
    assert said.startswith("gpt-tiny on 8 ranks, tp 2, pp 2, full_shard, fsdp2: the step of rank 6")


def test_styles_and_stages_of_options(tmp_path):
    path = in_file(tmp_path, MOE)
    options = ("--world-size", 4, "--layout", "per_param", "--json", "--rank", 3)
    styles = ("--parallel", "embed=colwise", "--parallel", "*.router=rowwise", "--parallel", "head=replicated")
    status, said = run("layout", path, *options, "--tp", 2, "--ep", 2, *styles)
    (rank,) = json.loads(said)["ranks"]
    parts = {param["name"]: param["part"] for unit in rank["units"] for param in unit["parameters"]}
    assert status == 0 and parts == {
        "embed.weight": [6, 4],
        "h.0.router.weight": [4, 2],
        "h.0.experts.w": [2, 4, 3],
        "head.weight": [12, 4],
    }
    assert [unit["unit"] for unit in rank["units"]] == ["", "h.0", "h.0.experts"]
    model = ParallelModel(
        model_shapes(str(path)),
        ParallelMesh.of(dp=1, ep=2, tp=2),
        [("*.experts", Style.EXPERTS), ("embed", Style.COLWISE)],
    )
    assert math.prod(model.part(0).params[0].shape) == 24
    status, said = run("layout", "gpt-tiny", "--world-size", 2, "--pp", 2, "--stage", "norm*=0", "--json", "--rank", 0)
    names = [p["name"] for unit in json.loads(said)["ranks"][0]["units"] for p in unit["parameters"]]
    assert status == 0 and "norm.weight" in names and "head.weight" not in names


@pytest.mark.parametrize("command", ["layout", "plan"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--tp", 3), "tp, pp: expected sizes whose product divides 4 ranks, got 3 x 1"),
        (("--tp", 0), "tp: expected a number of ranks of at least 1, got 0"),
        (("--pp", 4, "--tp", 2), "tp, pp: expected sizes whose product divides 4 ranks, got 2 x 4"),
        (("--ep", 3), "ep: expected a divisor of the 4 ranks of a shard group, got 3"),
        (("--ep", 2), "axis 'ep' of size 2: no known style matches a module of model 'gpt-tiny'"),
        (("--pp", 4), "axis 'pp' of size 4: model 'gpt-tiny' has 2 units"),
        (("--tp", 4), "'blocks.0.attention.query.weight' of shape (10, 10), axis 'tp' of size 4: dim 0 has 10 elements"),
        (("--parallel", "x=colwise"), "parallel: styles are of modules that --tp or --ep divides"),
        (("--stage", "x=1"), "stage: without --pp there is one stage"),
        (("--tp", 2, "--parallel", "head"), "parallel: expected PATTERN=STYLE"),
        (("--tp", 2, "--parallel", "head=x"), "parallel: expected one of colwise, rowwise, vocab"),
        (("--tp", 2, "--parallel", "x=colwise"), "no module with parameters matches 'x'"),
        (("--pp", 2, "--stage", "head"), "stage: expected PATTERN=STAGE"),
        (("--pp", 2, "--stage", "x=1"), "stage of 'x': no unit and no parameter of the root matches"),
        (("--pp", 2, "--rank", 4), "expected a rank from 0 to 3, got 4"),
    ],
)  # fmt: skip
def test_what_both_commands_refuse_of_model_axes(command, options, expected):
    assert expected in refused(command, "gpt-tiny", "--world-size", 4, *options)


def test_what_one_command_refuses_of_model_axes(tmp_path):
    assert "schedule: without --pp there is no pipeline" in refused(
        "plan", "gpt-tiny", "--world-size", 4, "--schedule", "gpipe"
    )
    assert "schedule: expected one of 1f1b, gpipe, got 'x'" in refused(
        "plan", "gpt-tiny", "--world-size", 4, "--pp", 2, "--schedule", "x"
    )
    tp = ("layout", "gpt-tiny", "--world-size", 4, "--tp", 2)
    assert "svg: draws the ranks of one shard group" in refused(*tp, "--svg", tmp_path / "x.svg")
    assert "tp, ep, pp: the page of --html has no such choice" in refused(*tp, "--html", tmp_path / "x.html")
    assert "no unit is named 'x'" in refused(*tp, "--unit", "x")
    assert "replicate: expected a divisor of 2 ranks, got 4" in refused(*tp, "--replicate", 4)


def test_plan_states_all_parts_and_the_traffic_of_the_axes():
    options = ("plan", "llama-3-8b", "--world-size", 16, "--tp", 4, "--pp", 2, "--tokens", 100, "--microbatches", 3)
    status, said = run(*options)
    assert status == 0 and "model axes, for rank 0; not in the times above" in said
    # Two in forward and two in backward of each of 16 blocks, and one of the embedding, in three microbatches.
    assert re.search(r"tp 4 +195 . all-reduce", said) and re.search(r"pp 2 +3 . send", said)
    assert "a stage waits for others for 25.0 % of the step" in said
    status, said = run(*options, "--json")
    found = json.loads(said)
    assert status == 0 and [part["coordinate"]["pp"] for part in found["parts"]] == [0, 1]
    assert found["peak_bytes"] == found["parts"][0]["peak_bytes"]
    for kind, total in found["total_bytes"].items():
        assert total == 8 * sum(part["collectives"][kind]["num_bytes"] for part in found["parts"])
    assert {(each["axis"], each["kind"], each["phase"]) for each in found["model_axes"]} == {
        ("tp", "all_reduce", "forward"), ("tp", "all_reduce", "backward"), ("pp", "send", "forward")
    }  # fmt: skip
    assert found["idle_share"] == 1 / 4
    assert "axes" not in json.loads(run("plan", "gpt-tiny", "--world-size", 2, "--json")[1])


def test_plan_of_experts_needs_their_number_for_a_token(tmp_path):
    plan = ("plan", in_file(tmp_path, MOE), "--world-size", 4, "--ep", 2)
    assert "expected the number of experts that process a token, from 1 to 4, got None" in refused(
        *plan, "--parallel", "embed=vocab"
    )
    status, said = run(*plan, "--parallel", "embed=vocab", "--experts-per-token", 2)
    assert status == 0 and re.search(r"ep 2 +4 . all-to-all", said) and "expert shards" in said
    status, said = run(*plan, "--experts-per-token", 2)
    assert status == 0 and "not stated, since no module of style vocab or rowwise states the width" in said
    assert "experts-per-token: without --ep" in refused("plan", "gpt-tiny", "--world-size", 2, "--experts-per-token", 2)
