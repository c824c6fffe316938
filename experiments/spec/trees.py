"""R01: the parameters of each unit of random module trees, in order, beside what torch's wrappers take."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from crossframe.errors import UnitError
from crossframe.unit_assignment import Order, Slot, UnitSpec, assign_units, enclosing_unit
from experiments.spec.checks import SEED, Scope
from experiments.spec.fake_ranks import fake_group, fake_mesh, quiet
from experiments.spec.tally import Tallies, Tally

NUM_TREES = 4000
MAX_MODULES = 9
TORN = (
    "a parameter shared by two units: torch says nothing, and the uses in one of them no longer get what the other gathers; "
    "the core refuses it by both names"
)
BELOW_TWO = (
    "a module below two units: torch's FSDP1 says nothing, and only one of the two gathers its parameters, whoever calls it; "
    "the core refuses them by both names"
)
Place = tuple[int, str]  # id of a module, attribute
WRAPPED = "_fsdp_wrapped_module"


class Node(nn.Module):
    """A module with nothing but parameters and children."""


@dataclass
class Tree:
    """A random tree of modules, some registered twice, with parameters, some registered twice; and which modules are units."""

    root: nn.Module
    modules: dict[str, nn.Module]
    slots: list[Slot]
    units: list[str]

    def assigned(self, order: Order) -> tuple[UnitSpec, ...] | None:
        """What the core says of it; None where it refuses, as a parameter lies in two units."""
        try:
            return assign_units(list(self.modules), self.slots, self.units, order)
        except UnitError:
            return None

    def count_refused(self, tally: Tally, gathered: dict[Place, object], case: str) -> None:
        """Count a tree that the core refuses, given which of torch's units' parameters gathers each place."""
        places: dict[object, list[Place]] = {}
        owners: dict[object, set[str]] = {}
        for slot in self.slots:
            places.setdefault(slot.identity, []).append((id(self.modules[slot.module]), slot.attribute))
            owners.setdefault(slot.identity, set()).add(enclosing_unit(slot.module, frozenset({"", *self.units})))
        in_two = [key for key, units in owners.items() if len(units) > 1]
        torn = [key for key in in_two if len({gathered.get(place) for place in places[key]}) > 1]
        below = [key for key in in_two if key not in torn and len(set(places[key])) < len(places[key])]
        if not in_two or len(torn) + len(below) < len(in_two):
            tally.fail(f"{case}: the core refuses a parameter in two units, torch gathers it as one")
        else:
            tally.explain(TORN if torn else BELOW_TWO, case)


def build_tree(seed: str) -> Tree:
    """The tree of a seed."""
    rng = random.Random(seed)
    nodes: list[nn.Module] = [Node()]
    params: list[nn.Parameter] = []
    for i in range(rng.randrange(1, MAX_MODULES)):
        # Older modules get children and parameters of their own in between, so that registration orders mix.
        for _ in range(rng.randrange(3)):
            if not params or rng.random() < 0.8:
                params.append(nn.Parameter(torch.zeros(rng.randrange(1, 4), 2)))
                chosen = params[-1]
            else:
                chosen = rng.choice(params)
            rng.choice(nodes).register_parameter(f"p{rng.randrange(10**6)}", chosen)
        nodes.append(Node())
        rng.choice(nodes[:-1]).add_module(f"m{i}", nodes[-1])
        if len(nodes) > 2 and rng.random() < 0.15:
            # A module under a second parent that it does not contain: an older one never lies below it.
            at = rng.randrange(2, len(nodes))
            parent = rng.choice(nodes[:at])
            if parent not in nodes[at].modules():
                parent.add_module(f"again{i}", nodes[at])
    root = nodes[0]
    named = list(root.named_modules(remove_duplicate=False))
    times: dict[nn.Module, int] = {}
    for _, module in named:
        times[module] = times.get(module, 0) + 1
    units = [name for name, module in named if name and times[module] == 1 and rng.random() < 0.4]
    slots = [
        Slot(name, attribute, id(param), tuple(param.shape), "float32")
        for name, module in named
        for attribute, param in module._parameters.items()
        if param is not None
    ]
    return Tree(root, dict(named), slots, units)


def _local(unit: UnitSpec, name: str) -> str:
    return name.removeprefix(f"{unit.name}.") if unit.name else name


def flat_order(tallies: Tallies, scope: Scope) -> None:
    """FSDP1: names and aliases of every unit."""
    for number in scope.take(range(NUM_TREES), num_quick=150):
        tree = build_tree(f"{SEED} {number}")
        if not tree.slots:
            continue
        units = tree.assigned(Order.PRE_ORDER)
        ours = {
            unit.name: (
                [_local(unit, p.name) for p in unit.params],
                [_local(unit, a) for p in unit.params for a in p.aliases],
            )
            for unit in units or ()
        }
        root, theirs = tree.root, {}
        with quiet():
            for name in reversed(tree.units):
                parent, _, child = name.rpartition(".")
                setattr(root.get_submodule(parent), child, _wrap(root.get_submodule(name)))
            root = _wrap(root)
        if units is None:
            tree.count_refused(tallies["R01"], _flat_places(root), f"FSDP1, tree {number}")
            continue
        for name, module in root.named_modules():
            if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
                flat = module._handle.flat_param
                shared = [f"{s.module_name}.{s.param_name}".lstrip(".") for s in flat._shared_param_infos]
                theirs[".".join(part for part in name.split(".") if part != WRAPPED)] = (
                    list(flat._fqns),
                    sorted(shared),
                )
        for unit in sorted(ours.keys() | theirs.keys()):
            names, aliases = ours.get(unit, ([], []))
            tallies["R01"].compare((names, sorted(aliases)), theirs.get(unit), f"tree {number}, unit {unit!r}")


def _flat_places(root: FullyShardedDataParallel) -> dict[Place, object]:
    """By place: the handle, and the parameter's first place in it."""
    places: dict[Place, object] = {}
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        if unit._handle is not None:
            flat = unit._handle.flat_param
            for info in flat._param_infos:
                places[id(info.module), info.param_name] = (unit, info.module, info.param_name)
            for info in flat._shared_param_infos:
                places[id(info.module), info.param_name] = (unit, info.prim_module, info.prim_param_name)
    return places


