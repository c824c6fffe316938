"""When what happens: the hooks around forward and backward, the root, and prefetch.

The course of a step for one unit:

- before its forward: gather (unless prefetched), expose, and put an anchor before its parameters;
- after it: conceal and free where it reshards after forward, and hook the outputs;
- when the first gradient of an output arrives: gather, and prefetch the unit that ran before it (R16);
- when the anchor is reached: free, and reduce. The reductions before it are taken one collective further first, so that no more
  are under way while the next unit computes than a reduction has collectives;
- at the end of backward: reduce what is left, finish, forget.

The order of reductions is in [Note: order of reductions] in _reductions.py.
Collectives are issued and waited for later; what runs beside what on a device is in [Note: streams] in memory/_streams.py.

[Note: hooks of autograd] Autograd runs hooks, and the backward of a Function, without grad mode, or with it under
`create_graph=True`; never in that of the forward. Whatever is part of a module's graph (aliases, DTensors of them) is therefore
made in the forward and used again by what checkpointing computes in the backward; and everything that a hook does here runs under
no_grad.
"""

import functools
import itertools
import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from crossframe.errors import RunOrderError, UsageError
from crossframe.faces import Face
from crossframe.lifecycle import Activity, Move
from crossframe.strategy import Prefetch
from torch_backend.engine._reductions import Reductions
from torch_backend.engine._settings_check import check_agreement
from torch_backend.engine._unit import Unit
from torch_backend.engine._unit_tree import NamedUnit
from torch_backend.memory._optimizer_steps import StepCount
from torch_backend.memory._streams import Streams, streams_of
from torch_backend.modules._inputs import cast_floating, moved, tensors_in
from torch_backend.ranks._failure import abandon, rejoin

# What a module may return without anything to differentiate in it.
_WITHOUT_TENSORS = (type(None), bool, int, float, complex, str, bytes, tuple, list, Mapping, Set)


# Of a tensor that units have returned: which did, and the tensor's version then, behind which it has another graph.
_WATCHING = "_crossframe_watching"


@torch.no_grad()
def _begin_backwards(watching: "list[tuple[Schedule, Unit, Any]]", grad: torch.Tensor) -> None:
    for schedule, unit, _ in reversed(watching):
        schedule.begin_backward(unit)


