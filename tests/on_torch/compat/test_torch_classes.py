"""torch's own enums and records are accepted, with their subclasses; anything else is refused by the argument's name."""

# pyright: reportArgumentType=false

from dataclasses import dataclass

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn

import torch_backend
from crossframe.errors import LayoutError, UsageError
from torch_backend import FullyShardedDataParallel, fully_shard
from torch_backend.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch_backend.compat._fully_shard_api import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch_backend.compat._torch_classes import as_ours
from torch_backend.state._state_dict_types import FullStateDictConfig, OptimStateKeyType, StateDictType

KINDS = [CPUOffloadPolicy, OffloadPolicy, MixedPrecisionPolicy, MixedPrecision, CPUOffload, FullStateDictConfig]
ENUMS = [ShardingStrategy, BackwardPrefetch, StateDictType, OptimStateKeyType]


def _subclass(base):
    """A subclass of a user's, under a name and with an attribute of its own."""

    @dataclass(frozen=base.__dataclass_params__.frozen)
    class Mine(base):
        more: int = 3

    return Mine


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("package", [theirs, None], ids=["torch", "ours"])
def test_records_and_their_subclasses_are_accepted(kind, package):
    base = getattr(package, kind.__name__) if package else kind
    for cls in (base, _subclass(base)):
        found = as_ours(cls(), kind)
        assert isinstance(found, kind)
        assert {name: getattr(cls(), name) for name in vars(kind())} == {
            name: getattr(found, name) for name in vars(kind())
        }


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_members_of_torchs_enums_are_accepted(kind):
    assert [as_ours(member, kind) for member in getattr(theirs, kind.__name__)] == list(kind)


@dataclass
class _SameName:
    """Neither torch's class nor ours, under the name of one."""

    pin_memory: bool = True
    param_dtype: torch.dtype | None = None
    offload_params: bool = True


FOREIGN = {
    "offload_policy": "CPUOffloadPolicy",
    "mp_policy": "MixedPrecisionPolicy",
    "dp_mesh_dims": "DataParallelMeshDims",
    "cpu_offload": "CPUOffload",
    "mixed_precision": "MixedPrecision",
    "sharding_strategy": "ShardingStrategy",
    "backward_prefetch": "BackwardPrefetch",
}


def _refused(rank, world_size, argument):
    shards = fully_shard if argument in ("offload_policy", "mp_policy", "dp_mesh_dims") else FullyShardedDataParallel
    same_name = type(FOREIGN[argument], (_SameName,), {})
    for wrong in (object(), "cpu", True, same_name()):
        with pytest.raises(UsageError, match=argument):
            shards(nn.Linear(3, 2), **{argument: wrong})


@pytest.mark.parametrize("argument", FOREIGN)
def test_other_objects_raise_with_the_arguments_name(ranks, argument):
    ranks.run(1, _refused, argument)


def _types_refused(rank, world_size):
    model = FullyShardedDataParallel(nn.Linear(3, 2))
    kind = type("StateDictType", (), {"name": "FULL_STATE_DICT"})()
    with pytest.raises(UsageError, match="state_dict_type"):
        FullyShardedDataParallel.set_state_dict_type(model, kind)
    config = type("FullStateDictConfig", (), {"offload_to_cpu": False, "rank0_only": False})()
    with pytest.raises(UsageError, match="FullStateDictConfig"):
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, config)
    with pytest.raises(UsageError, match="optim_state_key_type"):
        FullyShardedDataParallel.rekey_optim_state_dict(
            {}, type("OptimStateKeyType", (), {"name": "PARAM_NAME"})(), nn.Linear(3, 2)
        )


def test_other_state_dict_types_raise(ranks):
    ranks.run(1, _types_refused)


def _offloaded(rank, world_size):
    devices = []
    for package in (torch_backend, theirs):
        model = fully_shard(nn.Linear(3, 2), offload_policy=_subclass(package.CPUOffloadPolicy)())
        devices += [param.device.type for param in model.parameters()]
    return devices


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="shards are on the CPU in any case")
def test_subclasses_of_the_offload_policy_offload(ranks):
    assert ranks.run(1, _offloaded) == [["cpu"] * 4]


def _both_interfaces(rank, world_size):
    layer = nn.Linear(4, 4)
    layer.levels = nn.Parameter(torch.arange(4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(LayoutError, match="ignored_params") as refused:
        fully_shard(layer)
    assert "ignored_states" not in str(refused.value)
    with pytest.raises(LayoutError, match="ignored_states") as refused:
        FullyShardedDataParallel(layer)
    assert "ignored_params" not in str(refused.value)


def test_messages_name_the_interfaces_own_argument(ranks):
    ranks.run(1, _both_interfaces)
