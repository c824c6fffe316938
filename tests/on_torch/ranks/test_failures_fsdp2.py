"""What test_failures.py shows of FSDP1, for FSDP2's own choices: ranks that disagree, and exceptions (R08, R10, R17, R28)."""

from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import torch_backend
from tests.on_torch.helpers.failing_ranks import (
    Boom,
    Raises,
    changed_net,
    fsdp2_net,
    impatient,
    message_of,
    state_of,
    train_step,
)
from tests.on_torch.helpers.models import batch, loss_of
from tests.on_torch.programs.dying_ranks import Bomb, Trial, run_trial
from torch_backend.observe import observe

LOW = torch_backend.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def _each(net, **settings):
    """A unit a block and one for the rest, all with the same settings."""
    for block in net.blocks:
        torch_backend.fully_shard(block, **settings)
    return torch_backend.fully_shard(net, **settings)


# Ranks that disagree


def _across(param):
    return Shard(param.ndim - 1) if param.ndim > 1 and param.shape[-1] % 4 == 0 else None


def _inner_too(net):
    torch_backend.fully_shard(net.blocks[0].up)
    return fsdp2_net(net)


def _together(net):
    torch_backend.fully_shard([net.blocks[0], net.blocks[1]])
    return torch_backend.fully_shard(net)


# What rank 1 of 4 builds, and what all ranks must find different. The others build `fsdp2_net(changed_net(width=8))`.
DIFFERENT = {
    "shape": (
        lambda: fsdp2_net(changed_net(width=12)),
        "the shape of parameter 'embedding.weight' differs: rank 0, 2, 3: [11, 8]; rank 1: [11, 12]",
    ),
    "order": (
        lambda: fsdp2_net(changed_net(width=8, swapped=True)),
        "what the ranks shard differs: rank 0, 2, 3: parameter 'blocks.0.up.weight'; rank 1: parameter 'blocks.0.down.weight'",
    ),
    "dtype": (
        lambda: fsdp2_net(changed_net(width=8, double=True)),
        "the dtype of parameter 'blocks.1.norm.weight' differs: rank 0, 2, 3: float32; rank 1: float64",
    ),
    "frozen": (
        lambda: fsdp2_net(changed_net(width=8, frozen=True)),
        "the requires_grad of parameter 'blocks.0.norm.bias' differs: rank 0, 2, 3: True; rank 1: False",
    ),
    "one unit more": (
        lambda: _inner_too(changed_net(width=8)),
        "what the ranks shard differs: rank 0, 2, 3: unit 'blocks.1'; rank 1: unit 'blocks.0.up'",
    ),
    "blocks in one unit": (
        lambda: _together(changed_net(width=8)),
        "what the ranks shard differs: rank 0, 2, 3: unit 'blocks.0'; rank 1: unit 'blocks.0, blocks.1'",
    ),
    "reshard_after_forward": (
        lambda: fsdp2_net(changed_net(width=8), reshard_after_forward=False),
        "the reshard_after_forward of unit 'blocks.0' differs: rank 0, 2, 3: True; rank 1: False",
    ),
    "a reshard group": (
        lambda: fsdp2_net(changed_net(width=8), reshard_after_forward=2),
        "the reshard_after_forward of unit 'blocks.0' differs: rank 0, 2, 3: True; rank 1: 2",
    ),
    "mp_policy": (
        lambda: fsdp2_net(changed_net(width=8), mp_policy=LOW),
        "the mp_policy of unit 'blocks.0' differs: rank 0, 2, 3: MixedPrecisionPolicy(",
    ),
    "placement": (
        lambda: fsdp2_net(changed_net(width=8), shard_placement_fn=_across),
        "of parameter 'blocks.0.up.weight' differs: rank 0, 2, 3: ",
    ),
}


def _disagree(rank, world_size, what):
    model = DIFFERENT[what][0]() if rank == 1 else fsdp2_net(changed_net(width=8))
    return message_of(lambda: model(batch(0, rank)[0]))


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_disagree_on_fully_shard_all_name_the_first_difference_and_who_has_what(fragile, what):
    for rank, message in enumerate(fragile.run(4, _disagree, what)):
        assert message.startswith(f"AgreementError: rank {rank}: ") and DIFFERENT[what][1] in message, message


# Exceptions


@cache
def _grid():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


# World size, what is built, and how many collectives a step has; going over to a reshard group's shard counts too. Without
# options it is in test_failures.py.
BUILT = {
    "low": (2, lambda net: _each(net, reshard_after_forward=True, mp_policy=LOW), 9),
    "group": (4, lambda net: _each(net, reshard_after_forward=2), 12),
    "hybrid": (4, lambda net: _each(net, mesh=_grid(), mp_policy=LOW), 11),
}


