"""Full parameters for the user (R18-R24): the scenarios that the project set out from, by their names.

Each runs under every strategy, with original parameters and without, with offload and without, in full and in mixed precision,
and with every valid combination of the arguments of `summon_full_params`; of all products of these, a sample in which every pair
of values occurs [Note: Sample of setups and requests]. torch's FSDP1 runs beside ours in the same
ranks and must agree bit for bit. It cannot offload on a machine without an accelerator; since there is nowhere to offload to
from the CPU, what it does without is then what ours must do with offload.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import torch_backend
from crossframe.errors import ParamError, StateError
from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers.models import Block, build_net, loss_of
from torch_backend.engine._unit import unit_of

FSDP = torch_backend.FullyShardedDataParallel
WRAPPED = "_fsdp_wrapped_module."
# The units of the model, the outermost first, and the parameters of each.
UNITS = {
    "": ("embedding.weight", "head.weight", "head.bias"),
    "blocks.0": ("blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.down.weight", "blocks.0.down.bias"),
    "blocks.0.norm": ("blocks.0.norm.weight", "blocks.0.norm.bias"),
}
UNIT_OF = {name: unit for unit, names in UNITS.items() for name in names}


@dataclass(frozen=True)
class Setup:
    """How the model is wrapped. `over`: the ranks of a (replicate, shard) mesh; all of them if empty."""

    strategy: str
    use_orig_params: bool
    cpu_offload: bool
    mixed: bool
    over: tuple[int, ...] = ()

    @property
    def bare(self) -> "Setup":
        """Without offload."""
        return replace(self, cpu_offload=False)

    @property
    def shard_size(self) -> int:
        """Ranks in a shard group."""
        if self.strategy == "NO_SHARD":
            return 1
        return self.over[-1] if self.over else dist.get_world_size()

    @property
    def has_peer(self) -> bool:
        """Whether torch has this: where nothing is sharded it forgets that a hybrid mesh has replicas (R14)."""
        return self.over[1:] != (1,)

    def visible(self, request: "Request", rank: int) -> bool:
        """Whether a rank is shown full parameters: each, or the first of its shard group, or of its replicas (R19)."""
        group_rank = rank % self.shard_size if self.shard_size > 1 or self.over == (1,) else rank
        return group_rank == 0 or not request.rank0_only

    def persists(self, request: "Request") -> bool:
        """Whether edits remain (R20)."""
        return request.writeback or self.shard_size == 1

    def wrap(self, model: nn.Module, api: Any = torch_backend) -> nn.Module:
        """The model under `torch_backend`, or under `torch.distributed.fsdp`."""
        options: dict[str, Any] = {
            "sharding_strategy": api.ShardingStrategy[self.strategy],
            "use_orig_params": self.use_orig_params,
            "cpu_offload": api.CPUOffload(self.cpu_offload),
            "device_id": torch.device("cpu"),
            "auto_wrap_policy": import_module(f"{api.__name__}.wrap").ModuleWrapPolicy({Block, nn.LayerNorm}),
        }
        if self.mixed:
            options["mixed_precision"] = api.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if self.over == (1,):
            options["process_group"] = alone()
        elif self.over:
            options["device_mesh"] = mesh_of(self.over)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return api.FullyShardedDataParallel(model, **options)


@dataclass(frozen=True)
class Request:
    """The arguments of `summon_full_params`."""

    recurse: bool = True
    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False

    @property
    def bare(self) -> "Request":
        """Without offload."""
        return replace(self, offload_to_cpu=False)

    def is_legal(self, setup: Setup) -> bool:
        """Whether torch does not refuse it (R23)."""
        if self.writeback and self.rank0_only:
            return False
        if self.with_grads and (self.offload_to_cpu or not setup.use_orig_params):
            return False
        return not (self.offload_to_cpu and setup.shard_size == 1)

    def is_sampled(self, setup: Setup) -> bool:
        """Whether it is tried with a setup: one of every two requests that differ in recurse alone, the other if mixed."""
        # Not by offload_to_cpu: torch's answer with offload is that without, and is observed once for both.
        flags = (self.recurse, self.writeback, self.rank0_only, self.with_grads, setup.mixed)
        return LONG or sum(flags) % 2 == 0

    @property
    def units(self) -> tuple[str, ...]:
        """The units that are summoned."""
        return tuple(UNITS) if self.recurse else ("",)

    @property
    def names(self) -> list[str]:
        """The parameters that are summoned, in the order of the module."""
        return [name for name in plain() if UNIT_OF[name] in self.units]

    @contextmanager
    def summon(self, model: Any, of: nn.Module | None = None) -> Iterator[None]:
        """The context of torch's class or of ours, whichever the model is of."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            context = type(model).summon_full_params(of or model, **asdict(self))
            context.__enter__()
        try:
            yield
        except BaseException as error:
            if not context.__exit__(type(error), error, error.__traceback__):
                raise
        else:
            context.__exit__(None, None, None)


REQUESTS = [Request(*flags) for flags in product((True, False), repeat=5)]
HYBRIDS = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
LONG = EXHAUSTIVE in os.environ
# [Note: Sample of setups and requests]
# What a summon does follows from what is stored (original parameters or not), where, and in which precision, and from each
# argument. So three options of a wrapper take the four combinations of which the first of these lists consists: every pair of
# values occurs in it. The second list holds two opposite combinations, hence every value, for what differs from another setup in
# one thing only: SHARD_GRAD_OP, which keeps parameters unsharded during a step, and two further ways not to shard.
# With each setup every valid combination of writeback, rank0_only, offload_to_cpu and with_grads is tried once, with recurse or
# without (`Request.is_sampled`). `pytest --exhaustive` tries all setups with all requests.
PAIRWISE = ((True, False, False), (True, True, True), (False, True, False), (False, False, True))
OPPOSITE = ((True, True, False), (False, False, True))


