"""Checkpoints in crossframe's own format, of a model and its optimizer: from every API and layout into every other."""

# pyright: reportArgumentType=false

from typing import Any

import pytest
import torch
from torch import nn

from crossframe.checkpoint import AsyncSaver, read
from crossframe.errors import CrossframeError
from tests.core.helpers.checkpoints import writing_waits
from tests.on_torch.programs.campaign import content
from torch_backend import FullyShardedDataParallel, fully_shard, load_checkpoint, save_checkpoint

APIS = ("original", "per_param", "flat_param", "ragged", "flat")
WORLDS = (3, 2, 4, 1, 2)


def model_of(api: str, seed: int) -> Any:
    """Three units, one of which holds fewer rows than there are ranks; it has not run."""
    torch.manual_seed(seed)
    net: Any = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Tanh(), nn.Linear(2, 2))
    if api in ("original", "flat_param"):
        keep = api == "original"
        net[2] = FullyShardedDataParallel(net[2], use_orig_params=keep)
        return FullyShardedDataParallel(net, use_orig_params=keep)
    for module in (net[0], net[2], net):
        fully_shard(module, layout=api)
    return net


def step(net: Any, optimizer: Any, number: int, rank: int) -> None:
    inputs = torch.arange(6.0).reshape(2, 3) * (number + 1) + rank
    net(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def made(api: str, seed: int = 1, kind: Any = torch.optim.AdamW, **options: Any) -> Any:
    net = model_of(api, seed)
    return net, kind(net.parameters(), lr=0.1, **options)


def save_trained(rank, world_size, api, path):
    net, optimizer = made(api)
    for number in range(2):
        step(net, optimizer, number, rank)
    save_checkpoint(path, net, optimizer, about={"step": 2})


def load_and_save(rank, world_size, api, path, other, stepped):
    """Into a model of other values, whose optimizer has stepped or not; and what is saved of it then."""
    net, optimizer = made(api, seed=2)
    if stepped:
        step(net, optimizer, 0, rank)
    load_checkpoint(path, net, optimizer)
    save_checkpoint(other, net, optimizer)


def test_R36_R37_model_and_optimizer_go_from_every_api_and_layout_to_another(ranks, tmp_path):
    ranks.run(3, save_trained, APIS[0], tmp_path / "0")
    first = content(tmp_path / "0")
    assert read(tmp_path / "0").about == {"step": 2}
    assert len(first) == 3 * 6 + 1 and first["optimizer.step"] == 2
    assert all(value.any() for name, value in first.items() if name != "optimizer.step")
    for i in range(1, 6):
        api, world_size = APIS[i % 5], WORLDS[i % 5]
        ranks.run(world_size, load_and_save, api, tmp_path / str(i - 1), tmp_path / str(i), i % 2 == 0)
        again = content(tmp_path / str(i))
        assert again.keys() == first.keys() and again["optimizer.step"] == 2
        assert all(torch.equal(again[name], first[name]) for name in first if name != "optimizer.step"), api


def train_on(rank, world_size, api, path):
    """Whether a run that loads goes on as the one that saved: the same bits after the next step, and whether a checkpoint that is
    written during another step has them too."""
    net, optimizer = made(api)
    step(net, optimizer, 0, rank)
    save_checkpoint(path, net, optimizer)
    other, loaded = made(api, seed=2)
    load_checkpoint(path, other, loaded)
    for model, own in ((net, optimizer), (other, loaded)):
        step(model, own, 1, rank)
    save_checkpoint(f"{path}-1", net, optimizer)
    save_checkpoint(f"{path}-2", other, loaded)
    with AsyncSaver() as saver, writing_waits():
        save_checkpoint(f"{path}-3", net, optimizer, saver=saver)
        step(net, optimizer, 2, rank)


@pytest.mark.parametrize("api", ["original", "flat_param", "per_param"])
def test_R37_a_run_that_was_loaded_goes_on_bit_for_bit(ranks, tmp_path, api):
    ranks.run(2, train_on, api, tmp_path / "c")
    a, *others = (content(tmp_path / f"c-{i}") for i in (1, 2, 3))
    for b in others:
        assert a.keys() == b.keys() and a["optimizer.step"] == b["optimizer.step"] == 2
        assert all(torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name])) for name in a)


