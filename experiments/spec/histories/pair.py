"""A small world and the simplest model of it, side by side: every operation is done to both, and all is compared.

An operation is something that a user or a step does to one unit, lawful or not. One that is refused must say why, and leave
everything as it was.
"""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.errors import CrossframeError, ParamError, StateError, UnsupportedError
from crossframe.layout import post_forward
from crossframe.lifecycle import Move, UnitState
from crossframe.mesh import MeshSpec
from crossframe.plan import PlannedUnit
from crossframe.reference.live_unit import LiveUnit
from crossframe.reference.optim import SGD
from crossframe.reference.unit import Params
from crossframe.reference.world import World
from crossframe.step import UnitStep
from crossframe.unshard import UnshardRequest
from experiments.spec.histories.agree import Disagreement, check_grads, check_memory, same
from experiments.spec.histories.simple import Full, Refusal, Simple

LR = 0.5
FLAGS = "wrog"  # writeback, rank0_only, offload_to_cpu, with_grads
REQUESTS = {"".join(f for f, on in zip(FLAGS, flags, strict=True) if on): UnshardRequest(*flags)
            for flags in product([False, True], repeat=4)}  # fmt: skip
OPERATIONS = (
    *("unshard", "reshard", "reshard to group", "forward", "backward", "backward of one", "reduce", "step"),
    *(
        "toggle sync",
        "fail in forward",
        "fail in backward",
        "edit piece",
        "edit full",
        "edit grad",
        "zero one grad",
        "reset",
    ),
    *(
        "meddle in forward",
        "meddle in backward",
        "exit",
        "fail in summon",
        *(f"summon {flags}".strip() for flags in REQUESTS),
    ),
)


class UserError(Exception):
    """What a user's code raises in these histories."""


