"""`find` and `over`, which every layout has: where elements lie, and the same parameters over other ranks."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from crossframe.errors import LayoutError, MeshError
from crossframe.layout import FlatLayout, Layout, PerParamLayout, Piece, RaggedLayout
from crossframe.params import ParamSpec
from tests.core.helpers.random_layouts import ALL_LAYOUTS, QUICK, elements, specs


def kinds(world_size: int) -> list[Layout]:
    pair = specs([(5, 4), (3,)])
    return [
        FlatLayout(pair, world_size, True),
        FlatLayout(pair, world_size, False),
        PerParamLayout(pair, world_size),
        PerParamLayout(pair, world_size, (1, 0)),
        RaggedLayout(pair, world_size),
    ]


@QUICK
@given(ALL_LAYOUTS, st.data())
def test_R06_find_names_the_place_of_each_element_in_their_order(layout, data):
    held = {}
    for rank in range(layout.world_size):
        held |= {element: (rank, at) for at, element in enumerate(elements(layout, rank)) if isinstance(element, tuple)}
    for i, param in enumerate(layout.params):
        start = data.draw(st.integers(0, param.numel))
        stop = data.draw(st.integers(start, param.numel))
        found = [
            (piece.rank, piece.shard_start + at, piece.param_start + at)
            for piece in layout.find(i, start, stop)
            for at in range(piece.numel)
            if (piece.name, piece.num_runs, piece.stride) == (param.name, 1, 0)
        ]
        assert found == [(*held[param.name, element], element) for element in range(start, stop)]


@QUICK
@given(ALL_LAYOUTS)
def test_R06_find_of_a_whole_parameter_is_the_runs_of_all_pieces(layout):
    runs = {}
    for rank in range(layout.world_size):
        for piece in layout.pieces(rank):
            for at, start, numel in piece.runs():
                runs[piece.name, start] = Piece(piece.name, rank, at, at + numel, start, start + numel)
    found = [piece for i, param in enumerate(layout.params) for piece in layout.find(i, 0, param.numel)]
    assert found == [runs[key] for key in sorted(runs, key=lambda key: (int(key[0][1:]), key[1]))]


@pytest.mark.parametrize("layout", kinds(2), ids=lambda layout: layout.kind)
def test_questions_about_what_is_not_there_are_refused_at_once(layout):
    for i in (-1, 2, True, None, 0.0, 10**5000):
        with pytest.raises(LayoutError, match="index of one of 2 parameters"):
            layout.find(i, 0, 1)
    for start, stop in ((0, 21), (-1, 2), (3, 2), (0, None), ("0", 1), (0.0, 1), (False, True), (10**5000, 10**5000)):
        with pytest.raises(LayoutError, match="'p0': expected a range of its 20 elements"):
            layout.find(0, start, stop)
    assert list(layout.find(0, 20, 20)) == []
    for world_size in (0, None, 1.5, 2**31, 10**5000):
        with pytest.raises(MeshError, match="world size"):
            layout.over(world_size)


@QUICK
@given(ALL_LAYOUTS, st.integers(1, 9))
def test_over_is_the_same_parameters_and_options_over_other_ranks(layout, world_size):
    try:
        other = layout.over(world_size)
    except LayoutError as error:  # columns that these ranks do not divide
        assert "multiple of the world size" in str(error) and layout.kind == "per_param"
        assume(False)
    assert type(other) is type(layout)
    assert other.to_json() == layout.to_json() | {"world_size": world_size, "places": other.places()}
    assert other.over(layout.world_size) == layout


def test_time_grows_with_what_is_found_and_not_with_the_world():
    world_size = 2**30
    param = (ParamSpec("w", (2**40, 2**15), "bfloat16"), ParamSpec("v", (7,), "bfloat16"))
    # Anything that went through the ranks would not come to an end.
    for layout in (
        FlatLayout(param, world_size, True),
        PerParamLayout(param, world_size),
        PerParamLayout((param[0],), 2**15, (1,)),
        RaggedLayout(param, world_size),
    ):
        (piece,) = layout.find(0, 2**54 + 5, 2**54 + 6)
        assert (piece.param_start, piece.numel) == (2**54 + 5, 1)
        assert [p.name for p in layout.pieces(piece.rank) if p.shard_start <= piece.shard_start < p.shard_stop] == ["w"]
        layout.padding(layout.world_size - 1)
