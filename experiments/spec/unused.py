"""R29: what the optimizer finds of a parameter that backward did not reach, in torch, in the core and in its reference."""

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from crossframe.api import Api
from crossframe.layout import FlatLayout, Layout, PerParamLayout
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.plan import plan_units
from crossframe.reduction import Missing, missing_grad
from crossframe.reference import AdamW, World
from experiments.spec.checks import Scope
from experiments.spec.fake_ranks import fake_mesh, quiet
from experiments.spec.tally import Tallies

SHAPES = ((5,), (2, 3), (7, 1))
UNITS = ("a", "b")
Used = tuple[tuple[bool, ...], ...]


@dataclass(frozen=True)
class Case:
    """Which parameters of two units forward uses, and where."""

    used: Used
    api: Api
    world_size: int

    def layouts(self) -> list[tuple[str, Layout]]:
        """Both units."""
        layouts: list[tuple[str, Layout]] = []
        for unit in UNITS:
            specs = tuple(ParamSpec(f"{unit}.p{i}", shape, "float64") for i, shape in enumerate(SHAPES))
            if self.api is Api.FSDP1:
                layouts.append((unit, FlatLayout(specs, self.world_size, keep_original=True)))
            else:
                layouts.append((unit, PerParamLayout(specs, self.world_size)))
        return layouts

    def uses(self, name: str) -> bool:
        """Whether forward uses a parameter."""
        return self.used[UNITS.index(name[0])][int(name[-1])]

    def present(self) -> set[str]:
        """The parameters that have a gradient, as the core says."""
        return {
            spec.name
            for unit, layout in self.layouts()
            for spec in layout.params
            if self.uses(spec.name)
            or missing_grad(self.api, unit_used=any(self.used[UNITS.index(unit)])) is Missing.ZEROS
        }


class Part(nn.Module):
    """A unit of three parameters, some of which its forward uses."""

    def __init__(self, used: tuple[bool, ...]) -> None:
        super().__init__()
        self.used = used
        for i, shape in enumerate(SHAPES):
            self.register_parameter(f"p{i}", nn.Parameter(torch.ones(shape, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        for used, param in zip(self.used, self.parameters(), strict=True):
            x = x + param.sum() if used else x
        return x


def cases() -> list[Case]:
    """Every choice of parameters, but none at all, in both interfaces, on up to 4 ranks."""
    choices = list(product(product((False, True), repeat=len(SHAPES)), repeat=len(UNITS)))
    return [Case(used, api, size) for used, api, size in product(choices, Api, range(1, 5)) if any(map(any, used))]


def missing(tallies: Tallies, scope: Scope) -> None:
    """Zeros or none for every parameter of which a rank holds something; and what AdamW makes of it where one rank is alone."""
    tally = tallies["R29"]
    for case in scope.take(cases(), num_quick=20):
        expected = case.present()
        world = _reference(case)
        tally.compare(expected, set(world.full_grads()), case, "reference")
        for rank in range(case.world_size):
            held = {piece.name for _, layout in case.layouts() for piece in layout.pieces(rank)}
            wrapped = _run(case, rank)
            grads = {name for name, param in wrapped.items() if name in held and param.grad is not None}
            tally.compare(expected & held, grads, (case, f"rank {rank}"))
        if case.world_size == 1:
            torch.optim.AdamW(wrapped.values()).step()
            world.step()
            unused = [name for name in wrapped if not case.uses(name)]
            ours = {name: world.full_params()[name].tolist() for name in unused}
            tally.compare(ours, {name: _values(wrapped[name]) for name in unused}, (case, "AdamW"))


def _reference(case: Case) -> World:
    """A world of the reference behind a backward that has reached what the case uses."""
    units = plan_units(case.layouts(), api=case.api)
    specs = {spec.name: spec for _, layout in case.layouts() for spec in layout.params}
    world = World(
        units,
        MeshSpec(case.world_size),
        {name: np.ones(spec.shape) for name, spec in specs.items()},
        optimizer=AdamW(),
    )
    for name, unit in world.units.items():
        grads = {n: np.ones(spec.shape) for n, spec in specs.items() if n.startswith(name) and case.uses(n)}
        unit.compute("forward", lambda rank, full: None)
        unit.compute("backward", partial(_grads, grads))
        unit.reshard()
        world.reduce(name)
    return world


def _grads(grads: dict[str, np.ndarray], rank: int, full: Any) -> dict[str, np.ndarray]:
    return grads


def _run(case: Case, rank: int) -> dict[str, nn.Parameter]:
    """The parameters of torch's model on a rank, behind forward and backward."""
    parts = [Part(used) for used in case.used]
    with fake_mesh(rank, case.world_size) as mesh, quiet():
        if case.api is Api.FSDP2:
            model = nn.Sequential(*[_sharded(part, mesh) for part in parts])
        else:
            device = torch.device("cpu")
            wrap = partial(FullyShardedDataParallel, use_orig_params=True, device_id=device)
            model = wrap(nn.Sequential(*map(wrap, parts)))
        # What an optimizer would hold; the module shows other tensors while it computes.
        named = {
            f"{unit}.p{i}": getattr(part, f"p{i}")
            for unit, part in zip(UNITS, parts, strict=True)
            for i in range(len(SHAPES))
        }
        # An input that needs a gradient, so that the first unit is reached as one in the middle of a model is.
        model(torch.ones(1, dtype=torch.float64, requires_grad=True)).sum().backward()
    return named


def _sharded(part: Part, mesh: Any) -> nn.Module:
    fully_shard(part, mesh=mesh)
    return part


def _values(param: nn.Parameter) -> list[Any]:
    local: Any = getattr(param, "_local_tensor", param)
    return local.detach().tolist()
