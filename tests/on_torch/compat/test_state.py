"""torch.distributed.checkpoint.state_dict, torch.save and safetensors on sharded models: one test a row of the README's table
"What works with it". Under FSDP1 with `replace_torch_fsdp()`; without, it is refused. At 2 ranks, beside a plain model."""

# pyright: reportArgumentType=false

import copy
import functools
import io
import itertools
import os
import tempfile
from contextlib import nullcontext

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from tests.on_torch.helpers.models import build_net
from tests.on_torch.helpers.sharded_and_plain import (
    ADAMW,
    APIS,
    CLOSE,
    EVERY_WAY,
    F64,
    FSDP1,
    FSDP2,
    differing,
    full,
    refusal,
    shard,
    train,
    train_plain,
    whole,
)
from torch_backend import replace_torch_fsdp


def _shard(model, api):
    """With a mesh, so that FSDP1's sharded state dicts hold DTensors too."""
    return shard(model, api, **({"device_mesh": init_device_mesh("cpu", (2,))} if api in FSDP1 else {}))


def _run(rank, api, *, frozen=False):
    """A plain model and a sharded one after two steps, with their optimizers."""
    models = build_net(F64, depth=2), build_net(F64, depth=2)
    for model in models:
        if frozen:
            model.embedding.requires_grad_(False)
            model.blocks[1].requires_grad_(False)
    models = models[0], _shard(models[1], api)
    optimizers = [ADAMW([param for param in model.parameters() if param.requires_grad]) for model in models]
    train_plain(models[0], optimizers[0])
    train(models[1], optimizers[1], rank)
    return models[0], optimizers[0], models[1], optimizers[1]


def _by_name(state):
    """An optimizer's state as one dict."""
    return {f"{name}.{key}": value for name, values in state["state"].items() for key, value in values.items()}


def _other(found, expected):
    """The names under which two dicts differ."""
    if found.keys() != expected.keys():
        return sorted(found.keys() ^ expected.keys())
    return [
        name
        for name, value in expected.items()
        if not (
            torch.allclose(whole(found[name]), value, **CLOSE)
            if isinstance(value, torch.Tensor)
            else found[name] == value
        )
    ]


def _got(rank, world_size):
    wrong = []
    for api in APIS:
        with replace_torch_fsdp() if api in FSDP1 else nullcontext():
            plain, plain_optimizer, model, optimizer = _run(rank, api)
            expected = get_model_state_dict(plain)
            expected_optim = _by_name(get_optimizer_state_dict(plain, plain_optimizer))
            for whole_ones, offload in itertools.product((False, True), (False, True)):
                # Each alone under one layout of each interface is enough: neither asks what is offloaded, or whole.
                if whole_ones != offload and not (EVERY_WAY or api in ("orig", "ragged layout")):
                    continue
                options = StateDictOptions(full_state_dict=whole_ones, cpu_offload=offload)
                state, optim = get_state_dict(model, optimizer, options=options)
                if whole_ones and offload and rank:  # one rank alone has them
                    wrong += [(api, "first")] if state or optim.get("state") else []
                    continue
                wrong += [(api, whole_ones, offload, name) for name in _other(state, expected)]
                wrong += [(api, whole_ones, offload, name) for name in _other(_by_name(optim), expected_optim)]
                kinds = {hasattr(state[name], "full_tensor") for name, _ in plain.named_parameters()}
                wrong += [] if kinds == {not whole_ones} else [(api, "kinds")]
            flat = StateDictOptions(flatten_optimizer_state_dict=True)
            found, wanted = (
                get_optimizer_state_dict(*each, options=flat) for each in ((model, optimizer), (plain, plain_optimizer))
            )
            wrong += [(api, "flattened", name) for name in _other(found, wanted)]
    return wrong


def test_R36_R37_state_is_got_by_torchs_functions(ranks):
    assert ranks.run(2, _got) == [[], []]


def _set(rank, world_size):
    """State of a plain model goes into a sharded one, and a sharded one's into another, and they train on alike."""
    wrong = []
    for api in APIS:
        with replace_torch_fsdp() if api in FSDP1 else nullcontext():
            plain, plain_optimizer, model, optimizer = _run(rank, api)
            given = {
                "full": get_state_dict(plain, plain_optimizer, options=StateDictOptions(full_state_dict=True)),
                "first": get_state_dict(plain, plain_optimizer) if rank == 0 else ({}, {}),
                "sharded": get_state_dict(model, optimizer),
            }
            options = {
                "full": StateDictOptions(full_state_dict=True),
                "first": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
                "sharded": StateDictOptions(),
            }
            given = {kind: copy.deepcopy(states) for kind, states in given.items()}
            train_plain(plain, plain_optimizer, range(2, 3))
            for kind, (state, optim) in given.items():
                other = _shard(build_net(F64, depth=2, seed=9), api)
                others = ADAMW(other.parameters())
                if kind == "sharded":
                    set_state_dict(other, others, model_state_dict=state, optim_state_dict=optim, options=options[kind])
                else:
                    set_model_state_dict(other, state, options=options[kind])
                    set_optimizer_state_dict(other, others, optim, options=options[kind])
                train(other, others, rank, range(2, 3))
                wrong += [(api, kind, name) for name in differing(full(other), full(plain))]
    return wrong


def test_R36_R37_state_is_set_by_torchs_functions(ranks):
    assert ranks.run(2, _set) == [[], []]


def _frozen(rank, world_size):
    wrong = []
    for api in ("orig", *FSDP2):  # one flat parameter is trained or frozen as a whole
        with replace_torch_fsdp() if api in FSDP1 else nullcontext():
            plain, plain_optimizer, model, optimizer = _run(rank, api, frozen=True)
            options = StateDictOptions(ignore_frozen_params=True)
            found, expected = (get_model_state_dict(each, options=options) for each in (model, plain))
            wrong += [(api, name) for name in _other(found, expected)]
            found, expected = (
                _by_name(get_optimizer_state_dict(*each)) for each in ((model, optimizer), (plain, plain_optimizer))
            )
            wrong += [(api, name) for name in _other(found, expected)]
    return wrong


def test_R36_frozen_parameters_are_left_out(ranks):
    assert ranks.run(2, _frozen) == [[], []]


def _without_stand_in(rank, world_size):
    wrong = []
    for api in FSDP1:
        model = shard(build_net(F64), api)
        optimizer = ADAMW(model.parameters())
        for call in (
            functools.partial(get_model_state_dict, model),
            functools.partial(get_optimizer_state_dict, model, optimizer),
            functools.partial(set_model_state_dict, model, build_net(F64).state_dict()),
        ):
            said = refusal(call, "replace_torch_fsdp()", "state_dict_type", "optim_state_dict")
            wrong += [(api, said)] if said else []
    return wrong


def test_R36_without_stand_in_torchs_functions_refuse_fsdp1(ranks):
    """They would take this rank's shards for whole parameters."""
    assert ranks.run(2, _without_stand_in) == [[], []]


def _saved(rank, world_size):
    wrong = []
    for api in APIS:
        model, plain = shard(build_net(F64), api), build_net(F64)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        wrong += [(api, name) for name in _other(loaded, plain.state_dict())]
        if api in FSDP1:
            state = model.state_dict()
        else:
            state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.safetensors")
            save_file(state, path)
            wrong += [(api, name) for name in _other(load_file(path), plain.state_dict())]
    return wrong


def test_R36_state_dicts_go_through_torch_save_and_safetensors(ranks):
    assert ranks.run(2, _saved) == [[], []]
