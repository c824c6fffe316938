"""A model that tensor, expert and pipeline parallelism divide, and the same in the core's terms."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from crossframe.mesh import ParallelMesh
from crossframe.parallel import ParallelModel, Style
from crossframe.params import ParamSpec
from crossframe.shapes import ModelShapes
from tests.on_torch.helpers.models import seed_cpu

WIDTH, HIDDEN, VOCABULARY = 6, 8, 10
RULES = [
    ("embed", Style.VOCAB),
    ("h.*.up", Style.COLWISE),
    ("h.*.down", Style.ROWWISE),
    ("head", Style.COLWISE),
    ("h.*.experts", Style.EXPERTS),
]
SEQUENCE = [("h.*.norm", Style.SEQUENCE), ("norm", Style.SEQUENCE)]


@functools.cache
def mesh_of(names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    """A mesh over all ranks, made once in each process."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


class Experts(nn.Module):
    """Four experts, divided between the ranks of a group; each position goes to all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.group: Any = None
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if self.group is None:
            return torch.einsum("bsi,eij->bsj", x, weight)
        x = all_gather_tensor_autograd(x, 0, self.group)
        found = torch.einsum("bsi,eij->bsj", x, weight.to_local()).contiguous()
        return reduce_scatter_tensor_autograd(found, "sum", 0, self.group)


class Block(nn.Module):
    """A perceptron and experts after a norm."""

    def __init__(self, has_experts: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.experts = Experts() if has_experts else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return x if self.experts is None else x + self.experts(x)


class Net(nn.Module):
    """An embedding, two blocks, a norm and a head; a stage of a pipeline lacks some of them."""

    def __init__(self, has_experts: bool = False) -> None:
        super().__init__()
        seed_cpu(5)
        self.embed: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleDict({str(i): Block(has_experts) for i in range(2)})
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.h.values():
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def shapes_of(net: nn.Module) -> ModelShapes:
    """The core's description of a net."""
    params = tuple(ParamSpec(name, tuple(param.shape)) for name, param in net.named_parameters())
    return ModelShapes("net", params, ("h.0", "h.1"))


def parallel(api: Any, mesh: ParallelMesh, *, sequence: bool = False, **options: Any) -> tuple[Net, ParallelModel]:
    """This rank's part of a net under `fully_shard`, and the core's description.

    Args:
        sequence: sequence parallelism too.
    """
    net = Net(has_experts=mesh.size("ep") > 1)
    rules = [rule for rule in RULES if rule[1] is not Style.EXPERTS or mesh.size("ep") > 1]
    model = ParallelModel(shapes_of(net), mesh, [*rules, *(SEQUENCE if sequence else [])])
    theirs: Any = mesh_of(mesh.names, mesh.sizes)
    if mesh.size("pp") == 2:
        if theirs["pp"].get_local_rank() == 0:
            net.norm = net.head = None
            del net.h["1"]
        else:
            net.embed = None
            del net.h["0"]
    if mesh.size("tp") > 1:
        for name, plan in _plan(net, sequence).items():
            parallelize_module(net, theirs["tp"], {name: plan})
    if mesh.size("ep") > 1:
        for block in net.h.values():
            experts: Any = block.experts
            experts.group = theirs["ep"].get_group()
            experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), theirs["ep"], [Shard(0)]))
            api.fully_shard(experts, mesh=theirs["dp"], **options)
            experts.set_gradient_divide_factor(mesh.world_size)
            experts.set_force_sum_reduction_for_comms(True)  # gloo has no other with a factor
    data = theirs["dp"] if mesh.size("ep") == 1 else mesh_of(("all",), (mesh.world_size,))
    for block in net.h.values():
        api.fully_shard(block, mesh=data, **options)
    return api.fully_shard(net, mesh=data, **options), model


def _plan(net: Net, sequence: bool) -> dict[str, Any]:
    inputs, outputs = ({"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}) if sequence else ({}, {})
    plan: dict[str, Any] = {}
    for i in net.h:
        plan |= {f"h.{i}.up": ColwiseParallel(**inputs), f"h.{i}.down": RowwiseParallel(**outputs)}
        if sequence:
            plan[f"h.{i}.norm"] = SequenceParallel()
    if net.embed is not None:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), **outputs)
    if net.head is not None:
        plan["head"] = ColwiseParallel(**inputs, use_local_output=False)
        if sequence:
            plan["norm"] = SequenceParallel()
    return plan
