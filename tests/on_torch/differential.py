"""Random training runs by `torch.distributed.fsdp` and by `torch_backend`, side by side in the same ranks.

A case is data: a tree, options under torch's names, a world size. Both train it for a few steps, and their histories must be
equal bit for bit at 2 ranks, and at 3 and 4 where the tree is exact (R32). `python -m tests.on_torch.differential --cases 500
--seed 1` runs many of them; a case that fails is made smaller and printed as an expression.
"""

import argparse
import io
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.on_torch.ranks import Ranks, started_ranks
from tests.on_torch.trees import NUM_TOKENS, ROWS, Grower, Node, Part, Tree, Unit, build_tree, smaller_trees, written

STEPS = 3
SECONDS = 60
SECONDS_SMALL = 12  # for a smaller case of one that fails; that may hang
TOO_LARGE = 2.0**20
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
class Options:
    """How a tree is wrapped and trained. The first fields are arguments of torch's.

    Attributes:
        mesh: how ranks are given to units: "" for the default group, "mesh", or "groups" (hybrids alone).
        shard_size: ranks in a shard group, for hybrids.
        wrap: by hand, or by a policy: "hand", "module", "lambda", "custom", "callable", "size".
        inner: the strategy of all units but the root, where it is another one; by hand alone.
        mixed_in: the units that have `mixed`: "all", and by hand also "root" or "inner".
        ignored: how modules to ignore are given: "modules", "states" or "params".
        optimizer: "sgd", "momentum" or "adamw".
        micro: of each microbatch of a step, whether it is reduced (False: under no_sync).
        forwards: forwards before each backward.
        clip: (max_norm, norm_type), or None.
        evals: a forward without gradients between steps.
        edits: full parameters are changed between steps: "" or "summon", "load" to load a state dict while they are summoned.
        sees_grads: full gradients are looked at before each step.
        zero: how gradients are cleared: "none", "zeros" or "model".
        watches: full parameters are looked at after each step, not just at the end.
    """

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
    optimizer: str = "sgd"
    micro: tuple[bool, ...] = (True,)
    forwards: int = 1
    clip: tuple[float, float] | None = None
    evals: bool = False
    edits: str = ""
    sees_grads: bool = False
    zero: str = "none"
    watches: bool = False
    steps: int = STEPS

    def __repr__(self) -> str:
        """As an expression that makes it."""
        return written(self)


@dataclass(frozen=True, repr=False)
class Case:
    """One run. `bits`: whether histories are equal bit for bit, or within a bound."""

    tree: Tree
    options: Options = Options()
    world_size: int = 2
    bits: bool = True

    def __repr__(self) -> str:
        """As an expression that makes it."""
        return written(self)

    @property
    def nodes(self) -> list[Node]:
        """All nodes of the tree."""
        return list(self.tree.root.walk())


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
        shares=not by_size,
        shares_units=options.wrap == "hand",
    )
    return Case(grower.tree(), options, world_size, bits)


