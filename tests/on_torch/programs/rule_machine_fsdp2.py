"""FSDP2's half of the rule machine (R08, R12, R13, R15, R17, R25, R28, R29): see rule_machine.py, whose model, forwards and
comparison it has. What a user may do is another: there are no summons, full parameters are shown between `unshard` and `reshard`,
and after a forward that does not reshard.

`python -m tests.on_torch.programs.rule_machine --api fsdp2 --examples 300 --seed 1` runs many long programs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from torch.distributed.tensor import DTensor

from crossframe.api import Api
from crossframe.layout import PerParamLayout, post_forward, post_forward_group
from crossframe.lifecycle import Exposure, Residency
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.plan import plan_units
from crossframe.precision import PrecisionPolicy
from crossframe.reduction import reduction_steps
from crossframe.reference import World
from crossframe.reference.live_unit import LiveUnit
from tests.on_torch.programs.rule_machine import (
    BY,
    LR,
    NAMES,
    SHAPES,
    UNIT,
    UNITS,
    VALUES,
    Expected,
    Job,
    Machine,
    Part,
    Real,
    UserError,
    _mesh,
    edited,
    full_name,
    initial,
    jobs,
    to_numpy,
    written,
)

# Where the engine is not as this reference, which knows what each forward may count on; see EXPLAINED in rule_machine.py.
EXPLAINED = {
    "learns late": "R17: of an exception in backward the engine hears nothing; the next forward, move or reset_iter_state brings "
    "all units back. Until then modules may show full parameters.",
}
NOT_DRIVEN = {
    "`.data = ...`": "torch: a DTensor's data is what it wraps, which that does not reach.",
    "edits of a reshard group's shards": "R08: they are memory between forward and backward, not parameters.",
    "unshard, edits and state dicts behind a backward that failed": "R17: before the next forward, move or reset_iter_state.",
    "other dtypes with momentum": "torch's optimizers do not convert what they keep.",
    "a backward of a forward before a step, an edit, a move or a reset": "torch itself refuses it by version counters.",
}


@dataclass(frozen=True, repr=False)
class Setup:
    """How the model is sharded and trained.

    Attributes:
        mesh: (shard,), or (replicate, shard).
        reshard: every unit's reshard_after_forward.
        mixed: param_dtype and reduce_dtype by name, None where not given.
        frozen: "params" freezes each unit's "f", "unit" all of unit "b".
    """

    mesh: tuple[int, ...] = (2,)
    reshard: bool | int | None = None
    mixed: tuple[str | None, str | None] = (None, None)
    frozen: str = ""
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __repr__(self) -> str:
        """As an expression that makes it."""
        return written(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # what hypothesis asks for

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.spec.world_size

    @property
    def spec(self) -> MeshSpec:
        """The mesh, for the core."""
        return MeshSpec(*reversed(self.mesh))

    def real(self, rank: int) -> "RealFSDP2":
        """A rank's model."""
        return RealFSDP2(rank, self)

    def expected(self, straight: str) -> "ExpectedFSDP2":
        """The reference's."""
        return ExpectedFSDP2(self, straight)

    def trains(self, unit: str, name: str) -> bool:
        """Whether a parameter takes a gradient."""
        return not (self.frozen == "unit" and unit == "b") and not (self.frozen == "params" and name == "f")