def setups(*strategies: str, over: tuple[int, ...] = (), flags: Sequence[tuple[bool, ...]] = PAIRWISE) -> list[Setup]:
    """Setups of these strategies: use_orig_params, cpu_offload and mixed precision as in `flags`."""
    some = list(product((True, False), repeat=3)) if LONG else flags
    return [Setup(strategy, *each, over=over) for strategy, each in product(strategies, some)]


# Offload, casts and the kind of hybrid strategy take the same path at every number of ranks.
PLAIN = ((True, False, False), (False, False, False))
SHARDED = {
    2: setups("FULL_SHARD") + setups("SHARD_GRAD_OP", flags=OPPOSITE),
    4: setups(*(HYBRIDS if LONG else HYBRIDS[:1]), over=(2, 2), flags=PLAIN),
}
# By strategy; since a shard group is one rank; since a hybrid mesh has shard groups of one rank.
UNSHARDED = {
    2: setups("NO_SHARD")
    + setups("FULL_SHARD", over=(1,), flags=OPPOSITE)
    + setups("HYBRID_SHARD", over=(2, 1), flags=OPPOSITE)
}
ALL = {2: SHARDED[2] + UNSHARDED[2], 4: SHARDED[4]}
# Where three ranks could show something else.
THREE = [Setup(strategy, *each) for strategy, each in product(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), PLAIN)]


@cache
def plain() -> dict[str, Tensor]:
    """The parameters of the model before it is sharded."""
    return values(build_net(depth=1))


@cache
def mesh_of(shape: tuple[int, ...]) -> Any:
    """A device mesh over all ranks."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


@cache
def alone() -> Any:
    """A group of this rank."""
    return dist.new_subgroups(1)[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that torch and ours give in these scenarios."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# What is observed, and the comparison

Scenario = Callable[[Any, Setup, Request, int], tuple[dict[str, Any], dict[str, Any]]]


def clean(name: str) -> str:
    """A name without what wrapping added."""
    return name.replace(WRAPPED, "")


def values(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter that the model shows now, by the name that it has now."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    """Their gradients."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def full(model: nn.Module) -> dict[str, Tensor]:
    """Full parameters, on every rank."""
    with Request(writeback=False).summon(model):
        return values(model)


def fill(model: nn.Module, value: float) -> None:
    """Write one number into all that the model shows, padding included."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)


def differences(path: str, a: Any, b: Any) -> Iterator[str]:
    """Where two observations differ in any bit, shape, dtype, name or order of names."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if list(a) != list(b):
            yield f"{path}: names {list(a)} != {list(b)}"
        for name in a.keys() & b.keys():
            yield from differences(f"{path}[{name}]", a[name], b[name])
    elif isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a, b):
            yield f"{path}: {a.dtype} {a.tolist()} != {b.dtype} {b.tolist()}"
    elif type(a) is not type(b) or a != b:
        yield f"{path}: {a} != {b}"


def check(
    rank: int,
    world_size: int,
    setups: list[Setup],
    scenario: Scenario,
    make: Callable[[], nn.Module] | None = None,
    once: bool = False,
    with_grads: bool = False,
) -> list[str]:
    """Run a scenario with every setup and every request of the sample; return where ours is not as expected or as torch's.

    With `once` a setup gets one request, of default arguments; with `with_grads` those alone that show gradients.

    A scenario is given a model, which is used again with the next request, and returns what it saw and, of that, what it must
    have been. An assertion that fails on one rank alone would hang the others, so there are none in it.
    """
    import torch.distributed.fsdp as peer

    make = make or (lambda: build_net(depth=1))
    peers: dict[Setup, nn.Module] = {}
    found: dict[tuple[Setup, Request], dict[str, Any]] = {}
    wrong = []
    for setup in setups:
        sample = [each for each in REQUESTS if each.is_sampled(setup) and each.with_grads >= with_grads]
        legal = [request for request in ([Request()] if once else sample) if request.is_legal(setup)]
        model = setup.wrap(make()) if legal else None
        for request in legal:
            observed, expected = scenario(model, setup, request, rank)
            for key, value in expected.items():
                wrong += [f"rank {rank} {setup} {request} expected {d}" for d in differences(key, value, observed[key])]
            if not setup.has_peer:
                continue
            case = (setup.bare, request.bare)
            if case not in found:
                if setup.bare not in peers:
                    peers[setup.bare] = setup.bare.wrap(make(), peer)
                found[case] = scenario(peers[setup.bare], *case, rank)[0]
            for key, value in found[case].items():
                wrong += [f"rank {rank} {setup} {request} torch {d}" for d in differences(key, value, observed[key])]
    return wrong


def assert_right(
    ranks: Any,
    scenario: Scenario,
    setups: dict[int, list[Setup]],
    make: Callable[[], nn.Module] | None = None,
    once: bool = False,
    with_grads: bool = False,
) -> None:
    """Run `check` at each world size, and name what went wrong."""
    for world_size, some in setups.items():
        wrong = [
            line for lines in ranks.run(world_size, check, some, scenario, make, once, with_grads) for line in lines
        ]
        assert not wrong, f"{len(wrong)} wrong, the first of them:\n" + "\n".join(wrong[:5])


