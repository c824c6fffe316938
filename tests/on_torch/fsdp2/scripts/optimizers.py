"""Optimizers, optimizers in backward, and gradient scalers."""

import functools
import math
from typing import Any

import torch

from tests.on_torch.fsdp2.scripts import scenario
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.fsdp2_models import linears, sharded_net, trained, values
from tests.on_torch.helpers.models import loss_of
from tests.on_torch.helpers.scenarios import EVERY
from tests.on_torch.helpers.scripts import Side, inputs

for _options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
    for _kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam):

        def _optimized(side: Side, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> Any:
            model = sharded_net(side)
            optimizer = kind(model.parameters(), lr=0.05, **options)  # type: ignore[call-arg]
            return [trained(side, model, optimizer=optimizer), list(optimizer.state_dict()["state"].values())]

        # DTensor does not support fused SGD; foreach=False is the default of both.
        if (
            _kind is (torch.optim.Adam if "fused" in _options else _kind)
            and (_kind is not torch.optim.Adam or "fused" in _options)
            and (EVERY or _options != {"foreach": False})
        ):
            scenario(name=f"optimizer_{_kind.__name__}_{'_'.join(f'{k}_{v}' for k, v in _options.items())}")(
                functools.partial(_optimized, kind=_kind, options=_options)
            )


@scenario()
def an_optimizer_in_backward(side):
    """Hooks after accumulation step each parameter and free its gradient."""
    model = sharded_net(side)
    optimizers = {param: torch.optim.Adam([param], lr=0.05) for param in model.parameters()}
    seen = []

    def step(param):
        seen.append([tuple(param.shape), param.grad is not None])
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for i in range(2):
        loss_of(model, i, side.rank).backward()
    return [seen, values(model)]


@scenario()
def scaled_gradients(side):
    """torch.amp.GradScaler, with a step that overflows on one rank."""
    model = side.fully_shard(linears(4, 3, 2))
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=4.0, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(inputs(side, step)).square().mean()
        if step == 1 and side.rank == 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        if step == 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [scales, values(model)]


@scenario()
def an_event_after_the_optimizer(side):
    model = sharded_net(side)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for step in range(3):
        loss_of(model, step, side.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.set_post_optim_event(torch.Event(DEVICE.type))
        results.append(values(model))
    return results