class RealFSDP2(Real):
    """A rank's model, and what its user does to it. Methods are operations; `ExpectedFSDP2` has the same."""

    def __init__(self, rank: int, setup: Setup) -> None:
        import torch_backend

        self.api, self.rank, self.setup = torch_backend, rank, setup  # type: ignore[assignment]
        low: Any = [None if name is None else getattr(torch, name) for name in setup.mixed]
        self._options: dict[str, Any] = {
            "mesh": _mesh(*setup.mesh),
            "reshard_after_forward": setup.reshard,
            "mp_policy": torch_backend.MixedPrecisionPolicy(*low),
        }
        self.parts: dict[str, Part] = {}
        self.wrappers: dict[str, Any] = {}
        self.model = self.wrap(Part(self, "", setup))  # type: ignore[arg-type]
        self.owned = {
            (unit, name): part._parameters[name] for unit, part in self.parts.items() for name in SHAPES[unit]
        }
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=LR, momentum=setup.momentum, weight_decay=setup.weight_decay
        )
        self.pending: list[torch.Tensor] = []
        self.contexts: list[Any] = []
        self.seen: dict[tuple[str, ...], Any] = {}

    def wrap(self, part: Part) -> Any:
        """The unit of a module."""
        self.parts[part.unit] = self.wrappers[part.unit] = part
        return self.api.fully_shard(part, **self._options)

    # Operations

    def backward(self, which: int, syncs: bool, all_reduces: bool = True) -> None:
        """The backward of one of the forwards."""
        self.model.set_requires_gradient_sync(syncs)
        if syncs:
            self.model.set_requires_all_reduce(all_reduces)
        out = self.pending.pop(which)
        try:
            out.backward()
        except UserError:
            del out
            self._clear()
            raise

    def unshard(self, unit: str) -> None:
        """Full parameters for the user."""
        self.wrappers[unit].unshard()

    def reshard(self, unit: str) -> None:
        """And no longer."""
        self.wrappers[unit].reshard()

    def reset(self) -> None:
        """What a user may call behind an exception, or at any other time."""
        self.pending.clear()
        self.model.reset_iter_state()

    def convert(self, dtype: str) -> None:
        """The module's parameters in another dtype, or in the one that they have."""
        self.pending.clear()
        self.model.to(getattr(torch, dtype))

    def edit(self, unit: str, name: str, value: int, by: int | None, how: str = "fill") -> None:
        """The user writes into what the module shows of a parameter."""
        self.pending.clear()
        state = self._unit(unit).state
        if (by is not None and by != self.rank) or state.residency is Residency.RESHARD_GROUP:
            return
        param = self.param(unit, name)
        with torch.no_grad():
            if state.exposure is Exposure.FULL:
                param.copy_(torch.from_numpy(edited(tuple(param.shape), value, self.rank)))
                return
            local = param.to_local()
            local.copy_(torch.from_numpy(edited(tuple(local.shape), value, self.rank)))

    def load(self, value: int, assign: bool) -> None:
        """A state dict of other values."""
        self.pending.clear()
        state = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        for tensor in state.values():
            local = tensor.to_local()
            local.copy_(torch.from_numpy(edited(tuple(local.shape), value, self.rank)))
        self.model.load_state_dict(state, assign=assign)

    # What there is to see

    def shown(self, unit: str) -> dict[str, np.ndarray]:
        """What the module shows: full parameters, or flat pieces of those that this rank holds anything of."""
        part, state = self.parts[unit], self._unit(unit).state
        found = {}
        for name in SHAPES[unit]:
            param: Any = part._parameters[name]
            assert self.param(unit, name) is param, (unit, name)
            if state.exposure is Exposure.FULL:
                assert not isinstance(param, DTensor) and param.shape == SHAPES[unit][name], (unit, name)
                found[name] = to_numpy(param)
                continue
            assert isinstance(param, DTensor) and param.shape == SHAPES[unit][name], (unit, name)
            if state.residency is Residency.RESHARD_GROUP:
                assert param.device_mesh.shape[-1] == self.setup.reshard, (unit, name)
            else:
                assert param is self.owned[unit, name], (unit, name)
            if param.to_local().numel():
                found[name] = to_numpy(param.to_local()).reshape(-1)
        return found

    def grads(self, unit: str) -> dict[str, np.ndarray | None]:
        """The gradients that an optimizer sees, of the parameters that this rank holds anything of."""
        found: dict[str, np.ndarray | None] = {}
        for name in SHAPES[unit]:
            param: Any = self.owned[unit, name]
            if param.to_local().numel():
                found[name] = None if param.grad is None else to_numpy(param.grad.to_local()).reshape(-1)
        return found

    def memory(self, unit: str) -> tuple[bool, ...]:
        """Whether full parameters, what a reshard group holds of them, and full gradients that wait are in memory."""
        real = self._unit(unit)
        bucket = real.buckets[0]
        full = not bucket.buffer.is_shard and bucket.buffer.full.untyped_storage().nbytes() > 0
        return full, bucket.group_shard is not None and bucket.group_shard.buffer is not None, real.has_grads

    def look(self) -> list[dict[str, Any]]:
        """All that there is to see on a rank, unit by unit."""
        found = []
        for unit in UNITS:
            state = self._unit(unit).state
            now: dict[str, Any] = {"state": (state.residency.name, state.exposure.name, state.activity.name)}
            if state.activity:  # after a backward that failed
                found.append(now)
                continue
            found.append(now | {"memory": self.memory(unit), "shown": self.shown(unit), "grads": self.grads(unit)})
        return found