def refusals(rank, world_size, path):
    """What cannot be saved or loaded, and whether anything was changed by it."""
    said: dict[str, str] = {}

    def refused(name: str, act: Any) -> None:
        try:
            act()
            said[name] = "nothing"
        except CrossframeError as error:
            said[name] = f"{type(error).__name__}: {error}"

    net, optimizer = made("flat")
    step(net, optimizer, 0, rank)
    save_checkpoint(path / "adam", net, optimizer)
    save_checkpoint(path / "bare", net)
    refused("about", lambda: save_checkpoint(path / "x", net, about={"at": (1, 2)}))
    refused("no root", lambda: save_checkpoint(path / "x", nn.Linear(2, 2)))
    refused("no module", lambda: load_checkpoint(path / "adam", 5))  # type: ignore[arg-type]
    refused("no path", lambda: save_checkpoint(5, net))  # type: ignore[arg-type]
    refused("no optimizer", lambda: save_checkpoint(path / "x", net, object()))  # type: ignore[arg-type]
    other, new = made("flat", seed=2)
    refused("not stepped", lambda: save_checkpoint(path / "x", other, new))
    before = content_of(other)
    refused("bare", lambda: load_checkpoint(path / "bare", other, new))
    momentum = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    refused("sgd", lambda: load_checkpoint(path / "adam", other, momentum))
    stranger = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    refused("stranger", lambda: load_checkpoint(path / "adam", other, stranger))
    unchanged = not (new.state or momentum.state or stranger.state) and content_of(other) == before

    mixed = nn.Sequential(nn.Linear(3, 5))
    mixed[0].bias.requires_grad_(False)
    fully_shard(mixed, layout="flat")
    part = torch.optim.AdamW([mixed[0].weight])
    step(mixed, part, 0, rank)
    refused("frozen", lambda: save_checkpoint(path / "x", mixed, part))
    net[0].bias.grad = torch.zeros_like(net[0].bias)
    optimizer.step()
    refused("steps", lambda: save_checkpoint(path / "x", net, optimizer))
    return said, unchanged


def content_of(net: Any) -> list[bytes]:
    return [param.local.numpy().tobytes() for param in net.parameters()]


def test_what_cannot_be_saved_or_loaded_is_refused_by_name_and_changes_nothing(ranks, tmp_path):
    found = ranks.run(2, refusals, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adam", "bare"]
    for said, unchanged in found:
        assert unchanged, said
        assert "about: expected a dict of JSON values" in said["about"]
        assert "expected the root of a sharded model, got Linear" in said["no root"]
        assert "expected the root of a sharded model, got int" in said["no module"]
        assert "expected the folder of a checkpoint as a path with a name, got 5" in said["no path"]
        assert "optimizer: expected one of torch.optim, got object" in said["no optimizer"]
        assert "the optimizer has no state of any parameter" in said["not stepped"]
        assert "the optimizer has no state of any parameter" in said["stranger"]
        assert "nothing was loaded: expected the state of AdamW with the values ['step'], got []" in said["bare"]
        assert "nothing was loaded: expected the state of SGD with the values [], got ['step']" in said["sgd"]
        assert "['0.bias'] are frozen and share a buffer with '0.weight', which is trained" in said["frozen"]
        assert "the state 'step' is 1 of parameter" in said["steps"] and "and 2 of '0.bias'" in said["steps"]


def frozen_and_trained(rank, world_size, path):
    """A unit of which the bias is frozen, one array a parameter."""
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    net[0].bias.requires_grad_(False)
    net[1].requires_grad_(False)
    fully_shard(net[1])
    fully_shard(net)
    optimizer: Any = torch.optim.AdamW([param for param in net.parameters() if param.requires_grad])
    step(net, optimizer, 0, rank)
    save_checkpoint(path, net, optimizer)
    moments = optimizer.state[net[0].weight]["exp_avg"].to_local().clone()
    optimizer.state.clear()
    load_checkpoint(path, net, optimizer)
    return torch.equal(optimizer.state[net[0].weight]["exp_avg"].to_local(), moments) and len(optimizer.state) == 1


def test_R37_what_is_frozen_has_no_state_in_a_checkpoint(ranks, tmp_path):
    assert ranks.run(2, frozen_and_trained, tmp_path / "c") == [True, True]
    names = [spec.name for spec in read(tmp_path / "c").sections["state"].params]
    assert names == ["exp_avg:0.weight", "exp_avg_sq:0.weight"]
    assert torch.isfinite(content(tmp_path / "c")["model.1.bias"]).all()
