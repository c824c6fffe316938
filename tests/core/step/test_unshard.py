"""What a user's unshard may ask for and who sees what (R19, R23)."""

import itertools
from typing import Any

import pytest

from crossframe.errors import CrossframeError, UnsupportedError, UsageError
from crossframe.unshard import AuthoritativeStorage, ExitStep, UnshardRequest, shows_grad

EVERY = list(itertools.product([False, True], repeat=4))


@pytest.mark.parametrize(("writeback", "rank0_only", "with_grads", "keeps_original"), EVERY)
def test_R23_what_torch_refuses_is_refused_and_nothing_else(writeback, rank0_only, with_grads, keeps_original):
    request = UnshardRequest(writeback=writeback, rank0_only=rank0_only, with_grads=with_grads)
    if writeback and rank0_only:
        with pytest.raises(UnsupportedError, match="writeback=True with rank0_only=True"):
            request.check(keeps_original=keeps_original)
    elif with_grads and not keeps_original:
        with pytest.raises(UnsupportedError, match="with_grads=True without original parameters"):
            request.check(keeps_original=keeps_original)
    else:
        request.check(keeps_original=keeps_original)


def test_R23_a_refusal_is_the_kind_of_error_that_torch_raises():
    assert issubclass(UnsupportedError, NotImplementedError) and issubclass(UnsupportedError, CrossframeError)


def test_R19_every_rank_sees_full_parameters_or_rank_0_alone():
    assert [UnshardRequest().visible(rank) for rank in range(3)] == [True, True, True]
    only = UnshardRequest(writeback=False, rank0_only=True)
    assert [only.visible(rank) for rank in range(3)] == [True, False, False]


@pytest.mark.parametrize(("authoritative", "offload"), list(itertools.product(AuthoritativeStorage, [False, True])))
def test_R23_offload_is_refused_beside_gradients_and_where_the_full_parameters_are_the_only_copy(
    authoritative, offload
):
    for with_grads in (False, True):
        request = UnshardRequest(offload_to_cpu=offload, with_grads=with_grads)
        if offload and (with_grads or authoritative is AuthoritativeStorage.FULL):
            with pytest.raises(UnsupportedError, match=r"offload_to_cpu=True.*; pass|offload_to_cpu=True where"):
                request.check(keeps_original=True, authoritative=authoritative)
        else:
            request.check(keeps_original=True, authoritative=authoritative)


@pytest.mark.parametrize("flags", EVERY)
def test_R24_what_was_asked_for_ends_in_the_order_of_the_steps(flags):
    writeback, _, offload, with_grads = flags
    steps = UnshardRequest(*flags).exit_steps()
    assert steps == tuple(step for step in ExitStep if step in steps) and ExitStep.RESHARD in steps
    assert (ExitStep.WRITEBACK in steps) == writeback and (ExitStep.BACK_FROM_CPU in steps) == offload
    assert (ExitStep.RESHARD_GRADS in steps) == with_grads
    names = ["BACK_FROM_CPU", "WRITEBACK", "RESHARD", "RESHARD_GRADS"]
    assert [step.name for step in ExitStep] == names


def test_a_copy_on_every_rank_is_warned_of():
    for offload, rank0_only in itertools.product([False, True], repeat=2):
        request = UnshardRequest(writeback=False, rank0_only=rank0_only, offload_to_cpu=offload)
        assert (request.warning is not None) == (offload and not rank0_only)


def test_R20_edits_remain_with_writeback_and_where_the_storage_is_the_truth():
    for writeback, authoritative in itertools.product([False, True], AuthoritativeStorage):
        remains = writeback or authoritative is AuthoritativeStorage.FULL
        assert UnshardRequest(writeback=writeback).persists(authoritative) == remains


def test_R22_a_gradient_is_shown_where_any_rank_has_one():
    assert [shows_grad(present) for present in ([], [False], [False, True], [True, True])] == [False, False, True, True]


@pytest.mark.parametrize("name", ["writeback", "rank0_only", "offload_to_cpu", "with_grads"])
def test_what_is_no_bool_is_refused_by_name(name):
    wrong: tuple[Any, ...] = (None, 1, "no")
    for value in wrong:
        with pytest.raises(UsageError, match=f"{name}: expected True or False, got {value!r}"):
            UnshardRequest(**{name: value})


def test_what_is_asked_unless_told():
    assert UnshardRequest() == UnshardRequest(writeback=True, rank0_only=False, with_grads=False)
