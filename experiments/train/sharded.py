"""The model of a run, sharded through either interface, and what a loop calls differently under the two."""

import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from crossframe.strategy import Strategy
from experiments.train.settings import TrainSettings
from torch_backend import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ModuleWrapPolicy,
    ShardingStrategy,
    fully_shard,
    initialise_sharded,
)


class Sharded(ABC):
    """A sharded model.

    Attributes:
        model: what the batch goes through.
    """

    model: nn.Module

    @abstractmethod
    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a microbatch: gradients travel with the last one of a step."""

    @abstractmethod
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale gradients down to this norm; returns the norm that they had, the same on all ranks."""


class Fsdp1(Sharded):
    """Through `FullyShardedDataParallel`."""

    def __init__(self, module: nn.Module, units: set[type], mesh: DeviceMesh, settings: TrainSettings) -> None:
        strategies = {strategy.strategy: strategy for strategy in ShardingStrategy}
        mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.model: FullyShardedDataParallel = FullyShardedDataParallel(
            module,
            sharding_strategy=strategies[Strategy(settings.strategy)],
            auto_wrap_policy=ModuleWrapPolicy(units),
            mixed_precision=mixed if settings.precision == "bfloat16" else None,
            device_id=torch.device(mesh.device_type, torch.cuda.current_device())
            if mesh.device_type == "cuda"
            else None,
            use_orig_params=True,
            device_mesh=mesh,
        )

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """See Sharded."""
        return nullcontext() if last else self.model.no_sync()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """See Sharded."""
        return self.model.clip_grad_norm_(max_norm)


class Fsdp2(Sharded):
    """Through `fully_shard`, over any of its layouts."""

    def __init__(self, module: nn.Module, units: set[type], mesh: DeviceMesh, settings: TrainSettings) -> None:
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": Strategy(settings.strategy).reshards_after_forward,
            "layout": settings.layout or "per_param",
            "mp_policy": mixed if settings.precision == "bfloat16" else MixedPrecisionPolicy(),
        }
        for inner in module.modules():
            if type(inner) in units:
                fully_shard(inner, **options)
        self.model = fully_shard(module, **options)
        initialise_sharded(self.model)

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """See Sharded."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """See Sharded."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def build(settings: TrainSettings, device: torch.device) -> Sharded:
    """The model with the values that its seed gives, sharded over the default process group. On one kind of device both
    interfaces, all layouts and any number of ranks give the same values.

    Raises:
        CrossframeError: what the interface refuses.
    """
    torch.manual_seed(settings.seed)
    # fully_shard needs the model nowhere in full; FullyShardedDataParallel cuts what each rank has made of the same seed.
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, settings.stored_dtype))  # in which values are drawn
    try:
        with device if settings.api == "fsdp1" else torch.device("meta"):
            module, units = settings.definition.make_torch()
        make = Fsdp1 if settings.api == "fsdp1" else Fsdp2
        return make(_with_dropout(module, units, settings.dropout), units, _mesh(settings, device), settings)
    finally:
        torch.set_default_dtype(before)


def _with_dropout(module: nn.Module, units: set[type], probability: float) -> nn.Module:
    """A model that drops elements behind the MLP of each of its units."""

    def drop(mlp: nn.Module, _: Any, output: Tensor) -> Tensor:
        return functional.dropout(output, probability, mlp.training)

    for inner in module.modules() if probability else ():
        if type(inner) in units:
            inner.get_submodule("mlp").register_forward_hook(drop)
    return module


def _mesh(settings: TrainSettings, device: torch.device) -> DeviceMesh:
    strategy, world_size = Strategy(settings.strategy), dist.get_world_size()
    shard = (settings.shard or int(os.environ["LOCAL_WORLD_SIZE"])) if strategy.is_hybrid else None
    spec = strategy.mesh(world_size, shard)
    if strategy.is_hybrid or (strategy is Strategy.NO_SHARD and settings.api == "fsdp2"):
        return init_device_mesh(device.type, (spec.replicate, spec.shard), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
