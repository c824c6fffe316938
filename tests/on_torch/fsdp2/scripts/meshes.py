"""Meshes of one axis and of several, and `DataParallelMeshDims`."""

# pyright: reportArgumentType=false

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from tests.on_torch.fsdp2.scripts import refusal, scenario
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.fsdp2_models import look, mesh_of, sharded_net, trained, values
from tests.on_torch.helpers.models import seed_cpu
from tests.on_torch.helpers.scripts import Side


@scenario()
def trains_on_one_rank_of_each_group(side):
    """Groups of one rank, which neither gather nor average."""
    mesh = mesh_of((2, 1), ("rest", "one"))["one"]
    return trained(side, sharded_net(side, mesh=mesh))


@scenario()
def a_mesh_of_a_group(side):
    """A mesh made from a group, and one with the ranks in reverse order."""
    group = dist.new_group([0, 1])
    results = []
    for mesh in (DeviceMesh.from_group(group, DEVICE.type), DeviceMesh(DEVICE.type, [1, 0])):
        model = sharded_net(side, mesh=mesh)
        results += [trained(side, model), [param.full_tensor().detach() for param in model.parameters()]]
    return results


def _on_a_full_mesh(side: Side, shape: tuple[int, ...], names: tuple[str, ...], **dims: Any) -> list[Any]:
    """Parameters that are DTensors on the whole mesh, replicated over its data-parallel dims."""
    mesh = mesh_of(shape, names)
    seed_cpu(16)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))

    def place(name, module, mesh):
        for key, param in module.named_parameters(recurse=False):
            placements = [Replicate() for _ in names]
            if "tp" in names and name == "0":
                placements[names.index("tp")] = Shard(0)
            elif "tp" in names and key == "weight":
                placements[names.index("tp")] = Shard(1)
            module.register_parameter(key, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))

    distribute_module(model, mesh, place)
    dp_mesh_dims = side.DataParallelMeshDims(**dims)
    side.fully_shard(model[2], mesh=mesh, dp_mesh_dims=dp_mesh_dims)
    side.fully_shard(model, mesh=mesh, dp_mesh_dims=dp_mesh_dims)
    seen = [look(model)]
    batch = side.rank // 2 if "tp" in names else side.rank
    x = DTensor.from_local(torch.full((3, 6), batch + 1.0), mesh, [Replicate() for _ in names])
    for _ in range(2):
        output = model(x)
        output.redistribute(placements=[Replicate() for _ in names]).to_local().square().sum().backward()
    return [*seen, values(model), look(model)]


@scenario(num_ranks=4, needs="DataParallelMeshDims")
def a_full_mesh_with_tensor_parallelism(side):
    return _on_a_full_mesh(side, (2, 2), ("dp", "tp"), shard="dp")


@scenario(num_ranks=4, needs="DataParallelMeshDims")
def a_full_mesh_of_data_parallelism(side):
    return _on_a_full_mesh(side, (2, 2), ("replicate", "shard"), shard="shard", replicate="replicate")


@scenario(num_ranks=4, needs="DataParallelMeshDims")
def a_full_mesh_of_replicas_alone(side):
    return _on_a_full_mesh(side, (2, 2), ("replicate", "tp"), replicate="replicate")


@scenario(num_ranks=4, needs="DataParallelMeshDims")
def a_full_mesh_of_three_axes(side):
    return _on_a_full_mesh(side, (1, 2, 2), ("replicate", "shard", "tp"), shard="shard", replicate="replicate")


@scenario(num_ranks=4, needs="DataParallelMeshDims")
def a_full_mesh_whose_dims_are_flattened(side):
    return _on_a_full_mesh(side, (2, 2), ("a", "b"), shard=("a", "b"))


@refusal(num_ranks=4)
def a_mesh_of_three_axes(side):
    side.fully_shard(nn.Linear(4, 2), mesh=mesh_of((2, 2, 1), ("a", "b", "c")))


@refusal(num_ranks=4)
def two_axes_without_names(side):
    side.fully_shard(nn.Linear(4, 2), mesh=init_device_mesh(DEVICE.type, (2, 2)))


@refusal(needs="DataParallelMeshDims")
def no_axis_of_data(side):
    side.DataParallelMeshDims()


@refusal(needs="DataParallelMeshDims")
def an_axis_that_is_not_there(side):
    side.fully_shard(nn.Linear(4, 2), mesh=mesh_of((2,), ("a",)), dp_mesh_dims=side.DataParallelMeshDims(shard="b"))


@refusal(needs="DataParallelMeshDims")
def axes_without_names(side):
    mesh = init_device_mesh(DEVICE.type, (2,))
    side.fully_shard(nn.Linear(4, 2), mesh=mesh, dp_mesh_dims=side.DataParallelMeshDims(shard="b"))


@refusal(needs="DataParallelMeshDims")
def plain_tensors_on_a_full_mesh(side):
    side.fully_shard(nn.Linear(4, 2), mesh=mesh_of((2,), ("a",)), dp_mesh_dims=side.DataParallelMeshDims(shard="a"))
