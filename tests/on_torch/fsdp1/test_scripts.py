"""Every script of `scripts/`, a module for each subject, run with torch's FSDP1 and with ours in the same ranks.

Where torch itself fails, the tests below state what ours gives instead.
"""

import contextlib
from typing import Any

import pytest
import torch

from tests.on_torch.fsdp1 import scripts
from tests.on_torch.helpers.fsdp1_models import Side, nested, sgd, trained
from tests.on_torch.helpers.scenarios import cases, load
from tests.on_torch.helpers.scripts import PACKAGES, difference, grads, inputs, raised

load(scripts)


def _differences(rank: int, world_size: int, name: str) -> str:
    return scripts.SCENARIOS[name].difference(rank, world_size)


@pytest.mark.parametrize("name", cases(scripts.SCENARIOS))
def test_R32_a_script_sees_what_it_sees_under_torch(ranks, name):
    num_ranks = scripts.SCENARIOS[name].num_ranks
    assert ranks.run(num_ranks, _differences, name) == [""] * num_ranks


# Where torch fails


def _after_forward(side: Side, low: torch.dtype | None, before: str) -> Any:
    """Losses of training after a forward without backward."""
    model = nested(
        side, mixed_precision=side.MixedPrecision(low), sharding_strategy=side.ShardingStrategy.SHARD_GRAD_OP
    )
    optimizer = sgd(model)
    with torch.inference_mode() if before == "inference" else contextlib.nullcontext():
        for _ in range(before != "nothing"):
            model(inputs(side))
    return trained(side, model, optimizer=optimizer)["losses"]


def _departs(rank: int, world_size: int, use_orig_params: bool) -> list[tuple[bool, bool]]:
    """Whether a forward without a backward leaves later steps unchanged, with torch and with ours."""
    results = []
    for low, before in ((None, "forward"), (torch.bfloat16, "forward"), (None, "inference")):
        same = []
        for package in PACKAGES:
            side = Side(package, rank, world_size, use_orig_params)
            expected = _after_forward(side, low, "nothing")
            try:
                same.append(difference(expected, _after_forward(side, low, before)) == "")
            except (RuntimeError, AssertionError):
                same.append(False)
        results.append(tuple(same))
    return results


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
def test_R12_a_forward_without_backward_changes_no_later_step(ranks, use_orig_params):
    # Under torch mixed precision loses gradients of the next step, and parameters gathered in inference mode cannot be trained.
    for results in ranks.run(2, _departs, use_orig_params):
        assert results == [(True, True), (False, True), (False, True)]


def _twice(rank: int, world_size: int, strategy: str, use_orig_params: bool) -> list[Any]:
    results = []
    for package in PACKAGES:
        side = Side(package, rank, world_size, use_orig_params)
        model = nested(side, sharding_strategy=side.ShardingStrategy[strategy])
        loss = model(inputs(side)).square().sum()
        loss.backward(retain_graph=True)
        once = grads(model)
        again = raised(loss.backward)
        doubled = [None if grad is None else grad * 2 for grad in once]
        results.append(again.kind if again else difference(doubled, grads(model)))
    return results


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_R28_a_graph_is_gone_through_twice(ranks, strategy, use_orig_params):
    # torch has freed the parameters before the second backward. The sum of two equal gradients is exactly their double.
    for theirs, ours in ranks.run(2, _twice, strategy, use_orig_params):
        assert theirs is RuntimeError
        assert ours == ""
