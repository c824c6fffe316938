"""What a user's unshard may ask for and who sees what (R19, R23)."""

import itertools

import pytest

from crossframe.errors import CrossframeError, UnsupportedError
from crossframe.unshard import UnshardRequest

EVERY = list(itertools.product([False, True], repeat=4))


@pytest.mark.parametrize(("writeback", "rank0_only", "with_grads", "keeps_original"), EVERY)
def test_R23_what_torch_refuses_is_refused_and_nothing_else(writeback, rank0_only, with_grads, keeps_original):
    request = UnshardRequest(writeback=writeback, rank0_only=rank0_only, with_grads=with_grads)
    if writeback and rank0_only:
        with pytest.raises(UnsupportedError, match="writeback=True with rank0_only=True"):
            request.check(keeps_original=keeps_original)
    elif with_grads and not keeps_original:
        with pytest.raises(UnsupportedError, match="with_grads=True with use_orig_params=False"):
            request.check(keeps_original=keeps_original)
    else:
        request.check(keeps_original=keeps_original)


def test_R23_a_refusal_is_the_kind_of_error_that_torch_raises():
    assert issubclass(UnsupportedError, NotImplementedError) and issubclass(UnsupportedError, CrossframeError)


def test_R19_every_rank_sees_full_parameters_or_rank_0_alone():
    assert [UnshardRequest().visible(rank) for rank in range(3)] == [True, True, True]
    only = UnshardRequest(writeback=False, rank0_only=True)
    assert [only.visible(rank) for rank in range(3)] == [True, False, False]


def test_what_is_asked_unless_told():
    assert UnshardRequest() == UnshardRequest(writeback=True, rank0_only=False, with_grads=False)
