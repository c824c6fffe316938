"""Hooks on modules, on parameters, and after the reduction."""

import torch
from torch import nn

from tests.on_torch.fsdp2.scripts import refusal, scenario
from tests.on_torch.helpers.fsdp2_models import hybrid_mesh, linears, sharded_net, trained
from tests.on_torch.helpers.scripts import inputs


@scenario(differs="in forward our parameters are plain tensors, not nn.Parameter")
def hooks_of_the_user_see_parameters(side):
    """Module hooks registered before and after `fully_shard`, in forward and backward."""
    events = []

    def note(name):
        def hook(module, *_):
            events.append([name, type(module.weight).__name__])

        return hook

    def register(module, when):
        module.register_forward_pre_hook(note(f"pre forward, {when}"))
        module.register_forward_hook(note(f"forward, {when}"))
        module.register_full_backward_pre_hook(note(f"pre backward, {when}"))
        module.register_full_backward_hook(note(f"backward, {when}"))

    model = linears(4, 3, 2)
    for layer in model:
        register(layer, "before")
        side.fully_shard(layer)
        register(layer, "after")
    side.fully_shard(model)
    x = inputs(side).requires_grad_()
    for _ in range(2):
        model(x).sum().backward()
    return [events, x.grad]


@scenario()
def hooks_on_parameters(side):
    """Tensor hooks are not called for shards; hooks after accumulation are, in a fixed order."""
    model, seen = sharded_net(side), []
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: seen.append(["gradient", name]))
        param.register_post_accumulate_grad_hook(lambda param, name=name: seen.append(["accumulated", name]))
    return [trained(side, model), seen]


@scenario()
def a_hook_after_the_reduction(side):
    seen = []

    def hook(reduced):
        seen.append(reduced.clone())
        reduced.mul_(0.5).add_(1)

    results = []
    for policy in (side.MixedPrecisionPolicy(), side.MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        model = sharded_net(side, mp_policy=policy)
        model.set_all_reduce_hook(hook)
        for block in model.blocks:
            block.set_all_reduce_hook(hook)
        results += [trained(side, model), seen]
    return results


@refusal(num_ranks=4)
def a_stream_where_replicas_have_one(side):
    model = side.fully_shard(nn.Linear(4, 2), mesh=hybrid_mesh())
    model.set_all_reduce_hook(lambda reduced: None, stream=object())
