"""Names of parameters in models with wrappers inside of units: those of the model without wrappers."""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from crossframe.recording import Recording
from torch_backend import fully_shard, initialise_sharded, load_checkpoint, save_checkpoint
from torch_backend.engine._unit_tree import named_units
from torch_backend.recorder import Recorder


def _plain(device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))


def _compiled(module):
    return torch.compile(module, backend="eager")


def _wrapped(wrap, when, device="cpu"):
    """One layer inside a unit is wrapped, before or after the unit is sharded."""
    model = _plain(device)
    if when == "before":
        model[0][1] = wrap(model[0][1])
    fully_shard(model[0])
    fully_shard(model)
    if when == "after":
        model[0][1] = wrap(model[0][1])
    return model


WRAPPED = pytest.mark.parametrize("wrap", [checkpoint_wrapper, _compiled])
WHEN = pytest.mark.parametrize("when", ["before", "after"])


def _stored(rank, world_size, wrap, when, folder):
    plain = dict(_plain().named_parameters())
    model = _wrapped(wrap, when)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Recorder(f"{folder}/run", model=model, optimizer=optimizer, every=1) as recorder:
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        recorder.step(loss=loss)
    save_checkpoint(f"{folder}/saved", model)
    other = _plain()
    fully_shard(other)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    load_checkpoint(f"{folder}/saved", other)
    for name, param in other.named_parameters():
        assert torch.equal(param.full_tensor(), plain[name]), name


@WRAPPED
@WHEN
def test_R36_stored_names_are_the_plain_models(ranks, tmp_path, wrap, when):
    ranks.run(2, _stored, wrap, when, str(tmp_path))
    assert set(Recording.open(tmp_path / "run").manifest.params) == set(dict(_plain().named_parameters()))


def _keys(rank, world_size, wrap, when):
    model = _wrapped(wrap, when)
    names = {spec.name for unit in named_units(model) for each in unit.buckets for spec in each.params}
    assert names == set(model.state_dict())


@WRAPPED
@WHEN
def test_R36_names_are_the_keys_of_state_dicts(ranks, wrap, when):
    ranks.run(2, _keys, wrap, when)


def _initialised(rank, world_size, wrap, when):
    model = _wrapped(wrap, when, "meta")
    torch.manual_seed(0)
    initialise_sharded(model, device="cpu")
    for (name, value), param in zip(_plain().named_parameters(), model.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), value), name


@WRAPPED
@WHEN
def test_R38_wrapped_modules_are_initialised(ranks, wrap, when):
    ranks.run(2, _initialised, wrap, when)


def _removed(rank, world_size):
    model = _plain()
    fully_shard(model)
    model[1] = nn.Identity()
    names = [spec.name for unit in named_units(model) for each in unit.buckets for spec in each.params]
    assert sorted(names) == sorted(dict(_plain().named_parameters()))


def test_parameters_of_removed_modules_keep_their_names(ranks):
    ranks.run(2, _removed)


def _sharded_twice(rank, world_size, folder):
    plain, model = _plain(), _plain()
    fully_shard(model[0])
    model[0] = checkpoint_wrapper(model[0])
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(f"{folder}/run", model=model, optimizer=optimizer, every=1) as recorder:
        for _ in range(2):
            for each in (plain, model):
                loss = each(torch.ones(2, 4)).square().sum()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss)
            with torch.no_grad():
                for param in plain.parameters():
                    param -= 0.1 * param.grad  # pyright: ignore[reportOperatorIssue]
                    param.grad = None
    for (name, expected), (key, param) in zip(plain.named_parameters(), model.state_dict().items(), strict=True):
        assert key == name
        assert torch.allclose(param.full_tensor(), expected), name


def test_R01_a_unit_around_a_wrapped_unit_owns_nothing(ranks, tmp_path):
    """As accelerate shards with activation checkpointing: the block, and its wrapper, which has the name of the block."""
    ranks.run(2, _sharded_twice, str(tmp_path))
    assert set(Recording.open(tmp_path / "run").manifest.params) == set(dict(_plain().named_parameters()))