def draw_options(rng: random.Random, world_size: int, *, bits: bool) -> Options:
    """Random options, most of them as by default."""

    def maybe(probability: float, value: Any, default: Any) -> Any:
        drawn = rng.random() < probability
        return value() if drawn and callable(value) else value if drawn else default

    strategy = rng.choice(("FULL_SHARD", *STRATEGIES))
    wrap = rng.choice(("hand", "hand", "module", "lambda", "custom", "callable", "size"))
    inner = ""
    if wrap == "hand" and strategy not in HYBRIDS:
        inner = maybe(0.2, lambda: rng.choice(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")), "")
    # By size, layers are units below the modules that ask them for the dtype of their weights.
    mixed = maybe(0.4, lambda: draw_mixed(rng), None) if bits and wrap != "size" else None
    use_orig_params = rng.random() < 0.5
    norm_types = (1.0, 2.0, 3.0, float("inf")) if world_size <= 2 or not bits else (1.0, float("inf"))
    return Options(
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


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


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


def _policy(options: Options, wrap_module: ModuleType) -> Any:
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


def _mixed(mixed: Mixed, face: ModuleType) -> Any:
    from tests.on_torch import trees

    values = {f.name: getattr(mixed, f.name) for f in fields(mixed) if f.name != "ignores"}
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        values[name] = _dtype(values[name])
    if mixed.ignores is not None:
        values["_module_classes_to_ignore"] = tuple(getattr(trees, n, getattr(nn, n, None)) for n in mixed.ignores)
    return face.MixedPrecision(**values)


def wrap(root: nn.Module, options: Options, face: ModuleType) -> nn.Module:
    """The tree's module as a model of `face`: torch.distributed.fsdp or torch_backend."""
    world_size = dist.get_world_size()

    def arguments(module: nn.Module, *, is_root: bool) -> dict[str, Any]:
        strategy = options.sharding_strategy if is_root or not options.inner else options.inner
        given: dict[str, Any] = {"device_id": torch.device("cpu")}
        given["sharding_strategy"] = face.ShardingStrategy[strategy]
        given["use_orig_params"] = options.use_orig_params
        prefetch = options.backward_prefetch
        given["backward_prefetch"] = None if prefetch is None else face.BackwardPrefetch[prefetch]
        for name in ("forward_prefetch", "limit_all_gathers"):
            if getattr(options, name) != getattr(Options, name):
                given[name] = getattr(options, name)
        if options.mixed is not None and options.mixed_in in ("all", "root" if is_root else "inner"):
            given["mixed_precision"] = _mixed(options.mixed, face)
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
        policy = _policy(options, import_module(f"{face.__name__}.wrap"))
        return face.FullyShardedDataParallel(root, auto_wrap_policy=policy, **arguments(root, is_root=True))
    wrapped: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        for name, child in list(module._modules.items()):
            assert child is not None
            if child not in wrapped:
                visit(child)
                wrapped[child] = child
                if _is_unit(child):
                    wrapped[child] = face.FullyShardedDataParallel(child, **arguments(child, is_root=False))
            module._modules[name] = wrapped[child]

    visit(root)
    return face.FullyShardedDataParallel(root, **arguments(root, is_root=True))


# Training

History = list[tuple[str, Any]]


def batch(case: Case, rank: int, turn: int) -> tuple[Tensor, dict[str, Any], Tensor]:
    """The stream, the plain inputs and the weights of the loss, of one rank at one forward."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    shape = (ROWS if not case.tree.exact else 2, case.tree.width)
    dtype = _dtype(case.tree.root.dtype)
    if case.tree.exact:
        plain = torch.randint(0, 2, shape, generator=generator).to(dtype)
        weights = 12.0 * torch.randint(1, 3, shape, generator=generator)
    else:
        plain = torch.randn(shape, generator=generator, dtype=dtype)
        weights = torch.randn(shape, generator=generator)
    tokens = torch.randint(0, NUM_TOKENS, shape[:1], generator=generator)
    # Where something is frozen or unused there might be nothing else to differentiate, and so no backward.
    alone = any(node.frozen or not node.uses for node in case.nodes)
    stream = plain.clone().requires_grad_(turn % 2 == 0 or alone or not case.tree.exact)
    return stream, {"plain": plain, "tokens": tokens, "more": [plain]}, weights.double()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an output, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "stream"):
        yield value.stream


def loss_of(case: Case, output: Any, weights: Tensor) -> Tensor:
    """Linear in the output where the tree is exact; otherwise with a square."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors_in(output):
        total = total + (tensor.double() * weights).sum()
        if not case.tree.exact:
            total = total + tensor.double().square().mean()
    return total


class Run:
    """One training run and its history: what happened, in order, each with a label of which the first word is the operation."""

    def __init__(self, case: Case, face: ModuleType, rank: int) -> None:
        self.case, self.face, self.rank = case, face, rank
        self.history: History = []
        self.turn = 0
        self.step = 0

    def note(self, operation: str, value: Any, where: str = "") -> None:
        """Append to the history."""
        value = value.detach().clone() if isinstance(value, Tensor) else value
        self.history.append((f"{operation} (step {self.step}{where and ', '}{where})", value))

    def go(self) -> History:
        """Train. An exception ends the history."""
        try:
            self.train()
        except Exception as error:
            self.note("raises", error)
        return self.history

    def train(self) -> None:
        """Wrap, then step by step."""
        options = self.case.options
        torch.manual_seed(0)
        root, seen = build_tree(self.case.tree)
        self.model: Any = wrap(root, options, self.face)
        self.note("names", [name for name, _ in self.model.named_parameters()])
        optimizer = self.optimizer()
        for self.step in range(options.steps):
            for number, reduced in enumerate(options.micro):
                with nullcontext() if reduced else self.model.no_sync():
                    self.forward_backward(f"microbatch {number}")
            if options.wrap != "size":  # by size, a layer may be a unit, and the module around it sees it from outside
                self.note("seen", list(seen))
            seen.clear()
            self.note_grads("grad")
            if options.sees_grads:
                self.note_full(with_grads=True)
            if options.clip is not None:
                norm = self.model.clip_grad_norm_(*options.clip)
                self.note("norm", norm)
                self.note_grads("clipped")
            optimizer.step()
            for name, param in self.params():
                self.note("param", param, name)
            self.zero(optimizer)
            if options.edits and self.step == 0:
                self.edit()
            if options.evals:
                self.evaluate()
            if options.watches or self.step == options.steps - 1:
                self.note_full()
            for name, buffer in self.model.named_buffers():
                self.note("buffer", buffer, name)

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the options; a learning rate that is a power of two."""
        params = list(self.model.parameters())
        match self.case.options.optimizer:
            case "adamw":
                return torch.optim.AdamW(params, lr=2.0**-6)
            case "momentum":
                return torch.optim.SGD(params, lr=2.0**-7, momentum=0.5)
        return torch.optim.SGD(params, lr=2.0**-6)

    def params(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters by name; torch registers some anew, so that their order changes."""
        return sorted(self.model.named_parameters(), key=lambda named: named[0])

    def batch(self) -> tuple[Tensor, dict[str, Any], Tensor]:
        """The next one."""
        self.turn += 1
        return batch(self.case, self.rank, self.turn)

    def forward_backward(self, where: str) -> None:
        """One microbatch, and what it did to the inputs."""
        streams, total = [], torch.zeros((), dtype=torch.float64)
        for _ in range(self.case.options.forwards):
            stream, given, weights = self.batch()
            output = self.model(stream, given=given)
            for tensor in tensors_in(output):
                self.note("output", tensor, where)
            total = total + loss_of(self.case, output, weights)
            streams.append(stream)
        self.note("loss", total, where)
        if total.requires_grad:
            total.backward()
        for stream in streams:
            self.note("input's grad", stream.grad, where)

    def note_grads(self, operation: str) -> None:
        """The sharded gradients."""
        for name, param in self.params():
            self.note(operation, param.grad, name)

    def zero(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear the gradients."""
        match self.case.options.zero:
            case "model":
                self.model.zero_grad()
            case zero:
                optimizer.zero_grad(set_to_none=zero == "none")

    def edit(self) -> None:
        """Change full parameters, on each rank in another way."""
        summon = self.face.FullyShardedDataParallel.summon_full_params
        with summon(self.model), torch.no_grad():
            if self.case.options.edits == "load":
                state = {name: value * 0.5 for name, value in self.model.state_dict().items()}
                self.model.load_state_dict(state)
            else:
                for param in self.model.parameters():
                    param.mul_(0.5).add_(self.rank * 0.25)

    def evaluate(self) -> None:
        """A forward without gradients."""
        self.model.eval()
        with torch.no_grad():
            stream, given, _ = self.batch()
            for tensor in tensors_in(self.model(stream, given=given)):
                self.note("evaluated", tensor)
        self.model.train()

    def note_full(self, *, with_grads: bool = False) -> None:
        """Full parameters, and with `with_grads` their gradients."""
        summon = self.face.FullyShardedDataParallel.summon_full_params
        with summon(self.model, writeback=False, **({"with_grads": True} if with_grads else {})):
            for name, param in self.params():
                self.note("full", param, name)
                if with_grads:
                    self.note("full grad", param.grad, name)


# Comparing


def same(a: Any, b: Any, case: Case) -> bool:
    """Whether two entries of histories agree."""
    if isinstance(a, Exception) and isinstance(b, Exception):
        return True
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and a == b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if case.bits or not a.is_floating_point():
        numbers = ~(a.isnan() & b.isnan()) if a.is_floating_point() else torch.ones_like(a, dtype=torch.bool)
        return torch.equal(a[numbers], b[numbers]) and torch.equal(_signs(a[numbers]), _signs(b[numbers]))
    return bool((a - b).norm() <= bound(case) * (1 + a.norm()))


def _signs(a: Tensor) -> Tensor:
    return torch.signbit(a) if a.is_floating_point() else a


def bound(case: Case) -> float:
    """What float64 histories may differ by where sums of 3 and 4 are in other orders, relative to the size of things, or 1.

    A sum of N terms and a division have a relative error of at most N u in any order; two orders differ by 2 N u of the sizes
    of the terms, of which no model here has more than 2 ** 7. Momentum of 0.5 adds up at most 2 such errors, and a step
    passes a perturbation of the parameters on with a factor of at most 1 + lr * curvature, taken as 2 ** 4 for steps of
    2 ** -6 (norms over few and close numbers bend most).
    """
    return 2 * case.world_size * 2**7 * 2 * 2.0 ** (4 * case.options.steps) * 2.0**-53


def difference(theirs: History, ours: History, case: Case) -> str:
    """The first difference of two histories, or nothing."""
    for (label, a), (other, b) in zip(theirs, ours, strict=False):
        if label != other:
            return f"torch: {label}: {_shown(a)}\nours: {other}: {_shown(b)}"
        if not case.bits and isinstance(a, Tensor) and not a.double().norm() < TOO_LARGE:
            return ""  # training has blown up, and the bound with it
        if not same(a, b, case):
            return f"{label}:\ntorch: {_shown(a)}\nours:  {_shown(b)}"
    if len(theirs) != len(ours):
        return f"torch's history has {len(theirs)} entries, ours {len(ours)}"
    return ""


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.tolist()}"
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {' '.join(str(value).split())[:400]}"
    return str(value)


def run(case: Case, face: ModuleType, rank: int) -> History:
    """The history of a case by one of the two, without what torch prints before it raises."""
    nowhere = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(nowhere), redirect_stderr(nowhere):
        warnings.simplefilter("ignore")
        return Run(case, face, rank).go()


def compare(rank: int, world_size: int, case: Case) -> tuple[str, str]:
    """On a rank: the first difference, and what torch raised, if it did."""
    import torch_backend

    theirs = run(case, import_module("torch.distributed.fsdp"), rank)
    ours = run(case, torch_backend, rank)
    raised = theirs[-1][1] if theirs and isinstance(theirs[-1][1], Exception) else None
    return difference(theirs, ours, case), _shown(raised) if raised is not None else ""


def failure_of(ranks: Ranks, case: Case, seconds: float = SECONDS) -> tuple[str, str]:
    """What is different in a case, and what torch raised; both empty for a case that passes."""
    try:
        results = ranks.run(case.world_size, compare, case, seconds=seconds)
    except (TimeoutError, EOFError, AssertionError, ConnectionError) as error:
        return f"{type(error).__name__}: {error}", ""
    found = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(results) if text]
    return "\n".join(found[:1]), next((raised for _, raised in results if raised), "")


# Making a failing case smaller


def smaller_cases(case: Case) -> Iterator[Case]:
    """Cases that are simpler by one thing each."""
    options = case.options
    if options.steps > 1:
        yield replace(case, options=replace(options, steps=options.steps - 1))
    for f in fields(options):
        if f.name not in ("steps", "shard_size", "mesh") and getattr(options, f.name) != f.default:
            kept = {"mixed_in": "all"} if f.name == "mixed" else {"inner": ""} if f.name == "wrap" else {}
            if f.name == "sharding_strategy":
                kept = {"mesh": "", "shard_size": 0}
            yield replace(case, options=replace(options, **{f.name: f.default, **kept}))
    if options.mixed is not None:
        for f in fields(options.mixed):
            if getattr(options.mixed, f.name) != f.default:
                yield replace(case, options=replace(options, mixed=replace(options.mixed, **{f.name: f.default})))
    for tree in smaller_trees(case.tree):
        yield replace(case, tree=tree)


def shrink(case: Case, fails: Callable[[Case], bool], limit: int) -> Case:
    """The smallest case that `fails`, as far as `limit` attempts get."""
    while True:
        for smaller in smaller_cases(case):
            limit -= 1
            if limit < 0:
                return case
            if fails(smaller):
                case = smaller
                break
        else:
            return case


def check(ranks: Ranks, case: Case, *, named: str, limit: int = 100) -> str:
    """Run a case. Returns what torch raised, if both did; fails with the smallest case that `limit` attempts find."""
    from tests.on_torch.exceptions import around_departures

    def fails(other: Case) -> bool:
        return around_departures(other) == other and bool(failure_of(ranks, other, SECONDS_SMALL)[0])

    text, raised = failure_of(ranks, case)
    if text:
        small = shrink(case, fails, limit)
        raise AssertionError(f"{named}: {text}\n{case!r}\nsmallest:\n{small!r}\n{failure_of(ranks, small)[0]}")
    return raised


def main() -> int:
    """Run cases of many seeds; print and count those that differ."""
    from tests.on_torch.exceptions import around_departures

    parser = argparse.ArgumentParser(prog="python -m tests.on_torch.differential", description=__doc__)
    parser.add_argument("--cases", type=int, default=100, help="how many cases")
    parser.add_argument("--seed", type=int, default=1, help="the first seed is 1000 times this")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], help="world sizes, taken in turn")
    parser.add_argument("--shrinks", type=int, default=100, help="attempts to make a failing case smaller")
    given = parser.parse_args()
    failed: list[str] = []
    raised: Counter[str] = Counter()
    start = time.monotonic()
    with started_ranks() as ranks:
        for number in range(given.cases):
            world_size = given.ranks[number % len(given.ranks)]
            named = f"seed {1000 * given.seed + number}, {world_size} ranks"
            case = around_departures(draw_case(1000 * given.seed + number, world_size))
            try:
                text = check(ranks, case, named=named, limit=given.shrinks)
                raised[text[:100]] += 1
            except AssertionError as error:
                failed.append(named)
                print(f"{error}\n", flush=True)
    seconds = time.monotonic() - start
    print(f"{given.cases} cases in {seconds:.0f} s: {len(failed)} differ {failed}")
    for text, count in raised.most_common():
        print(f"{count:6} {'ran through' if not text else 'raised on both sides: ' + text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
