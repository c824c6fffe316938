"""Hybrid sharding."""

from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh

from tests.on_torch.fsdp1.scripts import scenario
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.fsdp1_models import nested, trained, world
from tests.on_torch.helpers.scripts import inputs, raised


@scenario("flat")
def a_communication_hook_under_hybrid_sharding(side):
    mesh = init_device_mesh(DEVICE.type, (1, side.world_size), mesh_dim_names=("replicate", "shard"))
    model = side.shard(nn.Linear(4, 2), device_mesh=mesh, sharding_strategy=side.ShardingStrategy.HYBRID_SHARD)
    state = default_hooks.DefaultState(world())
    return [raised(lambda: model.register_comm_hook(state, default_hooks.reduce_scatter_hook))]


@scenario("orig")
def hybrid_sharding_by_mesh_and_by_groups(side):
    results = []
    for name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        mesh = init_device_mesh(DEVICE.type, (1, side.world_size), mesh_dim_names=("replicate", "shard"))
        strategy = side.ShardingStrategy[name]
        model = nested(side, device_mesh=mesh, sharding_strategy=strategy)
        groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
        other = nested(side, process_group=groups, sharding_strategy=strategy)
        results += [trained(side, model), trained(side, other), model.sharding_strategy.name, model.world_size]
        results.append([model.process_group.size(), model.process_group is groups[0]])
    return results


@scenario(differs="_inter_node_pg, _device_mesh and _is_root are missing")
def attributes_for_hybrid_sharding(side):
    """Names with an underscore that PyTorch's own tests of hybrid sharding read."""
    mesh = init_device_mesh(DEVICE.type, (1, side.world_size), mesh_dim_names=("replicate", "shard"))
    model = side.shard(nn.Linear(4, 2), device_mesh=mesh, sharding_strategy=side.ShardingStrategy.HYBRID_SHARD)
    model(inputs(side))
    return [hasattr(model, "_inter_node_pg"), hasattr(model, "_device_mesh"), hasattr(model, "_is_root")]
