"""Every public name of torch.distributed.fsdp is here, under the same module, with the same parameters, members and defaults."""

import json
import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import torch_backend
from tests.on_torch.programs.public_names import FILE, MODULES, attributes_of_wrappers, described, of_torch

TORCH = json.loads(FILE.read_text())
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
# Internal to torch's FSDP: handles of flat parameters and their states, which scripts cannot use.
ABSENT = {(FSDP1, "FlatParamHandle"), (FSDP1, "HandleTrainingState")}
# Keyword arguments that torch does not have.
ADDED = {"fully_shard": ", layout='per_param', block_fn=None"}
NAMES = [(module, name) for module, names in TORCH["modules"].items() for name in names if (module, name) not in ABSENT]


@pytest.mark.parametrize(("module", "name"), [pytest.param(*each, id=".".join(each)) for each in NAMES])
def test_names_are_what_they_are_in_torch(module, name):
    theirs = TORCH["definitions"][TORCH["modules"][module][name]]
    ours = described(getattr(import_module(MODULES[module]), name))
    if ours["kind"] == "function":
        ours["parameters"] = ours["parameters"].removesuffix(ADDED.get(name, ""))
        assert ours == theirs
    elif ours["kind"] == "class":
        assert {each: ours["methods"].get(each) for each in theirs["methods"]} == theirs["methods"]
        assert set(theirs["attributes"]) <= set(ours["attributes"])
        assert set(theirs["bases"]) <= set(ours["bases"])
        assert ours.get("frozen") == theirs.get("frozen")
    else:
        assert ours == theirs


@pytest.mark.parametrize("module", MODULES)
def test_star_imports_bring_what_torchs_bring(module):
    torchs = import_module(module)
    named = set(getattr(torchs, "__all__", ()))
    assert named <= set(getattr(import_module(MODULES[module]), "__all__", ()))


@pytest.mark.parametrize(("module", "name"), sorted(ABSENT))
def test_internal_names_say_what_to_use_instead(module, name):
    with pytest.raises(ImportError, match=f"no {name}, which is internal to PyTorch's FSDP: .* `params`"):
        getattr(import_module(MODULES[module]), name)
    with pytest.raises(AttributeError, match="no attribute 'anything'"):
        import_module(MODULES[module]).anything  # noqa: B018


def _interface_and_instances(rank, world_size):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return of_torch(), attributes_of_wrappers(torch_backend)


def test_wrappers_have_torchs_attributes_and_the_list_is_torchs(ranks):
    [(installed, ours)] = ranks.run(1, _interface_and_instances)
    assert set(TORCH["instances"]) <= set(ours) | set(dir(torch_backend.FullyShardedDataParallel))
    assert installed == TORCH or not torch.__version__.startswith("2.13")


def _states(rank, world_size):
    inner, model = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    torch_backend.fully_shard(model)
    state: Any = torch_backend.fully_shard.state  # type: ignore[attr-defined]
    return state(model) is not None, state(model[0]), state(inner)


def test_fully_shard_state_is_none_for_plain_modules(ranks):
    assert ranks.run(1, _states) == [(True, None, None)]
