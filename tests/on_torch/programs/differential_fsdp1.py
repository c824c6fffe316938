"""Random trees under `FullyShardedDataParallel`, torch's and ours: options, how they are drawn, and what a run does with them."""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.on_torch.helpers import random_trees
from tests.on_torch.helpers.paired_runs import Case, Options, Run, drawn, dtype_named
from tests.on_torch.helpers.random_trees import Grower, Part, Unit, written

HYBRIDS = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *HYBRIDS)
LOW = ("bfloat16", "float16")


@dataclass(frozen=True, repr=False)
class Mixed:
    """Mixed precision; dtypes by name. `ignores`: classes that keep full precision, by name, or None for torch's default."""

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    buffer_dtype: str | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    ignores: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        """As an expression that makes it."""
        return written(self)


@dataclass(frozen=True, repr=False)
class WrapOptions(Options):
    """How a tree is wrapped, and what a run does with it. The first fields are arguments of torch's.

    Attributes:
        mesh: how ranks are given to units: "" for the default group, "mesh", or "groups" (hybrids alone).
        shard_size: ranks in a shard group, for hybrids.
        wrap: by hand, or by a policy: "hand", "module", "lambda", "custom", "callable", "size".
        inner: the strategy of all units but the root, where it is another one; by hand alone.
        mixed_in: the units that have `mixed`: "all", and by hand also "root" or "inner".
        ignored: how modules to ignore are given: "modules", "states" or "params".
        edits: full parameters are changed between steps: "summon", or "load" to load a state dict while they are summoned.
        sees_grads: full gradients are looked at before each step.
    """

    api: ClassVar[str] = "fsdp1"
    sharding_strategy: str = "FULL_SHARD"
    use_orig_params: bool = True
    backward_prefetch: str | None = "BACKWARD_PRE"
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    mixed: Mixed | None = None
    mesh: str = ""
    shard_size: int = 0
    wrap: str = "hand"
    inner: str = ""
    mixed_in: str = "all"
    ignored: str = "modules"
    sees_grads: bool = False

    def simpler(self) -> "Iterator[Options]":
        """Options that are simpler by one thing each; what hangs together stays so."""
        for options in super().simpler():
            assert isinstance(options, WrapOptions)
            if options.sharding_strategy != self.sharding_strategy:
                options = replace(options, mesh="", shard_size=0)
            elif (options.mesh, options.shard_size) != (self.mesh, self.shard_size):
                continue
            if options.mixed is None:
                options = replace(options, mixed_in="all")
            if options.wrap != self.wrap:
                options = replace(options, inner="")
            yield options
        if self.mixed is not None:
            for f in fields(self.mixed):
                if getattr(self.mixed, f.name) != f.default:
                    yield replace(self, mixed=replace(self.mixed, **{f.name: f.default}))


# Drawing


def draw_case(seed: int, world_size: int) -> Case:
    """The case of a seed. At 2 ranks the tree computes really; at 3 and 4 half of them do, in float64 and within a bound."""
    rng = random.Random(f"{seed} at {world_size}")
    real = world_size <= 2 or rng.random() < 0.35
    bits = world_size <= 2 or not real
    options = draw_options(rng, world_size, bits=bits)
    by_size = options.wrap == "size"  # units are other modules than those that are marked
    one_dtype = by_size or rng.random() < 0.7
    dtypes = ("float64",) if not bits else (rng.choice(("float32", "float32", "float64")),) * one_dtype
    grower = Grower(
        rng,
        exact=not real,
        per_param_frozen=options.use_orig_params,
        batch_norms=options.mixed is None or (options.wrap != "hand" and options.mixed.ignores is None),
        dtypes=dtypes or ("float32", "float32", "float64"),
        ignores=rng.random() < 0.25,
        freezes=options.use_orig_params or not by_size,
        # A policy wraps a module of two names under one of them, and torch reads freed memory through the other.
        shares=not by_size and (options.wrap == "hand" or options.mixed is None),
        shares_units=options.wrap == "hand",
    )
    return Case(grower.tree(), options, world_size, bits)