class ExpectedFSDP2(Expected):
    """The reference's world, and what a user does to it.

    Whether a full copy is used again is decided as a rank can that sees itself alone: not by whether any shard was written, which
    LiveUnit would call stale, but by whether an optimizer has stepped or a forward for training begins (R12).
    """

    exceptions = EXPLAINED
    _began = False

    def _build(self, dtype: str = "float32", params: Mapping[str, np.ndarray] | None = None) -> World:
        setup: Setup = self.setup
        layouts = []
        for unit in UNITS:
            specs = tuple(
                ParamSpec(full_name(unit, name), shape, dtype, requires_grad=setup.trains(unit, name))
                for name, shape in SHAPES[unit].items()
            )
            layouts.append((unit, PerParamLayout(specs, setup.spec.shard)))
        if params is None:
            params = {full_name(unit, name): initial(unit, name) for unit in UNITS for name in SHAPES[unit]}
        units = plan_units(
            layouts, api=Api.FSDP2, reshard_after_forward=setup.reshard, policy=PrecisionPolicy(*setup.mixed)
        )
        return World(units, setup.spec, params, optimizer=self.optimizer)

    # Forward and backward

    def _begin_step(self, training: bool) -> None:
        self.unsettled, self._began = False, True
        for name, unit in self.world.units.items():
            if self._outdated(name) or (training and not self._kept[name]):
                unit.reshard()

    def _outdated(self, unit: str) -> bool:
        held = self.world.units[unit].state.residency is not Residency.SHARD
        return held and self._seen_steps[unit] != self.steps

    def _after_forward(self, unit: LiveUnit) -> None:
        unit.after_forward()
        if unit.state.residency is Residency.FULL and unit.state.exposure is Exposure.SHARDED:
            for step in unit.steps:
                step.expose()

    def backward(self, which: int, syncs: bool, all_reduces: bool = True) -> None:
        """The backward of one of the forwards."""
        job = self.pending.pop(which)
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
        steps = reduction_steps(self.mesh, Api.FSDP2, all_reduce=all_reduces or self.mesh.replicate == 1)
        for unit in self.world.units.values():
            for bucket in unit.buckets if syncs else ():
                if any(bucket.grads):
                    bucket.reduce(steps, None)
            unit.reshard()

    # Between steps

    def step(self) -> None:
        """The optimizer's step."""
        self.pending.clear()
        for unit in self.world.units.values():
            for bucket in unit.buckets:
                bucket.step(self.optimizer)
        self.steps += 1

    def zero_grad(self, how: str) -> None:
        """Clears the gradients of the module, of the optimizer, or sets zeros instead of None."""
        for unit in self.world.units.values():
            for bucket in unit.buckets:
                for grad in bucket.sharded_grads if how == "zeros" else ():
                    if grad is not None:
                        grad[:] = 0
            shows_shards = (
                unit.state.exposure is Exposure.SHARDED and unit.state.residency is not Residency.RESHARD_GROUP
            )
            if how == "optimizer" or (how == "model" and shows_shards):
                unit.zero_grad()

    def unshard(self, unit: str) -> None:
        """Full parameters for the user."""
        live = self.world.units[unit]
        if self._outdated(unit):
            live.reshard()
        live.unshard()
        self._kept[unit] = True

    def reshard(self, unit: str) -> None:
        """And no longer."""
        self.world.units[unit].reshard()

    def reset(self) -> None:
        """Nothing is full and nothing waits; what was reduced is the user's. Nothing happens before the first forward."""
        self.pending.clear()
        self.unsettled = False
        for unit in self.world.units.values() if self._began else ():
            for step in unit.steps:
                step.reset()
            for bucket in unit.buckets:
                bucket.free(self.ranks)
                bucket.drop_grads()

    def convert(self, dtype: str) -> None:
        """The same in another dtype: shards, gradients, and what waits."""
        self.pending.clear()
        self.unsettled = False
        before = self.world
        params = {name: value.astype(dtype) for name, value in before.full_params().items()}
        self.world = self._build(dtype, params)
        for name, unit in self.world.units.items():
            for old, new in zip(before.units[name].buckets, unit.buckets, strict=True):
                # Replicas and ranks may hold what one rank's user wrote.
                new.unit.shards = [shard.astype(dtype) for shard in old.unit.shards]
                new.sharded_grads = [None if g is None else _to(g, new.precision.kept) for g in old.sharded_grads]
                waits = new.precision.accumulated(Api.FSDP2)
                new.grads = [{key: _to(grad, waits) for key, grad in grads.items()} for grads in old.grads]
                new.partials = old.partials and [_to(partial, new.precision.reduced) for partial in old.partials]
                new.under_way, new.reached, new.steps = old.under_way, old.reached, old.steps
                new.optimizer_state = old.optimizer_state
            self._watch(unit)

    def edit(self, unit: str, name: str, value: int, by: int | None, how: str = "fill") -> None:
        """The user writes into what the module shows of a parameter."""
        self.pending.clear()
        live = self.world.units[unit]
        if live.state.residency is Residency.RESHARD_GROUP:
            return
        for rank in self.ranks if by is None else (by,):
            shown = self._shown(live, rank).get(full_name(unit, name))
            if shown is not None:
                live._overwrite(rank, full_name(unit, name), edited(shown.shape, value, rank))

    def load(self, value: int, assign: bool) -> None:
        """A state dict of other values; assigned, its tensors bring their own gradients, which are none."""
        self.pending.clear()
        for unit in self.world.units.values():
            unit.reshard()
            for rank in self.ranks:
                for name, shown in self._shown(unit, rank).items():
                    unit._overwrite(rank, name, edited(shown.shape, value, rank))
            if assign:
                unit.zero_grad()

    # What there is to see

    def _shown(self, live: LiveUnit, rank: int) -> dict[str, np.ndarray]:
        bucket = live.buckets[0]
        part = bucket.parts[rank]
        if part is None or live.state.exposure is Exposure.FULL:
            return live.shown(rank)
        size = int(live.reshard_after_forward)
        index = post_forward_group(self.mesh, rank, size).index(rank)
        return {p.name: part[p.shard_start : p.shard_stop] for p in post_forward(bucket.layout, size).pieces(index)}

    def look(self, rank: int) -> list[dict[str, Any]]:
        """All that there is to see on a rank, unit by unit, as `RealFSDP2.look` finds it."""
        found = []
        for unit in UNITS:
            live = self.world.units[unit]
            state, bucket = live.states[rank], live.buckets[0]
            own = bucket.grad_pieces(rank)
            held = bucket.unit.pieces(bucket.unit.shards[rank], rank)
            buffer = bucket.full[rank]
            full = buffer is not None and buffer is not bucket.unit.shards[rank]
            found.append(
                {
                    "state": (state.residency.name, state.exposure.name, state.activity.name),
                    "memory": (full, state.residency is Residency.RESHARD_GROUP, bool(bucket.grads[rank])),
                    "shown": {name.rpartition(".")[2]: value for name, value in self._shown(live, rank).items()},
                    "grads": {
                        name.rpartition(".")[2]: own[name] if name in bucket.reached[rank] else None for name in held
                    },
                }
            )
        return found


