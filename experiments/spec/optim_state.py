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
from crossframe.layout import FlatLayout, Layout, Sharding, overlay
from crossframe.mesh import MeshSpec
from crossframe.reference.redistribute import apply_overlay
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
    by_id, named = optimizer.state_dict(), {param: name for name, param in model.named_parameters()}
    names = dict(enumerate(named[param] for group in optimizer.param_groups for param in group["params"]))
    ids = {name: i for i, name in names.items()}
    rekey = FullyShardedDataParallel.rekey_optim_state_dict
    by_name = rekey(by_id, OptimStateKeyType.PARAM_NAME, model)
    if not by_id["state"] and _bits(by_name) == _bits(by_id):
        tallies["R37"].explain(STILL_BY_ID, case)
    elif case.num_groups == 1:  # torch counts the model's parameters, and not the optimizer's
        tallies["R37"].compare(_sorted(_rekeyed(by_id, names)), _sorted(by_name), (case, "by name"))
        tallies["R37"].compare(
            _bits(_rekeyed(by_name, ids)),
            _bits(rekey(by_name, OptimStateKeyType.PARAM_ID, model)),
            (case, "by id"),
        )
    ours = _rekeyed(by_id, names)
    tallies["R37"].compare(_bits(_rekeyed(ours, ids)), _bits(by_id), (case, "by name and back"), "the optimizer")
    return ours


def _rekeyed(state_dict: dict[str, Any], keys: dict[Any, Any]) -> dict[str, Any]:
    groups = core.rekeyed_groups(state_dict["param_groups"], {key: (new,) for key, new in keys.items()})
    return {"state": {keys[key]: state for key, state in state_dict["state"].items()}, "param_groups": groups}


def _sorted(by_name: dict[str, Any]) -> Any:
    """With the names inside a group in alphabetical order, as torch has them; by name their order says nothing."""
    groups = [group | {"params": sorted(group["params"])} for group in by_name["param_groups"]]
    return _bits(by_name | {"param_groups": groups})


def _compare_parts(tallies: Tallies, case: Case, by_name: dict[str, Any]) -> None:
    """Every rank's part of the full state, and the full state of all parts."""
    full = {name: {entry: _array(value) for entry, value in state.items()} for name, state in by_name["state"].items()}
    theirs = [_torchs_part(case, by_name, rank) for rank in range(case.world_size)]
    for unit, layout in case.layouts().items():
        own = {spec.name: full[spec.name] for spec in layout.params if full.get(spec.name)}
        told = {
            name: {e: (core.seen(v), v if v.ndim == 0 else None) for e, v in state.items()}
            for name, state in own.items()
        }
        here = (case, f"unit {unit!r}")
        tallies["R37"].compare(core.unfit_state(layout.params, told, as_one=not case.keep_original), [], here)
        parts = _parts(layout, own, unit, case.keep_original)
        for rank, (ours, torchs) in enumerate(zip(parts, theirs, strict=True)):
            # A rank loads only scalars for a parameter of which it holds no element.
            held = {piece.name for piece in layout.pieces(rank)} if case.keep_original else {core.local_key(unit)}
            mine, its = ({n: s for n, s in side.items() if n in held} for side in (ours, torchs))
            tallies["R37"].compare(_bits(mine), _bits(its), (*here, f"rank {rank}"))
        whole = _gathered(layout, parts, unit, case.keep_original)
        tallies["R37"].compare(_bits(whole), _bits(own), (*here, "in full again"), "the optimizer")


Parts = list[dict[str, dict[str, Any]]]


def _parts(layout: Layout, own: dict[str, dict[str, Any]], unit: str, keep_original: bool) -> Parts:
    """What every rank's optimizer holds of a full state, by parameter that it holds: elementwise state cut by the copy plan,
    scalars as they are."""
    parts: Parts = [{} for _ in range(layout.world_size)]
    specs = {spec.name: spec for spec in layout.params}
    for names in [[name] for name in own] if keep_original else [list(own)] if own else []:
        holder = names[0] if keep_original else core.local_key(unit)
        for entry, first in own[names[0]].items():
            if core.role_in_full(specs[names[0]], core.seen(first)) is core.Role.SCALAR:
                for part in parts:
                    part.setdefault(holder, {})[entry] = first
                continue
            for rank, line in enumerate(_cut(layout, {name: own[name][entry] for name in names})):
                value = _piece(layout, rank, holder, line) if keep_original else line
                parts[rank].setdefault(holder, {})[entry] = value
    return parts


def _gathered(layout: Layout, parts: Parts, unit: str, keep_original: bool) -> dict[str, dict[str, Any]]:
    """The full state of a unit's parameters from what all ranks' optimizers hold."""
    found: dict[str, dict[str, Any]] = {}
    for holder in parts[0]:
        names = [holder] if keep_original else [spec.name for spec in layout.params]
        numels = [layout.padded_shard_numel] * len(parts)
        if keep_original:
            lines = [np.zeros(layout.padded_shard_numel) for _ in parts]
            numels = [_piece(layout, rank, holder, line).size for rank, line in enumerate(lines)]
        for entry in parts[0][holder]:
            values = [part[holder][entry] for part in parts]
            if core.classify(holder, entry, [core.seen(value) for value in values], numels) is core.Role.SCALAR:
                common = core.agreed(holder, entry, dict(enumerate(values)), numels)
                for name in names:
                    found.setdefault(name, {})[entry] = common
                continue
            if keep_original:
                lines = [np.zeros(layout.padded_shard_numel, value.dtype) for value in values]
                for rank, (line, value) in enumerate(zip(lines, values, strict=True)):
                    _piece(layout, rank, holder, line)[:] = value
                values = lines
            full = _whole(layout, values)
            for name in names:
                found.setdefault(name, {})[entry] = full[name]
    return found


def _piece(layout: Layout, rank: int, name: str, line: np.ndarray) -> np.ndarray:
    return next((line[p.shard_start : p.shard_stop] for p in layout.pieces(rank) if p.name == name), line[:0])


def _shardings(layout: Layout) -> tuple[Sharding, Sharding]:
    whole = core.target_of(layout, core.StateKind.FULL)
    return Sharding((("", whole),), MeshSpec(1)), Sharding((("", layout),), MeshSpec(layout.world_size))


def _cut(layout: Layout, full: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Every rank's line of full arrays, by the core's copies; 0 where there is no array."""
    whole, cut = _shardings(layout)
    dtype = next(iter(full.values())).dtype
    line = np.zeros(whole.units[0][1].padded_shard_numel, dtype)
    for spec, start in zip(layout.params, whole.units[0][1].offsets, strict=True):
        if spec.name in full:
            line[start : start + spec.numel] = full[spec.name].reshape(-1)
    lines = [[np.zeros(layout.padded_shard_numel, dtype)] for _ in range(layout.world_size)]
    apply_overlay(overlay(whole, cut), [[line]], lines)
    return [line for (line,) in lines]


def _whole(layout: Layout, lines: list[np.ndarray]) -> dict[str, np.ndarray]:
    """The inverse."""
    whole, cut = _shardings(layout)
    line = np.zeros(whole.units[0][1].padded_shard_numel, lines[0].dtype)
    apply_overlay(overlay(cut, whole), [[each] for each in lines], [[line]])
    return {
        spec.name: line[start : start + spec.numel].reshape(spec.shape)
        for spec, start in zip(layout.params, whole.units[0][1].offsets, strict=True)
    }


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