# What persists


def own_numel(numel: int, setup: Setup, rank: int) -> tuple[int, int]:
    """Elements of a flat parameter without original ones that a rank holds, and elements of its shard (R04)."""
    chunk = -(-numel // setup.shard_size)
    place = rank % setup.shard_size
    return max(0, min(chunk, numel - place * chunk)), chunk


def written(before: Mapping[str, Tensor], setup: Setup, rank: int, values: Mapping[str, float]) -> dict[str, Tensor]:
    """What this rank shows once units, by name, were written in full by this rank; padding is as it was (R20)."""
    after = {name: param.clone() for name, param in before.items()}
    for name, param in after.items():
        unit = UNIT_OF[clean(name)] if setup.use_orig_params else clean(name).rpartition("_flat_param")[0].rstrip(".")
        if unit in values:
            own = param.numel()
            if not setup.use_orig_params:
                own, padded = own_numel(sum(plain()[each].numel() for each in UNITS[unit]), setup, rank)
                assert padded == param.numel()
            param.view(-1)[:own] = values[unit]
    return after


def writeback(model: Any, setup: Setup, request: Request, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ranks hold different values, and write other ones: what remains is each rank's slice of its own."""
    fill(model, rank + 1)
    before = values(model)
    visible = setup.visible(request, rank)
    with request.summon(model), torch.no_grad():
        inside = values(model)
        for name, param in model.named_parameters():
            if visible and name in request.names:
                param.fill_(10 + rank)
    edited = dict.fromkeys(request.units, 10.0 + rank) if visible and setup.persists(request) else {}
    observed = {"inside": inside, "after": values(model), "full": full(model)}
    return observed, {"after": written(before, setup, rank, edited)}


def test_unshard_params_writeback(ranks):
    """R20: each rank persists the slice that it owns, padding excluded, and without writeback nothing."""
    assert_right(ranks, writeback, {**SHARDED, 3: THREE[:-2]})


def test_unshard_params_writeback_no_shard(ranks):
    """R20: where nothing is sharded every write persists, with writeback or without."""
    assert_right(ranks, writeback, UNSHARDED)


def singleton() -> nn.Module:
    """A model of one element."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 1, bias=False))


def singleton_writeback(model: Any, setup: Setup, request: Request, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """One rank of a shard group owns the element; what the others write to it is lost, and their padding stays."""
    fill(model, rank + 1)
    before = values(model)
    visible = setup.visible(request, rank)
    with request.summon(model), torch.no_grad():
        inside = values(model)
        if visible:
            for param in model.parameters():
                param.fill_(10 + rank)
    owns = rank % setup.shard_size == 0
    edits = owns and visible and setup.persists(request)
    after = {name: param + 9 if edits else param for name, param in before.items()}
    observed = {"inside": inside, "before": before, "after": values(model), "full": full(model)}
    expected: dict[str, Any] = {"after": after}
    if visible:
        expected["inside"] = {"0.weight": torch.full((1, 1), rank - rank % setup.shard_size + 1.0)}
    if setup.use_orig_params and not owns:
        expected["before"] = {name: torch.empty(0) for name in before}
    return observed, expected


def test_unshard_singleton_param_writeback(ranks):
    """R04, R20: one element on two, three and four ranks."""
    assert_right(ranks, singleton_writeback, {**ALL, 3: THREE}, singleton)


# What is shown


def described(model: nn.Module) -> dict[str, Any]:
    """All that a user sees of the parameters: names in order, values, dtypes and shapes, what they are and where."""
    return {
        name: (
            param.data.clone(),
            (isinstance(param, nn.Parameter), param.is_leaf, param.requires_grad, str(param.device)),
        )
        for name, param in model.named_parameters()
    }


def param_data(model: Any, setup: Setup, request: Request, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """`.data` of the parameters inside is that of the model before it was sharded, in full precision."""
    before = described(model)
    with request.summon(model):
        data, kinds = {}, {}
        for name, (value, kind) in described(model).items():
            data[name], kinds[name] = value, kind
        unwrapped = {name: param.data.clone() for name, param in model.module.named_parameters()}
    after = described(model)
    observed: dict[str, Any] = {"data": data, "kinds": kinds, "unwrapped": unwrapped}
    observed |= {"after": {name: value for name, (value, _) in after.items()}}
    expected: dict[str, Any] = {"after": {name: value for name, (value, _) in before.items()}}
    if setup.visible(request, rank):
        observed["of"] = {name: data.get(name) for name in request.names}
        expected["of"] = {name: plain()[name] for name in request.names}
        if request.recurse:
            expected |= {"data": plain(), "kinds": dict.fromkeys(plain(), (True, True, True, "cpu"))}
    return observed, expected


def test_unshard_params_param_data(ranks):
    """R19: full parameters in full precision, also under mixed precision, on every rank or on the first alone."""
    assert_right(ranks, param_data, SHARDED)


def test_unshard_params_param_data_no_shard(ranks):
    """R19: the same where nothing is sharded."""
    assert_right(ranks, param_data, UNSHARDED)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes that the model shows, without the names of wrappers, but for the parts of a shard."""
    return {clean(name): tuple(param.shape) for name, param in model.named_parameters()}


def recursion(model: Any, setup: Setup, request: Request, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the root and of an inner unit with one inside it: which units show full parameters."""
    block = model.module.blocks[0]
    observed, expected = {}, {}
    for key, of, units in (
        ("root", model, request.units),
        ("inner", block, ("blocks.0", "blocks.0.norm") if request.recurse else ("blocks.0",)),
    ):
        outside = shapes(model)
        with request.summon(model, of):
            inside = observed[key] = shapes(model)
        expected[f"{key} after"], observed[f"{key} after"] = outside, shapes(model)
        if not setup.visible(request, rank):
            expected[key] = outside
            continue
        names = [name for name in plain() if UNIT_OF[name] in units]
        observed[f"{key} full"] = {name: inside.get(name) for name in names}
        expected[f"{key} full"] = {name: tuple(plain()[name].shape) for name in names}
        rest = {name for name in outside if not any(UNIT_OF.get(name) == unit for unit in units)}
        rest -= {f"{unit}._flat_param".lstrip(".") for unit in units}
        observed[f"{key} rest"] = {name: inside.get(name) for name in sorted(rest)}
        expected[f"{key} rest"] = {name: outside[name] for name in sorted(rest)}
    return observed, expected


def test_unshard_params_recurse(ranks):
    """R19: with `recurse=False` a unit alone, and not those inside it."""
    assert_right(ranks, recursion, ALL)


def tied() -> nn.Module:
    """A model with a parameter under two names, and its buffers in several places."""
    model = build_net(depth=1, tied=True)
    model.blocks[0].register_buffer("count", torch.tensor(3))
    return model


def names_of(model: Any) -> dict[str, Any]:
    """What all ways of asking for names answer, for the wrapper, for what it wraps, and for the unit inside."""
    answers: dict[str, Any] = {}
    modules = {"model": model, "module": model.module, "block": model.module.blocks[0]}
    for (key, module), prefix, recurse, once in product(modules.items(), ("", "top"), (True, False), (True, False)):
        given = {"prefix": prefix, "recurse": recurse, "remove_duplicate": once}
        answers[f"parameters of {key} {given}"] = [name for name, _ in module.named_parameters(**given)]
        answers[f"buffers of {key} {given}"] = [name for name, _ in module.named_buffers(**given)]
    return answers


def names(model: Any, setup: Setup, request: Request, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Names inside and outside, of parameters and buffers, one of which is the wrapper's own."""
    if not hasattr(model, "mark"):
        model.register_buffer("mark", torch.tensor([1.0]))
    before = names_of(model)
    with request.summon(model):
        inside, buffers = names_of(model), {name: buffer.clone() for name, buffer in model.named_buffers()}
    after = names_of(model)
    # In what order torch registers a parameter's second name, in or after a summon, differs from the module's own.
    observed: dict[str, Any] = {f"inside, {key}": sorted(found) for key, found in inside.items()}
    observed |= {f"outside, {key}": sorted(found) for key, found in before.items()}
    expected: dict[str, Any] = {f"outside, {key}": sorted(found) for key, found in after.items()}
    observed["buffers"] = buffers
    if setup.visible(request, rank) and request.recurse:
        unwrapped = tied()
        for key, prefix, once in product(("parameters", "buffers"), ("", "top"), (True, False)):
            given = {"prefix": prefix, "recurse": True, "remove_duplicate": once}
            asked = list(getattr(unwrapped, f"named_{key}")(**given))
            shown = inside[f"{key} of model {given}"]
            # The wrapper's own buffer comes first.
            mine = [] if key == "parameters" else [f"{prefix}.mark".lstrip(".")]
            if isinstance(model, FSDP):
                observed[f"{key} {given}"] = shown
                expected[f"{key} {given}"] = mine + [name for name, _ in asked]
    return observed, expected


def test_named_parameters_and_buffers(ranks):
    """R19: inside, names are those of the module before it was wrapped, whatever is asked."""
    assert_right(ranks, names, ALL, tied)


def submodule(model: Any, setup: Setup, request: Request, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A submodule that is a unit, one with units inside, and one without: no other unit is touched."""
    observed, expected = {}, {}
    block = model.module.blocks[0]
    for key, of, units in (
        ("a unit", block, ("blocks.0", "blocks.0.norm") if request.recurse else ("blocks.0",)),
        ("a list of units", model.module.blocks, ("blocks.0", "blocks.0.norm") if request.recurse else ()),
        ("no unit", model.module.head, ()),
    ):
        fill(model, rank + 1)
        before = values(model)
        visible = setup.visible(request, rank)
        with request.summon(model, of), torch.no_grad():
            observed[f"{key} inside"] = values(model)
            if visible:
                for name, param in model.named_parameters():
                    if UNIT_OF.get(clean(name)) in units:
                        param.fill_(10 + rank)
        edited = dict.fromkeys(units, 10.0 + rank) if visible and setup.persists(request) else {}
        observed[key] = values(model)
        expected[key] = written(before, setup, rank, edited)
    return observed, expected


def test_unshard_submodule(ranks):
    """R19, R20: the units of a submodule alone are shown and written back."""
    assert_right(ranks, submodule, ALL)


# Memory


def allocated(model: Any) -> list[bool]:
    """Of each unit whether its full parameters are in memory; where nothing is sharded they always are."""
    if isinstance(model, FSDP):
        buffers = [unit_of(wrapper).buckets[0].buffer.full for wrapper in FSDP.fsdp_modules(model)]
    else:
        handles = [wrapper._handle for wrapper in type(model).fsdp_modules(model)]
        buffers = [
            handle.flat_param._full_param_padded if handle.uses_sharded_strategy else handle.flat_param
            for handle in handles
        ]
    return [buffer.untyped_storage().size() > 0 for buffer in buffers]


def reshard(model: Any, setup: Setup, _: Request, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is in memory between forward and backward, and after backward, before, in and after each summon. As long as a summon
    leaves memory as it was, the next one comes in the same step."""
    observed, expected = {}, {}
    keeps = setup.strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    left, sharded = ([True] * 3, [True] * 3) if setup.shard_size == 1 else ([True, keeps, keeps], [False] * 3)
    loss = None
    for request in REQUESTS:
        if not (request.is_legal(setup) and request.is_sampled(setup)):
            continue
        if request.offload_to_cpu and not isinstance(model, FSDP):
            continue
        if loss is None:
            model.zero_grad()
            loss = loss_of(model, 0, rank)
        before = allocated(model)
        with request.summon(model):
            inside = allocated(model)
        summoned = [unit in request.units for unit in UNITS]
        # The full precision that was shown has replaced the low one, which is freed (R21).
        freed = [setup.mixed and some for some in summoned]
        now = {"before": before, "after": allocated(model)}
        right = {"before": left, "after": [a and not b for a, b in zip(left, freed, strict=True)]}
        if not setup.mixed and setup.visible(request, rank):
            now["inside"] = inside
            right["inside"] = [a or b for a, b in zip(left, summoned, strict=True)]
        if setup.mixed:
            loss.backward()
            loss = None
            now["end"], right["end"] = allocated(model), sharded
            with request.summon(model):
                pass
            now["last"], right["last"] = allocated(model), sharded
        observed |= {f"{request} {key}": value for key, value in now.items()}
        expected |= {f"{request} {key}": value for key, value in right.items()}
    if loss is not None:
        loss.backward()
        observed["end"], expected["end"] = allocated(model), sharded
    if (
        setup.shard_size == 1 and setup.mixed
    ):  # each implementation decides whether it keeps the cast of an unsharded parameter
        observed, expected = {}, {}
    return {**observed, "grads": grads(model)}, expected


def test_unshard_params_respects_reshard(ranks):
    """R21: what was full between forward and backward stays so, but for a copy in low precision; the gradients are the same."""
    assert_right(ranks, reshard, ALL, once=True)


# Gradients


@cache
def mean_grads(over: tuple[int, ...], nothing_sharded: bool, mixed: bool) -> dict[str, Tensor]:
    """The gradients of the model before it is sharded, averaged over the ranks of a setup, computed by torch's
    DistributedDataParallel inside a shard group and then over replicas; in bfloat16, averaged in float32, if mixed."""
    rank, model = dist.get_rank(), build_net(depth=1)
    if over == (1,):
        groups = []
    elif len(over) == 2:
        groups = [
            mesh_of(over).get_group(axis) for axis in ("shard", "replicate") if over != (2, 1) or axis == "replicate"
        ]
    else:
        groups = [dist.group.WORLD]
    if mixed:
        for param in model.parameters():
            param.data = param.data.bfloat16()
        loss_of(model, 0, rank).backward()
    else:
        parallel = nn.parallel.DistributedDataParallel(model, process_group=groups.pop(0)) if groups else model
        loss_of(parallel, 0, rank).backward()
    found = {}
    for name, param in model.named_parameters():
        assert param.grad is not None
        grad = found[name] = param.grad.float()
        for group in groups:  # of two ranks each: in either order the same bits
            dist.all_reduce(grad, group=group)
            grad /= 2
    return found


def backward(model: Any, rank: int) -> None:
    """New gradients of the rank's batch."""
    model.zero_grad()
    loss_of(model, 0, rank).backward()


def grads_core(model: Any, setup: Setup, request: Request, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Full gradients are those of data parallel training; what is done to them, and to parameters beside them, persists."""
    fill_with(model, plain())
    backward(model, rank)
    before, visible = grads(model), setup.visible(request, rank)
    with request.summon(model), torch.no_grad():
        inside = grads(model)
        for name, param in model.named_parameters() if visible else ():
            if name in request.names and param.grad is not None:
                param.fill_(10 + rank)
                edit(name, param.grad, rank)
    edits = visible and setup.persists(request)
    expected = {"after": {name: None if grad is None else grad.clone() for name, grad in before.items()}}
    for name, grad in expected["after"].items():
        if edits and grad is not None and clean(name) in request.names:
            edit(clean(name), grad, rank)
    observed = {"inside": inside, "after": grads(model), "values": values(model)}
    if visible:
        mean = mean_grads(setup.over, setup.shard_size == 1, setup.mixed)
        observed["full"] = {name: inside.get(name) for name in request.names}
        expected["full"] = {name: mean[name] for name in request.names}
    return observed, expected


def fill_with(model: Any, full: Mapping[str, Tensor]) -> None:
    """Write full parameters."""
    with Request().summon(model), torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(full[name])


def edit(name: str, grad: Tensor, rank: int) -> None:
    """Something else with each gradient: zeroed, scaled, or the rank's own number."""
    match list(plain()).index(name) % 3:
        case 0:
            grad.zero_()
        case 1:
            grad.mul_(2)
        case 2:
            grad.fill_(7 + rank)


def test_with_grads_core(ranks):
    """R22, R20: the full gradients, and edits of them."""
    assert_right(ranks, grads_core, ALL, with_grads=True)


def none_grads(model: Any, setup: Setup, request: Request, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gradients that no rank has, and then those that the first rank alone lacks.

    torch goes by units: in one of which any gradient is left it shows zeros for a parameter of which none is. Ours goes by
    parameters.
    """
    model.zero_grad()
    with request.summon(model):
        none = grads(model)
    backward(model, rank)
    if rank == 0:
        for param in model.parameters():
            param.grad = None
    before = {clean(name): grad for name, grad in grads(model).items()}
    with request.summon(model), torch.no_grad():
        some = grads(model)
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(2)
    after = {clean(name): grad for name, grad in grads(model).items()}
    observed: dict[str, Any] = {"none": none, "after": after}
    expected: dict[str, Any] = {"none": dict.fromkeys(none)}
    visible = setup.visible(request, rank)
    # What is not summoned here is the shard itself.
    lost = {name for name in request.names if visible and not setup.persists(request)}
    expected["after"] = {name: grad if grad is None or name in lost else grad * 2 for name, grad in before.items()}
    if visible:
        mean = mean_grads(setup.over, setup.shard_size == 1, setup.mixed)
        with_first = rank < setup.shard_size  # the first rank is in this rank's shard group
        shown = {}
        for name in request.names:
            owned = first_numel(name, setup) if with_first else 0
            grad = mean[name].clone()
            grad.view(-1)[:owned] = 0
            shown[name] = None if owned == grad.numel() else grad
        zeros_or_none = {name: torch.zeros_like(mean[name]) for name, grad in shown.items() if grad is None}
        if setup.shard_size > 1:
            observed["some"] = {name: zeros_or_none.get(name, some[name]) for name in request.names}
            expected["some"] = {name: zeros_or_none.get(name, grad) for name, grad in shown.items()}
        if isinstance(model, FSDP):
            observed["ours"] = {name: some[name] for name in request.names}
            expected["ours"] = shown
    return observed, expected


def first_numel(name: str, setup: Setup) -> int:
    """Elements of a parameter that the first rank of a shard group holds, with original parameters: each starts at a multiple of
    16 bytes of the dtype of compute, and the whole is padded to a multiple of the ranks (R02-R04)."""
    align, start, offsets = 8 if setup.mixed else 4, 0, {}
    for each in UNITS[UNIT_OF[name]]:
        start += -start % align
        offsets[each] = start
        start += plain()[each].numel()
    chunk = -(-start // setup.shard_size)
    return max(0, min(chunk - offsets[name], plain()[name].numel()))


def test_with_grads_none_grads(ranks):
    """R22: none on all ranks is none; none on some counts as zeros there, and is none again afterwards."""
    assert_right(ranks, none_grads, ALL, with_grads=True)


def taken_grads(rank: int, world_size: int, setups: list[Setup]) -> list[str]:
    """One gradient set to None inside, one replaced by another tensor, and one of a frozen parameter."""
    wrong = []
    for setup in setups:
        net = build_net(depth=1)
        net.embedding.weight.requires_grad_(False)
        model: Any = setup.wrap(net)
        backward(model, rank)
        mean = mean_grads(setup.over, setup.shard_size == 1, setup.mixed)
        with Request(with_grads=True).summon(model):
            inside = grads(model)
            model.module.head.weight.grad = None
            model.module.head.bias.grad = torch.full((11,), 5.0)
        after = {clean(name): grad for name, grad in grads(model).items()}
        with Request(with_grads=True, writeback=False).summon(model):
            again = grads(model)
        untouched = {name: grad for name, grad in mean.items() if name not in UNITS[""]}
        none = None if setup.shard_size == 1 else torch.zeros(11, 7)  # there the gradients shown are the gradients
        expected = {"embedding.weight": None, "head.weight": none, "head.bias": torch.full((11,), 5.0)} | untouched
        lines = [*differences("inside", {**mean, "embedding.weight": None}, inside)]
        lines += differences("again", {name: expected[name] for name in plain()}, again)
        lines += ["a frozen parameter has a gradient"] * (after["embedding.weight"] is not None)
        wrong += [f"rank {rank} {setup} {line}" for line in lines]
    return wrong


def test_R22_gradients_that_a_user_takes_away_replaces_or_never_had(ranks):
    """Beyond torch, which keeps the earlier gradient in both cases, and shows zeros for frozen parameters."""
    for world_size, some in ALL.items():
        some = [setup for setup in some if setup.use_orig_params and setup.over != (2, 1)]
        wrong = [line for lines in ranks.run(world_size, taken_grads, some) for line in lines]
        assert not wrong, f"{len(wrong)} wrong, the first of them:\n" + "\n".join(wrong[:5])


# What is refused


def refusal(context: Any) -> str:
    """What a context that must be refused says."""
    try:
        with quiet(), context:
            return "not refused"
    except (AssertionError, NotImplementedError) as error:
        return str(error) or "refused"


def from_phase(model: Any, setup: Setup, phase: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """In the midst of a step everything is tried with each of three units, one of which is not in use; with torch's the root,
    since that allows the last. The step is what it would have been."""
    backward(model, dist.get_rank())
    undisturbed = grads(model)
    block = model.module.blocks[0]
    targets = (model, block, block.module.norm) if isinstance(model, FSDP) else (model,)
    said: dict[str, str] = {}

    def attempt(*_: Any) -> None:
        for (i, target), request in product(enumerate(targets), REQUESTS):
            if request.is_legal(setup):
                said[f"{i} {request}"] = refusal(request.summon(model, target))

    def attach(module: nn.Module, given: Any, output: Tensor) -> None:
        output.register_hook(attempt)

    handle = block.module.up.register_forward_hook(attempt if phase == "forward" else attach)
    backward(model, dist.get_rank())
    handle.remove()
    assert said
    refused = {case: "not refused" not in message for case, message in said.items()}
    observed: dict[str, Any] = {
        "grads": grads(model),
        "refused": {case: said for case, said in refused.items() if case[0] == "0"},
    }
    if not isinstance(model, FSDP):
        return observed, {}
    observed |= {
        "all": refused,
        "said": {
            case: message.startswith("unit '") and f"not during {phase}" in message for case, message in said.items()
        },
    }
    return observed, {"grads": undisturbed, "all": dict.fromkeys(said, True), "said": dict.fromkeys(said, True)}


def from_forward(model: Any, setup: Setup, request: Request, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """In a forward."""
    return from_phase(model, setup, "forward")


def from_backward(model: Any, setup: Setup, request: Request, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """In a backward."""
    return from_phase(model, setup, "backward")


def test_unshard_params_from_forward_raises(ranks):
    """R18: also for units that are not in their forward; the message says so, and the step is what it would have been."""
    assert_right(ranks, from_forward, ALL, once=True)


def test_unshard_params_from_backward_raises(ranks):
    """R18: the same in a backward."""
    assert_right(ranks, from_backward, ALL, once=True)


def refused_request(model: Any, setup: Setup, request: Request, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every request that R23 refuses: as NotImplementedError, by torch and by ours, before anything is touched."""
    before = values(model)
    said = {}
    for request in REQUESTS:
        if not request.is_legal(setup):
            said[str(request)] = refusal(request.summon(model))
    after = described(model)
    refused = {case: message != "not refused" for case, message in said.items()}
    observed = {"refused": refused, "values": {name: value for name, (value, _) in after.items()}, "full": full(model)}
    expected = {"refused": dict.fromkeys(said, True), "values": before}
    if isinstance(model, FSDP):
        cases = [request for request in REQUESTS if not request.is_legal(setup)]
        expected["reasons"] = {str(request): True for request in cases}
        observed["reasons"] = {str(request): reason(request, setup) in said[str(request)] for request in cases}
    return observed, expected


def reason(request: Request, setup: Setup) -> str:
    """What the message of a refusal begins with."""
    if request.writeback and request.rank0_only:
        return "writeback=True with rank0_only=True: "
    if request.with_grads and not setup.use_orig_params:
        return "with_grads=True without original parameters: "
    if request.with_grads:
        return "with_grads=True with offload_to_cpu=True: "
    return "offload_to_cpu=True where nothing is sharded (NO_SHARD): "


def test_rank0_only_with_writeback_raises(ranks):
    """R23: with all other flags; and with_grads without original parameters or with offload."""
    assert_right(ranks, refused_request, SHARDED, once=True)


def test_offload_to_cpu_no_shard_raises(ranks):
    """R23: the same where nothing is sharded, and offload to CPU there; elsewhere that warns, unless rank 0 alone is shown."""
    assert_right(ranks, refused_request, UNSHARDED, once=True)
    assert ranks.run(2, warned) == [[], []]


def warned(rank: int, world_size: int) -> list[str]:
    """Requests that do not warn as they should."""
    wrong = []
    for setup in SHARDED[2]:
        model = setup.wrap(build_net(depth=1))
        for request in REQUESTS:
            if request.is_legal(setup) and request.is_sampled(setup):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    with FSDP.summon_full_params(model, **asdict(request)):
                        pass
                expected = request.offload_to_cpu and not request.rank0_only
                files = {
                    warning.filename
                    for warning in caught
                    if "offload_to_cpu=True on every rank" in str(warning.message)
                }
                if (files == {__file__}) != expected:  # a warning points at the user's line
                    wrong.append(f"{setup} {request}: {files}")
    return wrong


# The first rank's edits to all ranks, which torch has not


def is_first(setup: Setup, rank: int) -> bool:
    """Whether a rank is the one that edits; alone in its group, each is."""
    return rank == 0 or setup.over == (1,)


def edit_all(model: Any, names: Sequence[str]) -> None:
    """In each way that there is: in place, by other data, by another object."""
    for i, name in enumerate(names):
        path, _, attribute = name.rpartition(".")
        module = model.module.get_submodule(path)
        module = module.module if isinstance(module, FSDP) else module
        param: Any = module._parameters[attribute]
        value = torch.full_like(plain()[name], 20.0 + i)
        match i % 3:
            case 0:
                with torch.no_grad():
                    param.fill_(20.0 + i)
            case 1:
                param.data = value
            case 2:
                setattr(module, attribute, nn.Parameter(value))


def first_ranks_edits(rank: int, world_size: int, setups: list[Setup]) -> list[str]:
    """The first rank edits, the others write into their shards what is lost; between steps, and in the midst of one."""
    wrong: list[str] = []
    for setup in setups:
        model = setup.wrap(build_net(depth=1))
        for recurse, offload, midst in product((True, False), repeat=3):
            if not LONG and (recurse + offload + midst + setup.mixed) % 2:
                continue  # every pair of these occurs in what is left
            fill_with(model, plain())
            loss = loss_of(model, 0, rank) if midst else None
            memory, outside = allocated(model), shapes(model)
            request = Request(recurse=recurse)
            with FSDP.summon_full_params_on_rank0(model, recurse=recurse, offload_to_cpu=offload):
                inside = values(model)
                if is_first(setup, rank):
                    edit_all(model, request.names)
                elif recurse:
                    fill(model, 99)
            after = allocated(model)
            if loss is not None:
                loss.backward()
            edited = {name: torch.full_like(plain()[name], 20.0 + i) for i, name in enumerate(request.names)}
            expected: dict[str, Any] = {"full": {**plain(), **edited}}
            observed: dict[str, Any] = {"full": full(model), "memory": after}
            if is_first(setup, rank):
                expected["inside"] = {name: plain()[name] for name in request.names}
                observed["inside"] = {name: inside.get(name) for name in request.names}
            else:
                expected["inside"] = outside
                observed["inside"] = {clean(name): tuple(value.shape) for name, value in inside.items()}
            if not (setup.mixed and midst):
                expected["memory"] = memory
            case = f"rank {rank} {setup} recurse={recurse} offload_to_cpu={offload} midst={midst}"
            for key, value in expected.items():
                wrong += [f"{case} {d}" for d in differences(key, value, observed[key])]
    return wrong


def test_R23_the_first_ranks_edits_become_every_ranks(ranks):
    four = [setup for setup in SHARDED[4] if not (setup.mixed or setup.cpu_offload)]
    for world_size, some in {2: ALL[2], 3: THREE, 4: four}.items():
        wrong = [line for lines in ranks.run(world_size, first_ranks_edits, some) for line in lines]
        assert not wrong, f"{len(wrong)} wrong, the first of them:\n" + "\n".join(wrong[:5])


FIRST_FAILS, OTHER_FAILS = ("first raises", "wrong shape"), ("other raises",)


def failure_of(model: Any, rank: int, failure: str) -> str:
    """What each rank is told when one of them fails."""
    try:
        with FSDP.summon_full_params_on_rank0(model):
            if rank == 0:
                edit_all(model, list(plain()))
            if failure == "wrong shape" and rank == 0:
                model.module.head.bias = nn.Parameter(torch.zeros(12))
            if (failure, rank) in (("first raises", 0), ("other raises", 1)):
                raise KeyError("mine")
    except (KeyError, ParamError, StateError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def failures_on_rank0(
    rank: int, world_size: int, setups: list[Setup], failures: tuple[str, ...], midst: bool
) -> list[str]:
    """Where the first rank fails no rank's parameters change, and all are told; where another does, the first one's count."""
    wrong: list[str] = []
    for setup, failure in product(setups, failures):
        model = setup.wrap(build_net(depth=1))
        loss = loss_of(model, 0, rank) if midst else None
        said = failure_of(model, rank, failure)
        if loss is not None and failure == "other raises":
            loss.backward()
        after = full(model)
        edited = {name: torch.full_like(value, 20.0 + i) for i, (name, value) in enumerate(plain().items())}
        expected = {
            "first raises": ("KeyError: 'mine'" if rank == 0 else "StateError: the first rank raised", plain()),
            "wrong shape": (
                "ReplacedError: parameter 'head.bias': expected the unsharded shape (11,), got (12,)"
                if rank == 0
                else "StateError: the first rank raised",
                plain(),
            ),
            "other raises": ("KeyError: 'mine'" if rank == 1 else "nothing", edited),
        }[failure]
        case = f"rank {rank} {setup} {failure} midst={midst}"
        wrong += [f"{case} said {said}"] * (not said.startswith(expected[0]))
        wrong += [f"{case} {d}" for d in differences("full", expected[1], after)]
        model.zero_grad()
        loss_of(model, 1, rank).backward()  # and it goes on
        wrong += [f"{case} memory {allocated(model)}"] * (setup.shard_size > 1 and any(allocated(model)))
    return wrong


def assert_told(ranks: Any, setups: dict[int, list[Setup]], *args: Any) -> None:
    """Run `failures_on_rank0` at each world size."""
    for world_size, some in setups.items():
        wrong = [line for lines in ranks.run(world_size, failures_on_rank0, some, *args) for line in lines]
        assert not wrong, f"{len(wrong)} wrong, the first of them:\n" + "\n".join(wrong[:5])


# Who fails has nothing to do with where shards live nor with their precision: that is tried at 2 ranks.
FAILING = {
    2: SHARDED[2] + [setup for setup in UNSHARDED[2] if setup.over != (1,)],
    4: [setup for setup in SHARDED[4] if not (setup.cpu_offload or setup.mixed)],
}


@pytest.mark.parametrize("midst", [False, True])
def test_R23_where_the_first_rank_fails_nothing_changes_on_any(ranks, midst):
    assert_told(ranks, FAILING, FIRST_FAILS, midst)


@pytest.mark.parametrize("midst", [False, True])
def test_R23_where_another_rank_fails_the_first_ones_edits_count(ranks, midst):
    assert_told(ranks, FAILING, OTHER_FAILS, midst)


def refused_on_the_way_in(rank: int, world_size: int, context: str) -> list[bool]:
    """Which units show full parameters after an inner one's was refused, since its data had been replaced by another shape."""
    model: Any = Setup("FULL_SHARD", True, False, False).wrap(build_net(depth=1))
    block = model.module.blocks[0].module
    param = (block.up.weight, block.down.weight)[rank]  # one that lies on this rank, so that each refuses
    assert param.numel()
    param.data = torch.zeros(param.numel() + 1)
    with pytest.raises(ParamError), getattr(FSDP, context)(model):
        pass
    return [unit_of(wrapper).summoned for wrapper in FSDP.fsdp_modules(model)]


@pytest.mark.parametrize("context", ["summon_full_params", "summon_full_params_on_rank0"])
def test_R24_a_refusal_by_a_later_unit_leaves_no_unit_summoned(ranks, context):
    assert not any(summoned for units in ranks.run(2, refused_on_the_way_in, context) for summoned in units)
