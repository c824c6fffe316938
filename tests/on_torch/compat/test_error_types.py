"""Scripts catch a mistake by the same `except` as under torch.distributed.fsdp: our errors are instances of torch's."""

import copy
import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

CPU = torch.device("cpu")
PACKAGES = ("torch_backend", "torch.distributed.fsdp")


class _Package:
    """The interface of a package, and small models that it has sharded."""

    def __init__(self, name: str) -> None:
        self.fsdp: Any = import_module(name)
        self.wrap: Any = import_module(f"{name}.wrap")
        self.scaler: Any = import_module(f"{name}.sharded_grad_scaler")

    def wrapped(self, module: nn.Module | None = None, **options: Any) -> Any:
        return self.fsdp.FullyShardedDataParallel(module or nn.Linear(4, 4), device_id=CPU, **options)

    def nested(self, **options: Any) -> Any:
        return self.wrapped(nn.Sequential(self.wrapped(**options), nn.Linear(4, 4)), **options)

    def sharded(self) -> Any:
        return self.fsdp.fully_shard(nn.Sequential(self.fsdp.fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))


def _with_scalar() -> nn.Module:
    module = nn.Linear(4, 4)
    module.scale = nn.Parameter(torch.tensor(1.0))
    return module


def _frozen_bias() -> nn.Module:
    module = nn.Linear(4, 4)
    module.bias.requires_grad_(False)
    return module


def _set_type(p: _Package, *config: str | None) -> None:
    records = [None if name is None else getattr(p.fsdp, name)() for name in config]
    p.fsdp.FullyShardedDataParallel.set_state_dict_type(p.wrapped(), p.fsdp.StateDictType.FULL_STATE_DICT, *records)


def _mixed_types(p: _Package) -> None:
    model = p.nested()
    p.fsdp.FullyShardedDataParallel.set_state_dict_type(model[0], p.fsdp.StateDictType.LOCAL_STATE_DICT)
    p.fsdp.FullyShardedDataParallel.get_state_dict_type(model)


def _used(model: Any) -> Any:
    model(torch.ones(4, 4)).sum().backward()
    return model


def _hooked_twice(p: _Package) -> None:
    model = p.wrapped()
    for _ in range(2):
        model.register_comm_hook(None, lambda state, full, shard: None)


def _summoned_twice(p: _Package) -> None:
    model = p.wrapped()
    summon = p.fsdp.FullyShardedDataParallel.summon_full_params
    with summon(model), summon(model):
        pass


def _summon(p: _Package, **options: Any) -> None:
    with p.fsdp.FullyShardedDataParallel.summon_full_params(p.wrapped(), **options):
        pass


def _summon_without_sharding(p: _Package) -> None:
    model = p.wrapped(sharding_strategy=p.fsdp.ShardingStrategy.NO_SHARD)
    with p.fsdp.FullyShardedDataParallel.summon_full_params(model, offload_to_cpu=True):
        pass


def _unscaled_twice(p: _Package) -> None:
    scaler = p.scaler.ShardedGradScaler("cpu")
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param])
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def _mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"axis {i}" for i in range(len(shape))))


