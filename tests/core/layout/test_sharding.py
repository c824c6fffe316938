"""A whole model on a mesh (R10), the reshard groups between forward and backward (R08), and how fast both answer."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.errors import LayoutError, MeshError, ParamError
from crossframe.layout import (
    FlatLayout,
    PerParamLayout,
    RaggedLayout,
    Sharding,
    layout_from_json,
    post_forward,
    post_forward_group,
)
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from tests.core.helpers.random_layouts import ALL_LAYOUTS, QUICK, elements, specs

TIED = ParamSpec("embed.weight", (5, 2), aliases=("head.weight",))
BIAS = ParamSpec("head.bias", (3,), "bfloat16")


def model(shard: int, replicate: int = 1) -> Sharding:
    """A unit of two buckets, which mix dtypes, and a unit of one."""
    root = PerParamLayout((TIED,), shard), PerParamLayout((BIAS,), shard)
    block = FlatLayout(specs([(7,), (2,)]), shard, keep_original=True)
    return Sharding((("", root[0]), ("block", block), ("", root[1])), MeshSpec(shard, replicate))


@QUICK
@given(ALL_LAYOUTS, st.integers(1, 3))
def test_R10_every_replica_holds_the_pieces_of_the_layout_under_its_own_ranks(layout, replicate):
    sharding = Sharding((("u", layout),), MeshSpec(layout.world_size, replicate))
    for rank in range(sharding.mesh.world_size):
        found = list(sharding.pieces(rank))
        own = layout.pieces(rank % layout.world_size)
        assert [bucket for bucket, _ in found] == [0] * len(own)
        for (_, piece), expected in zip(found, own, strict=True):
            assert piece.rank == rank
            assert list(piece.runs()) == list(expected.runs())
            assert (piece.name, piece.numel) == (expected.name, expected.numel)


@QUICK
@given(ALL_LAYOUTS, st.integers(1, 3), st.data())
def test_R10_where_names_every_holder_of_an_element(layout, replicate, data):
    sharding = Sharding((("u", layout),), MeshSpec(layout.world_size, replicate))
    param = data.draw(st.sampled_from(layout.params))
    for element in range(min(param.numel, 20)):
        expected = [
            (rank, "u", elements(layout, rank % layout.world_size).index((param.name, element)))
            for rank in range(sharding.mesh.world_size)
            if (param.name, element) in elements(layout, rank % layout.world_size)
        ]
        assert list(sharding.where(param.name, element)) == expected and len(expected) == replicate


def test_R10_a_unit_of_several_buckets_and_names_of_shared_parameters():
    sharding = model(2, replicate=2)
    assert [param.name for param in sharding.params] == ["embed.weight", "p0", "p1", "head.bias"]
    assert [(bucket, piece.name, piece.rank) for bucket, piece in sharding.pieces(3)] == [
        (0, "embed.weight", 3),
        (1, "p0", 3),
        (1, "p1", 3),
        (2, "head.bias", 3),
    ]
    assert sharding.where("head.weight", 7) == sharding.where("embed.weight", 7) == ((1, "", 1), (3, "", 1))
    assert sharding.where("head.bias", 0) == ((0, "", 0), (2, "", 0))
    assert sharding.find("head.weight") == sharding.find("embed.weight") == (0, 0)
    assert sharding.find("p1") == (1, 1) and sharding.find("no") is None


def test_wrong_shardings_are_refused():
    one, two = FlatLayout((TIED,), 2, True), FlatLayout(specs([(2,)]), 3, True)
    with pytest.raises(LayoutError, match=r"unit 'b': its layout is over 3 ranks.*over 2.*layout.over\(2\)"):
        Sharding((("a", one), ("b", two)), MeshSpec(2, replicate=3))
    with pytest.raises(ParamError, match=r"'head\.weight' belongs to two parameters"):
        Sharding((("a", one), ("b", FlatLayout((ParamSpec("head.weight", (5, 2)),), 2, True))), MeshSpec(2))
    for units in (
        [("a", one)],
        ("a", one),
        (("a", None),),
        ((1, one),),
        (("a", one, 2),),
        None,
        ((one, "a"),),
        10**5000,
    ):
        with pytest.raises(LayoutError, match="name"):
            Sharding(units, MeshSpec(2))  # type: ignore[arg-type]
    with pytest.raises(MeshError, match="MeshSpec"):
        Sharding((("a", one),), 2)  # type: ignore[arg-type]
    sharding = Sharding((("a", one),), MeshSpec(2))
    for rank in (-1, 2, True, None, 1.0):
        with pytest.raises(MeshError, match="from 0 to 1"):
            sharding.pieces(rank)
    for name in ("no", None, ["embed.weight"], 3):
        with pytest.raises(LayoutError, match=r"no parameter is named.*embed\.weight"):
            sharding.where(name, 0)  # type: ignore[arg-type]
    for element in (-1, 10, None, 1.0, True):
        with pytest.raises(LayoutError, match=r"'embed\.weight'"):
            sharding.where("embed.weight", element)  # type: ignore[arg-type]
    assert list(Sharding((), MeshSpec(2)).pieces(1)) == []


def test_R08_the_groups_are_those_of_torch():
    torch = pytest.importorskip("torch")
    for shard, replicate, size in [(4, 1, 2), (4, 3, 2), (6, 2, 3), (6, 2, 2), (8, 2, 4)]:
        mesh = MeshSpec(shard, replicate)
        # torch views the ranks of the mesh, replicas first, as rows of the group's size.
        rows = torch.arange(mesh.world_size).view(replicate, shard).view(-1, size).tolist()
        for rank in range(mesh.world_size):
            group = post_forward_group(mesh, rank, size)
            assert list(group) == next(row for row in rows if rank in row)
            assert set(group) <= set(mesh.shard_group(rank))


def test_R08_five_rows_in_groups_of_two_of_four_ranks():
    torch = pytest.importorskip("torch")
    layout = post_forward(PerParamLayout(specs([(5, 2)]), 4), 2)
    full = torch.arange(10.0).view(5, 2)
    for rank, chunk in enumerate(full.chunk(2)):
        assert layout.shard_shape(0, rank) == tuple(chunk.shape)
        (piece,) = layout.pieces(rank)
        assert full.flatten()[piece.param_start : piece.param_stop].tolist() == chunk.flatten().tolist()
    # torch cuts the gathered buffer, 4 chunks of 2 rows with the padding of the third inside: its second half begins at row 4.
    padded = torch.cat([full, torch.zeros(3, 2)])
    assert torch.equal(padded.chunk(2)[1][0], full[4]) and layout.pieces(1)[0].param_start == 3 * 2


@QUICK
@given(ALL_LAYOUTS, st.integers(2, 6), st.integers(2, 4))
def test_R08_a_group_holds_all_of_every_parameter_once(layout, group_size, times):
    try:
        layout = layout.over(group_size * times)
    except LayoutError:
        return  # columns that these ranks do not divide
    group = post_forward(layout, group_size)
    held = [e for rank in range(group_size) for e in elements(group, rank) if isinstance(e, tuple)]
    assert sorted(held) == sorted((param.name, i) for param in layout.params for i in range(param.numel))
    assert type(group) is type(layout) and group.params == layout.params


@QUICK
@given(ALL_LAYOUTS.filter(lambda layout: layout.contiguous), st.integers(2, 4), st.integers(2, 4))
def test_R08_a_line_is_cut_as_it_stands(layout, group_size, times):
    layout = layout.over(group_size * times)
    group = post_forward(layout, group_size)
    assert (group.offsets, group.gathered_numel, group.flat_numel) == (
        layout.offsets,
        layout.gathered_numel,
        layout.flat_numel,
    )
    for rank in range(group_size):
        # What is padding, and of which kind, stays too.
        joined = [each for part in range(rank * times, (rank + 1) * times) for each in elements(layout, part)]
        assert elements(group, rank) == joined
    assert layout_from_json(group.to_json(), group.params) == group
    assert group.over(group_size * times) == layout


def test_R08_a_line_is_padded_for_a_multiple_of_its_ranks():
    for wrong in (3, 0, -4, 2.0, "4"):
        with pytest.raises((LayoutError, MeshError), match="expected"):
            FlatLayout(specs([(5,)]), 2, True, padded_for=wrong)  # type: ignore[arg-type]
    assert FlatLayout(specs([(5,)]), 2, True, padded_for=2) == FlatLayout(specs([(5,)]), 2, True)


def test_R08_group_sizes_that_are_none_are_refused_with_what_they_mean():
    layout, mesh = PerParamLayout(specs([(5,)]), 4), MeshSpec(4, 2)
    for size, said in [
        (1, "means False"), (4, "means True"), (3, "divides the 4"), (0, "divides the 4"), (-2, "divides the 4"), (8, "divides"),
        (True, "divides"), (2.0, "divides"), (None, "divides"), ("2", "divides"), (10**5000, "divides"),
    ]:  # fmt: skip
        with pytest.raises(MeshError, match=said):
            post_forward(layout, size)  # type: ignore[arg-type]
        with pytest.raises(MeshError, match=said):
            post_forward_group(mesh, 0, size)  # type: ignore[arg-type]
    with pytest.raises(MeshError, match="from 0 to 7"):
        post_forward_group(mesh, 8, 2)
    with pytest.raises(MeshError, match="MeshSpec"):
        post_forward_group(8, 0, 2)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="expected a layout"):
        post_forward(mesh, 2)  # type: ignore[arg-type]


def test_R10_nothing_of_a_large_model_grows_with_the_world():
    """Anything that went through the ranks would not come to an end."""
    hidden, wide, world_size = 16384, 53248, 2**30
    shapes = [(hidden, hidden)] * 2 + [(1024, hidden)] * 2 + [(wide, hidden)] * 2 + [(hidden, wide)] + [(hidden,)] * 2
    units = [tuple(ParamSpec(f"{u}.p{i}", shape, "bfloat16") for i, shape in enumerate(shapes)) for u in range(126)]
    for make in (lambda params: FlatLayout(params, world_size, True), lambda params: PerParamLayout(params, world_size),
                 lambda params: RaggedLayout(params, world_size)):  # fmt: skip
        sharding = Sharding(tuple((f"{u}", make(params)) for u, params in enumerate(units)), MeshSpec(world_size))
        held = [list(sharding.pieces(rank)) for rank in (0, 5000, world_size - 1)]
        assert len(held[0]) >= 126 > len(held[2])
        assert sharding.where("125.p8", 7) and sharding.where("0.p0", 0) == ((0, "0", 0),)
