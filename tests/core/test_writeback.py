"""What is copied back where (R20): each rank's own elements, and no padding."""

from hypothesis import given

from crossframe.layout import FlatLayout, PerParamLayout
from crossframe.writeback import Copy, writeback_copies
from tests.core.random_layouts import ALL_LAYOUTS, QUICK, elements, specs


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
