"""R01: the parameters of each unit of random module trees, in order, beside what torch's wrappers take."""

import random
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from crossframe.errors import UnitError
from crossframe.units import Order, Slot, UnitSpec, assign_units
from experiments.spec.checks import SEED, Scope
from experiments.spec.fake_ranks import fake_group, fake_mesh, quiet
from experiments.spec.tally import Tallies

NUM_TREES = 4000
MAX_MODULES = 9
WRAPPED = "_fsdp_wrapped_module"


class Node(nn.Module):
    """A module with nothing but parameters and children."""


@dataclass
class Tree:
    """A random tree of modules, some registered twice, with parameters, some registered twice; and which modules are units."""

    root: nn.Module
    modules: list[str]
    slots: list[Slot]
    units: list[str]


def build_tree(seed: str, order: Order) -> Tree | None:
    """The tree of a seed; None where a parameter would lie in two units, which is refused (see tests of `assign_units`)."""
    rng = random.Random(seed)
    nodes: list[nn.Module] = [Node()]
    params: list[nn.Parameter] = []
    once: set[nn.Module] = set(nodes)
    for i in range(rng.randrange(1, MAX_MODULES)):
        # Older modules get children and parameters of their own in between, so that registration orders mix.
        for _ in range(rng.randrange(3)):
            if not params or rng.random() < 0.8:
                params.append(nn.Parameter(torch.zeros(rng.randrange(1, 4))))
                chosen = params[-1]
            else:
                chosen = rng.choice(params)
            rng.choice(nodes).register_parameter(f"p{rng.randrange(10**6)}", chosen)
        nodes.append(Node())
        rng.choice(nodes[:-1]).add_module(f"m{i}", nodes[-1])
        once.add(nodes[-1])
        if len(nodes) > 2 and rng.random() < 0.15:
            # A module under a second parent that it does not contain: an older one never lies below it.
            at = rng.randrange(2, len(nodes))
            parent = rng.choice(nodes[:at])
            if parent not in nodes[at].modules():
                parent.add_module(f"again{i}", nodes[at])
                once -= set(nodes[at].modules())
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
    tree = Tree(root, [name for name, _ in named], slots, units)
    try:
        assign_units(tree.modules, tree.slots, tree.units, order)
    except UnitError:
        return None
    return tree


def _local(unit: UnitSpec, name: str) -> str:
    return name.removeprefix(f"{unit.name}.") if unit.name else name


def flat_order(tallies: Tallies, scope: Scope) -> None:
    """FSDP1: names and aliases of every unit."""
    for number in scope.take(range(NUM_TREES), num_quick=150):
        tree = build_tree(f"{SEED} {number}", Order.PRE_ORDER)
        if tree is None or not tree.slots:
            continue
        ours = {
            unit.name: (
                [_local(unit, p.name) for p in unit.params],
                [_local(unit, a) for p in unit.params for a in p.aliases],
            )
            for unit in assign_units(tree.modules, tree.slots, tree.units, Order.PRE_ORDER)
        }
        root, theirs = tree.root, {}
        with quiet():
            for name in reversed(tree.units):
                parent, _, child = name.rpartition(".")
                setattr(root.get_submodule(parent), child, _wrap(root.get_submodule(name)))
            root = _wrap(root)
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


def _wrap(module: nn.Module) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        module, process_group=fake_group(2, 0), device_id=torch.device("cpu"), use_orig_params=True
    )


def per_param_order(tallies: Tallies, scope: Scope) -> None:
    """FSDP2: the parameters of every unit in order, each with every place at which it is registered."""
    with fake_mesh(0, 2) as mesh:
        for number in scope.take(range(NUM_TREES), num_quick=150):
            tree = build_tree(f"{SEED} {number}", Order.POST_ORDER)
            if tree is None or not tree.slots:
                continue
            ours = {
                unit.name: [(p.name, *sorted(p.aliases)) for p in unit.params]
                for unit in assign_units(tree.modules, tree.slots, tree.units, Order.POST_ORDER)
            }
            names: dict[tuple[int, str], list[str]] = {}
            for name, module in tree.root.named_modules(remove_duplicate=False):
                for attribute in module._parameters:
                    names.setdefault((id(module), attribute), []).append(f"{name}.{attribute}".lstrip("."))
            for name in [*reversed(tree.units), ""]:
                module = tree.root.get_submodule(name)
                fully_shard(module, mesh=mesh)
                group = fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]
                theirs = []
                for built in group.fsdp_params if group else ():
                    info = built._module_info
                    places = [(info.module, info.param_name)]
                    places += zip(info.shared_modules, info.shared_param_names, strict=True)
                    first = names[id(info.module), info.param_name][0]
                    every = {full for place, attribute in places for full in names[id(place), attribute]}
                    theirs.append((first, *sorted(every - {first})))
                tallies["R01"].compare(ours.get(name, []), theirs, f"tree {number}, unit {name!r}")
