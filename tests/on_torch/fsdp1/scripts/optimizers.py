"""Parameter groups, optimizers in backward, and gradient scalers."""

from importlib import import_module

import torch
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

from tests.on_torch.fsdp1.scripts import scenario
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.fsdp1_models import OneRankGroup, nested
from tests.on_torch.helpers.scripts import grads, inputs, raised


@scenario("orig")
def two_groups_of_parameters(side):
    """Biases without weight decay, chosen by name."""
    model = nested(side)
    if not side.use_orig_params:
        return []
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0, "lr": 0.05},
        ],
        lr=0.01,
        foreach=True,
    )
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(inputs(side, step)).square().sum().backward()
        optimizer.step()
    return [side.full(model), [tuple(p.shape) for p in model.parameters()]]


@scenario("flat")
def a_scaler_around_a_step(side):
    scaler = import_module(f"{side.name}.sharded_grad_scaler").ShardedGradScaler(DEVICE.type, init_scale=4.0)
    model = nested(side)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(inputs(side, step)).square().sum()
        scaler.scale(loss).backward()
        if step == 2 and side.rank == 1:
            next(p for p in model.parameters() if p.grad is not None and p.grad.numel()).grad[0] = float("inf")
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
    return [scaler.get_scale(), side.full(model)]


@scenario("orig")
def a_scaler_in_a_group_that_only_says_its_rank_and_size(side):
    cls = import_module(f"{side.name}.sharded_grad_scaler").ShardedGradScaler
    scaler = cls(DEVICE.type, init_scale=2.0, process_group=OneRankGroup(), enabled=True)
    return scaler.scale(torch.full((1,), 4.0))


@scenario()
def an_optimizer_that_steps_in_backward(side):
    model = nested(side)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1}, register_hook=False)
    if not side.use_orig_params:
        return [raised(lambda: model(inputs(side)))]
    for step in range(3):
        model(inputs(side, step)).square().sum().backward()
    return [side.full(model), grads(model)]