def _to(array: np.ndarray, dtype: str) -> np.ndarray:
    from crossframe.dtypes import numpy_dtype

    return array.astype(numpy_dtype(dtype))


@st.composite
def setups(draw: st.DrawFn, world_size: int) -> Setup:
    """How a model may be sharded. At 3 ranks and more sums in low precision are left out (R32)."""
    meshes: list[tuple[int, ...]] = [(world_size,), (world_size,), (world_size, 1)]
    meshes += [(2, 2), (2, 2)] * (world_size == 4)
    mesh = draw(st.sampled_from(meshes))
    low = [("bfloat16", "float32"), (None, None)] + [("bfloat16", None), (None, "bfloat16")] * (world_size <= 2)
    smaller = [2, 2] if mesh == (4,) else []
    return Setup(
        mesh,
        draw(st.sampled_from([None, True, False, *smaller])),
        draw(st.sampled_from([(None, None), *low])),
        draw(st.sampled_from(["", "unit", "params"])),
        draw(st.sampled_from([0.0, 0.5])),
        draw(st.sampled_from([0.0, 0.25])),
    )


EDITS = st.lists(st.tuples(UNIT, NAMES, VALUES, BY), min_size=1, max_size=3)
HOW = st.sampled_from(["none", "model", "optimizer", "zeros"])


