"""Ranks that hold the same things in different orders: state reaches the parameter that it belongs to, or the ranks raise."""

# pyright: reportArgumentType=false

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _NamedOptimizer  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from crossframe.errors import AgreementError
from torch_backend import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch_backend import FullyShardedDataParallel as FSDP


def _half_managed(last):
    """A model of which FSDP manages the first layer alone."""
    first = FSDP(nn.Linear(4, 4), use_orig_params=True)
    model = nn.Sequential(first, nn.Linear(4, 4, bias=False), nn.Linear(4, last, bias=False))
    return model.train()


def _stepped(model, params):
    optimizer = torch.optim.Adam(params, lr=0.1)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return optimizer


def _from_the_first_rank(rank, world_size, last, method, absent):
    model = _half_managed(last)
    every = list(model.parameters())
    optimizer = _stepped(model, every[::-1] if rank == 1 else every)
    # What the last rank's optimizer does not hold it cannot be given; the others must get theirs all the same.
    held = [p for p in every if not (absent and rank == world_size - 1 and p is model[1].weight)]
    fresh = torch.optim.Adam(held[::-1] if rank == 1 else held, lr=0.1)
    if method == "scatter":
        full = FSDP.full_optim_state_dict(model, optimizer)
        given = {"state": full["state"]} if absent and rank == 0 else full
        mine = FSDP.scatter_full_optim_state_dict(given if rank == 0 else None, model, optim=fresh)
    else:
        configs = FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
            full = FSDP.optim_state_dict(model, optimizer)
            if absent:
                full.pop("param_groups", None)
            mine = FSDP.optim_state_dict_to_load(model, fresh, full)
    mine.setdefault("param_groups", fresh.state_dict()["param_groups"])
    fresh.load_state_dict(mine)
    for layer in (1, 2):
        param = model[layer].weight
        if absent and rank == world_size - 1 and layer == 1:
            assert param not in fresh.state
            continue
        for entry, value in optimizer.state[param].items():
            assert torch.equal(fresh.state[param][entry], value), (layer, entry)
    for param in model[0].parameters():
        for entry, value in optimizer.state.get(param, {}).items():
            assert torch.equal(fresh.state[param][entry], value), entry


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("last", [pytest.param(4, id="equal"), pytest.param(8, id="unequal")])
@pytest.mark.parametrize("method", ["scatter", "to_load"])
def test_R37_optimizers_may_differ_in_order(ranks, world_size, last, method):
    ranks.run(world_size, _from_the_first_rank, last, method, False)


@pytest.mark.parametrize("method", ["scatter", "to_load"])
def test_R37_optimizers_may_lack_unmanaged_parameters(ranks, method):
    ranks.run(3, _from_the_first_rank, 8, method, True)


class _Gated(torch.optim.Optimizer):
    """Keeps one value a parameter, as a tensor of one dim."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            if param.numel():
                self.state[param]["gate"] = torch.tensor([5.0])


def _gates(rank, world_size):
    model = _half_managed(4)
    optimizer = _Gated(model.parameters())
    optimizer.step()
    full = FSDP.full_optim_state_dict(model, optimizer)
    mine = FSDP.scatter_full_optim_state_dict(full if rank == 0 else None, model, optim=optimizer)
    assert {float(own["gate"]) for own in mine["state"].values()} == {5.0}


def test_R37_values_of_one_dim_reach_all_ranks(ranks):
    ranks.run(2, _gates)


def _entries_in_another_order(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    model = FSDP(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), use_orig_params=True, device_mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    configs = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs):
        saved = FSDP.optim_state_dict(model, optimizer)
        if rank == 1:
            state = saved["state"]
            saved["state"] = {name: dict(reversed(state[name].items())) for name in reversed(state)}
        mine = FSDP.optim_state_dict_to_load(model, optimizer, saved)
    for at, param in enumerate(optimizer.param_groups[0]["params"]):
        for entry, value in optimizer.state.get(param, {}).items():
            assert torch.equal(mine["state"][at][entry], value), (at, entry)


@pytest.mark.parametrize("world_size", [2, 3])
def test_R37_entries_may_differ_in_order(ranks, world_size):
    ranks.run(world_size, _entries_in_another_order)


def _pieces_in_another_order(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, layout="flat")
    fully_shard(model, layout="flat")
    named = list(model.named_parameters())
    if rank == 1:
        named.reverse()
    optimizer = torch.optim.Adam([param for _, param in named], lr=0.1)
    model(torch.arange(8.0).view(2, 4)).square().sum().backward()
    optimizer.step()
    whole = {name: optimizer.state[param]["exp_avg"].full_tensor() for name, param in model.named_parameters()}
    shown = optimizer.state_dict()
    for at, (name, _) in sorted(enumerate(named), key=lambda each: each[1][0]):
        entry = shown["state"][at]["exp_avg"]
        assert isinstance(entry, DTensor)
        assert torch.equal(entry.full_tensor(), whole[name]), name
    before = {name: optimizer.state[param]["exp_avg"].local.clone() for name, param in named}
    optimizer.load_state_dict(shown)
    for name, param in named:
        assert torch.equal(optimizer.state[param]["exp_avg"].local, before[name]), name


@pytest.mark.parametrize("world_size", [2, 3])
def test_R37_optimizers_of_pieces_may_differ_in_order(ranks, world_size):
    ranks.run(world_size, _pieces_in_another_order)


def _lists_in_another_order(rank, world_size):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard([model[0], model[1]] if rank else [model[1], model[0]])
    fully_shard(model)
    with pytest.raises(AgreementError, match=r"rank 0: parameter '1\.weight'; rank 1: parameter '0\.weight'"):
        model(torch.ones(2, 4))
    dist.barrier()


def test_lists_that_differ_in_order_are_refused(ranks):
    ranks.run(2, _lists_in_another_order)


def _named_optimizer(rank, world_size, whole):
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if whole:
        model = FSDP(inner, use_orig_params=True)
    else:
        inner[0] = FSDP(inner[0], use_orig_params=True)
        model = inner
    optimizer = _NamedOptimizer(model.named_parameters(), torch.optim.Adam, module=model, lr=0.1)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    saved = FSDP.optim_state_dict(model, optimizer)
    assert sorted(saved["state"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert sorted(saved["param_groups"][0]["params"]) == sorted(saved["state"])
    loaded = FSDP.optim_state_dict_to_load(model, optimizer, saved, is_named_optimizer=True)
    own = optimizer.state_dict()
    assert set(loaded["state"]) == set(own["state"])
    assert loaded["param_groups"][0]["params"] == own["param_groups"][0]["params"]
    for name, entries in own["state"].items():
        for entry, value in entries.items():
            assert torch.equal(loaded["state"][name][entry], value), (name, entry)
    # What was saved under registered names, as the optimizer itself saves it, is taken too.
    raw = {"state": {name: dict(own) for name, own in saved["state"].items()}, "param_groups": saved["param_groups"]}
    raw["state"] = {f"_fsdp_wrapped_module.{name}": own for name, own in raw["state"].items()}
    assert set(FSDP.optim_state_dict_to_load(model, optimizer, raw, is_named_optimizer=True)["state"]) == set(
        own["state"]
    )


@pytest.mark.parametrize("whole", [pytest.param(True, id="root"), pytest.param(False, id="inner")])
def test_R37_registered_names_are_optimizer_keys(ranks, whole):
    ranks.run(2, _named_optimizer, whole)
