"""The layout explorer in a browser: what it says about elements and events is what the core says."""

import json
import re
from html import unescape

import pytest

from crossframe.cli.layout import LayoutOptions, where_text
from crossframe.cli.plan import PlanOptions
from crossframe.draw.amounts import bytes_text, seconds_text
from crossframe.draw.shards import alike_ranks
from crossframe.shapes import model_shapes
from tests.browser import needs_chromium, opened
from tests.commands import invoke

pytestmark = needs_chromium
# world size, layout, strategy, dtype, shards, element
SELECTED = [
    ("1", "flat", "full_shard", "float32", 1, "head.weight[0,0]"),
    ("2", "flat", "no_shard", "float32", 1, "norm.bias[9]"),
    ("4", "per_param", "hybrid_shard", "bfloat16", 2, "blocks.1.mlp.up.weight[39,9]"),
    ("8", "ragged", "shard_grad_op", "float32", 8, "blocks.0.attention.key.weight[5,3]"),
    ("12", "flat", "full_shard", "float32, computed in bfloat16", 12, "token_embedding.weight[2559]"),
    ("12", "ragged", "hybrid_shard", "bfloat16", 6, "token_embedding.weight[100,3]"),
    ("12", "per_param", "full_shard", "float32", 12, "position_embedding.weight[7,0]"),
]
EVENT = 11
# Selects as a reader does, and writes down what the page then shows.
DRIVER = """
<script>
const set = (id, value, event) => {
  byId(id).value = value;
  byId(id).dispatchEvent(new Event(event));
};
const shown = [["first", byId("where").textContent, location.hash]];
for (const [world, layout, strategy, dtype, , element] of SELECTED) {
  for (const [id, value] of Object.entries({world, layout, strategy, dtype})) set(id, value, "change");
  set("element", element, "input");
  set("event", EVENT, "input");
  const values = ["world", "layout", "strategy", "dtype"].map((id) => byId(id).value);
  const bars = document.querySelectorAll("#bars rect.frame").length;
  shown.push([values, byId("where").textContent, byId("happens").textContent, byId("commands").textContent, bars,
    document.querySelectorAll("#bars rect.outline").length]);
}
const drawing = document.querySelector("#bars svg"), box = drawing.getBoundingClientRect();
drawing.dispatchEvent(new PointerEvent("click", {clientX: box.right - 4, clientY: box.top + 10}));
shown.push(byId("element").value);
shown.push([...document.querySelectorAll("#table tr")].map((line) => [...line.cells].map((cell) => cell.textContent)));
for (const wrong of ["head.weight[256,0]", "nothing[0]"]) {
  set("element", wrong, "input");
  shown.push(byId("where").textContent);
}
document.body.append(html("pre", {id: "results"}, JSON.stringify(shown)));
</script>
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explorer")
    page = folder / "page.html"
    status, printed = invoke("layout", "gpt-tiny", "--world-size", 12, "--html", page)
    assert status == 0 and printed.startswith("page: "), printed
    driver = DRIVER.replace("SELECTED", json.dumps(SELECTED)).replace("EVENT", str(EVENT))
    page.write_text(page.read_text().replace("</body>", f"{driver}</body>"))
    fragment = "world=4&layout=ragged&element=blocks.1.mlp_norm.bias[7]"
    document = opened(f"{page.as_uri()}#{fragment}", folder / "profile")
    found = re.search(r'<pre id="results">(.*?)</pre>', document, re.DOTALL)
    assert found, document[-2000:]
    return json.loads(unescape(found[1]))


def test_the_fragment_is_the_first_selection(results):
    sharding = LayoutOptions(4, "ragged").sharding(model_shapes("gpt-tiny", "float32")).data_sharding(0)
    assert results[0][1] == where_text(sharding, "blocks.1.mlp_norm.bias[7]")
    assert "world=4" in results[0][2] and "layout=ragged" in results[0][2]


@pytest.mark.parametrize("at", range(len(SELECTED)))
def test_rank_offset_and_memory_are_those_of_the_core(results, at):
    world, kind, strategy, dtype, shard, element = SELECTED[at]
    values, where, happens, commands, bars, outlines = results[1 + at]
    assert values == [world, kind, strategy, dtype]
    stored, _, compute = dtype.partition(", computed in ")
    shapes, replicas = model_shapes("gpt-tiny", stored), int(world) // shard
    aligned = (compute or None) if kind == "flat" else None
    sharding = (
        LayoutOptions(int(world), kind, compute_dtype=aligned, replicate=replicas).sharding(shapes).data_sharding(0)
    )
    assert where == where_text(sharding, element)
    plan = PlanOptions(
        int(world), strategy, shard if "hybrid" in strategy else None, kind=kind, param_dtype=compute or None
    )
    span = (spans := plan.cost(plan.model(shapes), 0).spans)[min(EVENT, len(spans) - 1)]
    assert happens.startswith(f"event {spans.index(span) + 1} of {len(spans)}, at {seconds_text(span.issue_seconds)}: ")
    assert happens.endswith(f"memory after it: {bytes_text(span.memory_bytes)}")
    (layout,) = (layout for _, layout in sharding.units if element.partition("[")[0] in {p.name for p in layout.params})
    assert outlines == 1 and bars == len(alike_ranks(layout))
    for command in commands.splitlines():
        assert invoke(*command.split()[1:])[0] == 0


def test_a_click_selects_the_element(results):
    sharding = LayoutOptions(12, "per_param").sharding(model_shapes("gpt-tiny", "float32")).data_sharding(0)
    found = where_text(sharding, results[1 + len(SELECTED)])
    offset = int(found.partition("at offset ")[2].split()[0])
    assert "on rank 0 " in found and offset > 0.98 * sharding.units[0][1].padded_shard_numel


def test_the_table_lists_parameters_and_ranks(results):
    head, first, *_ = results[2 + len(SELECTED)]
    assert head == ["parameter", "shape", "ranks", "hold", "in the shard"]
    assert first == ["token_embedding.weight", "(256, 10)", "rank 0", "rows 0:22", "0:220"]


def test_invalid_elements_are_explained(results):
    outside, unknown = results[-2:]
    assert outside == "head.weight[256,0]: expected an index for each dim of shape (256, 10), or one below 2,560"
    assert unknown == "no parameter is named 'nothing': expected parameter[index]"
