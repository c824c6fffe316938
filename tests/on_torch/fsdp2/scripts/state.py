"""State dicts."""

import copy
import io

import torch
import torch.distributed.checkpoint.state_dict as checkpoint_state

from tests.on_torch.fsdp2.scripts import scenario
from tests.on_torch.helpers.fsdp2_models import sharded_net, trained, values
from tests.on_torch.helpers.models import Net, build_net, loss_of, seed_cpu
from tests.on_torch.helpers.scripts import grads, raised


@scenario()
def state_dicts_at_each_moment(side):
    """State dicts hold shards, also while parameters are unsharded."""
    model = sharded_net(side)
    results = [model.state_dict()]
    model.unshard()
    results.append(model.state_dict())
    loss = loss_of(model, 0, side.rank)
    results.append(copy.deepcopy(model.state_dict()))
    results.append(copy.deepcopy(model.blocks[0].state_dict(prefix="block.")))
    loss.backward()
    results += [model.state_dict(keep_vars=True), grads(model), model.head.state_dict()]
    return results


@scenario()
def state_dicts_alias_the_parameters(side):
    model = sharded_net(side)
    state = model.state_dict()
    results = trained(side, model)
    return [results, state]


@scenario()
def states_are_loaded(side):
    results = []
    for assign in (False, True):
        model = sharded_net(side)
        seed_cpu(20)
        other = sharded_net(side, Net(depth=2))
        trained(side, model)
        before = list(model.parameters())
        state = copy.deepcopy(other.state_dict())
        result = model.load_state_dict(state, assign=assign)
        same = [a is b for a, b in zip(before, model.parameters(), strict=True)]
        results += [list(result), same if not assign else None, values(model), trained(side, model)]
    return results


@scenario()
def a_part_of_a_state_is_loaded(side):
    model = sharded_net(side)
    state = {name: value * 2 for name, value in model.state_dict().items() if "up" in name}
    missing, unexpected = model.load_state_dict(state | {"other": torch.ones(2)}, strict=False)
    return [missing, unexpected, values(model), raised(lambda: model.load_state_dict(state))]


@scenario()
def full_tensors_are_not_loaded(side):
    model = sharded_net(side)
    return [raised(lambda: model.load_state_dict(build_net(depth=2).state_dict()))]


@scenario()
def a_state_is_saved(side):
    """Saved by torch.save, read by torch.load, and loaded."""
    model = sharded_net(side)
    trained(side, model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    fresh = sharded_net(side)
    fresh.load_state_dict(state)
    return [state, trained(side, fresh)]


@scenario()
def states_by_the_checkpoint_library(side):
    """torch.distributed.checkpoint.state_dict: full, on the CPU, from the first rank; the optimizer's too."""
    model = sharded_net(side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    trained(side, model, optimizer=optimizer)
    first = checkpoint_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    everywhere = checkpoint_state.StateDictOptions(full_state_dict=True)
    spread = checkpoint_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    on_the_first = [dict(part) for part in checkpoint_state.get_state_dict(model, optimizer, options=first)]
    sharded = [dict(part) for part in checkpoint_state.get_state_dict(model, optimizer)]
    state, optim = checkpoint_state.get_state_dict(model, optimizer, options=everywhere)
    fresh = sharded_net(side, Net(depth=2))
    again = torch.optim.AdamW(fresh.parameters(), lr=0.05)
    checkpoint_state.set_state_dict(fresh, again, model_state_dict=state, optim_state_dict=optim, options=spread)
    return [on_the_first, sharded, dict(state), dict(optim), trained(side, fresh, optimizer=again)]
