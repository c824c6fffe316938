"""R38: torch's modules built in full under a seed, beside the same drawn module by module by the core's plan."""

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from crossframe.initialise import init_plan, initialise
from crossframe.layout import Layout, Sharding
from crossframe.mesh import MeshSpec
from crossframe.unit_assignment import Order, Slot, assign_units
from crossframe.writeback import writeback_copies
from experiments.spec.cases import KINDS, layout_of
from experiments.spec.checks import SEED, Scope
from experiments.spec.tally import Tallies

NUM_TREES = 600
LEAVES: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(3, 5),
    lambda: nn.Linear(4, 2, bias=False),
    lambda: nn.Embedding(7, 3),
    lambda: nn.LayerNorm(5),
    lambda: nn.Conv1d(2, 3, 3),
    lambda: nn.Conv2d(2, 4, 1, bias=False),
    lambda: nn.BatchNorm1d(3),
    lambda: nn.GroupNorm(2, 4),
    lambda: nn.Bilinear(2, 3, 2),
    lambda: nn.GRUCell(2, 3),
    lambda: nn.LSTM(2, 3),
)


class Drawn(nn.Module):
    """A module that has children, and draws a parameter of its own at the end of its constructor."""

    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        for i, child in enumerate(children):
            self.add_module(f"m{i}", child)
        self.own = nn.Parameter(torch.empty(3, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.own)


def build(seed: str) -> nn.Module:
    """The tree of a seed: containers, modules that draw behind their children, and torch's own leaves."""
    rng = random.Random(seed)

    def grow(depth: int) -> nn.Module:
        if depth == 0 or rng.random() < 0.3:
            return rng.choice(LEAVES)()
        children = [grow(depth - 1) for _ in range(rng.randint(1, 3))]
        return nn.Sequential(*children) if rng.random() < 0.5 else Drawn(children)

    return nn.Sequential(*[grow(2) for _ in range(rng.randint(1, 3))])


def streams(tallies: Tallies, scope: Scope) -> None:
    """Every tree, sharded in some way on some mesh: every rank's shards, buffers, and the stream's end."""
    for number in scope.take(range(NUM_TREES), num_quick=30):
        _compare(tallies, number)


def _compare(tallies: Tallies, number: int) -> None:
    seed, rng = f"{SEED} {number}", random.Random(f"how {number}")
    torch.manual_seed(number)
    full = build(seed)
    end = torch.get_rng_state()
    mesh = MeshSpec(rng.randint(1, 4), rng.randint(1, 2))
    kind = rng.choice(KINDS)
    case = f"tree {number}, {kind}, {mesh}"
    for rank in range(mesh.world_size):
        with torch.device("meta"):
            model = build(seed)
        torch.manual_seed(number)
        sharding, shards = _initialised(model, mesh, kind, rank, random.Random(seed))
        ours = [
            _pieces(layout, mesh.coordinate(rank)[1], shard)
            for (_, layout), shard in zip(sharding.units, shards, strict=True)
        ]
        whole = {name: param.detach().numpy() for name, param in full.named_parameters()}
        theirs = [_pieces(layout, mesh.coordinate(rank)[1], None, whole) for _, layout in sharding.units]
        tallies["R38"].compare(ours, theirs, (case, f"rank {rank}"), "the model built in full")
        buffers = {name: buffer.tolist() for name, buffer in model.named_buffers()}
        tallies["R38"].compare(
            (buffers, bool(torch.equal(torch.get_rng_state(), end))),
            ({name: buffer.tolist() for name, buffer in full.named_buffers()}, True),
            (case, f"rank {rank}", "buffers, and the end of the stream"),
            "the model built in full",
        )


def _initialised(
    model: nn.Module, mesh: MeshSpec, kind: str, rank: int, rng: random.Random
) -> tuple[Sharding, list[np.ndarray]]:
    named = dict(model.named_modules())
    order = Order.POST_ORDER if kind == "per parameter" else Order.PRE_ORDER
    units = [name for name in named if name and rng.random() < 0.3]
    slots, buffers = [], []
    for name, module in named.items():
        tensors = [(attribute, param, slots) for attribute, param in module.named_parameters(recurse=False)]
        tensors += [(attribute, buffer, buffers) for attribute, buffer in module.named_buffers(recurse=False)]
        for attribute, tensor, found in tensors:
            found.append(
                Slot(name, attribute, id(tensor), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            )
    assigned = assign_units(list(named), slots, units, order)
    sharding = Sharding(tuple((unit.name, layout_of(kind, unit.params, mesh.shard)) for unit in assigned), mesh)
    plan = init_plan(
        list(named),
        slots,
        assigned,
        meta={slot.identity for slot in (*slots, *buffers)},
        initialisers={name for name, module in named.items() if _initialiser(module)},
        buffers=buffers,
    )
    shards = initialise(plan, sharding, rank, lambda name: _draw(named[name]))
    return sharding, shards


def _initialiser(module: nn.Module) -> Callable[[], None] | None:
    return getattr(module, "reset_parameters", None)


def _draw(module: nn.Module) -> dict[str, np.ndarray]:
    """Make a module's own tensors in full, and let it draw."""
    initialiser = _initialiser(module)
    assert initialiser is not None
    module.to_empty(device="cpu", recurse=False)
    initialiser()
    return {attribute: param.detach().numpy().copy() for attribute, param in module.named_parameters(recurse=False)}


def _pieces(
    layout: Layout, rank: int, shard: np.ndarray | None, full: dict[str, np.ndarray] | None = None
) -> list[tuple[str, int, bytes]]:
    """The bits of each piece of a rank, out of its shard or out of full parameters."""
    found = []
    for copy in writeback_copies(layout, rank):
        name = layout.params[copy.index].name
        if shard is not None:
            values = shard[copy.shard_start : copy.shard_stop]
        else:
            assert full is not None
            values = full[name].reshape(-1)[copy.param_start : copy.param_stop]
        found.append((name, copy.param_start, values.tobytes()))
    return found