MISTAKES: dict[str, Any] = {
    # FullyShardedDataParallel
    "config of another type": lambda p: _set_type(p, "LocalStateDictConfig"),
    "optimizer config of another type": lambda p: _set_type(p, None, "LocalOptimStateDictConfig"),
    "wrappers of two state dict types": _mixed_types,
    "group and mesh": lambda p: p.wrapped(process_group=dist.group.WORLD, device_mesh=_mesh(2)),
    "hybrid without groups": lambda p: p.wrapped(sharding_strategy=p.fsdp.ShardingStrategy.HYBRID_SHARD),
    "hybrid over one group": lambda p: p.wrapped(
        sharding_strategy=p.fsdp.ShardingStrategy.HYBRID_SHARD, process_group=dist.group.WORLD
    ),
    "hybrid over one axis": lambda p: p.wrapped(
        sharding_strategy=p.fsdp.ShardingStrategy.HYBRID_SHARD, device_mesh=_mesh(2)
    ),
    "ignored twice": lambda p: p.wrapped(ignored_modules=[], ignored_states=[]),
    "ignored modules of another type": lambda p: p.wrapped(ignored_modules=[3]),
    "ignored modules that are no list": lambda p: p.wrapped(ignored_modules=3),
    "ignored wrapper": lambda p: p.wrapped(inner := nn.Sequential(p.wrapped()), ignored_modules=[inner[0]]),
    "ignored states of two types": lambda p: p.wrapped(ignored_states=[nn.Linear(1, 1), nn.Parameter(torch.ones(1))]),
    "scalar parameter": lambda p: p.wrapped(_with_scalar()),
    "two dtypes": lambda p: p.wrapped(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())),
    "frozen and trained in one flat parameter": lambda p: p.wrapped(_frozen_bias()),
    "invalid init function": lambda p: p.wrapped(nn.Linear(2, 2, device="meta"), param_init_fn=3),
    "policy over wrapped modules": lambda p: p.wrapped(
        nn.Sequential(p.wrapped()), auto_wrap_policy=p.wrap.ModuleWrapPolicy({nn.Linear})
    ),
    "policy that returns a number": lambda p: p.wrapped(
        nn.Sequential(nn.Linear(2, 2)), auto_wrap_policy=p.wrap.CustomPolicy(lambda module: 3)
    ),
    "clipping an inner unit": lambda p: _used(p.nested())[0].clip_grad_norm_(1.0),
    "hook on an inner unit": lambda p: _used(p.nested())[0].register_comm_hook(None, print),
    "invalid hook": lambda p: p.wrapped().register_comm_hook(None, 3),
    "two hooks": _hooked_twice,
    "summoned twice": _summoned_twice,
    "summoned on rank 0 with writeback": lambda p: _summon(p, rank0_only=True, writeback=True),
    "summoned gradients of flat parameters": lambda p: _summon(p, with_grads=True),
    "summoned to CPU without sharding": _summon_without_sharding,
    "state dict with a missing name": lambda p: p.wrapped().load_state_dict({"weight": torch.ones(4, 4)}),
    "state dict of another shape": lambda p: p.wrapped().load_state_dict(nn.Linear(4, 5).state_dict()),
    "rekeyed to no key type": lambda p: p.fsdp.FullyShardedDataParallel.rekey_optim_state_dict({}, 3, nn.Linear(1, 1)),
    "units that differ in use_orig_params": lambda p: _used(
        p.wrapped(nn.Sequential(p.wrapped(use_orig_params=True), nn.Linear(4, 4)))
    ),
    # ShardedGradScaler
    "scaling a number": lambda p: p.scaler.ShardedGradScaler("cpu").scale(3),
    "unscaled twice": _unscaled_twice,
    # fully_shard
    "module list": lambda p: p.fsdp.fully_shard(nn.ModuleList([nn.Linear(2, 2)])),
    "no module": lambda p: p.fsdp.fully_shard(3),
    "sharded twice": lambda p: p.fsdp.fully_shard(p.sharded()),
    "mesh of three axes": lambda p: p.fsdp.fully_shard(nn.Linear(2, 2), mesh=_mesh(1, 1, 2)),
    "group that does not divide": lambda p: p.fsdp.fully_shard(nn.Linear(2, 2), reshard_after_forward=3),
    "sharded scalar parameter": lambda p: p.fsdp.fully_shard(_with_scalar()),
    "uneven on dim 1": lambda p: p.fsdp.fully_shard(
        nn.Linear(3, 4), shard_placement_fn=lambda param: Shard(param.ndim - 1)
    ),
    "invalid placement": lambda p: p.fsdp.fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda param: 3),
    "placement beyond the dims": lambda p: p.fsdp.fully_shard(
        nn.Linear(2, 2), shard_placement_fn=lambda param: Shard(5)
    ),
    "copied": lambda p: copy.deepcopy(p.sharded()),
    "buffers that are no number": lambda p: p.sharded().set_reduce_scatter_max_input_buffers("2"),
    "no buffers": lambda p: p.sharded().set_reduce_scatter_max_input_buffers(0),
    "prefetch of a plain module": lambda p: p.sharded().set_modules_to_forward_prefetch([nn.Linear(1, 1)]),
    "backward prefetch of a plain module": lambda p: p.sharded().set_modules_to_backward_prefetch([nn.Linear(1, 1)]),
    "contexts of plain modules": lambda p: p.fsdp.share_comm_ctx([nn.Linear(1, 1)]),
    "missing method": lambda p: p.fsdp.register_fsdp_forward_method(p.sharded(), "nothing"),
    "no mesh dims": lambda p: p.fsdp.DataParallelMeshDims(),
    "still on meta": lambda p: p.fsdp.fully_shard(nn.Linear(4, 4, device="meta"))(torch.ones(4, 4)),
    "sharded state dict of another shape": lambda p: p.sharded().load_state_dict(nn.Linear(4, 5).state_dict()),
    "reset of an inner unit": lambda p: _used(p.sharded())[0].reset_iter_state(),
}


def _errors(rank, world_size):
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in PACKAGES:
            package = _Package(name)
            for mistake, make in MISTAKES.items():
                try:
                    make(package)
                except Exception as error:
                    found[mistake, name] = [cls.__name__ for cls in type(error).__mro__]
    return found


@pytest.fixture(scope="module")
def errors(ranks):
    """The classes of the error that a mistake raises in a package, on rank 0."""
    return ranks.run(2, _errors)[0]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_are_instances_of_torchs(errors, mistake):
    ours, torchs = (errors[mistake, name] for name in PACKAGES)
    assert torchs[0] in ours
    assert "CrossframeError" in ours or mistake == "unscaled twice"