def _wrap(module: nn.Module) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        module, process_group=fake_group(2, 0), device_id=torch.device("cpu"), use_orig_params=True
    )


def per_param_order(tallies: Tallies, scope: Scope) -> None:
    """FSDP2: the parameters of every unit in order, each with every place at which it is registered."""
    tally = tallies["R01"]
    with fake_mesh(0, 2) as mesh:
        for number in scope.take(range(NUM_TREES), num_quick=150):
            tree = build_tree(f"{SEED} {number}")
            if not tree.slots:
                continue
            units = tree.assigned(Order.POST_ORDER)
            names: dict[Place, list[str]] = {}
            for slot in tree.slots:
                names.setdefault((id(tree.modules[slot.module]), slot.attribute), []).append(slot.name)
            try:
                for name in [*reversed(tree.units), ""]:
                    fully_shard(tree.modules[name], mesh=mesh)
            except RuntimeError as error:  # a parameter that another unit has made a DTensor
                tally.compare(units is None, True, f"tree {number}: torch raises {error!r}")
                continue
            if units is None:
                gathered = {place: built for name in ["", *tree.units] for place, built in _places(tree.modules[name])}
                tree.count_refused(tally, gathered, f"FSDP2, tree {number}")
                continue
            ours = {unit.name: [(p.name, *sorted(p.aliases)) for p in unit.params] for unit in units}
            for name in [*tree.units, ""]:
                found: dict[object, list[Place]] = {}
                for place, built in _places(tree.modules[name]):
                    found.setdefault(built, []).append(place)
                theirs = []
                for first, *others in found.values():
                    named = names[first][0]
                    every = {name for place in (first, *others) for name in names[place]}
                    theirs.append((named, *sorted(every - {named})))
                tally.compare(ours.get(name, []), theirs, f"tree {number}, unit {name!r}")


def _places(module: nn.Module) -> Iterator[tuple[Place, object]]:
    """Every place that torch's unit at a module gathers into, with its parameter there, in the unit's order."""
    group = fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]
    for built in group.fsdp_params if group else ():
        info = built._module_info
        yield (id(info.module), info.param_name), built
        for shared, attribute in zip(info.shared_modules, info.shared_param_names, strict=True):
            yield (id(shared), attribute), built
