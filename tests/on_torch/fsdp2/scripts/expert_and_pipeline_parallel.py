"""Expert and pipeline parallelism: units over two meshes, and units of one stage."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.tensor import Shard, distribute_tensor

from tests.on_torch.fsdp2.scripts import scenario
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.fsdp2_models import linears, look, mesh_of, trained_linears, values
from tests.on_torch.helpers.models import seed_cpu
from tests.on_torch.helpers.scripts import Side, counting_collectives
from torch_backend import pipelining as ours


class _Experts(nn.Module):
    """Six experts, divided between the ranks of an axis; each sample goes to all of them."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.group = mesh.get_group()
        seed_cpu(8)
        self.weight = nn.Parameter(distribute_tensor(torch.randn(6, 5, 5), mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = all_gather_tensor_autograd(x, 0, self.group)
        weight: Any = self.weight
        found = torch.einsum("si,eij->sj", x, weight.to_local()).contiguous()
        return reduce_scatter_tensor_autograd(found, "sum", 0, self.group)


def _trained_experts(side: Side, **options: Any) -> list[Any]:
    mesh = mesh_of((2, 2), ("dp_mod_ep", "ep"))
    model: Any = linears(5, 5, 5)
    model.insert(1, _Experts(mesh["ep"]))
    side.fully_shard(model[1], mesh=mesh["dp_mod_ep"], **options)
    model[1].set_gradient_divide_factor(4)
    model[1].set_force_sum_reduction_for_comms(True)  # gloo has no other with a factor
    side.fully_shard(model, mesh=mesh_of((4,), ("dp",)), **options)
    return [look(model), trained_linears(side, model)]


@scenario(num_ranks=4)
def experts_on_a_mesh_of_their_own(side):
    """The experts are sharded over the ranks that have the same ones, all else over all ranks."""
    return _trained_experts(side)


@scenario(num_ranks=4)
def experts_in_low_precision(side):
    policy = side.MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    return _trained_experts(side, mp_policy=policy)


def _loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (x - target).square().mean()


def _stage(side: Side, mesh: Any, **options: Any) -> Any:
    """Two of four linears, sharded over two ranks."""
    stage = mesh["pp"].get_local_rank()
    model: Any = linears(5, 7, 5, 3, 5)[2 * stage : 2 * stage + 2]
    for layer in model:
        side.fully_shard(layer, mesh=mesh["dp"], **options)
    return side.fully_shard(model, mesh=mesh["dp"], **options)


def _microbatches(side: Side, step: int) -> list[torch.Tensor]:
    """The same on both ranks of a pipeline."""
    data = torch.Generator(DEVICE).manual_seed(10 * step + side.rank % 2)
    return [torch.randn(3, 5, generator=data) for _ in range(4)]


def _trained_stages(side: Side, **options: Any) -> list[Any]:
    """Two steps of two stages: all forwards, then all backwards, of which the last reduces."""
    mesh = mesh_of((2, 2), ("pp", "dp"))
    model, stage, group = _stage(side, mesh, **options), mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[Any] = []
    for step in range(2):
        optimizer.zero_grad()
        received: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []
        for x in _microbatches(side, step):
            if stage == 1:
                given = torch.empty(3, 5)
                dist.recv(given, group=group, group_src=0)
                received.append(given.requires_grad_())
                outputs.append(_loss(model(given), x.sin()))
            else:
                outputs.append(model(x))
                dist.send(outputs[-1].detach(), group=group, group_dst=1)
        for i, output in enumerate(outputs):
            is_last = i == len(outputs) - 1
            model.set_is_last_backward(is_last)
            model.set_requires_gradient_sync(is_last)
            grad = None
            if stage == 0:
                grad = torch.empty_like(output)
                dist.recv(grad, group=group, group_src=1)
            output.backward(grad)
            if stage == 1:
                sent = received[i].grad
                assert sent is not None
                dist.send(sent, group=group, group_dst=0)
        optimizer.step()
        seen += [outputs, values(model)]
    return seen


@scenario(num_ranks=4)
def stages_of_a_pipeline(side):
    return _trained_stages(side)


@scenario(num_ranks=4)
def stages_kept_between_microbatches(side):
    return _trained_stages(side, reshard_after_forward=False)


def _scheduled_stages(
    side: Side, schedule_of: Any, num_stages: int, *, is_v: bool = False, **options: Any
) -> list[Any]:
    """Two steps of four linears in as many stages, of four microbatches. A V has its first and last stage on the first rank."""
    mesh = mesh_of((2, 2), ("pp", "dp"))
    rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    layers: Any = linears(5, 7, 5, 3, 5)
    size = 4 // num_stages
    indices = [rank, num_stages - 1 - rank] if is_v else list(range(rank, num_stages, 2))
    models: list[Any] = [layers[size * i : size * i + size] for i in indices]
    for model in models:
        for layer in model:
            side.fully_shard(layer, mesh=mesh["dp"], **options)
        side.fully_shard(model, mesh=mesh["dp"], **options)
    kind = {"torch_backend": ours.PipelineStage}.get(side.name, pipelining.PipelineStage)
    stages = [kind(model, i, num_stages, DEVICE, group=group) for i, model in zip(indices, models, strict=True)]
    schedule = schedule_of(stages if num_stages > 2 else stages[0], 4, loss_fn=_loss)
    optimizer = torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.1, momentum=0.9)
    seen: list[Any] = []
    for step in range(2):
        optimizer.zero_grad()
        x = torch.cat(_microbatches(side, step))
        with counting_collectives() as counts:
            schedule.step(*([x] if rank == 0 else []), **({"target": x.sin()} if num_stages - 1 in indices else {}))
        optimizer.step()
        seen += [counts["red"], *map(values, models)]
    return seen


@scenario(num_ranks=4)
def stages_of_a_schedule(side):
    return _scheduled_stages(side, pipelining.Schedule1F1B, 2)


@scenario(num_ranks=4)
def stages_of_an_interleaved_schedule(side):
    return _scheduled_stages(side, pipelining.ScheduleInterleaved1F1B, 4)


@scenario(num_ranks=4)
def stages_of_a_schedule_that_cuts_backwards_in_two(side):
    return _scheduled_stages(side, pipelining.ScheduleInterleavedZeroBubble, 4, reshard_after_forward=False)


@scenario(num_ranks=4)
def resharded_stages_of_a_schedule_that_cuts_backwards_in_two(side):
    """Equal to torch's without resharding: torch does not find weights of resharded units, and leaves them without gradients."""
    resharded = side.name == "torch_backend"
    return _scheduled_stages(side, pipelining.ScheduleInterleavedZeroBubble, 4, reshard_after_forward=resharded)


@scenario(num_ranks=4)
def stages_of_a_schedule_shaped_like_a_v(side):
    """Both ends of the pipeline are on one rank."""
    return _scheduled_stages(side, pipelining.ScheduleZBVZeroBubble, 4, is_v=True, reshard_after_forward=False)


@scenario(num_ranks=4)
def stages_of_two_pipelines_that_meet(side):
    """Whole backwards, and backwards cut in two."""
    return _scheduled_stages(side, pipelining.ScheduleDualPipeV, 4, is_v=True, reshard_after_forward=False)
