"""FSDP1 and FSDP2, torch's and ours, around the same model."""

import warnings

import pytest

import torch_backend
from tests.on_torch.helpers.models import Block


def torch_fsdp1(model, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel as Peer
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Peer(
            model,
            sharding_strategy=ShardingStrategy[options["strategy"]],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=options["use_orig_params"],
            device_id=next(model.parameters()).device,
        )


def our_fsdp1(model, **options):
    return torch_backend.FullyShardedDataParallel(
        model,
        sharding_strategy=torch_backend.ShardingStrategy[options["strategy"]],
        auto_wrap_policy=torch_backend.ModuleWrapPolicy({Block}),
        use_orig_params=options["use_orig_params"],
    )


def _fsdp2(shard, model, **options):
    for block in model.blocks:
        shard(block, reshard_after_forward=options["strategy"] == "FULL_SHARD")
    return shard(model)


def torch_fsdp2(model, **options):
    from torch.distributed.fsdp import fully_shard

    return _fsdp2(fully_shard, model, **options)


def our_fsdp2(model, **options):
    return _fsdp2(torch_backend.fully_shard, model, **options)


APIS = {"fsdp1": (torch_fsdp1, our_fsdp1), "fsdp2": (torch_fsdp2, our_fsdp2)}


def local_tensor(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach().clone()


OPTIONS = [
    pytest.param(
        "fsdp1", {"strategy": strategy, "use_orig_params": keep}, id=f"fsdp1-{strategy}-{'orig' * keep or 'flat'}"
    )
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
    for keep in (False, True)
] + [
    pytest.param("fsdp2", {"strategy": strategy}, id=f"fsdp2-{strategy}")
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
]