class Pair:
    """A world, and a model of each of its units; every operation is done to both.

    Attributes:
        pairs: every (state, move) that a unit took.
    """

    def __init__(self, units: Sequence[PlannedUnit], mesh: MeshSpec, *, poison: float | None = None) -> None:
        """
        Args:
            units: of one bucket each.
            poison: written into all padding at the start, and into that of gradients whenever there are new ones.
        """
        params = {
            spec.name: (np.arange(spec.numel) + 1 + i).reshape(spec.shape).astype(numpy_dtype(spec.dtype))
            for i, spec in enumerate(spec for unit in units for spec in unit.buckets[0].layout.params)
        }
        self.world = World(units, mesh, params, optimizer=SGD(lr=LR))
        self.syncs = True
        self.poison = poison
        self.pairs: set[tuple[UnitState, Move]] = set()
        self.models: dict[str, Simple] = {}
        for unit in units:
            names = [spec.name for spec in unit.buckets[0].layout.params]
            authoritative = [{name: params[name].copy() for name in names} for _ in range(mesh.replicate)]
            self.models[unit.name] = Simple(unit, mesh, unit.api, LR, authoritative)
        for unit in self.world.units.values():
            self._record(unit)
            self._poison(unit, unit.buckets[0].unit.shards)
        self.padding = {unit.name: self._padding(unit) for unit in self.world.units.values()}

    def _padding(self, unit: LiveUnit) -> list[bytes]:
        """What each rank's padding must hold: 42 or 0 (R05), or the poison."""
        layout, dtype = unit.buckets[0].layout, numpy_dtype(unit.buckets[0].layout.dtype)
        return [
            b"".join(
                np.full(run.stop - run.start, run.fill if self.poison is None else self.poison, dtype).tobytes()
                for run in layout.padding(unit.buckets[0].unit.shard_index(rank))
            )
            for rank in unit.ranks
        ]

    def _record(self, unit: LiveUnit) -> None:
        for step in unit.steps:
            self._record_step(step)

    def _record_step(self, step: UnitStep) -> None:
        take = step.move

        def move(move: Move) -> None:
            before = step.state
            take(move)
            self.pairs.add((before, move))

        step.move = move  # type: ignore[method-assign]

    def _poison(self, unit: LiveUnit, shards: Sequence[np.ndarray | None]) -> None:
        bucket = unit.buckets[0]
        for rank, shard in enumerate(shards):
            if shard is not None and self.poison is not None:
                for run in bucket.layout.padding(bucket.unit.shard_index(rank)):
                    shard[run.start : run.stop] = self.poison

    # Operations

    def take(self, operation: str, name: str | None = None, before: bytes | None = None) -> bool:
        """Do one of OPERATIONS to a unit, and compare.

        Args:
            name: which unit; None: the first.
            before: what `save` gives now, if the caller has it.

        Returns:
            Whether it was lawful.

        Raises:
            Disagreement: the world is not what the model says, or a refusal is not.
        """
        name = next(iter(self.models)) if name is None else name
        expected = self._refusal(operation, self.models[name])
        before = self.save() if expected is not None and before is None else before
        # An optimizer's step is of all units: the first that is summoned refuses it.
        refused = next((other for other, model in self.models.items() if model.shows == "summoned"), name)
        refused = refused if operation == "step" else name
        states = {state.describe() for state in self.world.units[refused].states}
        try:
            self._do(operation, self.world.units[name])
            came = None
        except CrossframeError as error:
            came = error
        if type(came) is not (expected or type(None)):
            raise Disagreement(
                f"{operation!r}: expected {expected.__name__ if expected else 'no refusal'}, got {came!r}"
            )
        if came is not None:
            self._check_refusal(operation, refused, states, came)
            if self.save() != before:
                raise Disagreement(f"{operation!r} was refused ({came}), and has changed something")
            return False
        self._do_simply(operation, self.models[name])
        self.check()
        return True

    def _check_refusal(self, operation: str, name: str, states: set[str], error: CrossframeError) -> None:
        """A refusal names the unit and the state, or the options, or the parameter and the rank, and says what to do."""
        message = str(error)
        if isinstance(error, StateError | ParamError):
            said = f"unit {name!r}" in message and any(state in message for state in states)
        elif isinstance(error, UnsupportedError):
            said = "=True" in message and "; " in message
        else:
            said = f"unit {name!r}" in message and "; " in message
        if not said:
            raise Disagreement(f"{operation!r}: the refusal does not say what it should: {message}")

    def _refusal(self, operation: str, model: Simple) -> Refusal:
        last = model.mesh.world_size - 1
        match operation.split():
            case ["reshard", "to", "group"]:
                return model.refusal_of_group()
            case ["step"]:
                return next((refusal for other in self.models.values() if (refusal := other.refusal_of_use())), None)
            case ["toggle", _] | ["zero", *_] | ["reset"]:
                return None
            case ["edit", "piece"]:
                return model.refusal_of_edit(last, full=False)
            case ["edit", "full"]:
                return model.refusal_of_edit(0, full=True)
            case ["edit", "grad"]:
                return model.refusal_of_grad_edit(0, model.names[0])
            case ["exit"] | ["fail", "in", "summon"]:
                return model.refusal_of_exit()
            case ["summon", *flags]:
                return model.refusal_of_summon(REQUESTS["".join(flags)])
        return model.refusal_of_use()

    def _do(self, operation: str, unit: LiveUnit) -> None:
        name, last = unit.name, unit.mesh.world_size - 1
        first = unit.buckets[0].layout.params[0]
        match operation.split():
            case ["unshard"]:
                unit.unshard()
            case ["reshard"]:
                unit.reshard()
            case ["reshard", "to", "group"]:
                unit.reshard_to_group()
            case ["forward"] | ["meddle", "in", "forward"]:
                unit.compute("forward", lambda rank, params: self._used(unit, rank, params, operation))
                unit.after_forward()
            case ["backward", *_] | ["meddle", "in", "backward"]:
                unit.compute("backward", lambda rank, params: self._used(unit, rank, params, operation))
                if self.syncs or not unit.keeps_full_unreduced:
                    unit.reshard()
                if self.syncs:
                    self.world.reduce(name)
                    self._poison_grads(unit)
            case ["reduce"]:
                self.world.reduce(name)
                self._poison_grads(unit)
            case ["step"]:
                self.world.step()
            case ["reset"]:
                self.world.reset()
            case ["toggle", _]:
                self.syncs = not self.syncs
            case ["fail", "in", "summon"]:
                unit.dismiss(failed=True)
            case ["fail", "in", phase]:
                self._fail(unit, phase)
            case ["edit", "piece"]:
                shown = unit.shown(last).get(first.name, np.zeros(0))
                unit.edit(last, first.name, np.full(shown.size, 16.0))
            case ["edit", "full"]:
                for rank in unit.ranks:
                    if rank == 0 or self.models[name].visible(rank):
                        unit.edit(rank, first.name, np.full(first.shape, 32.0 + rank))
            case ["edit", "grad"]:
                for rank in unit.ranks:
                    if rank == 0 or self.models[name].visible(rank):
                        unit.edit_grad(rank, first.name, np.full(first.shape, 2.0 + rank))
            case ["zero", *_]:
                unit.zero_grad([0])
            case ["exit"]:
                unit.dismiss()
            case ["summon", *flags]:
                unit.summon(REQUESTS["".join(flags)])
            case _:
                raise AssertionError(f"no such operation: {operation!r}")

    def _fail(self, unit: LiveUnit, phase: str) -> None:
        """The last rank raises, when the others have done their part; everything is reset then (R17)."""

        def work(rank: int, params: Any) -> Full:
            if rank == unit.mesh.world_size - 1:
                raise UserError
            return self._grads(unit, rank, phase)

        try:
            unit.compute(phase, work)
        except UserError:
            self.world.reset()

    def _do_simply(self, operation: str, model: Simple) -> None:
        unit = self.world.units[model.planned.name]
        match operation.split():
            case ["unshard"]:
                model.unshard()
            case ["reshard"]:
                model.reshard()
            case ["reshard", "to", "group"]:
                model.keep_group()
            case ["forward"] | ["meddle", "in", "forward"]:
                model.forward()
            case ["backward", *_] | ["meddle", "in", "backward"]:
                model.backward(lambda rank: self._grads(unit, rank, operation), syncs=self.syncs)
                if self.syncs:
                    model.reduce()
            case ["reduce"]:
                model.reduce()
            case ["step"]:
                for other in self.models.values():
                    other.step()
            case ["fail", "in", "summon"]:
                model.exit(failed=True)
            case ["fail", "in", _] | ["reset"]:
                for other in self.models.values():
                    other.reset()
            case ["edit", "piece"]:
                model.edit_piece(model.mesh.world_size - 1, 16.0)
            case ["edit", "full"]:
                for rank in filter(model.visible, model.ranks):
                    model.edit_full(rank, 32.0 + rank)
            case ["edit", "grad"]:
                for rank in filter(model.visible, model.ranks):
                    model.edit_grad(rank, model.names[0], 2.0 + rank)
            case ["zero", *_]:
                model.zero_grad([0])
            case ["exit"]:
                model.exit(failed=False)
            case ["summon", *flags]:
                model.summon(REQUESTS["".join(flags)])
            case ["toggle", _]:
                pass  # `_do` has toggled what both read
            case _:
                raise AssertionError(f"no such operation: {operation!r}")

    def _grads(self, unit: LiveUnit, rank: int, operation: str) -> Full:
        """A backward's gradients: of all parameters, or of the first on rank 0. Multiples of the number of ranks, so that
        their mean is exact."""
        size, params = unit.mesh.world_size, unit.buckets[0].layout.params
        if operation == "backward of one":
            params = params[:1] if rank == 0 else ()
        elif "backward" not in operation:
            params = ()
        return {spec.name: size * (np.arange(spec.numel).reshape(spec.shape) % 3 + rank + 1.0) for spec in params}

    def _poison_grads(self, unit: LiveUnit) -> None:
        self._poison(unit, unit.buckets[0].sharded_grads)

    def _used(self, unit: LiveUnit, rank: int, params: Params, operation: str) -> Full:
        """A forward or backward computes with what the model expects, in the dtype of compute."""
        model = replace(self.models[unit.name])
        model.authoritative, model.copy = self.models[unit.name].authoritative, list(self.models[unit.name].copy)
        model.unshard()
        same(model.full(rank), params, model.precision.gathered, f"rank {rank} computes with")
        if operation.startswith("meddle") and rank == 0:
            self._meddle(unit)
        return self._grads(unit, rank, operation)

    def _meddle(self, unit: LiveUnit) -> None:
        """What nobody may do in the middle of a forward or backward is refused there (R18), and changes nothing."""
        summon = UnshardRequest()
        meddles = {
            "summon": lambda: self.world.summon_full_params().__enter__(),
            "summon a unit": lambda: unit.summon(summon),
            "exit": unit.dismiss,
            "step": self.world.step,
            "reduce": lambda: self.world.reduce(unit.name),
        }
        before = self.save()
        states = {other.state.describe() for other in self.world.units.values()}
        for name, meddle in meddles.items():
            try:
                meddle()
            except StateError as error:
                if not any(state in str(error) for state in states) or self.save() != before:
                    raise Disagreement(f"{name} in the middle: refused with {error}, or something changed") from error
                continue
            raise Disagreement(f"{name} in the middle of a computation was not refused")

    def check(self) -> None:
        """Compare everything; Disagreement says what differs."""
        for name, model in self.models.items():
            unit = self.world.units[name]
            for rank in model.ranks:
                check_memory(unit, model, rank, self.padding[name][rank])
                check_grads(unit, model, rank)

    # Snapshots

    def save(self) -> bytes:
        """Everything that may change, in bytes."""
        memory = [
            ([step.snapshot for step in unit.steps], unit._request, bucket.full_layout is bucket.layout, bucket.unit.shards,
             {name: vars(bucket)[name] for name in MEMORY})
            for unit in self.world.units.values() for bucket in unit.buckets
        ]  # fmt: skip
        models = [{name: vars(model)[name] for name in REMEMBERED} for model in self.models.values()]
        return pickle.dumps((self.syncs, memory, models))

    def load(self, saved: bytes) -> None:
        """Go back to a snapshot."""
        self.syncs, memory, models = pickle.loads(saved)
        for unit, (snapshots, request, whole, shards, fields) in zip(self.world.units.values(), memory, strict=True):
            bucket = unit.buckets[0]
            unit._request = request
            for step, snapshot in zip(unit.steps, snapshots, strict=True):
                step.restore(snapshot)
            bucket.full_layout = (
                bucket.layout if whole else post_forward(bucket.layout, int(unit.reshard_after_forward))
            )
            bucket.unit.shards = shards
            vars(bucket).update(fields)
        for model, fields in zip(self.models.values(), models, strict=True):
            vars(model).update(fields)


MEMORY = ("full", "parts", "grads", "partials", "under_way", "sharded_grads", "reached", "shown_grads", "shown_names",
          "optimizer_state", "steps")  # fmt: skip
REMEMBERED = ("authoritative", "memory", "stale", "shows", "copy", "aliased", "waiting", "mean", "reached", "shown", "request",
              "before")  # fmt: skip
