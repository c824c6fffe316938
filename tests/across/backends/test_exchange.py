"""Shards go from torch to JAX and back by lines, bit for bit, under every API and layout."""

from typing import Any

import jax
import numpy as np
import pytest

from crossframe.mesh import MeshSpec
from crossframe.param_map import MapEntry, ParamMap
from jax_backend import from_torch, load_checkpoint, make_mesh, save_checkpoint, shard, to_torch, unshard

APIS = ("FSDP1", "per_param", "flat", "ragged")
UNITS = ("0", "2")
SIZES = {"0": (5, 3), "2": (5, 5), "4": (2, 5)}


def model_of(api: Any, seed: int) -> Any:
    """A model in three units, which has run once, and so knows its parameters' names."""
    import torch
    from torch import nn

    from torch_backend import FullyShardedDataParallel, fully_shard

    torch.manual_seed(seed)
    net: Any = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))
    full = {name: param.detach().numpy().copy() for name, param in net.named_parameters()}
    if api == "FSDP1":
        for unit in UNITS:
            net[int(unit)] = FullyShardedDataParallel(net[int(unit)], use_orig_params=True)
        net = FullyShardedDataParallel(net, use_orig_params=True)
    else:
        for module in (*(net[int(unit)] for unit in UNITS), net):
            fully_shard(module, layout=api, reshard_after_forward=api != "ragged")
    net(torch.zeros(1, 3))
    return net, full


def lines_of(net: Any) -> Any:
    from torch_backend.shards import sharded_units

    return {name: bucket.store for name, (bucket,) in sharded_units(net)}


def send(rank, world_size, api):
    net, full = model_of(api, seed=1)
    stores = lines_of(net)
    net.eval()
    return (
        {name: store.buffer.numpy() for name, store in stores.items()},
        {n: s.layout for n, s in stores.items()},
        full,
    )


def receive(rank, world_size, api, lines):
    """Whether a model of other values that took these lines is the first one, padding included."""
    import torch

    (first, _), (other, _) = model_of(api, seed=1), model_of(api, seed=2)
    wanted, stores = lines_of(first), lines_of(other)
    # 5 rows on 4 ranks are 2, 2 and 1: the last rank has none.
    different = rank == 3 or any(not torch.equal(wanted[name].buffer, store.buffer) for name, store in stores.items())
    for name, store in stores.items():
        for piece, value in zip(store.pieces, store.split(torch.from_numpy(lines[rank][name])), strict=True):
            piece.copy_(value)
    return different and all(torch.equal(wanted[name].buffer, store.buffer) for name, store in stores.items())


def zeros_like(tree: Any, world_size: int, layout: str) -> Any:
    entries = [MapEntry(f"{name}.{key}", f"{name}.{key}") for name in SIZES for key in ("weight", "bias")]
    zeros, param_map = jax.tree.map(np.zeros_like, tree), ParamMap(tuple(entries))
    return shard(zeros, make_mesh(MeshSpec(world_size)), units=UNITS, param_map=param_map, layout=layout)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("api", APIS)
def test_R04_R07_R09_shards_of_torch_become_those_of_jax_and_go_back(ranks, world_size, api):
    import torch

    sent = ranks.run(world_size, send, api)
    layouts, full = sent[0][1], sent[0][2]
    tree = {name: {key: full[f"{name}.{key}"] for key in ("weight", "bias")} for name in SIZES}
    like = zeros_like(tree, world_size, "flat" if api == "FSDP1" else api)
    lines = {
        rank: {name: torch.from_numpy(line) for name, line in own.items()} for rank, (own, _, _) in enumerate(sent)
    }
    sharded = from_torch(like, lines, layouts)
    jax.tree.map(np.testing.assert_array_equal, unshard(sharded), tree)
    back = {
        rank: {name: torch.from_dlpack(line).numpy().copy() for name, line in to_torch(sharded, rank).items()}
        for rank in range(world_size)
    }
    assert all(ranks.run(world_size, receive, api, back))


def save_from_torch(rank, world_size, api, path):
    from torch_backend.checkpoint import save_checkpoint

    net, full = model_of(api, seed=1)
    save_checkpoint(path, net)
    return full


def load_into_torch(rank, world_size, api, path):
    """Whether a model of other values is the first one once it has loaded; what damaged checkpoints say, and change."""
    import torch

    from crossframe.errors import CrossframeError
    from torch_backend.checkpoint import load_checkpoint

    (first, _), (other, _) = model_of(api, seed=1), model_of(api, seed=2)
    before = {name: store.buffer.clone() for name, store in lines_of(other).items()}
    try:
        load_checkpoint(f"{path}-damaged", other)
        said = ""
    except CrossframeError as error:
        said = str(error)
    unchanged = all(torch.equal(store.buffer, before[name]) for name, store in lines_of(other).items())
    load_checkpoint(path, other)
    wanted = lines_of(first)
    same = all(torch.equal(wanted[name].buffer, store.buffer) for name, store in lines_of(other).items())
    # All units are still full from their first forward, which one that is no training would go on with.
    with torch.no_grad():
        out = [net(torch.ones(1, 3)) for net in (first, other)]
    return same and torch.equal(*out), unchanged, said


def test_R36_a_checkpoint_goes_from_torch_to_jax_and_back_at_other_world_sizes_and_layouts(ranks, tmp_path):
    full = ranks.run(2, save_from_torch, "FSDP1", tmp_path / "torch")[0]
    tree = {name: {key: full[f"{name}.{key}"] for key in ("weight", "bias")} for name in SIZES}
    sharded = load_checkpoint(tmp_path / "torch", zeros_like(tree, 3, "per_param"))
    jax.tree.map(np.testing.assert_array_equal, unshard(sharded), tree)
    for path in (tmp_path / "jax", tmp_path / "jax-damaged"):
        save_checkpoint(path, sharded)
    file = tmp_path / "jax-damaged" / "rank00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    for same, unchanged, said in ranks.run(2, load_into_torch, "ragged", tmp_path / "jax"):
        assert same and unchanged and "rank00000.safetensors has other content" in said
