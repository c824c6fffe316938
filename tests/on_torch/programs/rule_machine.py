"""A rule machine that drives `torch_backend` on real ranks and the numpy reference side by side (R12, R15, R17-R25, R29, R30).

Each operation that a user may do to a sharded model, lawful or not, is done to both, and everything that a user or an optimizer
could see is then compared on every rank, bit for bit: what modules show, gradients and the lack of one, memory, what forward and
backward computed with, and the kind of a refusal. The machine runs here, the ranks are processes that are sent one operation
at a time.

The model is made so that both sides can compute it exactly: what a gradient is does not depend on the parameters (those are
looked at instead, wherever a unit computes), it is made of small integers, and the optimizer's factors are powers of two.

`python -m tests.on_torch.programs.rule_machine --examples 500 --seed 1` runs many long programs; one that fails is made smaller
and printed.
"""

import argparse
import importlib
import inspect
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import torch
from hypothesis import HealthCheck, assume, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from crossframe.errors import CrossframeError
from crossframe.layout import FlatLayout
from crossframe.lifecycle import Exposure, Freshness, Move, Residency, UnitState
from crossframe.params import ParamSpec
from crossframe.plan import plan_units
from crossframe.precision import PrecisionPolicy
from crossframe.reference import SGD, World
from crossframe.reference.live_unit import LiveUnit
from crossframe.strategy import Strategy
from crossframe.unshard import AuthoritativeStorage, UnshardRequest
from tests.on_torch.helpers.random_trees import written
from tests.ranks import Ranks, started_ranks

SECONDS = 20
LR = 0.5
FLAGS = ("writeback", "rank0_only", "offload_to_cpu", "with_grads")

# Where the engine is not as the reference, each with its rule; the expectation is bent where `_bends` is called with the
# key, and `test_rule_machine.py` asserts that each of them is met. What is not driven at all is in NOT_DRIVEN.
EXPLAINED = {
    "trains anew": "R12, R14: a forward for training frees what an earlier forward left full, fresh or not: whether to gather "
    "must not hang on what one rank alone can see. The reference sees all ranks.",
    "evaluates stale": "R12: what an evaluation left full, or a backward under no_sync where full parameters are kept (R15), "
    "is used again until an optimizer steps: an edit by hand in between is seen by one rank alone, and so by none. torch too.",
    "gathers ahead": "R16: a backward under no_sync that keeps full parameters keeps those too of a unit that was gathered ahead "
    "and then not reached.",
    "learns late": "R17: of an exception in backward the engine hears nothing; the next forward, summon or clipping resets it. "
    "Until then modules may show full parameters, and an edit of them is lost.",
    "fails when refused": "R17, R18: to the engine a backward that was refused is one that failed: the next forward, summon or "
    "clipping brings all units back to their shards, and drops full gradients that wait.",
    "shows own gradients": "R22: where nothing is sharded the gradients are the parameters' own: shown with or without "
    "with_grads, and None where this rank has none.",
    "replaces the only copy": "R20: without writeback a write into a parameter that is the authoritative storage persists, "
    "but not `.data = ...`, which is no write into it.",
    "asks its shard group": "R22: whether any rank has a gradient is asked of the ranks of the shard group that hold any of the "
    "parameter; the others have none in any case.",
    "one gradient of a unit": "R22: a user may take one parameter's gradient away on one rank; the reference knows a rank's "
    "gradients of a unit as a whole, and would write back into one that is not there.",
}
NOT_DRIVEN = {
    "gradients that a failed step leaves": "R17: the reference drops them; in torch they are the user's, who clears them here.",
    "an optimizer's step or zero_grad inside a summon": "torch's optimizers know nothing of it and cannot refuse.",
    "a backward of a forward before an edit of the shards or a step": "torch itself refuses it by version counters.",
    "units that a forward passes by, under forward_prefetch": "R16: what is gathered for nothing waits for the next forward.",
    "p = 2 that scales, and sums that are not exact": "R32: torch takes roots in between.",
    "an exception, or a wrong shape, on one rank alone": "the other ranks would wait for it in a collective.",
}


class UserError(Exception):
    """What a user's code raises here."""


# The model

# In the order of forward. Every unit has these parameters; "f" may be frozen, and "v" may be left out by some ranks.
UNITS: tuple[str, ...] = ("a", "a.c", "b", "")
CHILDREN: dict[str, tuple[str, ...]] = {"": ("a", "b"), "a": ("a.c",), "a.c": (), "b": ()}
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "": {"w": (4, 3), "v": (3,), "f": (1, 2)},
    "a": {"w": (5, 2), "v": (3,), "f": (2,)},
    "a.c": {"w": (3, 1), "v": (1,), "f": (1, 1)},
    "b": {"w": (11,), "v": (2, 2), "f": (3,)},
}