def draw_options(rng: random.Random, world_size: int, *, bits: bool) -> WrapOptions:
    """Random options, most of them as by default."""

    maybe = partial(drawn, rng)
    strategy = rng.choice(("FULL_SHARD", *STRATEGIES))
    wrap = rng.choice(("hand", "hand", "module", "lambda", "custom", "callable", "size"))
    inner = ""
    if wrap == "hand" and strategy not in HYBRIDS:
        inner = maybe(0.2, lambda: rng.choice(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")), "")
    # By size, layers are units below the modules that ask them for the dtype of their weights.
    mixed = maybe(0.4, lambda: draw_mixed(rng), None) if bits and wrap != "size" else None
    use_orig_params = rng.random() < 0.5
    norm_types = (1.0, 2.0, 3.0, float("inf")) if world_size <= 2 or not bits else (1.0, float("inf"))
    return WrapOptions(
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        backward_prefetch=rng.choice(("BACKWARD_PRE", "BACKWARD_POST", None)),
        forward_prefetch=rng.random() < 0.3,
        limit_all_gathers=rng.random() < 0.7,
        mixed=mixed,
        mesh=rng.choice(("mesh", "groups")) if strategy in HYBRIDS else maybe(0.1, "mesh", ""),
        shard_size=rng.choice([n for n in (1, 2, 3, 4) if world_size % n == 0]) if strategy in HYBRIDS else 0,
        wrap=wrap,
        inner=inner,
        mixed_in=rng.choice(("all", "all", "root", "inner")) if mixed and wrap == "hand" else "all",
        ignored=rng.choice(("modules", "states", "params")),
        # AdamW takes no gradients of another dtype than the parameters'.
        optimizer=rng.choice(
            ("sgd", "momentum", *["adamw"] * (bits and not (mixed and mixed.keep_low_precision_grads)))
        ),
        micro=rng.choice(((True,), (True,), (True, True), (False, True), (False, True, True))),
        forwards=maybe(0.1, 2, 1),
        clip=maybe(0.3, lambda: (rng.choice((0.01, 0.5, 100.0)), rng.choice(norm_types)), None),
        evals=rng.random() < 0.3,
        edits=maybe(0.3, lambda: rng.choice(("summon", "load")), ""),
        sees_grads=use_orig_params and rng.random() < 0.3,  # torch has it with original parameters alone
        zero=rng.choice(("none", "none", "zeros", "model")),
        watches=rng.random() < 0.5,
    )


def draw_mixed(rng: random.Random) -> Mixed:
    """A random policy of mixed precision."""
    some = (None, None, *LOW, "float32")
    return Mixed(
        param_dtype=rng.choice((None, *LOW, *LOW, "float32")),
        reduce_dtype=rng.choice(some),
        buffer_dtype=rng.choice(some),
        keep_low_precision_grads=rng.random() < 0.3,
        cast_forward_inputs=rng.random() < 0.4,
        cast_root_forward_inputs=rng.random() < 0.7,
        ignores=rng.choice((None, None, (), ("Square",), ("Vector", "BatchNorm1d"))),
    )


# Wrapping


@cache
def _device_mesh(shape: tuple[int, ...]) -> Any:
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@cache
def _groups(replicate: int, shard: int) -> tuple[Any, Any]:
    """The shard group and the replicate group of this rank."""
    grid = torch.arange(replicate * shard).view(replicate, shard)
    mine: list[Any] = []
    for rows in (grid, grid.T):
        groups = [(row, dist.new_group(row)) for row in rows.tolist()]
        mine.append(next(group for row, group in groups if dist.get_rank() in row))
    return mine[0], mine[1]


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, Unit)


def _policy(options: WrapOptions, wrap_module: ModuleType) -> Any:
    match options.wrap:
        case "module":
            return wrap_module.ModuleWrapPolicy({Unit})
        case "custom":
            return wrap_module.CustomPolicy(_is_unit)
        case "lambda":
            return partial(wrap_module.lambda_auto_wrap_policy, lambda_fn=_is_unit)
        case "callable":
            return lambda module, recurse, nonwrapped_numel: True if recurse else _is_unit(module)
        case "size":
            return partial(wrap_module.size_based_auto_wrap_policy, min_num_params=30)
    return None


def _mixed(mixed: Mixed, api: ModuleType) -> Any:
    values = {f.name: getattr(mixed, f.name) for f in fields(mixed) if f.name != "ignores"}
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        values[name] = dtype_named(values[name])
    if mixed.ignores is not None:
        values["_module_classes_to_ignore"] = tuple(
            getattr(random_trees, n, getattr(nn, n, None)) for n in mixed.ignores
        )
    return api.MixedPrecision(**values)


def wrap(root: nn.Module, options: WrapOptions, api: ModuleType) -> nn.Module:
    """The tree's module as a model of `api`: torch.distributed.fsdp or torch_backend."""
    world_size = dist.get_world_size()

    def arguments(module: nn.Module, *, is_root: bool) -> dict[str, Any]:
        strategy = options.sharding_strategy if is_root or not options.inner else options.inner
        given: dict[str, Any] = {"device_id": torch.device("cpu")}
        given["sharding_strategy"] = api.ShardingStrategy[strategy]
        given["use_orig_params"] = options.use_orig_params
        prefetch = options.backward_prefetch
        given["backward_prefetch"] = None if prefetch is None else api.BackwardPrefetch[prefetch]
        for name in ("forward_prefetch", "limit_all_gathers"):
            if getattr(options, name) != getattr(WrapOptions, name):
                given[name] = getattr(options, name)
        if options.mixed is not None and options.mixed_in in ("all", "root" if is_root else "inner"):
            given["mixed_precision"] = _mixed(options.mixed, api)
        replicate = world_size // options.shard_size if options.shard_size else 1
        if options.mesh == "mesh":
            shape = (replicate, options.shard_size) if options.shard_size else (world_size,)
            given["device_mesh"] = _device_mesh(shape)
        elif options.mesh == "groups":
            given["process_group"] = _groups(replicate, options.shard_size)
        left = [m for m in module.modules() if isinstance(m, Part) and m.node.ignored]
        if left and options.ignored == "modules":
            given["ignored_modules"] = left
        elif left:
            params = [p for m in left for p in m.parameters()]
            given["ignored_states"] = left if options.ignored == "states" else params
        return given

    if options.wrap != "hand":
        policy = _policy(options, import_module(f"{api.__name__}.wrap"))
        return api.FullyShardedDataParallel(root, auto_wrap_policy=policy, **arguments(root, is_root=True))
    wrapped: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        for name, child in list(module._modules.items()):
            assert child is not None
            if child not in wrapped:
                visit(child)
                wrapped[child] = child
                if _is_unit(child):
                    wrapped[child] = api.FullyShardedDataParallel(child, **arguments(child, is_root=False))
            module._modules[name] = wrapped[child]

    visit(root)
    return api.FullyShardedDataParallel(root, **arguments(root, is_root=True))


# Training


class WrappedRun(Run):
    """A run of FSDP1."""

    def wrap(self, root: nn.Module) -> Any:
        """By the options."""
        return wrap(root, self.case.options, self.api)

    def microbatch(self, number: int) -> AbstractContextManager:
        """Under no_sync unless it is reduced."""
        return nullcontext() if self.case.options.micro[number] else self.model.no_sync()

    def clip(self, max_norm: float, norm_type: float) -> Any:
        """By the model's own method."""
        return self.model.clip_grad_norm_(max_norm, norm_type)

    def sees_inside(self) -> bool:
        """By size, a layer may be a unit, and the module around it sees it from outside."""
        return self.case.options.wrap != "size"

    def after_backward(self) -> None:
        """Full gradients."""
        if self.case.options.sees_grads:
            self.note_full(with_grads=True)

    def edit(self) -> None:
        """Change full parameters, on each rank in another way."""
        summon = self.api.FullyShardedDataParallel.summon_full_params
        with summon(self.model), torch.no_grad():
            if self.case.options.edits == "load":
                state = {name: value * 0.5 for name, value in self.model.state_dict().items()}
                self.model.load_state_dict(state)
            else:
                for param in self.model.parameters():
                    param.mul_(0.5).add_(self.rank * 0.25)

    def note_full(self, *, with_grads: bool = False) -> None:
        """Full parameters, and with `with_grads` their gradients."""
        summon = self.api.FullyShardedDataParallel.summon_full_params
        with summon(self.model, writeback=False, **({"with_grads": True} if with_grads else {})):
            for name, param in self.params():
                self.note("full", param, name)
                if with_grads:
                    self.note("full grad", param.grad, name)
