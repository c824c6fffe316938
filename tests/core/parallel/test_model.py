"""Models on meshes with model axes (R39): the part of each rank, and the owners of every element."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.errors import CrossframeError
from crossframe.layout import LAYOUT_KINDS, Sharding
from crossframe.mesh import ParallelMesh
from crossframe.parallel import ParallelModel, ParallelSharding, Style
from crossframe.params import ParamSpec
from crossframe.shapes import ModelShapes, model_shapes
from crossframe.shapes.published import PUBLISHED
from tests.core.helpers.random_layouts import QUICK

# An embedding, blocks with a perceptron and stacked or numbered experts, and a head.
RULES = [
    ("embed", Style.VOCAB),
    ("*.up", Style.COLWISE),
    ("*.down", Style.ROWWISE),
    ("*.experts", Style.EXPERTS),
    ("head", Style.COLWISE),
]


def shapes_of(num_blocks=2, *, numbered=False, num_experts=4, width=4):
    params = [ParamSpec("embed.weight", (12, width))]
    for i in range(num_blocks):
        experts = [(f"experts.{k}.w", (width, 3)) for k in range(num_experts)]
        stacked = [("experts.w", (num_experts, width, 3)), ("experts.b", (num_experts, 3))]
        named = [
            ("norm.weight", (width,)),
            ("up.weight", (12, width)),
            ("up.bias", (12,)),
            *(experts if numbered else stacked),
            ("down.weight", (width, 12)),
            ("down.bias", (width,)),
        ]
        params += [ParamSpec(f"h.{i}.{name}", shape) for name, shape in named]
    params += [ParamSpec("norm.weight", (width,)), ParamSpec("head.weight", (12, width))]
    return ModelShapes("m", tuple(params), tuple(f"h.{i}" for i in range(num_blocks)))


@st.composite
def meshes(draw):
    sizes = {
        "pp": draw(st.sampled_from([1, 1, 2])),
        "replicate": draw(st.sampled_from([1, 1, 2])),
        "dp": draw(st.integers(1, 3)),
        "ep": draw(st.sampled_from([1, 2, 4])),
        "tp": draw(st.sampled_from([1, 2, 3])),
    }
    names = draw(st.permutations(list(sizes)))
    return ParallelMesh(tuple(names), tuple(sizes[name] for name in names))


@QUICK
@given(meshes())
def test_R39_coordinates_are_row_major_and_groups_vary_along_their_axes_only(mesh):
    ranks = range(mesh.world_size)
    grid = [()]
    for size in mesh.sizes:
        grid = [(*at, i) for at in grid for i in range(size)]
    assert [tuple(mesh.coordinate(rank).values()) for rank in ranks] == grid
    assert [mesh.rank(mesh.coordinate(rank)) for rank in ranks] == list(ranks)
    for rank in ranks:
        for axes in (("tp",), ("dp", "ep"), ("ep", "dp", "pp"), ()):
            same = {name: at for name, at in mesh.coordinate(rank).items() if name not in axes}
            assert tuple(mesh.group(rank, *axes)) == tuple(
                r for r in ranks if mesh.coordinate(r) | same == mesh.coordinate(r)
            )


@QUICK
@given(meshes(), st.booleans())
def test_R39_data_ranks_are_replicas_times_shards_of_one_model_rank(mesh, experts):
    model_axes = ["pp", "tp", *(["ep"] if experts else [])]
    for rank in range(mesh.world_size):
        data = mesh.data_ranks(rank, experts=experts)
        fixed = {axis: mesh.coordinate(rank)[axis] for axis in model_axes}
        same = [r for r in range(mesh.world_size) if mesh.coordinate(r) | fixed == mesh.coordinate(r)]
        assert sorted(data.ranks) == same and data.mesh.world_size == len(same)
        assert tuple(data.shard_group(rank)) == tuple(mesh.group(rank, "dp", *(() if experts else ("ep",))))
        assert tuple(data.replicate_group(rank)) == tuple(mesh.group(rank, "replicate"))


@QUICK
@given(meshes(), st.sampled_from(LAYOUT_KINDS), st.booleans(), st.booleans())
def test_R39_each_element_is_owned_by_the_ranks_of_its_part_alone(mesh, kind, numbered, replicated_head):
    shapes = shapes_of(numbered=numbered)
    rules = [*RULES, *([("head", Style.REPLICATED)] if replicated_head else [])]
    model = ParallelModel(shapes, mesh, rules)
    sharding = ParallelSharding(model, kind)
    owners = defaultdict(list)
    for rank in range(mesh.world_size):
        offsets = []
        for unit, piece in sharding.pieces(rank):
            assert piece.rank == rank
            for run in piece.runs():
                for k in range(run.numel):
                    owners[piece.name, run.param_start + k].append((rank, unit, run.shard_start + k))
                    offsets.append((unit, run.shard_start + k))
        assert len(set(offsets)) == len(offsets)
    tp, ep, pp, replicate = (mesh.size(axis) for axis in ("tp", "ep", "pp", "replicate"))
    assert {name for name, _ in owners} == {param.name for param in shapes.params}
    for param in shapes.params:
        divided = ("embed", "up", "down.weight", *(() if replicated_head else ("head",)))
        by_tp = any(part in param.name for part in divided)
        for element in range(param.numel):
            ranks = [rank for rank, _, _ in owners[param.name, element]]
            assert len(ranks) == len(set(ranks)) == replicate * (1 if by_tp else tp), (param.name, element)
            coordinates = [mesh.coordinate(rank) for rank in ranks]
            # All of one stage; those of an expert on one index of "ep", those of a divided dim on one of "tp".
            assert len({at["pp"] for at in coordinates}) == 1
            row, rest = divmod(element, param.numel // param.shape[0])
            number = int(param.name.split(".")[3]) if "experts." in param.name and numbered else row
            if "experts." in param.name and ep > 1:
                assert {at["ep"] for at in coordinates} == {number * ep // 4}
            column = rest if "down" in param.name else row
            size = 12
            if by_tp:
                assert {at["tp"] for at in coordinates} == {column * tp // size}
        assert sharding.where(param.name, param.numel - 1) == tuple(sorted(owners[param.name, param.numel - 1]))
    stages = model.stages
    assert (
        stages["embed.weight"] == stages["h.0.norm.weight"] == 0
        and stages["head.weight"] == stages["norm.weight"] == pp - 1
    )


@pytest.mark.parametrize("kind", LAYOUT_KINDS)
def test_R39_without_model_axes_the_sharding_is_that_of_the_model(kind):
    shapes = model_shapes("gpt-tiny")
    mesh = ParallelMesh.of(replicate=2, dp=3)
    plain = Sharding(shapes.layouts(kind, 3), mesh.data_ranks(0).mesh)
    sharding = ParallelSharding(ParallelModel(shapes, mesh), kind)
    for rank in range(6):
        assert sharding.layouts(rank) == plain.units
        assert list(sharding.pieces(rank)) == [(plain.units[bucket][0], piece) for bucket, piece in plain.pieces(rank)]
    assert sharding.where("head.weight", 7) == plain.where("head.weight", 7)


def test_R39_parts_of_llama():
    model = ParallelModel(model_shapes("llama-3-8b"), ParallelMesh.of(pp=2, dp=4, tp=8))
    shapes = [{param.name: param.shape for param in model.part(rank).params} for rank in (0, 32)]
    assert shapes[0]["model.embed_tokens.weight"] == (128256 // 8, 4096) and "lm_head.weight" not in shapes[0]
    assert shapes[0]["model.layers.15.self_attn.k_proj.weight"] == (128, 4096)
    assert shapes[1]["model.layers.16.mlp.down_proj.weight"] == (4096, 14336 // 8)
    assert shapes[1]["lm_head.weight"] == (128256 // 8, 4096) and shapes[1]["model.norm.weight"] == (4096,)
    assert len(shapes[0]) == 1 + 16 * 9 and len(shapes[1]) == 2 + 16 * 9


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b", "llama-3-405b"])
def test_the_size_of_a_published_model_is_the_sum_of_its_parameters(name):
    assert PUBLISHED[name].numel == sum(param.numel for param in model_shapes(name).params)


def test_R39_unknown_names_elements_and_ranks_are_refused():
    sharding = ParallelSharding(ParallelModel(shapes_of(), ParallelMesh.of(dp=2), ()), "flat")
    assert sharding.where("h.0.norm.weight", 3) and sharding.where("h.0.norm.weight", 0)
    with pytest.raises(CrossframeError, match=r"no parameter is named 'x': expected one of \['embed.weight', 'h.0"):
        sharding.where("x", 0)
    with pytest.raises(CrossframeError, match="no parameter is named 3"):
        sharding.where(3, 0)  # type: ignore[arg-type]
    for element in (-1, 4, True, 1.0):
        with pytest.raises(CrossframeError, match=f"'h.0.norm.weight': expected an element from 0 to 3, got {element}"):
            sharding.where("h.0.norm.weight", element)  # type: ignore[arg-type]
    data = ParallelMesh.of(dp=2, tp=2).data_ranks(1)
    assert [data.index(rank) for rank in data.ranks] == [0, 1]
    with pytest.raises(CrossframeError, match=r"expected one of the data-parallel ranks .*, got 2"):
        data.index(2)
    with pytest.raises(CrossframeError, match="expected the name of a model or a path, got 3"):
        model_shapes(3)  # type: ignore[arg-type]


def test_R39_shared_parameters_of_the_root_are_on_no_stage():
    shapes = shapes_of()
    first = replace(shapes.params[0], aliases=("head.tied",))
    tied = ModelShapes(shapes.name, (first, *shapes.params[1:]), shapes.units)
    with pytest.raises(
        CrossframeError, match=r"'embed.weight' of the root is shared with \('head.tied',\), which may be on another"
    ):
        ParallelModel(tied, ParallelMesh.of(pp=2))


def test_R39_experts_are_units_of_their_own():
    for numbered in (False, True):
        model = ParallelModel(shapes_of(numbered=numbered), ParallelMesh.of(dp=2, ep=2), RULES)
        assert model.part(1).units == ("h.0", "h.0.experts", "h.1", "h.1.experts")
        assert model.expert_units == {"h.0.experts", "h.1.experts"}
        assert tuple(model.data_ranks(1, "h.0.experts").ranks) == (1, 3)
        assert tuple(model.data_ranks(1, "h.0").ranks) == (0, 1, 2, 3)
    names = [param.name for param in model.part(1).params if "h.0.experts" in param.name]
    assert names == ["h.0.experts.2.w", "h.0.experts.3.w"]


def test_R39_stages_are_even_and_rules_move_them():
    shapes = shapes_of(5)
    units = [f"h.{i}.norm.weight" for i in range(5)]

    def stages(num, rules=()):
        model = ParallelModel(shapes, ParallelMesh.of(pp=num), stage_rules=rules)
        return [model.stages[name] for name in units]

    assert stages(2) == [0, 0, 0, 1, 1] and stages(3) == [0, 0, 1, 1, 2] and stages(5) == [0, 1, 2, 3, 4]
    assert stages(2, [("h.2", -1)]) == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("sizes", "options", "said"),
    [
        ({"tp": 5}, {"rules": RULES}, r"'embed.weight' of shape \(12, 4\), axis 'tp' of size 5: dim 0 has 12 elements"),
        ({"ep": 3}, {"rules": RULES}, r"'h.0.experts.w' of shape \(4, 4, 3\), axis 'ep' of size 3: dim 0 has 4"),
        ({"tp": 2}, {"rules": ()}, "axis 'tp' of size 2: no known style matches .* state the styles"),
        ({"tp": 2}, {"rules": [("up", Style.COLWISE)]}, "'colwise': .* matches 'up': .* instance 'embed', with"),
        ({"pp": 3}, {}, "axis 'pp' of size 3: model 'm' has 2 units"),
        ({"pp": 2}, {"stage_rules": [("h.1", 2)]}, "'h.1': expected a stage from 0 to 1, or -1 for the last, got 2"),
        ({"pp": 2}, {"stage_rules": [("x", 0)]}, "'x': no unit and no parameter of the root matches"),
        ({"pp": 2}, {"stage_rules": [("*", 0)]}, "stage 1 of 2 has no parameters"),
        ({"ep": 2}, {"rules": [("h.0", Style.EXPERTS), ("h.0.norm", Style.REPLICATED)]},
         "divides 'h.0.down.bias' and not 'h.0.norm.weight'"),
    ],
)  # fmt: skip
def test_R39_meshes_and_rules_that_do_not_fit_are_refused(sizes, options, said):
    with pytest.raises(CrossframeError, match=said):
        ParallelModel(shapes_of(), ParallelMesh.of(**sizes), **options)


def test_R39_numbered_experts_that_an_axis_does_not_divide_are_refused():
    with pytest.raises(
        CrossframeError, match=r"module 'h.0.experts', axis 'ep' of size 3: expected experts numbered from 0"
    ):
        ParallelModel(shapes_of(numbered=True), ParallelMesh.of(ep=3), RULES)


def test_R39_stages_of_a_safetensors_file_need_the_places_of_the_roots_parameters():
    shapes = shapes_of()
    shapes = ModelShapes(shapes.name, shapes.params[::-1], shapes.units, is_ordered=False)
    with pytest.raises(CrossframeError, match=r"does not state the order of registration.*'head.weight' = 1"):
        ParallelModel(shapes, ParallelMesh.of(pp=2))
    rules = [("embed*", 0), ("norm*", -1), ("head*", -1)]
    assert ParallelModel(shapes, ParallelMesh.of(pp=2), stage_rules=rules).stages["head.weight"] == 1


@pytest.mark.parametrize(
    ("names", "sizes", "said"),
    [
        ((), (), "at least one axis"),
        (("dp", "cp"), (2, 2), "unknown mesh axis 'cp': expected some of pp, replicate, dp, ep, tp"),
        (("dp", "tp"), (2, 0), "mesh axis 'tp': expected a size of at least 1, got 0"),
        (("dp", "dp"), (2, 2), "stands twice"),
        (("dp",), (2, 2), "as many sizes"),
        (("dp", "tp"), (2**20, 2**12), "at most 2147483647 ranks"),
    ],
)
def test_R39_invalid_meshes_are_refused(names, sizes, said):
    with pytest.raises(CrossframeError, match=said):
        ParallelMesh(names, sizes)