@dataclass(frozen=True, repr=False)
class Setup:
    """How the model is wrapped and trained.

    Attributes:
        mixed: param_dtype and reduce_dtype by name, None where not given.
        frozen: "params" freezes each unit's "f", "unit" all of unit "b".
        prefetch: backward_prefetch by name.
    """

    world_size: int = 2
    strategy: str = "FULL_SHARD"
    use_orig_params: bool = True
    mixed: tuple[str | None, str | None] = (None, None)
    keep_low_precision_grads: bool = False
    frozen: str = ""
    prefetch: str | None = "BACKWARD_PRE"
    forward_prefetch: bool = False
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __repr__(self) -> str:
        """As an expression that makes it."""
        return written(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # what hypothesis asks for

    def real(self, rank: int) -> "Real":
        """A rank's model."""
        return Real(rank, self)

    def expected(self, straight: str) -> "Expected":
        """The reference's."""
        return Expected(self, straight)

    def trains(self, unit: str, name: str) -> bool:
        """Whether a parameter takes a gradient."""
        return not (self.frozen == "unit" and unit == "b") and not (self.frozen == "params" and name == "f")


@dataclass(frozen=True, repr=False)
class Job:
    """One forward, and what comes of it in its backward.

    Attributes:
        seed: what the gradients are made from.
        skipped: units that the forward passes by.
        twice: units that the forward runs two times.
        detached: units whose output leads to no gradient.
        missing: (rank, unit): the unit's "v" is not used by that rank.
        raises: (phase, unit): the user's code raises there, on all ranks.
        caught: the module around that unit catches it, and goes on.
        summons: (phase, unit, whom): the user asks for the full parameters of `whom` there, and catches the refusal.
    """

    seed: int = 0
    training: bool = True
    skipped: tuple[str, ...] = ()
    twice: tuple[str, ...] = ()
    detached: tuple[str, ...] = ()
    missing: tuple[tuple[int, str], ...] = ()
    raises: tuple[str, str] | None = None
    caught: bool = False
    summons: tuple[str, str, str] | None = None

    def __repr__(self) -> str:
        """As an expression that makes it."""
        return written(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # what hypothesis asks for

    def used(self, rank: int, unit: str) -> list[str]:
        """The parameters that a rank's forward reads."""
        return [name for name in SHAPES[unit] if name != "v" or (rank, unit) not in self.missing]

    def times(self, unit: str) -> range:
        """How often the forward runs a unit."""
        return range(0 if unit in self.skipped else 2 if unit in self.twice else 1)

    def raises_at(self, phase: str, unit: str) -> bool:
        """Whether the user's code raises there."""
        return self.raises == (phase, unit)

    def catches(self, unit: str) -> bool:
        """Whether the module around a unit catches what is raised in the unit's forward."""
        return self.caught and self.raises_at("forward", unit) and unit != ""


def initial(unit: str, name: str) -> np.ndarray:
    """A parameter's value at the start: no dtype below float32 holds it exactly."""
    shape = SHAPES[unit][name]
    return ((np.arange(np.prod(shape)) + 1 + UNITS.index(unit)) / np.float32(3)).astype(np.float32).reshape(shape)


def gradient(unit: str, name: str, rank: int, job_seed: int) -> np.ndarray:
    """What a rank's backward makes of a parameter: integers from -2 to 3."""
    shape = SHAPES[unit][name]
    start = 5 * rank + 7 * job_seed + 2 * UNITS.index(unit) + len(shape)
    return ((np.arange(np.prod(shape)) * 3 + start) % 6 - 2).astype(np.float32).reshape(shape)


def edited(shape: tuple[int, ...], value: int, rank: int) -> np.ndarray:
    """What a user writes: another number everywhere, and on every rank."""
    return (np.arange(np.prod(shape, dtype=int)) + 16 * value + 1000 * (rank + 1)).astype(np.float32).reshape(shape)


def full_name(unit: str, name: str) -> str:
    """A parameter's name."""
    return f"{unit}.{name}" if unit else name


# The real thing, in the rank's process

Seen = dict[tuple[str, ...], Any]


class _Use(torch.autograd.Function):
    """A unit's own computation: it notes the parameters that it is given, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: "Part", job: Job, names: list[str], *params: Tensor) -> Tensor:
        ctx.part, ctx.job, ctx.names = part, job, names
        ctx.save_for_backward(*params)
        part.note("forward", job, names, params)
        return x + 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        part, job, saved = ctx.part, ctx.job, ctx.saved_tensors
        part.note("backward", job, ctx.names, saved)
        rank = part.real.rank
        grads = [
            torch.from_numpy(gradient(part.unit, name, rank, job.seed)).to(param.dtype)
            for name, param in zip(ctx.names, saved, strict=True)
        ]
        return grad, None, None, None, *grads


class Part(nn.Module):
    """The module of one unit."""

    def __init__(self, real: "Real", unit: str, setup: Setup) -> None:
        super().__init__()
        self.real, self.unit = real, unit
        for name in SHAPES[unit]:
            value = torch.from_numpy(initial(unit, name))
            self.register_parameter(name, nn.Parameter(value, requires_grad=setup.trains(unit, name)))
        for child in CHILDREN[unit]:
            self.add_module(child.rpartition(".")[2], real.wrap(Part(real, child, setup)))

    def forward(self, x: Tensor, job: Job) -> Tensor:
        """The root computes itself after what is inside it, the others before."""
        if self.unit:
            x = self._own(x, job)
        for child in CHILDREN[self.unit]:
            for _ in job.times(child):
                x = self._inner(child, x, job)
        return x if self.unit else self._own(x, job)

    def _own(self, x: Tensor, job: Job) -> Tensor:
        names = job.used(self.real.rank, self.unit)
        return _Use.apply(x, self, job, names, *(getattr(self, name) for name in names))  # type: ignore[return-value]

    def _inner(self, child: str, x: Tensor, job: Job) -> Tensor:
        try:
            out = getattr(self, child.rpartition(".")[2])(x, job)
        except UserError:
            if job.catches(child):
                return x
            raise
        return x + (out.detach() - x.detach()) if child in job.detached else out

    def note(self, phase: str, job: Job, names: list[str], params: tuple[Tensor, ...]) -> None:
        """What the user's code does in the middle of the unit's computation."""
        if job.raises_at(phase, self.unit):
            raise UserError
        values = {name: to_numpy(param) for name, param in zip(names, params, strict=True)}
        self.real.seen[phase, self.unit] = values
        if job.summons is not None and job.summons[:2] == (phase, self.unit):
            refused = self.real.refusal_of_summon(job.summons[2])
            self.real.seen["summon", phase, self.unit] = refused


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy with the same bits."""
    tensor = tensor.detach().clone()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


@cache
def _mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


class Real:
    """A rank's model of `torch_backend`, and what its user does to it. Methods are operations; `Expected` has the same."""

    def __init__(self, rank: int, setup: Setup) -> None:
        import torch_backend

        self.api, self.rank, self.setup = torch_backend, rank, setup
        low = [None if name is None else getattr(torch, name) for name in setup.mixed]
        self._options: dict[str, Any] = {
            "sharding_strategy": torch_backend.ShardingStrategy[setup.strategy],
            "use_orig_params": setup.use_orig_params,
            "backward_prefetch": setup.prefetch and torch_backend.BackwardPrefetch[setup.prefetch],
            "forward_prefetch": setup.forward_prefetch,
            "mixed_precision": torch_backend.MixedPrecision(
                *low, keep_low_precision_grads=setup.keep_low_precision_grads
            ),
        }
        if "HYBRID" in setup.strategy:
            self._options["device_mesh"] = _mesh(2, setup.world_size // 2)
        self.parts: dict[str, Part] = {}
        self.wrappers: dict[str, Any] = {}
        self.model = self.wrap(Part(self, "", setup))
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=LR, momentum=setup.momentum, weight_decay=setup.weight_decay
        )
        self.pending: list[Tensor] = []
        self.contexts: list[AbstractContextManager[None]] = []
        self.seen: Seen = {}

    def wrap(self, part: Part) -> Any:
        """The unit of a module."""
        self.parts[part.unit] = part
        self.wrappers[part.unit] = self.api.FullyShardedDataParallel(part, **self._options)
        return self.wrappers[part.unit]

    # Operations

    def forward(self, job: Job) -> None:
        """A forward; for training its graph is kept."""
        try:
            with torch.set_grad_enabled(job.training):
                out = self.model(torch.ones(1), job)
        except UserError:
            self._clear()
            raise
        if job.training:
            self.pending.append(out)
            del self.pending[:-2]

    def backward(self, which: int, syncs: bool) -> None:
        """The backward of one of the forwards."""
        out = self.pending.pop(which)
        try:
            if syncs:
                out.backward()
            else:
                with self.model.no_sync():
                    out.backward()
        except UserError:
            del out
            self._clear()
            raise

    def _clear(self) -> None:
        self.pending.clear()
        self.optimizer.zero_grad()

    def step(self) -> None:
        """The optimizer's step."""
        self.pending.clear()
        self.optimizer.step()

    def zero_grad(self, how: str) -> None:
        """Of the model, of the optimizer, or with zeros instead of None."""
        if how == "model":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=how == "optimizer")

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Returns the norm."""
        return float(self.model.clip_grad_norm_(max_norm, norm_type))

    def convert(self) -> None:
        """The module is moved to where it is."""
        self.pending.clear()
        self.model.to("cpu")

    def summon(self, unit: str, recurse: bool, flags: tuple[bool, ...]) -> None:
        """Full parameters for the user, until `leave`."""
        options = dict(zip(FLAGS, flags, strict=True))
        context = self.api.FullyShardedDataParallel.summon_full_params(self.wrappers[unit], recurse, **options)
        context.__enter__()
        self.contexts.append(context)

    def leave(self, failed: bool) -> None:
        """The end of the last summon, by an exception or not."""
        error = UserError() if failed else None
        self.contexts.pop().__exit__(type(error) if error else None, error, None)

    def refusal_of_summon(self, unit: str) -> str:
        """What a summon of a unit, and of those inside it, is refused with."""
        try:
            with self.api.FullyShardedDataParallel.summon_full_params(self.wrappers[unit]):
                return "was not refused"
        except CrossframeError as error:
            return type(error).__name__

    def edit(self, unit: str, name: str, value: int, by: int | None, how: str) -> None:
        """The user writes into what the module shows of a parameter: in place, by other data, or by another object."""
        if self._unit(unit).state.exposure is not Exposure.SUMMONED:
            self.pending.clear()
        if by is not None and by != self.rank:
            return
        param, shown = self.param(unit, name), self.shown(unit).get(name)
        if shown is None:
            return
        values = torch.from_numpy(edited(shown.shape, value, self.rank))
        if self._flat(unit):
            flat = self.parts[unit]._parameters["_flat_param"]
            assert flat is not None
            if how != "fill":
                flat.data = flat.data.clone()
            self._pieces(unit, flat.data)[name].copy_(values)
        elif how == "fill":
            with torch.no_grad():
                param.view(shown.shape).copy_(values)
        elif how == "data":
            param.data = values.view(param.shape)
        else:
            self.parts[unit]._parameters[name] = nn.Parameter(
                values.view(param.shape), requires_grad=param.requires_grad
            )

    def assign(self, unit: str, name: str, value: int, by: int | None) -> None:
        """Replaces a sharded parameter by another object, whose values the next gather takes."""
        self.edit(unit, name, value, by, "object")
        self.summon(unit, False, (False, False, False, False))
        self.leave(False)

    def edit_grad(self, unit: str, name: str, value: int, by: int | None, how: str) -> None:
        """The user writes into a gradient that a summon shows, or takes it away."""
        if (by is None or by == self.rank) and self.summoned(unit):
            grad = self.param(unit, name).grad
            if how == "none":
                self.param(unit, name).grad = None
            elif grad is not None:
                grad.copy_(torch.from_numpy(edited(tuple(grad.shape), value, self.rank)))

    def forget_grad(self, unit: str, name: str, by: int) -> None:
        """A rank's user takes a gradient away; that of the flat parameter is of all of them."""
        if by == self.rank:
            flat = self.parts[unit]._parameters["_flat_param"] if self._flat(unit) else None
            (self.param(unit, name) if flat is None else flat).grad = None

    def misfit(self, unit: str, name: str) -> None:
        """A sharded parameter's data is replaced by data of another shape, on all ranks, and put back once that is refused."""
        flat = self.parts[unit]._parameters["_flat_param"] if self._flat(unit) else None
        param = self.param(unit, name) if flat is None else flat
        before = param.data
        param.data = torch.zeros(param.numel() + 1)
        try:
            self.summon(unit, False, (True, False, False, False))
        finally:
            param.data = before

    # What there is to see

    def param(self, unit: str, name: str) -> Any:
        """What the unit's module has under a name."""
        return getattr(self.parts[unit], name)

    def summoned(self, unit: str) -> bool:
        """Whether this rank's user is shown the unit's full parameters."""
        state = self._unit(unit).state
        return state.exposure is Exposure.SUMMONED and state.residency is Residency.FULL

    def _unit(self, unit: str) -> Any:
        from torch_backend.engine._unit import unit_of

        return unit_of(self.wrappers[unit])

    def _flat(self, unit: str) -> bool:
        return not self.setup.use_orig_params and not self.summoned(unit)

    def _pieces(self, unit: str, shard: Tensor) -> dict[str, Tensor]:
        store = self._unit(unit).buckets[0].store
        return {name: piece for name, piece in zip(SHAPES[unit], store.split(shard), strict=True) if piece.numel()}

    def shown(self, unit: str) -> dict[str, np.ndarray]:
        """What the module shows: full parameters, or flat pieces of those that this rank holds anything of."""
        part = self.parts[unit]
        if self._flat(unit):
            for name, shape in SHAPES[unit].items():
                absent = self.param(unit, name)
                assert absent.shape == shape and bool(absent.isnan().all()), (unit, name)
            flat = part._parameters["_flat_param"]
            assert flat is not None and not set(SHAPES[unit]) & set(part._parameters)
            return {name: to_numpy(piece) for name, piece in self._pieces(unit, flat).items()}
        assert all(self.param(unit, name) is part._parameters[name] for name in SHAPES[unit]), unit
        if self.summoned(unit):
            return {name: to_numpy(self.param(unit, name)) for name in SHAPES[unit]}
        return {name: to_numpy(p).reshape(-1) for name in SHAPES[unit] if (p := self.param(unit, name)).numel()}

    def grads(self, unit: str) -> dict[str, np.ndarray | None]:
        """The gradients of the parameters that `shown` returns."""
        if self._flat(unit):
            flat = self.parts[unit]._parameters["_flat_param"]
            assert flat is not None
            if flat.grad is None:
                return dict.fromkeys(self._pieces(unit, flat))
            return {name: to_numpy(piece) for name, piece in self._pieces(unit, flat.grad).items()}
        found: dict[str, np.ndarray | None] = {}
        for name, shown in self.shown(unit).items():
            grad = self.param(unit, name).grad
            found[name] = None if grad is None else to_numpy(grad).reshape(shown.shape)
        return found

    def memory(self, unit: str) -> tuple[bool, ...]:
        """Whether full parameters, and full gradients that wait, are in memory."""
        real = self._unit(unit)
        bucket = real.buckets[0]
        held = [buffer for buffer in (bucket.buffer, bucket._shown) if buffer is not None and not buffer.is_shard]
        return any(buffer.full.untyped_storage().nbytes() for buffer in held), real.has_grads

    def look(self) -> list[dict[str, Any]]:
        """All that there is to see on a rank, unit by unit."""
        found = []
        for unit in UNITS:
            state = self._unit(unit).state
            if state.exposure is Exposure.FULL:  # after a backward that failed
                found.append({"state": (state.residency.name, state.exposure.name, state.activity.name)})
                continue
            found.append(
                {
                    "state": (state.residency.name, state.exposure.name, state.activity.name),
                    "memory": self.memory(unit),
                    "shown": self.shown(unit),
                    "grads": self.grads(unit),
                }
            )
        return found


_here: dict[str, Real] = {}


def build_real(rank: int, world_size: int, setup: Setup) -> list[dict[str, Any]]:
    """Build a rank's model."""
    _here.clear()
    _here["real"] = setup.real(rank)
    return _here["real"].look()


def do_real(rank: int, world_size: int, name: str, arguments: dict[str, Any]) -> tuple[Any, Any, Seen, Any]:
    """Do one operation on a rank; returns the refusal, what it returns, what it noted, and all there is to see."""
    real, refusal, result = _here["real"], [], None
    real.seen = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = getattr(real, name)(**arguments)
        except (CrossframeError, UserError) as error:
            refusal = [kind.__name__ for kind in type(error).__mro__]
    return refusal, result, real.seen, real.look()


def end_real(rank: int, world_size: int) -> None:
    """Leave what is open, and forget the model. After a failure the rank may be a new process, which has none."""
    real = _here.pop("real", None)
    if real is not None:
        real.pending.clear()
        while real.contexts:
            real.contexts.pop().__exit__(None, None, None)


# The reference, on all ranks at once


class Expected:
    """The reference's world, and what a user does to it; bent where EXPLAINED says so.

    Attributes:
        seen: by rank, what the last operation noted.
        unsettled: whether the engine has yet to hear of a backward that failed.
        ahead: units that the last backward may have gathered ahead.
        explained: how often each exception was made use of.
    """

    exceptions = EXPLAINED

    def __init__(self, setup: Any, straight: str = "") -> None:
        """
        Args:
            straight: a key of `exceptions` in which the reference is taken at its word.
        """
        self.setup, self.straight = setup, straight
        self.optimizer = SGD(LR, setup.momentum, setup.weight_decay)
        self.world = self._build()
        self.mesh = self.world.mesh
        self.ranks = range(setup.world_size)
        self.pending: list[Job] = []
        self.contexts: list[tuple[AbstractContextManager[None], list[str], UnshardRequest]] = []
        self.seen: list[Seen] = [{} for _ in self.ranks]
        self.unsettled = False
        self.ahead: set[str] = set()
        self._refused = False
        self.taken: set[tuple[int, str]] = set()
        self.replaced: dict[tuple[int, str], np.ndarray] = {}
        self.explained: Counter[str] = Counter()
        self.steps = 0
        self._seen_steps = dict.fromkeys(UNITS, 0)
        self._kept = dict.fromkeys(UNITS, False)
        for unit in self.world.units.values():
            self._watch(unit)

    def _build(self) -> World:
        setup = self.setup
        strategy = Strategy[setup.strategy.removeprefix("_")]
        mesh = strategy.mesh(setup.world_size, setup.world_size // 2 if strategy.is_hybrid else None)
        policy = PrecisionPolicy(*setup.mixed, keep_low_precision_grads=setup.keep_low_precision_grads)
        layouts = []
        for unit in UNITS:
            specs = tuple(
                ParamSpec(full_name(unit, name), shape, requires_grad=setup.trains(unit, name))
                for name, shape in SHAPES[unit].items()
            )
            keeps = setup.use_orig_params
            layouts.append((unit, FlatLayout(specs, mesh.shard, keep_original=keeps, compute_dtype=policy.param_dtype)))
        params = {full_name(unit, name): initial(unit, name) for unit in UNITS for name in SHAPES[unit]}
        return World(plan_units(layouts, strategy, policy=policy), mesh, params, optimizer=self.optimizer)

    def _watch(self, unit: LiveUnit) -> None:
        step = unit.steps[0]
        take = step.move

        def move(move: Move) -> None:
            take(move)
            if move is Move.GATHER:
                self._seen_steps[unit.name], self._kept[unit.name] = self.steps, False

        step.move = move  # type: ignore[method-assign]

    def _bends(self, key: str) -> bool:
        """Whether to depart from the reference here, as EXPLAINED says."""
        assert key in self.exceptions
        self.explained[key] += 1
        return key != self.straight

    def do(self, name: str, arguments: dict[str, Any]) -> tuple[str | None, Any]:
        """Do one operation; returns the refusal and what it returns."""
        self.seen, self.ahead = [{} for _ in self.ranks], set()
        try:
            return None, getattr(self, name)(**arguments)
        except (CrossframeError, UserError) as error:
            return type(error).__name__, None

    # Forward and backward

    def _trains(self, unit: str) -> bool:
        return any(self.setup.trains(unit, name) for name in SHAPES[unit])

    def _course(
        self, job: Job, unit: str = "", needs: bool = False, live: bool = True
    ) -> tuple[list[tuple[str, bool]], bool]:
        """The units inside one in the order of forward, with whether backward reaches each; whether the output has a gradient.

        Args:
            needs: whether the input has one.
            live: whether the output leads to one.
        """
        if job.raises_at("forward", unit) and unit:
            return [(unit, False)], needs
        course: list[tuple[str, bool]] = []
        if unit:
            needs = needs or self._trains(unit)
            course.append((unit, live and needs))
        for child in CHILDREN[unit]:
            for _ in job.times(child):
                inner, gets = self._course(job, child, needs, live and child not in job.detached)
                course += inner
                needs = needs if child in job.detached else gets
        if not unit:
            needs = needs or self._trains(unit)
            course.append((unit, live and needs))
        return course, needs

    def _begin_step(self, training: bool) -> None:
        for unit in self.world.units.values():
            unit.state.after(Move.BEGIN_FORWARD, unit.name)
        self._recover()
        for name, unit in self.world.units.items():
            if unit.state.residency is Residency.FULL:
                if self._seen_steps[name] != self.steps:
                    unit.reshard()
                elif training and not self._kept[name]:
                    if self._bends("trains anew"):
                        unit.reshard()
                elif unit.state.freshness is Freshness.STALE and self._bends("evaluates stale"):
                    for step in unit.steps:
                        step.state = replace(step.state, freshness=Freshness.SAME)

    def forward(self, job: Job) -> None:
        """A forward; for training its backward may come."""
        self._begin_step(job.training)
        for name, _ in self._course(job)[0]:
            unit = self.world.units[name]
            try:
                unit.compute("forward", lambda rank, params, unit=unit: self._note(unit, rank, params, "forward", job))
            except UserError:
                if not job.catches(name):
                    self._fail()
                    raise
                for step in unit.steps:
                    step.reset()
                for bucket in unit.buckets:
                    bucket.free(self.ranks)
                continue
            self._after_forward(unit)
        if job.training:
            self.pending.append(job)
            del self.pending[:-2]

    def _after_forward(self, unit: LiveUnit) -> None:
        unit.after_forward()

    def backward(self, which: int, syncs: bool) -> None:
        """The backward of one of the forwards."""
        job = self.pending.pop(which)
        if any(unit.state.exposure is Exposure.SUMMONED for unit in self.world.units.values()):
            self._refused = self._bends("fails when refused")
        for unit in self.world.units.values():
            unit.state.after(Move.BEGIN_BACKWARD, unit.name)
        reached = [self.world.units[name] for name, reaches in self._course(job)[0] if reaches]
        for unit in reversed(reached):
            try:
                unit.compute(
                    "backward", lambda rank, params, unit=unit: self._note(unit, rank, params, "backward", job)
                )
            except UserError:
                self.unsettled = self._bends("learns late")
                self._fail()
                raise
        for name, unit in self.world.units.items():
            if syncs:
                self.world.reduce(name)
            if syncs or not unit.keeps_full_unreduced:
                unit.reshard()
            else:
                self._kept[name] = True
                if unit not in reached and unit.state.residency is Residency.SHARD and self.setup.prefetch:
                    self.ahead.add(name)

    def gathered_ahead(self, unit: str) -> None:
        """The last backward has gathered this unit ahead, on all ranks."""
        if self._bends("gathers ahead"):
            self.world.units[unit].gather()
            self._kept[unit] = True

    def _recover(self) -> None:
        """What the engine does once it has heard of a backward that failed."""
        self.unsettled = False
        if self._refused:
            self._refused = False
            for unit in self.world.units.values():
                unit.reshard()
                for bucket in unit.buckets:
                    bucket.drop_grads()

    def _fail(self) -> None:
        self.world.reset()
        self.pending.clear()

    def _note(self, unit: LiveUnit, rank: int, params: Any, phase: str, job: Job) -> dict[str, np.ndarray]:
        if job.raises_at(phase, unit.name):
            raise UserError
        used = job.used(rank, unit.name)
        self.seen[rank][phase, unit.name] = {name: params[full_name(unit.name, name)].copy() for name in used}
        if job.summons is not None and job.summons[:2] == (phase, unit.name):
            self.seen[rank]["summon", phase, unit.name] = self._refusal_of_summon(job.summons[2])
        if phase == "forward":
            return {}
        return {full_name(unit.name, name): gradient(unit.name, name, rank, job.seed) for name in used}

    def _refusal_of_summon(self, unit: str) -> str:
        try:
            with self.world.summon_full_params(names=self._below(unit)):
                return "was not refused"
        except CrossframeError as error:
            return type(error).__name__

    # Between steps

    def step(self) -> None:
        """The optimizer's step."""
        self.pending.clear()
        for unit in self.world.units.values():
            unit.edited()
            for bucket in unit.buckets:
                bucket.step(self.optimizer)
        self.steps += 1

    def zero_grad(self, how: str) -> None:
        """Of the model, of the optimizer, or with zeros instead of None."""
        for unit in self.world.units.values():
            for bucket in unit.buckets:
                for grad in bucket.sharded_grads if how == "zeros" else ():
                    if grad is not None:
                        grad[:] = 0
                if how == "model":
                    bucket.drop_grads()
            if how != "zeros":
                unit.zero_grad()

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Returns the norm."""
        self._recover()
        return self.world.clip_grad_norm(max_norm, norm_type)

    def convert(self) -> None:
        """The module is moved to where it is."""
        self.pending.clear()
        self._recover()
        for unit in self.world.units.values():
            if unit.state != UnitState():
                unit.edited()
                unit.reshard()

    # Summons

    def _below(self, unit: str) -> list[str]:
        return [name for name in UNITS if name == unit or not unit or name.startswith(f"{unit}.")]

    def summon(self, unit: str, recurse: bool, flags: tuple[bool, ...]) -> None:
        """Full parameters for the user, until `leave`."""
        names, request = self._below(unit) if recurse else [unit], UnshardRequest(*flags)
        context = self.world.summon_full_params(request, names)
        if self._refused:
            self.world.units[unit].check_summon(request)
            self._recover()
        context.__enter__()
        self.unsettled = False
        self.contexts.append((context, names, request))

    def leave(self, failed: bool) -> None:
        """The end of the last summon, by an exception or not."""
        context, names, _ = self.contexts.pop()
        error = UserError() if failed else None
        context.__exit__(type(error) if error else None, error, None)
        for name in names:
            for bucket in self.world.units[name].buckets:
                self._forget_unwritten(bucket)
        self.taken = {(rank, param) for rank, param in self.taken if param.rpartition(".")[0] not in names}
        self.replaced = {key: value for key, value in self.replaced.items() if key[1].rpartition(".")[0] not in names}

    def _forget_unwritten(self, bucket: Any) -> None:
        for rank in self.ranks:
            for name, piece in bucket.grad_pieces(rank).items():
                if name not in bucket.reached[rank] and piece.any() and self._bends("one gradient of a unit"):
                    piece[:] = 0

    def summoned(self, unit: str, rank: int) -> bool:
        """Whether a rank's user is shown the unit's full parameters."""
        state = self.world.units[unit].states[rank]
        return state.exposure is Exposure.SUMMONED and state.residency is Residency.FULL

    def edit(self, unit: str, name: str, value: int, by: int | None, how: str) -> None:
        """The user writes into what the module shows of a parameter."""
        live = self.world.units[unit]
        if live.state.exposure is not Exposure.SUMMONED:
            self.pending.clear()
        for rank in self.ranks if by is None else (by,):
            shown = live.shown(rank).get(full_name(unit, name))
            if shown is None:
                continue
            key, values = (rank, full_name(unit, name)), edited(shown.shape, value, rank)
            alone = self.summoned(unit, rank) and self._owns_all(live) and not live._request.writeback
            if alone and (how == "data" or key in self.replaced) and self._bends("replaces the only copy"):
                self.replaced[key] = values
            else:
                live.edit(rank, full_name(unit, name), values)

    def assign(self, unit: str, name: str, value: int, by: int | None) -> None:
        """Replaces a sharded parameter by another object, which brings its own gradient, None."""
        self.edit(unit, name, value, by, "object")
        for rank in self.ranks if by is None else (by,):
            if self.setup.use_orig_params:
                self._forget(self.world.units[unit], rank, full_name(unit, name))
        self.summon(unit, False, (False, False, False, False))
        self.leave(False)

    def misfit(self, unit: str, name: str) -> None:
        """A sharded parameter's data is replaced by data of another shape, on all ranks."""
        live = self.world.units[unit]
        self._recover()
        for rank in self.ranks:
            shown = live.shown(rank)[full_name(unit, name)]
            live.edit(rank, full_name(unit, name), np.zeros(shown.size + 1, shown.dtype))

    def edit_grad(self, unit: str, name: str, value: int, by: int | None, how: str) -> None:
        """The user writes into a gradient that a summon shows, or takes it away."""
        live, full = self.world.units[unit], full_name(unit, name)
        for rank in self.ranks if by is None else (by,):
            shown = self._shown_grads(live, rank).get(full) if self.summoned(unit, rank) else None
            if shown is None or (rank, full) in self.taken:
                continue
            if how == "none":
                self.taken.add((rank, full))
                if self._owns_all(live):
                    self._forget(live, rank, full)
                else:
                    live.edit_grad(rank, full, np.zeros_like(shown))
            elif self._owns_all(live):
                shown[...] = edited(shown.shape, value, rank)
            else:
                live.edit_grad(rank, full, edited(shown.shape, value, rank))

    def forget_grad(self, unit: str, name: str, by: int) -> None:
        """A rank's user takes a gradient away."""
        live = self.world.units[unit]
        if self.setup.use_orig_params:
            self._forget(live, by, full_name(unit, name))
        else:
            live.zero_grad([by])

    def _forget(self, live: LiveUnit, rank: int, name: str) -> None:
        for bucket in live.buckets:
            bucket.reached[rank].discard(name)
            if not bucket.reached[rank]:
                bucket.zero_grad([rank])
            for other, piece in bucket.grad_pieces(rank).items():
                if other == name:
                    piece[:] = 0

    # What there is to see

    def _owns_all(self, live: LiveUnit) -> bool:
        return live.buckets[0].authoritative is AuthoritativeStorage.FULL

    def _shown_grads(self, live: LiveUnit, rank: int) -> dict[str, np.ndarray]:
        """Full gradients that a rank's user is shown; the rank sees full parameters."""
        bucket = live.buckets[0]
        if not self.setup.use_orig_params:
            return {}
        if self._owns_all(live) and self._bends("shows own gradients"):
            shapes = {spec.name: spec.shape for spec in bucket.layout.params}
            own = bucket.grad_pieces(rank)
            return {name: own[name].reshape(shapes[name]) for name in own if name in bucket.reached[rank]}
        shown = live.grads_shown(rank)
        group = [bucket.reached[other] & {*bucket.grad_pieces(other)} for other in self.mesh.shard_group(rank)]
        return {name: grad for name, grad in shown.items() if self._some_have(name, group)}

    def _some_have(self, name: str, reached: list[set[str]]) -> bool:
        return any(name in names for names in reached) or not self._bends("asks its shard group")

    def look(self, rank: int) -> list[dict[str, Any]]:
        """All that there is to see on a rank, unit by unit, as `look` finds it."""
        found = []
        for unit in UNITS:
            live = self.world.units[unit]
            state, bucket = live.states[rank], live.buckets[0]
            shown = {
                name.rpartition(".")[2]: self.replaced.get((rank, name), value)
                for name, value in live.shown(rank).items()
            }
            if self.summoned(unit, rank):
                grads = self._shown_grads(live, rank)
                grads = {name: grad for name, grad in grads.items() if (rank, name) not in self.taken}
            else:
                own = bucket.grad_pieces(rank)
                grads = {name: own[name] for name in own if name in bucket.reached[rank]}
            full = bucket.full[rank]
            found.append(
                {
                    "state": (state.residency.name, state.exposure.name, state.activity.name),
                    "memory": (full is not None and full is not bucket.unit.shards[rank], bool(bucket.grads[rank])),
                    "shown": shown,
                    "grads": {name: grads.get(full_name(unit, name)) for name in shown},
                }
            )
        return found


# Side by side


def difference(expected: Any, found: Any, where: str) -> Iterator[str]:
    """What differs between two things to see, in words."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted({*expected, *found}, key=str):
            if key not in expected or key not in found:
                yield f"{where}, {key}: expected {expected.get(key, 'nothing')}, found {found.get(key, 'nothing')}"
            else:
                yield from difference(expected[key], found[key], f"{where}, {key}")
    elif isinstance(expected, np.ndarray) and isinstance(found, np.ndarray):
        if (expected.shape, expected.dtype, expected.tobytes()) != (found.shape, found.dtype, found.tobytes()):
            yield f"{where}: expected {expected.tolist()} {expected.dtype}, found {found.tolist()} {found.dtype}"
    elif type(expected) is not type(found) or expected != found:
        yield f"{where}: expected {expected}, found {found}"


class Pair:
    """A model on real ranks and in the reference: every operation is done to both, and all is compared.

    Attributes:
        expected: the reference.
    """

    def __init__(self, ranks: Ranks, setup: Any, counts: "Counts", *, straight: str = "") -> None:
        """
        Args:
            straight: a key of EXPLAINED for which no exception is made.
        """
        self.ranks, self.setup, self.counts = ranks, setup, counts
        self.world_size = setup.world_size
        self.expected = setup.expected(straight)
        found = self.ranks.run(self.world_size, build_real, setup, seconds=SECONDS)
        self._compare("build", found)

    def take(self, operation: str, /, **arguments: Any) -> None:
        """Do one operation to both, and compare; AssertionError where they differ."""
        told, answer = self.expected.do(operation, arguments)
        results = self.ranks.run(self.world_size, do_real, operation, arguments, seconds=SECONDS)
        refusals = [refusal for refusal, _, _, _ in results]
        for rank, kinds in enumerate(refusals):
            came = kinds[0] if kinds else "none"
            assert told in kinds if told else not kinds, (
                f"{operation}, rank {rank}: expected refusal {told}, found {came}"
            )
        if answer is not None:
            self._compare_norms(arguments["norm_type"], answer, results[0][1])
        for rank, (_, _, seen, _) in enumerate(results):
            wrong = list(difference(self.expected.seen[rank], seen, f"{operation}, rank {rank} computed with"))
            assert not wrong, "\n".join(wrong)
        self._compare(operation, [found for _, _, _, found in results])
        self.counts.add(operation, told, self.expected)

    def _compare(self, operation: str, found: list[list[dict[str, Any]]]) -> None:
        wrong: list[str] = []
        for unit in self.expected.ahead:
            if all(units[UNITS.index(unit)]["state"][0] == Residency.FULL.name for units in found):
                self.expected.gathered_ahead(unit)
        for rank, units in enumerate(found):
            for unit, told, came in zip(UNITS, self.expected.look(rank), units, strict=True):
                if self.expected.unsettled:
                    if came["state"] != told["state"]:
                        continue
                    told, came = ({key: look[key] for key in ("shown", "grads")} for look in (told, came))
                wrong += difference(told, came, f"after {operation}, rank {rank}, unit {unit!r}")
        assert not wrong, "\n".join(wrong)

    def _compare_norms(self, norm_type: float, expected: float, found: float) -> None:
        # The order of a sum in float32 of some dozens of terms, and roots taken in between: far below this.
        close = abs(expected - found) <= 1e-5 * abs(expected)
        assert found == expected if norm_type == float("inf") else close, f"norm: expected {expected}, found {found}"

    def end(self) -> None:
        """Leave what is open, and forget the model."""
        self.ranks.run(self.world_size, end_real, seconds=SECONDS)


NAMES = st.sampled_from(["w", "v", "f"])
UNIT = st.sampled_from(UNITS)
VALUES = st.integers(0, 7)
NORM_TYPES = st.sampled_from([float("inf"), 1.0, 2.0])
BY = st.none() | st.integers(0, 3)
EDITS = st.lists(st.tuples(NAMES, VALUES, BY, st.sampled_from(["fill", "data"])), min_size=1, max_size=3)
GRAD_EDITS = st.lists(st.tuples(NAMES, VALUES, BY, st.sampled_from(["fill", "none"])), max_size=3)


@st.composite
def setups(draw: st.DrawFn, world_size: int) -> Setup:
    """How a model may be wrapped. At 3 ranks and more sums in low precision are left out (R32)."""
    hybrids = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"] if world_size == 4 else []
    low = [("bfloat16", "float32"), (None, None)] + [("bfloat16", None), (None, "bfloat16")] * (world_size <= 2)
    keeps_original = draw(st.booleans())
    mixed = draw(st.sampled_from([(None, None), *low]))
    keeps_low = mixed[0] is not None and draw(st.booleans())
    return Setup(
        world_size,
        draw(st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", *hybrids, "NO_SHARD"])),
        keeps_original,
        mixed,
        keeps_low,
        draw(st.sampled_from(["", "unit", *["params"] * keeps_original])),
        draw(st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", None])),
        draw(st.booleans()),
        0.0 if keeps_low else draw(st.sampled_from([0.0, 0.5])),
        0.0 if keeps_low else draw(st.sampled_from([0.0, 0.25])),
    )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """A forward; most have something out of the ordinary."""
    some = st.sampled_from([(), (), ("a",), ("a.c",), ("b",), ("a", "b")])
    missing = st.lists(st.tuples(st.integers(0, 3), UNIT), max_size=4, unique=True).map(tuple)
    return Job(
        draw(st.integers(0, 5)),
        draw(st.sampled_from([True, True, True, False])),
        draw(some),
        draw(some),
        draw(some),
        draw(missing),
    )


class Machine(RuleBasedStateMachine):
    """A model on both sides; what is done to it are the rules of those that inherit."""

    setups: Any = None

    def __init__(self, ranks: Ranks, world_size: int, counts: "Counts") -> None:
        super().__init__()
        self.ranks, self.world_size, self.counts = ranks, world_size, counts
        self.pair: Pair | None = None

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        self.setup = data.draw(self.setups(self.world_size))
        self.pair = Pair(self.ranks, self.setup, self.counts)
        self.expected, self.take = self.pair.expected, self.pair.take

    def teardown(self) -> None:
        if self.pair is not None:
            self.pair.end()

    def _rank(self, by: int | None) -> int | None:
        return None if by is None else by % self.world_size

    def _lawful(self, job: Job) -> Job:
        return replace(job, missing=tuple(sorted({(rank % self.world_size, unit) for rank, unit in job.missing})))


class SideBySide(Machine):
    """Any operations in any order."""

    setups = staticmethod(setups)

    # When what is driven

    @property
    def open(self) -> bool:
        return bool(self.expected.contexts)

    def closed(self) -> bool:
        return not self.open

    def settled(self) -> bool:
        """Whether modules show what is edited: see "learns late"."""
        return self.closed() and not self.expected.unsettled

    def can_go_back(self) -> bool:
        return bool(self.expected.pending) and not self.open

    # Rules

    @rule(job=jobs())
    def forward(self, job: Job) -> None:
        self.take("forward", job=self._lawful(job))

    def _lawful(self, job: Job) -> Job:
        job = super()._lawful(job)
        return replace(job, skipped=()) if self.setup.forward_prefetch else job

    @precondition(can_go_back)
    @rule(which=st.integers(0, 1), syncs=st.sampled_from([True, True, False]))
    def backward(self, which: int, syncs: bool) -> None:
        self.take("backward", which=which % len(self.expected.pending), syncs=syncs)

    @precondition(closed)
    @rule(job=jobs(), unit=UNIT, writeback=st.booleans(), edits=EDITS, failed=st.booleans(), syncs=st.booleans())
    def summon_between(self, job: Job, unit: str, writeback: bool, edits: list, failed: bool, syncs: bool) -> None:
        """Edits of full parameters between a forward and its backward."""
        self.take("forward", job=replace(self._lawful(job), training=True))
        self.take("summon", unit=unit, recurse=True, flags=(writeback, False, False, False))
        for name, value, by, how in edits:
            self.take("edit", unit=unit, name=name, value=value, by=self._rank(by), how=how)
        self.take("leave", failed=failed)
        self.take("backward", which=len(self.expected.pending) - 1, syncs=syncs)

    @precondition(can_go_back)
    @rule(which=st.integers(0, 1), syncs=st.booleans())
    def backward_in_summon(self, which: int, syncs: bool) -> None:
        """A backward that is refused, and gone."""
        self.take("summon", unit="", recurse=True, flags=(True, False, False, False))
        self.take("backward", which=which % len(self.expected.pending), syncs=syncs)
        self.take("leave", failed=False)

    @precondition(closed)
    @rule(
        job=jobs(),
        syncs=st.booleans(),
        clips=st.none() | st.tuples(st.integers(-2, 3), NORM_TYPES),
        how=st.sampled_from(["none", "model", "optimizer", "zeros"]),
    )
    def train(self, job: Job, syncs: bool, clips: tuple[int, float] | None, how: str) -> None:
        """The moves of a step, which are drawn more often than all that is refused."""
        self.take("forward", job=replace(self._lawful(job), training=True))
        self.take("backward", which=len(self.expected.pending) - 1, syncs=syncs)
        if clips is not None and not self.setup.keep_low_precision_grads:
            self._clip(*clips)
        if how != "none":
            self.take("step")
            self.take("zero_grad", how=how)

    @precondition(closed)
    @rule(
        job=jobs(), phase=st.sampled_from(["forward", "backward"]), unit=UNIT, caught=st.booleans(), syncs=st.booleans()
    )
    def fail(self, job: Job, phase: str, unit: str, caught: bool, syncs: bool) -> None:
        """The user's code raises in a forward or backward."""
        caught = caught and not (self.setup.forward_prefetch and CHILDREN[unit])
        job = replace(self._lawful(job), raises=(phase, unit), caught=caught, training=True)
        assume(unit not in job.skipped)
        self.take("forward", job=job)
        if self.expected.pending:
            self.take("backward", which=len(self.expected.pending) - 1, syncs=syncs)

    @precondition(closed)
    @rule(job=jobs(), phase=st.sampled_from(["forward", "backward"]), unit=UNIT, whom=UNIT, syncs=st.booleans())
    def meddle(self, job: Job, phase: str, unit: str, whom: str, syncs: bool) -> None:
        """The user's code asks for full parameters in a forward or backward."""
        job = replace(self._lawful(job), summons=(phase, unit, whom), training=True)
        self.take("forward", job=job)
        self.take("backward", which=len(self.expected.pending) - 1, syncs=syncs)

    @precondition(closed)
    @rule()
    def step(self) -> None:
        self.take("step")

    @precondition(closed)
    @rule(how=st.sampled_from(["model", "optimizer", "zeros"]))
    def zero_grad(self, how: str) -> None:
        self.take("zero_grad", how=how)

    @precondition(lambda self: self.closed() and not self.setup.keep_low_precision_grads)
    @rule(exponent=st.integers(-2, 3), norm_type=NORM_TYPES)
    def clip(self, exponent: int, norm_type: float) -> None:
        self._clip(exponent, norm_type)

    def _clip(self, exponent: int, norm_type: float) -> None:
        """By a power of two, so that it does not matter whether one multiplies by an inverse."""
        scales = norm_type == float("inf") or (norm_type == 1.0 and self._sums_are_exact())
        self.take("clip", max_norm=2.0**exponent if scales else float("inf"), norm_type=norm_type)

    def _sums_are_exact(self) -> bool:
        world = self.expected.world
        return all(bool((grad * 8 == np.round(grad * 8)).all() and (abs(grad) < 4096).all())
                   for rank in self.expected.ranks for grad in world._own_grads(rank))  # fmt: skip

    @precondition(settled)
    @rule(what=st.sampled_from(["convert", "assign", "assign", "misfit"]), unit=UNIT, name=NAMES, value=VALUES, by=BY)
    def odd(self, what: str, unit: str, name: str, value: int, by: int | None) -> None:
        """What users do seldom."""
        live = self.expected.world.units[unit]
        if what == "convert":
            self.take("convert")
        elif what == "assign":
            self.take("assign", unit=unit, name=name, value=value, by=self._rank(by))
        elif what == "misfit" and all(full_name(unit, name) in live.shown(rank) for rank in self.expected.ranks):
            self.take("misfit", unit=unit, name=name)

    @rule(unit=st.sampled_from(["", "", *UNITS]), recurse=st.booleans(), flags=st.tuples(*[st.booleans()] * 4))
    def summon(self, unit: str, recurse: bool, flags: tuple[bool, ...]) -> None:
        self.take("summon", unit=unit, recurse=recurse, flags=flags)

    @precondition(closed)
    @rule(unit=st.sampled_from(["", "", *UNITS]), recurse=st.booleans(), writeback=st.sampled_from([True, True, False]),
          with_grads=st.booleans())  # fmt: skip
    def enter(self, unit: str, recurse: bool, writeback: bool, with_grads: bool) -> None:
        """A summon that is granted."""
        flags = (writeback, False, False, with_grads and self.setup.use_orig_params)
        self.take("summon", unit=unit, recurse=recurse, flags=flags)

    @precondition(closed)
    @rule(
        unit=UNIT,
        writeback=st.sampled_from([True, True, False]),
        edits=EDITS,
        grad_edits=GRAD_EDITS,
        job=st.none() | jobs(),
        forgets=st.lists(st.tuples(NAMES, st.integers(0, 3)), max_size=3),
        failed=st.booleans(),
    )
    def change(
        self, unit: str, writeback: bool, edits: list, grad_edits: list, job: Job | None, forgets: list, failed: bool
    ) -> None:
        """Edits of full parameters, and of full gradients, of one unit; before, some may be taken away."""
        if job is not None:
            self.train(job, True, None, "none")
            for name, by in forgets:
                self.forget_grad(unit, name, by)
        flags = (writeback, False, False, self.setup.use_orig_params)
        self.take("summon", unit=unit, recurse=True, flags=flags)
        for name, value, by, how in edits:
            self.take("edit", unit=unit, name=name, value=value, by=self._rank(by), how=how)
        for name, value, by, how in grad_edits:
            self.take("edit_grad", unit=unit, name=name, value=value, by=self._rank(by), how=how)
        self.take("leave", failed=failed)

    @precondition(closed)
    @rule(first=jobs(), second=jobs(), unit=UNIT, edits=EDITS)
    def evaluate(self, first: Job, second: Job, unit: str, edits: list) -> None:
        """Forwards without gradients, and edits of the shards in between."""
        for job in (first, second):
            self.take("forward", job=replace(self._lawful(job), training=False))
            for name, value, by, how in edits:
                self.take("edit", unit=unit, name=name, value=value, by=self._rank(by), how=how)

    @precondition(lambda self: self.open)
    @rule(failed=st.sampled_from([False, False, True]))
    def leave(self, failed: bool) -> None:
        self.take("leave", failed=failed)

    @precondition(lambda self: self.open or self.settled())
    @rule(unit=UNIT, name=NAMES, value=VALUES, by=BY, how=st.sampled_from(["fill", "data"]))
    def edit(self, unit: str, name: str, value: int, by: int | None, how: str) -> None:
        self.take("edit", unit=unit, name=name, value=value, by=self._rank(by), how=how)

    @precondition(lambda self: self.open)
    @rule(
        unit=UNIT,
        name=NAMES,
        value=VALUES,
        by=BY,
        how=st.sampled_from(["fill", "fill", "none"]),
    )
    def edit_grad(self, unit: str, name: str, value: int, by: int | None, how: str) -> None:
        self.take("edit_grad", unit=unit, name=name, value=value, by=self._rank(by), how=how)

    @precondition(settled)
    @rule(unit=UNIT, name=NAMES, by=st.integers(0, 3))
    def forget_grad(self, unit: str, name: str, by: int) -> None:
        self.take("forget_grad", unit=unit, name=name, by=by % self.world_size)


class Counts:
    """What a run has gone through: operations, refusals by operation, exceptions made use of."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.explained: Counter[str] = Counter()

    def add(self, name: str, refusal: str | None, expected: Expected) -> None:
        """Count one operation."""
        self.done[name] += 1
        if refusal is not None:
            self.refused[f"{name}: {refusal}"] += 1
        self.explained += expected.explained
        expected.explained.clear()

    def describe(self) -> str:
        """All of it in words."""
        lines = [f"{self.done.total()} operations compared, {self.refused.total()} of them refused"]
        for title, counter in (("", self.done), ("refused ", self.refused), ("explained: ", self.explained)):
            lines += [f"{count:8} {title}{key}" for key, count in sorted(counter.items())]
        return "\n".join(lines)


def drive(
    ranks: Ranks,
    world_size: int,
    examples: int,
    steps: int,
    counts: Counts,
    first_seed: int | None = None,
    rules: type[Machine] = SideBySide,
) -> None:
    """Run programs of up to so many steps; AssertionError, with the shortest program that hypothesis found, if one differs.

    Args:
        first_seed: what programs are drawn from; None: always the same.
        rules: the state machine of an API.
    """

    def machine() -> Machine:
        return rules(ranks, world_size, counts)

    options = settings(
        deadline=None,
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=first_seed is None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        report_multiple_bugs=False,
        print_blob=True,
    )
    if first_seed is not None:
        seed(first_seed)(machine)
    run_state_machine_as_test(machine, settings=options)  # type: ignore[arg-type]


def main() -> int:
    """Run many programs at every world size; print what was gone through, and what failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.on_torch.programs.rule_machine", description=inspect.getdoc(sys.modules[__name__])
    )
    parser.add_argument("--api", choices=("fsdp1", "fsdp2"), default="fsdp1")
    parser.add_argument("--examples", type=int, default=100, help="programs, shared out over the world sizes")
    parser.add_argument("--steps", type=int, default=40, help="the longest program")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], help="world sizes, one after the other")
    given = parser.parse_args()
    rules = importlib.import_module(
        f"tests.on_torch.programs.rule_machine{'_fsdp2' * (given.api == 'fsdp2')}"
    ).SideBySide
    counts, failed, start = Counts(), 0, time.monotonic()
    for world_size in given.ranks:
        with started_ranks() as ranks:
            try:
                drive(ranks, world_size, -(-given.examples // len(given.ranks)), given.steps, counts, given.seed, rules)
            except Exception as error:
                failed += 1
                print(f"seed {given.seed}, {world_size} ranks: {type(error).__name__}: {error}", flush=True)
                print("\n".join(getattr(error, "__notes__", [])), flush=True)
    print(counts.describe())
    print(f"{given.examples} programs in {time.monotonic() - start:.0f} s: {failed} world sizes failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
