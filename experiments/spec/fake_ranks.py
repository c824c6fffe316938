"""Any rank of any world in one process: fake groups that know a rank and a size and communicate nothing."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._flat_param import FlatParamHandle, HandleShardingStrategy
from torch.testing._internal.distributed.fake_pg import FakeStore

from experiments.spec import cases
from experiments.spec.cases import Shapes, first_values

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in cases.DTYPES}


def build_params(shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters of these shapes, whose elements count up."""
    return [
        nn.Parameter(torch.arange(first, first + torch.Size(shape).numel(), dtype=dtype).view(shape))
        for first, shape in zip(first_values(shapes), shapes, strict=True)
    ]


@cache
def fake_group(world_size: int, rank: int) -> Any:
    """A group of its own, for constructors that ask for nothing but rank and size."""
    return FakeProcessGroup._create_internal(rank=rank, world_size=world_size)


def flat_handle(
    module: nn.Module,
    keep_original: bool,
    param_dtype: str | None = None,
    reduce_dtype: str | None = None,
    *,
    world_size: int = 2,
    rank: int = 0,
) -> FlatParamHandle:
    """What torch's FSDP1 makes of all parameters of a module on a rank, not yet sharded."""
    return FlatParamHandle(
        list(module.parameters()),
        module,
        torch.device("cpu"),
        HandleShardingStrategy.FULL_SHARD,
        False,
        None if param_dtype is None else DTYPES[param_dtype],
        None if reduce_dtype is None else DTYPES[reduce_dtype],
        False,
        fake_group(world_size, rank),
        keep_original,
    )


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """A default group in which this process is that rank, for what makes groups of its own."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_mesh(rank: int, shard: int, replicate: int | None = None) -> Iterator[DeviceMesh]:
    """A mesh (shard,), or (replicate, shard), as a rank sees it."""
    shape = (shard,) if replicate is None else (replicate, shard)
    names = ("shard",) if replicate is None else ("replicate", "shard")
    with fake_world(shard * (replicate or 1), rank):
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps torch's warnings, and the stacks that it prints where it refuses, off the screen."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
