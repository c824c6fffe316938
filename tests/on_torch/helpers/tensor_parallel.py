"""A model that FSDP1 shards over tensor parallelism, torch's and ours."""

import dataclasses
import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from tests.on_torch.helpers import scripts
from tests.on_torch.helpers.device import DEVICE

NAMES = {2: ("dp", "tp"), 3: ("replicate", "dp", "tp")}


class Block(nn.Module):
    """A norm with plain parameters, and two linears that tensor parallelism shards by columns and by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.seen: list[str] = []

    def forward(self, x):
        self.seen = [
            f"{type(p).__name__} {tuple(p.shape)} {p.dtype}" for p in (self.norm.weight, self.up.weight, self.down.bias)
        ]
        return x + self.down(torch.relu(self.up(self.norm(x))))


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh over all ranks, made once: its groups take longer to connect than a training step."""
    return init_device_mesh(DEVICE.type, shape, mesh_dim_names=NAMES[len(shape)])


@dataclasses.dataclass(frozen=True)
class Side(scripts.Side):
    """One of the two implementations of FSDP1, over tensor parallelism on a mesh of this shape."""

    shape: tuple[int, ...]

    def model(
        self,
        *,
        strategy: str = "FULL_SHARD",
        checkpointed: str = "",
        frozen: str = "",
        sequence: bool = False,
        **options: Any,
    ) -> Any:
        """Two blocks, each a unit, and a plain head, which belongs to the root."""
        mesh = mesh_of(self.shape)
        torch.manual_seed(options.pop("seed", 3))
        model = nn.Sequential(Block(), Block(), nn.Linear(4, 3))
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
        for i in range(2):
            parallelize_module(model[i], mesh["tp"], plan)
        for name, param in model.named_parameters():
            if frozen and frozen in name:
                param.requires_grad_(False)
        if checkpointed == "inside":
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        if "device_mesh" not in options and "process_group" not in options:
            options["device_mesh"] = mesh["replicate", "dp"] if "HYBRID" in strategy else mesh["dp"]
        wrapper = self.FullyShardedDataParallel
        options |= {"sharding_strategy": self.ShardingStrategy[strategy], "device_id": DEVICE}
        for i in range(2):
            model[i] = wrapper(model[i], **options)
            if checkpointed == "outside":
                apply_activation_checkpointing(model[i : i + 1], check_fn=lambda module: isinstance(module, wrapper))
        return wrapper(model, **options)

    def batch(self, step: int) -> torch.Tensor:
        """One data-parallel rank's inputs."""
        return torch.randn(
            2, 5, 4, generator=torch.Generator(DEVICE).manual_seed(10 * step + self.rank // self.shape[-1])
        )

    def full(self, model: Any, *, with_grads: bool = False) -> dict[str, Any]:
        """Full parameters, and full gradients if asked for."""
        with self.FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=with_grads):
            return {
                name: [param.detach().clone(), param.grad.clone() if with_grads else None]
                for name, param in model.named_parameters()
            }
