"""Checkpoints of torch.distributed.checkpoint and of torch.save, compared by `crossframe compare`."""

import json
import warnings

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from typer.testing import CliRunner

from crossframe.checkpoint_comparison import compare_checkpoints, read_unpacked
from crossframe.cli.commands import app
from torch_backend.state.unpack_checkpoint import unpack


def save(path, model_state, optimizer_state):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        save_distributed(
            {"model": model_state, "optimizer": optimizer_state, "epoch": 3}, checkpoint_id=path, no_dist=True
        )


def opened(path, folder):
    folder.mkdir()
    unpack(path, folder)
    return read_unpacked(folder, path.name)


def test_every_tensor_of_a_distributed_checkpoint_is_read(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save(tmp_path / "a", model_state, optimizer_state)
    found = opened(tmp_path / "a", tmp_path / "unpacked")
    assert found.steps == {1}
    assert set(found.tensors) == {
        *("weight", "bias"),
        *(f"{entry}:{name}" for entry in ("exp_avg", "exp_avg_sq") for name in ("weight", "bias")),
    }
    weight = found.tensors["weight"]()
    assert weight.dtype.name == "bfloat16" and torch.equal(torch.tensor(weight.astype("float32")), model.weight.float())
    assert found.values["epoch"] == 3 and found.values["optimizer.param_groups.0.lr"] == 1e-3


def test_parameters_before_their_update_are_a_bug(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save(tmp_path / "right", model_state, optimizer_state)
    save(tmp_path / "stale", before, optimizer_state)
    found = compare_checkpoints(*(opened(tmp_path / x, tmp_path / f"unpacked {x}") for x in ("right", "stale")))
    assert found.verdict.value == "bug"
    assert (
        "parameters of right are those of stale after one more update, with a learning rate of about 0.01"
        in found.reason
    )


def test_a_distributed_checkpoint_and_a_file_are_compared_by_the_command(forks, tmp_path):
    model = nn.Linear(3, 2)
    save(tmp_path / "a", model.state_dict(), {})
    torch.save({"model": model.state_dict(), "note": "x"}, tmp_path / "b.pt")
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b.pt"), "--json"])
    found = json.loads(result.output)
    assert (result.exit_code, found["verdict"], found["tensors"], found["equal"]) == (0, "equal", 2, 2)


def test_a_damaged_checkpoint_exits_with_2(forks, tmp_path):
    for name in ("a.pt", "b.pt"):
        (tmp_path / name).write_bytes(b"no checkpoint")
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")])
    assert result.exit_code == 2 and "expected a checkpoint of torch.save, cannot read it" in result.output
