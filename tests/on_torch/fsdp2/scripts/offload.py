"""Offload to the CPU."""

from tests.on_torch.fsdp2.scripts import scenario
from tests.on_torch.helpers.fsdp2_models import look, sharded_net, trained
from tests.on_torch.helpers.models import loss_of
from tests.on_torch.helpers.scripts import grads


@scenario()
def offloaded(side):
    """On a CPU mesh offload moves nothing."""
    model = sharded_net(side, offload_policy=side.CPUOffloadPolicy(pin_memory=False))
    return [look(model), trained(side, model)]


@scenario()
def offloaded_and_accumulated(side):
    model = sharded_net(side, offload_policy=side.CPUOffloadPolicy(pin_memory=False))
    results = []
    for step in range(3):
        model.set_requires_gradient_sync(step != 0)
        loss_of(model, step, side.rank).backward()
        results.append(grads(model))
    return results
