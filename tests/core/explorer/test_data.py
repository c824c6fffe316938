"""The data of the layout explorer against the core that it shows."""

import json

import numpy as np
import pytest

from crossframe.cli.plan import PlanOptions
from crossframe.errors import UsageError
from crossframe.explorer import DtypeChoice, dtype_choices, explorer_data, explorer_page
from crossframe.layout import Sharding
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.shapes import ModelShapes, model_shapes
from tests.commands import invoke

WORLD_SIZE = 12  # more ranks than are listed one by one, and no power of two


@pytest.fixture(scope="module")
def choices():
    return dtype_choices(lambda dtype: model_shapes("gpt-tiny", dtype), "float32")


@pytest.fixture(scope="module")
def data(choices):
    return json.loads(json.dumps(explorer_data(choices, WORLD_SIZE)))


def combinations(data, choices):
    """(world size, strategy, layout, choice of dtypes, combination)"""
    for key, found in data["combinations"].items():
        world_size, strategy, kind, dtype = key.split(" ", 3)
        yield int(world_size), strategy, kind, next(each for each in choices if each.name == dtype), found


def held(units):
    """What each shard rank holds according to the data: {(rank, parameter): (range of the shard, start in the parameter)}, and
    the padding {(rank, unit): ranges of the shard}."""
    pieces, padding = {}, {}
    for unit in units:
        for row in unit["rows"]:
            for group, start, stop, param_start, _ in row["held"]:
                first, number = unit["groups"][group]
                for k in range(number):
                    for name in unit["names"]:
                        if "padding" in row:
                            padding.setdefault((first + k, name), set()).add((start, stop))
                        else:
                            param = f"{name}.{row['label']}" if name else row["label"]
                            pieces[first + k, param] = (start, stop), param_start + k * (stop - start)
    return pieces, padding


def test_every_element_has_one_holder_per_replica(data, choices):
    checked = set()
    for _, _, kind, choice, found in combinations(data, choices):
        replicas, shard = found["mesh"]
        if (found["sharding"], replicas) in checked:
            continue
        checked.add((found["sharding"], replicas))
        layouts = choice.shapes.layouts(kind, shard, compute_dtype=choice.compute)
        sharding = Sharding(layouts, MeshSpec(shard, replicas))
        pieces, padding = held(data["shardings"][found["sharding"]])
        holders = {param.name: np.zeros(param.numel, int) for param in sharding.params}
        for rank in range(sharding.mesh.world_size):
            mine = {name: place for (holder, name), place in pieces.items() if holder == rank % shard}
            core = {p.name: ((p.shard_start, p.shard_stop), p.param_start) for _, p in sharding.pieces(rank)}
            assert mine == core
            for name, ((start, stop), at) in mine.items():
                holders[name][at : at + stop - start] += 1
        assert all((numbers == replicas).all() for numbers in holders.values())
        for unit, layout in layouts:
            for rank in range(shard):
                runs = {(run.start, run.stop) for run in layout.padding(rank)}
                assert padding.get((rank, unit), set()) == runs
    assert len(data["combinations"]) == len(choices) * 3 * (
        3 * 5 + 3
    )  # 4, 8 and 12 ranks have a shard group for hybrid_shard


def test_memory_of_each_event_is_that_of_the_plan(data, choices):
    for world_size, strategy, kind, choice, found in combinations(data, choices):
        shard = found["mesh"][1] if strategy == "hybrid_shard" else None
        options = PlanOptions(world_size, strategy, shard, kind=kind, param_dtype=choice.compute)
        spans = options.cost(options.model(choice.shapes), 0).spans
        step = data["steps"][found["step"]]
        memory = {name: data["columns"][index] for name, index in step["memory"].items()}
        for at, span in enumerate(spans):
            assert {name: values[at] for name, values in memory.items() if values[at]} == {
                name: held for name, held in span.memory.items() if held
            }
        assert data["columns"][step["bytes"]] == [span.event.num_bytes for span in spans]


def test_units_are_full_while_they_have_memory(data):
    for step in data["steps"]:
        plan = data["plans"][step["plan"]]
        if "full parameters" not in step["memory"]:
            assert plan["full"] == [[[0, len(plan["events"])]]] * len(plan["units"])
            continue
        for at, held_bytes in enumerate(data["columns"][step["memory"]["full parameters"]]):
            assert bool(held_bytes) == any(start <= at < stop for ranges in plan["full"] for start, stop in ranges)


def test_a_layout_that_the_core_refuses_is_explained():
    mixed = ModelShapes("m", (ParamSpec("a", (4,), "float32"), ParamSpec("b", (4,), "bfloat16")))
    data = explorer_data(dtype_choices(lambda _: mixed, "float32"), 2)
    assert [each["name"] for each in data["dtypes"]] == ["as stored", "as stored, computed in bfloat16"]
    assert "holds one dtype" in data["combinations"]["2 full_shard flat as stored"]["refused"]
    assert "sharding" in data["combinations"]["2 full_shard per_param as stored"]


def test_too_many_units_are_refused_at_once():
    units = tuple(f"blocks.{i}" for i in range(10**4))
    shapes = ModelShapes("m", tuple(ParamSpec(f"{unit}.w", (1,)) for unit in units), units)
    with pytest.raises(UsageError, match=r"html: .* expected at most 32,768: pass a smaller --world-size"):
        explorer_data([DtypeChoice("float32", shapes, "float32")], 8)


def test_names_cannot_leave_the_data_of_a_page():
    name = "</script><script>alert(1)</script><!--"
    shapes = ModelShapes(name, (ParamSpec(name, (4,)),))
    data = explorer_data([DtypeChoice("float32", shapes, "float32")], 2)
    page = explorer_page(data, model=name, start={})
    assert page.count("</script>") == 2 and "<script>alert" not in page and "<!--" not in page
    assert "://" not in page.replace("http://www.w3.org/", "")  # loads nothing: those are names of XML


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(("--rank", 1), "rank: the page of --html has no such choice", id="rank"),
        pytest.param(("--layout", "per_param", "--dim", "*=0"), "dim: the page of --html has no such choice", id="dim"),
        pytest.param(
            ("--where", "norm.bias[0]", "--where", "norm.bias[1]"), "points at one element, got 2", id="two elements"
        ),
        pytest.param(("--where", "nothing[0]"), "no parameter is named 'nothing'", id="unknown element"),
    ],
)
def test_options_that_the_page_lacks_are_refused(tmp_path, options, message):
    status, printed = invoke("layout", "gpt-tiny", "--world-size", 2, "--html", tmp_path / "page.html", *options)
    assert status == 2 and message in printed
    assert not (tmp_path / "page.html").exists()