class Schedule:
    """The units under one root, in order, and what of a step is under way.

    Attributes:
        units: in module pre-order; the root's comes first.
    """

    def __init__(self, named_units: Sequence[NamedUnit], *, face: str) -> None:
        """Take charge of the units of a module tree, whose root is about to be used for the first time.

        Args:
            named_units: every unit of the tree, the root's first.
            face: the interface in use, for the agreement between ranks.

        Raises:
            RunOrderError: a unit that ran as a root before. One that ran below another root leaves that for this one.
            AgreementError: other ranks have other units.
        """
        for each in named_units:
            schedule = each.unit.schedule
            if schedule is not None and schedule.root is each.unit:
                raise RunOrderError(
                    f"unit {each.name!r} has already run on its own, as a root; run the forward of the outermost sharded "
                    "module first, so that its units are scheduled together"
                )
        check_agreement(named_units, face)
        for each in named_units:
            unit = each.unit
            if unit.when_agreed is not None:
                unit.when_agreed()
                unit.when_agreed = None
            for i, bucket in enumerate(unit.buckets):
                bucket.unused.name(f"{each.name}/{i}")
        self.units = [each.unit for each in named_units]
        self.root = self.units[0]
        steps = StepCount()
        for each in named_units:
            each.unit.place(each.name, [bucket.layout for bucket in each.buckets])
            each.unit.count_steps(steps)
            each.unit.schedule = self
        self._groups = list(
            {
                communicator.ranks: communicator.group
                for unit in self.units
                for communicator in (unit.mesh.shards, unit.mesh.replicas)
                if communicator.size > 1
            }.values()
        )
        # Why a step was left, while an exception is under way.
        self._left_for = ""
        self._streams: set[Streams] = set()
        self._input_hooks: list[Any] = []
        # Units in the order in which their forwards began, and ended; and the one whose forward began next in the step before.
        self._begun: dict[Unit, None] = {}
        self._ended: dict[Unit, int] = {}
        self._next: dict[Unit, Unit] = {}
        # Units whose last output needed no gradient, so that no backward will reach them.
        self._without_backward: set[Unit] = set()
        self._order: list[Unit] = []
        self._reductions = Reductions()
        self._in_backward = False
        # Of units of several modules: those of which some have run, and the parameters are kept for the others.
        self._in_part: dict[Unit, None] = {}
        # Whether computation waits at the end of a backward for its reductions; and what gathers of the next step wait for.
        self.is_last_backward = True
        self.post_optim_event: Any = None

    @property
    def _within_autograd(self) -> bool:
        """Whether autograd is running now: a forward inside it is one that activation checkpointing computes again."""
        return torch._C._current_graph_task_id() != -1

    # Forward

    def begin_forward(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Unshard and expose a unit that is about to compute. Returns its inputs, the root's on the unit's device, in the dtype
        that the user chose for them (R35)."""
        dtype = unit.choices.input_dtype if unit.buckets or unit.choices.face is Face.FSDP2 else None
        if unit is self.root:
            dtype = unit.choices.root_input_dtype or dtype
            if not self._within_autograd:
                self._begin_step()
                if unit.device is not None and unit.device.type != "cpu":
                    args, kwargs = moved((args, kwargs), unit.device)
        elif self.root.state.activity != Activity.FORWARD and not self._within_autograd:
            self._begin_inside(unit)
        if dtype is not None:
            args, kwargs = cast_floating((args, kwargs), dtype)
        if unit.state.activity == Activity.BACKWARD:  # computed again, with what its backward holds
            unit.begin_backward()
            return args, kwargs
        if unit.state.activity == Activity.IDLE:
            unit.move(Move.BEGIN_FORWARD)
        unit.unshard("forward")
        if unit.choices.forward_prefetch:
            self._prefetch(self._next.get(unit), "forward")
        for other in unit.choices.forward_prefetch_units:
            self._prefetch(other, "forward")
        unit.expose()
        unit.begin_use()
        self._begun.setdefault(unit)
        if unit.buckets and not unit.trained and torch.is_grad_enabled():
            self._free_after_inputs(unit, (args, kwargs))
        return args, kwargs

    def _begin_step(self) -> None:
        for unit in self.units:
            if unit.summoned:
                unit.move(Move.BEGIN_FORWARD)  # refused, and the message says what to do
        if self._in_backward or any(unit.state.activity != Activity.IDLE for unit in self.units):
            self.reset()
        rejoin(self._groups)
        if self._begun:
            self._left_for = ""
            self._next = dict(itertools.pairwise(self._begun))
        self._begun.clear()
        self._ended.clear()
        self._without_backward.clear()
        self._forget_inputs()
        for unit in self.units:
            unit.free_outdated("forward", training=torch.is_grad_enabled())
        self._await_shards()

    def _begin_inside(self, unit: Unit) -> None:
        """A unit below the root is used by itself, unless one around it has begun."""
        if all(other.state.activity != Activity.FORWARD for other in self.units):
            unit.free_outdated("forward", training=torch.is_grad_enabled())
            self._await_shards()

    def _await_shards(self) -> None:
        """Gathers see what has been written to shards so far."""
        self._streams = {streams_of(unit.device) for unit in self.units if unit.device is not None}
        for streams in self._streams:
            if self.post_optim_event is None:
                streams.shards_written()
            else:
                streams.gather_after(self.post_optim_event)
        self.post_optim_event = None

    def _prefetch(self, unit: Unit | None, phase: str) -> None:
        """Issue a gather ahead of its need, unless it would be for nothing."""
        if unit is None or unit.state.activity != Activity.IDLE or unit.summoned:
            return
        if phase == "forward" or unit.choices.unshards_in_backward:
            unit.gather(phase)

    def _free_after_inputs(self, unit: Unit, inputs: Any) -> None:
        """Free a frozen unit, which has no anchor, once its inputs have their gradients."""
        tensors = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        if tensors:
            unit.num_frozen_uses += 1
            hook: Any = torch.autograd.graph.register_multi_grad_hook(
                tensors, lambda _grads: self._end_frozen_use(unit)
            )
            self._input_hooks.append(hook)
            # Before the unit that returned the tensor begins its backward, and gathers: hooks run in the order of the dict.
            for tensor, handle in zip(tensors, hook.handles, strict=True):
                hooks: Any = tensor._backward_hooks
                for earlier in [key for key in hooks if key != handle.id]:
                    hooks[earlier] = hooks.pop(earlier)

    def _forget_inputs(self) -> None:
        """Inputs may outlive their step (a prompt that is trained), and shall not keep its hooks."""
        for hook in self._input_hooks:
            hook.remove()
        self._input_hooks.clear()
        for unit in self.units:
            unit.num_frozen_uses = 0

    @torch.no_grad()
    def _end_frozen_use(self, unit: Unit) -> None:
        unit.num_frozen_uses -= 1
        if unit.num_frozen_uses == 0:
            self._free(unit)

    def end_forward(self, unit: Unit, output: Any, *, whole: bool = True) -> Any:
        """Reshard a unit that has computed, and watch for the gradient of its output. Returns that in the dtype that the user
        chose.

        Args:
            whole: False if other modules of the unit are still to run, for which its parameters stay.
        """
        if unit.state.activity == Activity.FORWARD:  # else computed again within its backward, which will reshard it
            unit.move(Move.END_FORWARD)
            unit.end_use()
            if whole:
                self._in_part.pop(unit, None)
                self._reshard_after_forward(unit)
            else:
                self._in_part.setdefault(unit)
            if torch.is_grad_enabled():
                self._watch(unit, output)
            unit.current_use = None
            if unit is self.root:
                for part in self._in_part:
                    self._reshard_after_forward(part)
                self._in_part.clear()
        dtype = unit.choices.output_dtype
        return output if dtype is None else cast_floating(output, dtype)

    def _reshard_after_forward(self, unit: Unit) -> None:
        self._ended.setdefault(unit, len(self._ended))
        if unit.choices.reshard_after_forward:
            unit.reshard_after_forward()
        else:
            self._conceal(unit)

    def _conceal(self, unit: Unit) -> None:
        """Full memory stays; what the module shows then is the face's."""
        if all(bucket.exposure.conceals_after_forward for bucket in unit.buckets):
            unit.conceal()

    def _watch(self, unit: Unit, output: Any) -> None:
        tensors = list(tensors_in(output))
        if not any(tensor.requires_grad for tensor in tensors):
            self._without_backward.add(unit)
        for tensor in tensors:
            if tensor.requires_grad:
                # A unit may return what one inside it has returned. On every rank the outer one begins its backward first,
                # whether or not something lies between their outputs there.
                version, watching = getattr(tensor, _WATCHING, (None, []))
                if version != tensor._version:
                    watching = []
                    setattr(tensor, _WATCHING, (tensor._version, watching))
                    tensor.register_hook(functools.partial(_begin_backwards, watching))
                watching.append((self, unit, unit.current_use))
        opaque = not tensors and not isinstance(output, _WITHOUT_TENSORS)
        if opaque and unit.trained and unit.choices.reshard_after_forward:
            raise UsageError(
                f"unit {unit.name!r} returned a {type(output).__name__}, in which no tensor can be seen, so that its "
                "backward would begin unnoticed, without its parameters; return tensors, as they are or in a tuple, list, "
                "dict, set or dataclass"
            )

    def abandon_forward(self, unit: Unit) -> None:
        """The module raised in its forward. Outermost, everything is brought back; inside, just this unit, since a module
        around it may catch the exception and go on (R17)."""
        unit.current_use = None
        if not self._within_autograd:  # there checkpointing ends what it computes again by an exception of its own
            error = sys.exception()
            self._left_for = self._left_for or f"{type(error).__name__} in the forward of unit {unit.name!r}"
        if unit is self.root and not self._within_autograd:
            self.reset()
        elif unit.state.activity == Activity.FORWARD:
            unit.move(Move.END_FORWARD)
            unit.reshard("forward")

    # Backward

    def begin_backward(self, unit: Unit) -> None:
        """A gradient of the unit's output has arrived."""
        self._join_backward()
        unit.begin_backward()
        for other in unit.choices.backward_prefetch_units:
            self._prefetch(other, "backward")
        if unit.choices.backward_prefetch is Prefetch.BACKWARD_PRE and not unit.choices.backward_prefetch_units:
            self._prefetch_before(unit)

    def _prefetch_before(self, unit: Unit) -> None:
        """Gather for backward the unit whose forward ended before this one's (R16)."""
        position = self._ended.get(unit, 0)
        if position > 0:
            before = self._order[position - 1]
            if before not in self._without_backward:
                self._prefetch(before, "backward")

    def _join_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._reductions.begin(reversed(self._begun))
            self._order = list(self._ended)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    def backward_done(self, unit: Unit) -> None:
        """The unit's anchor was reached: free its full parameters and reduce its gradients as soon as it is its turn."""
        self._free(unit)
        if unit.choices.backward_prefetch is Prefetch.BACKWARD_POST:
            self._prefetch_before(unit)
        if unit.reduces:
            self._reductions.done(unit)

    def _free(self, unit: Unit) -> None:
        if unit.state.activity == Activity.BACKWARD and self._reshards_after_backward(unit):
            unit.reshard("backward")

    def _reshards_after_backward(self, unit: Unit) -> bool:
        return unit.choices.reshard_after_backward and (unit.reduces or not unit.choices.keeps_full_unreduced)

    @torch.no_grad()
    def _end_backward(self) -> None:
        """The last thing in a backward. A unit in its forward called for a backward within it, and is left alone."""
        waiting = dict.fromkeys(self._reductions.waiting)
        late = [unit for unit in reversed(self.units) if unit not in waiting]
        for unit in (*waiting, *late):
            if unit.state.activity == Activity.FORWARD:
                continue
            if unit.reduces:
                self._reductions.issue(unit)
            if self._reshards_after_backward(unit):
                unit.reshard("backward")
            else:
                unit.keep()
                self._conceal(unit)
            unit.end_backward()
        self._reductions.finish()
        for streams in self._streams:
            host = any(bucket.offloaded for unit in self.units for bucket in unit.buckets)
            if host or self.is_last_backward:
                streams.end_reductions(host=host)
        self._leave_backward()

    def _leave_backward(self) -> None:
        self._in_backward = False
        self._forget_inputs()
        self._order = []
        self._reductions.clear()

    # After an exception

    def reset(self) -> None:
        """Bring every unit back to its shard after an exception in forward or backward (R17), and let the other ranks know."""
        abandon(self._groups, self._left_for or "an exception in its backward")
        self._left_for = ""
        for streams in self._streams:
            streams.end_reductions(host=False)
        self._leave_backward()
        self._begun.clear()
        self._ended.clear()
        self._in_part.clear()
        for unit in self.units:
            unit.reset()

    def recover(self) -> None:
        """Reset all units after a backward that was begun and is not under way: it ended in an exception (R17)."""
        if self._in_backward and not self._within_autograd:
            self.reset()
            rejoin(self._groups)

    def check_summon(self) -> None:
        """Raise StateError if the user cannot be shown full parameters now, since a forward or backward is under way (R18)."""
        self.recover()
        for unit in self.units:
            if unit.state.activity:
                unit.move(Move.SUMMON)