def _interrupted(rank, world_size, mode, resets):
    """Trains with and without an interrupted step before each; the collective at which the steps stopped being interrupted."""
    models = [BUILT[mode][1](changed_net()) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    nth, raised = 1, True
    while raised:
        raised = False
        optimizers[1].zero_grad()
        with observe(Raises(nth)):
            try:
                loss_of(models[1], 1000 + nth, rank).backward()
            except Boom:
                raised = True
        if resets:
            models[1].reset_iter_state()
            shown = [type(p).__name__ for p in models[1].parameters()]
            assert set(shown) == {"DTensor"}, shown
        losses = [train_step(model, optimizer, nth, rank) for model, optimizer in zip(models, optimizers, strict=True)]
        assert losses[0] == losses[1], (nth, losses)
        for a, b in zip(*map(state_of, models, optimizers), strict=True):
            assert torch.equal(a, b), nth
        nth += 1
    return nth - 2


@pytest.mark.parametrize(
    ("mode", "resets"),
    [pytest.param(mode, mode != "group", marks=[pytest.mark.exhaustive] * (mode == "hybrid")) for mode in BUILT],
)
def test_R08_R17_R28_an_exception_at_any_collective_leaves_no_trace(ranks, mode, resets):
    world_size, _, num_collectives = BUILT[mode]
    assert ranks.run(world_size, _interrupted, mode, resets) == [num_collectives] * world_size


def _partial(rank, world_size):
    """An exception in the last of three microbatches takes along what the earlier ones left: full gradients that wait, or sums
    that wait for the replicas."""
    found = []
    for method in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        model = _each(changed_net(), mesh=_grid())
        for interrupted in (True, False):
            for micro in range(3):
                getattr(model, method)(micro == 2)
                loss = loss_of(model, micro, rank)
                if not (interrupted and micro == 2):
                    loss.backward()
            if interrupted:
                model.zero_grad()
                with observe(Raises(1)), pytest.raises(Boom):
                    loss.backward()
        found.append([param.grad.full_tensor() for param in model.parameters()])
    model = _each(changed_net(), mesh=_grid())
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        loss_of(model, micro, rank).backward()
    expected = [param.grad.full_tensor() for param in model.parameters()]
    return [max(float((a - b).abs().max() / b.norm()) for a, b in zip(each, expected, strict=True)) for each in found]


def test_R17_R28_an_exception_drops_partial_sums_and_waiting_gradients(ranks):
    for waiting, partial in ranks.run(4, _partial):
        assert waiting == 0
        # The three sums are rounded in other places: a few units of 2 ** -24 of each term. One too many would be of order 1.
        assert partial < 1e-5


def _one_raises(rank, world_size, where):
    """Rank 0 raises alone, and every rank catches what it gets and goes on."""
    net = changed_net()
    bomb = Bomb(Trial("fsdp2", world_size, 0, where, "raise"))
    if rank == 0:
        first, second = net.blocks
        first.norm.register_forward_pre_hook(lambda *_: bomb.passes("forward"))  # type: ignore[union-attr]
        second.norm.register_forward_hook(  # type: ignore[union-attr]
            lambda module, args, output: output.register_hook(lambda grad: bomb.passes("backward")) and None
        )
    group: Any = dist.new_group(range(world_size), timeout=timedelta(seconds=3))
    model = _each(net, mesh=DeviceMesh.from_group(group, "cpu"), reshard_after_forward=2)
    told = []
    for step in range(2):
        try:
            with impatient():
                told.append(message_of(lambda step=step: loss_of(model, step, rank).backward()))
        except Boom:
            told.append("Boom")
            model.reset_iter_state()
    return told


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_R17_where_one_rank_raises_alone_under_fully_shard_no_rank_goes_on(fragile, where):
    (boom, refused), *others = fragile.run(4, _one_raises, where)
    assert boom == "Boom"
    assert "AgreementError: rank 0: rank" in refused, refused
    for left, again in others:
        assert left.startswith("CollectiveError: ") and "of unit 'blocks." in left, left
        assert "no further step is possible" in again or "AgreementError" in again, again


@pytest.mark.parametrize(
    "trial",
    [
        Trial("fsdp2 group", 4, 2, "gather in backward", "kill", nth=4),
        Trial("fsdp2 hybrid", 4, 1, "sum over replicas", "exit", nth=2),
    ],
    ids=lambda trial: f"{trial.mode}-{trial.where}",
)
def test_when_a_rank_of_a_smaller_group_or_a_replica_dies_the_others_end_and_say_why(trial):
    outcomes, written = run_trial(trial)
    complaints = [complaint for outcome in outcomes for complaint in outcome.complaints(trial)]
    assert not complaints, f"{trial}: {complaints}\n{written}"


def _mesh_disagree(rank, world_size, what):
    """Ranks 2 and 3 have another mesh than 0 and 1; every rank takes part in making the groups of both."""
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    other = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("r", "s"))
    here, there = {"one axis and two": (line, grid), "transposed": (grid, other)}[what]
    model = _each(changed_net(), mesh=there if rank >= 2 else here)
    with impatient():
        return message_of(lambda: model(batch(0, rank)[0]))


@pytest.mark.parametrize("what", [pytest.param("one axis and two", marks=pytest.mark.exhaustive), "transposed"])
def test_R10_ranks_that_disagree_on_the_mesh_are_told_so(fragile, what):
    messages = fragile.run(4, _mesh_disagree, what)
    fragile.stop()  # ranks that did not meet leave in the store where they have been
    for rank, message in enumerate(messages):
        assert message.startswith(f"AgreementError: rank {rank}: ") and "mesh" in message, message