class SideBySide(Machine):
    """Any operations in any order."""

    setups = staticmethod(setups)

    def settled(self) -> bool:
        """Whether modules show what is edited: see "learns late"."""
        return not self.expected.unsettled

    @rule(job=jobs())
    def forward(self, job: Job) -> None:
        self.take("forward", job=self._lawful(job))

    @precondition(lambda self: bool(self.expected.pending))
    @rule(which=st.integers(0, 1), syncs=st.sampled_from([True, True, False]), all_reduces=st.booleans())
    def backward(self, which: int, syncs: bool, all_reduces: bool) -> None:
        self.take("backward", which=which % len(self.expected.pending), syncs=syncs, all_reduces=all_reduces)

    @rule(job=jobs(), syncs=st.booleans(), all_reduces=st.booleans(), how=HOW)
    def train(self, job: Job, syncs: bool, all_reduces: bool, how: str) -> None:
        """The moves of a step."""
        self.take("forward", job=replace(self._lawful(job), training=True))
        self.take("backward", which=len(self.expected.pending) - 1, syncs=syncs, all_reduces=all_reduces)
        if how != "none":
            self.take("step")
            self.take("zero_grad", how=how)

    @rule(job=jobs(), unit=UNIT, edits=EDITS, reshards=st.booleans(), first=st.booleans())
    def use_between(self, job: Job, unit: str, edits: list, reshards: bool, first: bool) -> None:
        """Unshards for the user between a forward and its backward; edits the visible parameters before the forward."""
        if not self.expected.unsettled and first:
            self.edits(edits)
        self.take("forward", job=replace(self._lawful(job), training=True))
        self.take("unshard", unit=unit)
        if reshards:
            self.take("reshard", unit=unit)
        self.take("backward", which=len(self.expected.pending) - 1, syncs=True)

    @rule(
        job=jobs(),
        phase=st.sampled_from(["forward", "backward"]),
        unit=UNIT,
        caught=st.booleans(),
        resets=st.booleans(),
    )
    def fail(self, job: Job, phase: str, unit: str, caught: bool, resets: bool) -> None:
        """The user's code raises in a forward or backward."""
        job = replace(self._lawful(job), raises=(phase, unit), caught=caught, training=True)
        assume(unit not in job.skipped)
        self.take("forward", job=job)
        if self.expected.pending:
            self.take("backward", which=len(self.expected.pending) - 1, syncs=True)
        if resets:
            self.take("reset")

    @rule()
    def step(self) -> None:
        self.take("step")

    @rule(how=st.sampled_from(["model", "optimizer", "zeros"]))
    def zero_grad(self, how: str) -> None:
        self.take("zero_grad", how="optimizer" if self.expected.unsettled else how)

    @rule()
    def reset(self) -> None:
        self.take("reset")

    @precondition(settled)
    @rule(unit=UNIT)
    def unshard(self, unit: str) -> None:
        self.take("unshard", unit=unit)

    @precondition(settled)
    @rule(unit=UNIT)
    def reshard(self, unit: str) -> None:
        self.take("reshard", unit=unit)

    @precondition(settled)
    @rule(edits=EDITS)
    def edits(self, edits: list) -> None:
        for unit, name, value, by in edits:
            self.take("edit", unit=unit, name=name, value=value, by=self._rank(by))

    @precondition(settled)
    @rule(value=VALUES, assign=st.booleans())
    def load(self, value: int, assign: bool) -> None:
        self.take("load", value=value, assign=assign)

    @rule(dtype=st.sampled_from(["float32", "float32", "float64"]))
    def convert(self, dtype: str) -> None:
        self.take("convert", dtype="float32" if self.setup.momentum else dtype)

    @precondition(settled)
    @rule(first=jobs(), second=jobs(), edits=EDITS)
    def evaluate(self, first: Job, second: Job, edits: list) -> None:
        """Runs forwards without gradients, and edits the visible parameters in between."""
        for job in (first, second):
            self.take("forward", job=replace(self._lawful(job), training=False))
            self.edits(edits)
