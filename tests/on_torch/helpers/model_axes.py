"""A model that tensor, expert and pipeline parallelism divide, and the same in the core's terms."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from crossframe.mesh import ParallelMesh
from crossframe.parallel import ParallelModel, Style
from crossframe.params import ParamSpec
from crossframe.shapes import ModelShapes
from tests.on_torch.helpers.models import seed_cpu

WIDTH, HIDDEN, VOCABULARY = 6, 8, 10
RULES = [
    ("embed", Style.VOCAB),
    ("h.*.gate", Style.COLWISE),
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
    """Four experts, divided between the ranks of a group; each position goes to two of them, as many to each."""

    def __init__(self) -> None:
        super().__init__()
        self.group: Any = None
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        flat = x.reshape(-1, WIDTH)
        experts = [(i % 4, i) for i in range(len(flat))] + [((i + 1) % 4, i) for i in range(len(flat))]
        order = torch.tensor([i for _, i in sorted(experts)])
        sent = flat[order]
        if self.group is None:
            found = torch.bmm(sent.view(4, -1, WIDTH), weight).reshape(-1, WIDTH)
        else:
            size = self.group.size()
            came = all_to_all_single_autograd(sent, None, None, self.group).view(size, 4 // size, -1, WIDTH)
            by_expert = came.transpose(0, 1).reshape(4 // size, -1, WIDTH)
            done = torch.bmm(by_expert, weight.to_local()).view(4 // size, size, -1, WIDTH).transpose(0, 1)
            found = all_to_all_single_autograd(done.reshape(-1, WIDTH), None, None, self.group)
        return torch.zeros_like(flat).index_add(0, order, found).view(x.shape).clone()


class Perceptron(nn.Module):
    """A gated perceptron, whose two first linears have one input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A perceptron and experts after a norm."""

    def __init__(self, has_experts: bool) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Perceptron()
        self.experts = Experts() if has_experts else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x))
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
        shared = PrepareModuleInput(
            input_layouts=(Shard(1) if sequence else Replicate(),), desired_input_layouts=(Replicate(),)
        )
        colwise = {f"h.{i}.mlp.gate": ColwiseParallel(), f"h.{i}.mlp.up": ColwiseParallel()}
        plan |= {f"h.{i}.mlp": shared, **colwise, f"h.{i}.mlp.down": RowwiseParallel(**outputs)}
        if sequence:
            plan[f"h.{i}.norm"] = SequenceParallel()
    if net.embed is not None:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), **outputs)
    if net.head is not None:
        plan["head"] = ColwiseParallel(**inputs, use_local_output=False)
        if sequence:
            plan["norm"] = SequenceParallel()
    return plan
