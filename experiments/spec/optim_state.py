"""R37: an optimizer's state by name and by id, over shards and in full, beside what torch's FSDP1 makes of the same state."""

import random
from dataclasses import dataclass
from functools import cache
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

from crossframe import state as core
from crossframe.layout import FlatLayout
from crossframe.params import ParamSpec
from experiments.spec.checks import SEED, Scope
from experiments.spec.fake_ranks import fake_world, quiet
from experiments.spec.tally import Tallies
from experiments.spec.watch import NESTS, build_nest, specs_of

NUM_MODELS = 400
STILL_BY_ID = (
    "torch's rekey_optim_state_dict leaves ids in the groups of an optimizer without any state; the core names them"
)
OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "plain": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "Adagrad": torch.optim.Adagrad,
}


@dataclass(frozen=True)
class Case:
    """A model, its optimizer, how many groups its parameters form, which got no step, and the world."""

    nest: tuple[str, ...]
    optimizer: str
    num_groups: int
    untouched: frozenset[str]
    keep_original: bool
    world_size: int
    seed: int

    def layouts(self) -> dict[str, FlatLayout]:
        """The units."""
        return {name: FlatLayout(specs, self.world_size, self.keep_original) for name, specs in specs_of(self.nest)}

    def stepped(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The unsharded model behind two steps, and its optimizer."""
        torch.manual_seed(self.seed)
        model = build_nest(self.nest)
        named = list(model.named_parameters())
        groups = [[param for _, param in named[at :: self.num_groups]] for at in range(self.num_groups)]
        optimizer = OPTIMIZERS[self.optimizer]([{"params": group} for group in groups if group])
        for _ in range(2):
            for name, param in named:
                param.grad = None if name in self.untouched else torch.randn_like(param)
            optimizer.step()
        return model, optimizer


@cache
def cases() -> tuple[Case, ...]:
    """A seeded sample. Untouched are single parameters where the originals are kept, and whole units where they are not."""
    rng = random.Random(SEED)
    return tuple(_case(rng) for _ in range(NUM_MODELS))


def _case(rng: random.Random) -> Case:
    nest, keep = rng.choice(NESTS), rng.random() < 0.5
    untouched = [
        spec.name
        for _, specs in specs_of(nest)
        for all_of_it in [rng.random() < 0.2]
        for spec in specs
        if (rng.random() < 0.2 if keep else all_of_it)
    ]
    # Without original parameters a flat parameter is in one group.
    return Case(
        nest,
        rng.choice(list(OPTIMIZERS)),
        rng.randint(1, 3) if keep else 1,
        frozenset(untouched),
        keep,
        rng.randint(1, 6),
        rng.randrange(2**16),
    )


def states(tallies: Tallies, scope: Scope) -> None:
    """Keys by name and by id; every rank's part of a full state, and the full state of all parts."""
    for case in scope.take(cases(), num_quick=15):
        model, optimizer = case.stepped()
        _compare_parts(tallies, case, _compare_keys(tallies, case, model, optimizer))


def _compare_keys(tallies: Tallies, case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    by_id, names = optimizer.state_dict(), {param: name for name, param in model.named_parameters()}
    own = [[ParamSpec(names[p], tuple(p.shape)) for p in group["params"]] for group in optimizer.param_groups]
    rekey = FullyShardedDataParallel.rekey_optim_state_dict
    by_name = rekey(by_id, OptimStateKeyType.PARAM_NAME, model)
    if not by_id["state"] and _bits(by_name) == _bits(by_id):
        tallies["R37"].explain(STILL_BY_ID, case)
    elif case.num_groups == 1:  # torch counts the model's parameters, and not the optimizer's
        tallies["R37"].compare(_sorted(core.state_by_name(by_id, own)), _sorted(by_name), (case, "by name"))
        tallies["R37"].compare(
            _bits(core.state_by_id(by_name, own)),
            _bits(rekey(by_name, OptimStateKeyType.PARAM_ID, model)),
            (case, "by id"),
        )
    ours = core.state_by_name(by_id, own)
    tallies["R37"].compare(
        _bits(core.state_by_id(ours, own)), _bits(by_id), (case, "by name and back"), "the optimizer"
    )
    return ours


def _sorted(by_name: dict[str, Any]) -> Any:
    """With the names inside a group in alphabetical order, as torch has them; by name their order says nothing."""
    groups = [group | {"params": sorted(group["params"])} for group in by_name["param_groups"]]
    return _bits(by_name | {"param_groups": groups})


def _compare_parts(tallies: Tallies, case: Case, by_name: dict[str, Any]) -> None:
    full = {name: {entry: _array(value) for entry, value in state.items()} for name, state in by_name["state"].items()}
    found: dict[str, list[Any]] = {unit: [] for unit in case.layouts()}
    for rank in range(case.world_size):
        theirs = _torchs_part(case, by_name, rank)
        for unit, layout in case.layouts().items():
            names = {spec.name for spec in layout.params}
            own = {name: state for name, state in full.items() if name in names}
            here = (case, f"rank {rank}", f"unit {unit!r}")
            if case.keep_original:
                ours: Any = core.shard_state(layout, own, rank)
                held = {piece.name for piece in layout.pieces(rank)}
                # Of what it holds no element of, a rank has nothing but scalars to load.
                mine, its = ({n: s for n, s in side.items() if n in names & held} for side in (ours, theirs))
                tallies["R37"].compare(_bits(mine), _bits(its), here)
            else:
                ours = core.flatten_state(layout, own, rank, unit)
                tallies["R37"].compare(_bits(ours), _bits(theirs.get(core.local_key(unit), {})), here)
            found[unit].append(ours)
    for unit, layout in case.layouts().items():
        names = {spec.name for spec in layout.params}
        own = {name: state for name, state in full.items() if name in names and state}
        whole = (
            core.gather_state(layout, found[unit])
            if case.keep_original
            else core.unflatten_state(layout, found[unit], unit)
        )
        tallies["R37"].compare(_bits(whole), _bits(own), (case, f"unit {unit!r}", "in full again"), "the optimizer")


def _torchs_part(case: Case, by_name: dict[str, Any], rank: int) -> dict[str, dict[str, Any]]:
    """What torch gives a rank's optimizer to load, by name of the parameter that it holds."""
    model: Any = build_nest(case.nest)
    with fake_world(case.world_size, rank), quiet():
        for name in reversed([name for name in case.nest if name]):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, _wrap(case, model.get_submodule(name)))
        model = _wrap(case, model)
        clean = {id(param): core.canonical_name(name) for name, param in model.named_parameters()}
        order = list(model.parameters())
        held = OPTIMIZERS[case.optimizer](order)
        loaded = FullyShardedDataParallel.optim_state_dict_to_load(model, held, _one_group(by_name))
        return {
            # On one rank torch keeps the parameter's dims, where nothing is sharded; its elements are in the same order.
            clean[id(order[key])]: {entry: _line(_array(value)) for entry, value in state.items()}
            for key, state in loaded["state"].items()
        }


def _one_group(by_name: dict[str, Any]) -> dict[str, Any]:
    """The same with all parameters in one group, as the sharded optimizer here has them."""
    first = by_name["param_groups"][0]
    return by_name | {"param_groups": [first | {"params": [n for g in by_name["param_groups"] for n in g["params"]]}]}


def _wrap(case: Case, module: nn.Module) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, use_orig_params=case.keep_original, device_id=torch.device("cpu"))


def _array(value: Any) -> Any:
    return value.detach().numpy() if isinstance(value, torch.Tensor) else value


def _line(value: Any) -> Any:
    return value.reshape(-1) if isinstance(value, np.ndarray) and value.ndim else value


def _bits(nested: Any) -> Any:
    """Arrays by shape, dtype and a checksum of their bits, so that they can be compared and shown."""
    if isinstance(nested, dict):
        return {key: _bits(value) for key, value in nested.items()}
    if isinstance(nested, list | tuple):
        return [_bits(value) for value in nested]
    value = _array(nested)
    return (value.shape, str(value.dtype), crc32(value.tobytes())) if isinstance(value, np.ndarray) else value
