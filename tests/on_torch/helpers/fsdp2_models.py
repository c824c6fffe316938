"""Models for scripts that use fully_shard, torch's and ours."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils._pytree import tree_map_only

from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.models import Net, build_net, loss_of, seed_cpu
from tests.on_torch.helpers.scripts import Side, inputs


@functools.cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh over all ranks, made once in each process."""
    return init_device_mesh(DEVICE.type, shape, mesh_dim_names=names)


def hybrid_mesh() -> DeviceMesh:
    """Two replicas of two shards."""
    return mesh_of((2, 2), ("replicate", "shard"))


def sharded_net(side: Side, model: Net | None = None, **options: Any) -> Any:
    """A net whose blocks are units."""
    model = model or build_net(depth=2)
    for block in model.blocks:
        side.fully_shard(block, **options)
    return side.fully_shard(model, **options)


def linears(*widths: int) -> nn.Sequential:
    """Linears of these widths, the same on every rank."""
    seed_cpu(1)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def values(model: nn.Module) -> dict[str, Any]:
    """Parameters and gradients."""
    return {
        name: [param.detach().clone(), None if param.grad is None else param.grad.clone()]
        for name, param in model.named_parameters()
    }


def look(module: nn.Module) -> dict[str, Any]:
    """Class, shape, dtype and placements of each registered parameter."""
    return {
        name: [
            type(param).__name__,
            tuple(param.shape),
            param.stride(),
            param.dtype,
            param.requires_grad,
            [repr(placement) for placement in param.placements] if isinstance(param, DTensor) else None,
        ]
        for name, param in module.named_parameters()
    }


def trained(
    side: Side,
    model: nn.Module,
    steps: int = 2,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[int], Tensor] | None = None,
) -> list[Any]:
    """Losses, and parameters and gradients after some steps."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        now = loss(step) if loss else loss_of(model, step, side.rank)
        now.backward()
        optimizer.step()
        losses.append(now.detach())
    return [losses, values(model)]


def trained_linears(side: Side, model: nn.Module, steps: int = 2, **options: Any) -> list[Any]:
    """`trained` for a model of linears."""
    width = next(model.parameters()).shape[1]
    return trained(
        side, model, steps, loss=lambda step: model(inputs(side, step, width)).float().square().mean(), **options
    )


def parallel(side: Side | None, how: str, dtype: torch.dtype, **options: Any) -> nn.Module:
    """Two two-layer perceptrons, each after a norm, by tensor and data parallelism; plain without a side."""

    class Perceptron(nn.Module):
        """Widths that two ranks divide."""

        def __init__(self):
            super().__init__()
            seed_cpu(14)
            self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x):
            return self.down(torch.relu(self.up(self.norm(x))))

    model = nn.Sequential(Perceptron(), Perceptron()).to(dtype)
    if side is None:
        return model
    mesh = mesh_of((2, 2), ("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if how == "sequence":
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=True),
        }
    for part in model:
        parallelize_module(part, mesh["tp"], plan)
        side.fully_shard(part, mesh=mesh["dp"], **options)
    return side.fully_shard(model, mesh=mesh["dp"], **options)


class Both(Tensor):
    """The sum of two tensors, which are gathered separately."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, a.size(), strides=a.stride(), storage_offset=a.storage_offset(), dtype=a.dtype, device=a.device
        )

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(parts, meta, outer_size, outer_stride):
        return Both(parts["a"], parts["b"])

    def __repr__(self):
        return f"Both({self.a}, {self.b})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        done = [
            func(
                *tree_map_only(Both, lambda t: getattr(t, part), args),  # noqa: B023
                **tree_map_only(Both, lambda t: getattr(t, part), kwargs or {}),  # noqa: B023
            )
            for part in ("a", "b")
        ]
        if isinstance(done[0], Tensor):
            out = Both(*done)
            return args[0] if func.__name__.split(".")[0].endswith("_") else out
        if isinstance(done[0], list | tuple) and all(isinstance(each, Tensor) for each in done[0]):
            return type(done[0])(Both(a, b) for a, b in zip(*done, strict=True))
        return done[0]

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """Gathers both parts."""
        assert isinstance(mesh, DeviceMesh) and isinstance(module, nn.Module)
        asked.append([tuple(outer_size), tuple(outer_stride), type(mp_policy).__name__, mesh.size()])
        return (self.a, self.b), ("meta", 1)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """Adds the gathered parts."""
        assert metadata == ("meta", 1)
        a, b = all_gather_outputs
        given.append([tuple(a.shape), tuple(b.shape), param_dtype, out is None])
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):  # type: ignore[attr-defined]
                torch.add(a, b, out=out)
            return None
        full = a + b
        return full, (full,)


asked: list[Any] = []


given: list[Any] = []
