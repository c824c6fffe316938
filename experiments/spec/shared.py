"""R31: a parameter with several uses gets the sum of their gradients, once, beside autograd on the unsharded model."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from crossframe.api import Api
from crossframe.layout import FlatLayout, Layout
from crossframe.mesh import MeshSpec
from crossframe.plan import plan_units
from crossframe.reference import World
from crossframe.unit_assignment import Order, Slot, assign_units
from experiments.spec.cases import KINDS, layout_of
from experiments.spec.checks import Scope
from experiments.spec.fake_ranks import fake_mesh, quiet
from experiments.spec.tally import Tallies

MESHES = tuple(MeshSpec(shard, replicate) for shard, replicate in product(range(1, 5), (1, 2, 3)))


class Tied(nn.Module):
    """Linear layers without bias that share some of their weights, with small integers throughout, so that sums are exact."""

    def __init__(self, tied: tuple[int, ...]) -> None:
        super().__init__()
        for at, of in enumerate(tied):
            layer = nn.Linear(3, 3, bias=False, dtype=torch.float64)
            values = torch.arange(9.0, dtype=torch.float64).view(3, 3) % (2 + of) - 1
            layer.weight = nn.Parameter(values) if of == at else self.get_submodule(f"l{of}").get_parameter("weight")
            self.add_module(f"l{at}", layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


# Which earlier layer each layer's weight is; two to four layers, two and three uses, two weights of several uses.
TIES = ((0, 0), (0, 1, 0), (0, 0, 0), (0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 0))


@dataclass(frozen=True)
class Case:
    """Which weights are shared, how they are laid out, and where."""

    tied: tuple[int, ...]
    kind: str
    mesh: MeshSpec
    api: Api

    def layout(self, model: nn.Module) -> Layout:
        """The core's layout of all parameters as one unit."""
        named = list(model.named_modules())
        slots = [
            Slot(name, attribute, id(param), tuple(param.shape), "float64")
            for name, module in named
            for attribute, param in module.named_parameters(recurse=False)
        ]
        order = Order.POST_ORDER if self.kind == "per parameter" else Order.PRE_ORDER
        (unit,) = assign_units([name for name, _ in named], slots, [], order)
        return layout_of(self.kind, unit.params, self.mesh.shard)


def sums(tallies: Tallies, scope: Scope) -> None:
    """Every way of sharing in every layout on every mesh: the reference's sum over all ranks, and torch's with one rank."""
    cases = [Case(*case) for case in product(TIES, KINDS, MESHES, Api)]
    for case in scope.take(cases, num_quick=40):
        model = Tied(case.tied)
        layout = case.layout(model)
        by_rank = [_autograd(model, rank) for rank in range(case.mesh.world_size)]
        expected = {name: np.sum([grads[name] for grads in by_rank], axis=0).tolist() for name in by_rank[0]}
        ours = {name: grad.tolist() for name, grad in _reference(case, layout, by_rank).items()}
        tallies["R31"].compare(ours, expected, case, "autograd")
        every = {name for spec in layout.params for name in (spec.name, *spec.aliases)}
        tallies["R31"].compare(every, {f"l{at}.weight" for at in range(len(case.tied))}, (case, "names"), "the model")
    for tied, api, keep in product(TIES, Api, (False, True)):
        alone = _alone(tied, api, keep)
        tallies["R31"].compare(alone, {n: g.tolist() for n, g in _autograd(Tied(tied), 0).items()}, (tied, api, keep))


def _autograd(model: nn.Module, rank: int) -> dict[str, np.ndarray]:
    """Gradients of a rank's sum of outputs, by the first name of each parameter."""
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3) - rank
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(model(x).sum(), list(named.values()))
    return {name: grad.numpy() for name, grad in zip(named, grads, strict=True)}


def _reference(case: Case, layout: Layout, by_rank: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The reference's reduced gradients, by first names too; not divided, so that nothing is rounded."""
    units = plan_units([("", layout)], api=case.api)
    values = {spec.name: np.zeros(spec.shape) for spec in layout.params}
    world = World(units, case.mesh, values, divide_factor=1.0)
    unit = world.units[""]
    unit.compute("forward", lambda rank, full: None)
    first = {name: spec.name for spec in layout.params for name in (spec.name, *spec.aliases)}
    unit.compute("backward", lambda rank, full: {first[name]: grad for name, grad in by_rank[rank].items()})
    unit.reshard()
    world.reduce("")
    # Autograd names a shared parameter where the tree has it first.
    return {name: grad for own, grad in world.full_grads().items() for name in by_rank[0] if first[name] == own}


def _alone(tied: tuple[int, ...], api: Api, keep: bool) -> dict[str, Any]:
    """torch's gradients on one rank, where nothing is communicated, by first names."""
    model: Any = Tied(tied)
    specs = Case(tied, "flat" if api is Api.FSDP1 else "per parameter", MeshSpec(1), api).layout(model).params
    with fake_mesh(0, 1) as mesh, quiet():
        if api is Api.FSDP2:
            fully_shard(model, mesh=mesh)
            named = dict(model.named_parameters())
            _backward(model)
            return {name: param.grad._local_tensor.tolist() for name, param in named.items()}
        wrapped: Any = FullyShardedDataParallel(model, use_orig_params=keep, device_id=torch.device("cpu"))
        _backward(wrapped)
        # Its flat parameter, however the user sees it.
        flat, layout = wrapped._handle.flat_param, FlatLayout(specs, 1, keep)
        held = flat.grad if flat.grad is not None else torch.cat([p.grad.reshape(-1) for p in wrapped.parameters()])
        return {
            piece.name: held[piece.shard_start : piece.shard_stop].view(spec.shape).tolist()
            for piece, spec in zip(layout.pieces(0), layout.params, strict=True)
        }


def _backward(model: nn.Module) -> None:
    model(torch.arange(6.0, dtype=torch.float64).view(2, 3)).sum().backward()
