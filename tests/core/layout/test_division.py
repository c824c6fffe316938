"""Parts of parameters that mesh axes divide (R39): shapes and places are those of numpy's own slices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.errors import LayoutError
from crossframe.layout import FlatLayout, PerParamLayout
from crossframe.layout.division import Division, in_part, in_whole, local_part
from crossframe.params import ParamSpec
from tests.core.helpers.random_layouts import QUICK


@st.composite
def divided(draw):
    """A parameter, divisions on different dims, and the array of its part, whose values are indices of the whole one."""
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    dims = draw(st.lists(st.sampled_from(range(len(shape))), unique=True, max_size=2))
    divisions = []
    for axis, dim in zip(("ep", "tp"), dims, strict=False):
        parts = draw(st.integers(1, 3))
        shape[dim] *= parts
        divisions.append(Division(axis, dim, parts, draw(st.integers(0, parts - 1))))
    part = np.arange(np.prod(shape)).reshape(shape)
    for division in divisions:
        part = np.split(part, division.parts, axis=division.dim)[division.index]
    return ParamSpec("w", tuple(shape)), divisions, part


@QUICK
@given(divided(), st.integers(1, 4), st.data())
def test_R39_pieces_of_a_part_are_the_elements_of_numpys_split(case, world_size, data):
    param, divisions, part = case
    local = local_part(param, divisions)
    assert local.shape == part.shape
    layouts = [FlatLayout((local,), world_size, True), PerParamLayout((local,), world_size)]
    layouts += [
        PerParamLayout((local,), world_size, (dim,)) for dim in range(part.ndim) if part.shape[dim] % world_size == 0
    ]
    layout = data.draw(st.sampled_from(layouts))
    for rank in range(world_size):
        for piece in layout.pieces(rank):
            inside = [k for run in piece.runs() for k in range(run.param_start, run.param_start + run.numel)]
            found = list(in_whole(piece, param, divisions))
            whole = [
                k for each in found for run in each.runs() for k in range(run.param_start, run.param_start + run.numel)
            ]
            assert whole == part.reshape(-1)[inside].tolist()
            assert [each.shard_start for each in found] + [piece.shard_stop] == [
                piece.shard_start,
                *(each.shard_stop for each in found),
            ]
            for each in found:
                runs = list(each.runs())
                assert (each.param_start, each.param_stop) == (
                    min(run.param_start for run in runs),
                    max(run.param_start + run.numel for run in runs),
                )


@QUICK
@given(divided())
def test_R39_an_element_has_one_index_in_the_part_that_has_it(case):
    param, divisions, part = case
    known = {element: at for at, element in enumerate(part.reshape(-1).tolist())}
    assert [in_part(element, param, divisions) for element in range(param.numel)] == [
        known.get(element) for element in range(param.numel)
    ]


@pytest.mark.parametrize(
    ("divisions", "said"),
    [
        ([Division("tp", 2, 2, 0)], r"'w' of shape \(6, 4\), axis 'tp' of size 2: it has no dim 2"),
        ([Division("tp", 1, 3, 0)], r"axis 'tp' of size 3: dim 1 has 4 elements, expected a multiple of 3; pad it"),
        ([Division("ep", 0, 2, 0), Division("tp", 0, 3, 0)], r"axis 'tp' of size 3: axis 'ep' divides dim 0 too"),
    ],
)
def test_R39_a_dim_that_cannot_be_divided_is_refused(divisions, said):
    with pytest.raises(LayoutError, match=said):
        local_part(ParamSpec("w", (6, 4)), divisions)
