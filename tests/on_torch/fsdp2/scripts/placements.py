"""Shards on other dims than the first."""

# pyright: reportAttributeAccessIssue=false

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.on_torch.fsdp2.scripts import refusal, scenario
from tests.on_torch.helpers.fsdp2_models import linears, look, trained, trained_linears
from tests.on_torch.helpers.models import seed_cpu
from tests.on_torch.helpers.scripts import inputs


@scenario()
def cut_on_other_dims(side):
    def place(param):
        return Shard(1) if param.ndim == 2 and param.shape[1] % 2 == 0 else None

    seed_cpu(13)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 3))
    for layer in (model[0], model[2]):
        side.fully_shard(layer, shard_placement_fn=lambda p: Shard(p.ndim - 2) if p.ndim == 3 else place(p))
    side.fully_shard(model, shard_placement_fn=place)
    run = lambda step: model(inputs(side, step, width=12).view(3, 2, 6)).square().mean()  # noqa: E731
    return [look(model), trained(side, model, loss=run), [p.full_tensor().detach() for p in model.parameters()]]


@scenario()
def cut_on_a_dim_from_the_end(side):
    model = side.fully_shard(linears(4, 3), shard_placement_fn=lambda p: Shard(-1) if p.ndim == 2 else Shard(0))
    return [look(model), trained_linears(side, model, 1)]


@refusal()
def uneven_sizes_on_another_dim(side):
    side.fully_shard(nn.Linear(3, 2), shard_placement_fn=lambda p: Shard(p.ndim - 1))


@refusal()
def placements_that_are_none(side):
    side.fully_shard(nn.Linear(4, 2), shard_placement_fn=lambda p: Replicate())


@refusal()
def placements_on_a_dim_that_is_not_there(side):
    side.fully_shard(nn.Linear(4, 2), shard_placement_fn=lambda p: Shard(2))
