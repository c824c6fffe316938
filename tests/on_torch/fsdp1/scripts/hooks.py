"""Module hooks and communication hooks."""

import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks

from tests.on_torch.fsdp1.scripts import scenario
from tests.on_torch.helpers.fsdp1_models import nested, trained, world
from tests.on_torch.helpers.scripts import inputs, raised


@scenario("orig")
def hooks_of_the_users(side):
    seen = []
    model = nested(side)
    inner = model.module.layers[2]
    inner.register_forward_pre_hook(lambda m, a: seen.append(("pre", tuple(a[0].shape))))
    inner.register_forward_hook(lambda m, a, o: seen.append(("post", tuple(o.shape))))
    inner.register_full_backward_hook(lambda m, gi, go: seen.append(("back", tuple(go[0].shape))))
    model.module.layers[1].module[1].register_forward_hook(lambda m, a, o: o * 2)
    return [trained(side, model, steps=2), seen]


@scenario("flat")
def communication_hooks(side):
    results = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        model = nested(side, sharding_strategy=side.ShardingStrategy[strategy])
        hook = default_hooks.allreduce_hook if strategy == "NO_SHARD" else default_hooks.reduce_scatter_hook
        model.register_comm_hook(default_hooks.DefaultState(world()), hook)
        results.append(trained(side, model))
        model = nested(side, sharding_strategy=side.ShardingStrategy[strategy])
        seen = []
        model.register_comm_hook(seen, _double)
        results.append(trained(side, model))
        if strategy != "NO_SHARD":  # under which torch pads although nothing is sharded
            results.append(seen)
    return results


def _double(seen, full, shard=None):
    """A custom reduction without a collective: twice the gradient of this rank."""
    seen.append((tuple(full.shape), None if shard is None else tuple(shard.shape)))
    if shard is None:
        full.mul_(2)
    else:
        start = dist.get_rank() * shard.numel()
        shard.copy_(full[start : start + shard.numel()] * 2)


@scenario("orig")
def refused_communication_hooks(side):
    state = default_hooks.DefaultState(world())
    model = nested(side)
    model(inputs(side))
    inner = raised(lambda: model.module.layers[1].register_comm_hook(state, default_hooks.reduce_scatter_hook))
    model.register_comm_hook(state, default_hooks.reduce_scatter_hook)
    twice = raised(lambda: model.register_comm_hook(state, default_hooks.reduce_scatter_hook))
    return [inner, twice]
