"""What is copied back where (R20): each rank's own elements, and no padding."""

import pytest
from hypothesis import given

from crossframe.errors import ParamError
from crossframe.layout import FlatLayout, PerParamLayout
from crossframe.params import ParamSpec
from crossframe.writeback import Copy, check_full, check_replaced, writeback_copies
from tests.core.helpers.random_layouts import ALL_LAYOUTS, QUICK, elements, specs


@QUICK
@given(ALL_LAYOUTS)
def test_R20_the_ranks_copies_take_every_element_of_every_parameter_once(layout):
    taken = []
    for rank in range(layout.world_size):
        shard = elements(layout, rank)
        for copy in writeback_copies(layout, rank):
            name = layout.params[copy.index].name
            own = [(name, i) for i in range(copy.param_start, copy.param_stop)]
            assert shard[copy.shard_start : copy.shard_stop] == own != []
            taken += own
    assert len(taken) == len(set(taken))
    assert set(taken) == {(param.name, i) for param in layout.params for i in range(param.numel)}


def test_R20_copies_of_five_elements_and_two_on_two_ranks():
    layout = FlatLayout(specs([(5,), (2,)]), 2, keep_original=False)
    assert writeback_copies(layout, 0) == (Copy(0, 0, 4, 0, 4),)
    assert writeback_copies(layout, 1) == (Copy(0, 4, 5, 0, 1), Copy(1, 0, 2, 1, 3))


def test_R20_a_piece_of_many_runs_is_as_many_copies():
    layout = PerParamLayout(specs([(2, 4)]), 2, (1,))
    assert writeback_copies(layout, 0) == (Copy(0, 0, 2, 0, 2), Copy(0, 4, 6, 2, 4))
    assert writeback_copies(layout, 1) == (Copy(0, 2, 4, 0, 2), Copy(0, 6, 8, 2, 4))


def test_R20_full_values_of_another_shape_are_refused_by_name():
    spec = ParamSpec("w", (2, 3))
    check_full(spec, (2, 3))
    with pytest.raises(ParamError, match=r"'w': expected the unsharded shape \(2, 3\), got \(3, 2\); write into"):
        check_full(spec, (3, 2))


def test_R25_what_replaces_a_shard_has_its_shape_and_dtype():
    here = ((3,), "float32")
    check_replaced("w", 1, here, here)
    with pytest.raises(ParamError, match=r"'w', rank 1: .* sharded shape \(3,\), got \(2, 3\); replace it with"):
        check_replaced("w", 1, here, ((2, 3), "float32"))
    with pytest.raises(ParamError, match="'w', rank 1: expected float32, as it was sharded, got float64; convert"):
        check_replaced("w", 1, here, ((3,), "float64"))
