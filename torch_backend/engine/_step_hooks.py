"""The hooks around forward and backward of all units under one root: they send signals to the step machine and execute its
actions.

`crossframe.step` decides when a unit is unsharded, resharded, prefetched and reduced. This module maps hooks of autograd to its
signals and queues pending reductions. [Note: streams] in memory/_streams.py describes streams.

[Note: hooks of autograd] Autograd runs hooks and the backward of a Function with grad mode disabled, or enabled under
`create_graph=True`, independent of the grad mode of forward. So tensors that are part of a module's graph (aliases, DTensors of
them) are created in forward and reused by recomputation in backward, and all hooks here run under no_grad.
"""

import functools
import sys
from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from crossframe.api import Api
from crossframe.errors import RunOrderError, UsageError
from crossframe.lifecycle import Activity
from crossframe.step import ModelStep, StepCount
from crossframe.step.root_step import Do
from torch_backend.engine._anchor import without_grad
from torch_backend.engine._settings_check import check_agreement
from torch_backend.engine._unit import Unit
from torch_backend.engine._unit_tree import NamedUnit
from torch_backend.memory._streams import Streams, streams_of
from torch_backend.modules._nested_tensors import cast_floating, moved, tensors_in
from torch_backend.ranks._failure import abandon, rejoin

# What a module may return without anything to differentiate in it.
_WITHOUT_TENSORS = (type(None), bool, int, float, complex, str, bytes, tuple, list, Mapping, Set)


# On a tensor that units have returned: (version, units). An in-place operation gives it a new version and graph, and a new hook.
_WATCHING = "_crossframe_watching"


@without_grad
def _begin_backwards(watching: "list[tuple[StepExecutor, Unit, Any, bool]]", grad: torch.Tensor) -> None:
    for executor, unit, _, whole in reversed(watching):
        executor.begin_backward(unit, whole=whole)


class StepExecutor:
    """Runs the step machine for all units under one root: sends it signals, and executes its actions.

    Attributes:
        units: in module pre-order; the root's comes first.
        root: the root's unit.
        is_last_backward: whether computation waits for the reductions at the end of a backward.
        post_optim_event: the event that the gathers of the next step wait for, instead of all earlier work.
    """

    def __init__(self, named_units: Sequence[NamedUnit], *, api: str) -> None:
        """Take over the units of a module tree before the first use of its root.

        Args:
            named_units: all units of the tree, the root's first.
            api: the API in use, for the agreement between ranks.

        Raises:
            RunOrderError: a unit that ran as a root before. A unit that ran below another root moves to this one.
            AgreementError: other ranks have other units.
        """
        for each in named_units:
            executor = executor_of(each.unit)
            if executor is not None and executor.root is each.unit:
                raise RunOrderError(
                    f"unit {each.name!r} has already run on its own, as a root; run the forward of the outermost sharded "
                    "module first, so that its units run as one model"
                )
        check_agreement(named_units, api)
        for each in named_units:
            unit = each.unit
            if unit.when_agreed is not None:
                unit.when_agreed()
                unit.when_agreed = None
            for i, bucket in enumerate(unit.buckets):
                bucket.unused.name(f"{each.name}/{i}")
        self.units = [each.unit for each in named_units]
        self.root = self.units[0]
        self._step = ModelStep([unit.step for unit in self.units])
        self._unit_of = {unit.step: unit for unit in self.units}
        steps = StepCount()
        for each in named_units:
            each.unit.place(each.name, [bucket.layout for bucket in each.buckets])
            each.unit.count_steps(steps)
            each.unit.executor = self
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
        # Units whose reduction is in flight, the oldest first.
        self._in_flight: deque[Unit] = deque()
        self.is_last_backward = True
        self.post_optim_event: Any = None

    @property
    def _within_autograd(self) -> bool:
        """Whether autograd is running; a forward inside it is a recomputation by activation checkpointing."""
        return torch._C._current_graph_task_id() != -1

    def _run(self, do: Do) -> None:
        unit_of = self._unit_of
        for step, actions, phase in do:
            if actions:
                unit_of[step].run(actions, phase)

    # Forward

    def begin_forward(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Signal that a unit's forward begins. Returns the inputs, cast as the user chose (R35) and, for the root, moved to its
        device."""
        dtype = unit.options.input_dtype if unit.buckets or unit.options.api is Api.FSDP2 else None
        if unit is self.root:
            dtype = unit.options.root_input_dtype or dtype
            if not self._within_autograd:
                self._begin_step()
                if unit.device is not None and unit.device.type != "cpu":
                    args, kwargs = moved((args, kwargs), unit.device)
        elif not self._within_autograd and self._step.runs_alone(unit.step):
            unit.free_outdated("forward", training=torch.is_grad_enabled())
            self._await_shards()
        if dtype is not None:
            args, kwargs = cast_floating((args, kwargs), dtype)
        recomputed = unit.state.activity == Activity.BACKWARD
        self._run(self._step.begin_forward(unit.step))
        if not recomputed and unit.buckets and not unit.trained and torch.is_grad_enabled():
            self._watch_inputs(unit, (args, kwargs))
        return args, kwargs

    def _begin_step(self) -> None:
        self._step.check_begin()
        if self._step.interrupted:
            self.reset()
        rejoin(self._groups)
        self._left_for = ""
        self._forget_inputs()
        self._run(self._step.begin_step(training=torch.is_grad_enabled()))
        self._await_shards()

    def _await_shards(self) -> None:
        """Let all-gathers wait for earlier writes to the shards."""
        self._streams = {streams_of(unit.device) for unit in self.units if unit.device is not None}
        for streams in self._streams:
            if self.post_optim_event is None:
                streams.shards_written()
            else:
                streams.gather_after(self.post_optim_event)
        self.post_optim_event = None

    def _watch_inputs(self, unit: Unit, inputs: Any) -> None:
        """Signal that the inputs of a frozen unit, which has no anchor, have their gradients."""
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
        """Remove the hooks of inputs, which may outlive their step (a trained prompt)."""
        for hook in self._input_hooks:
            hook.remove()
        self._input_hooks.clear()
        for unit in self.units:
            unit.num_frozen_uses = 0

    @without_grad
    def _end_frozen_use(self, unit: Unit) -> None:
        unit.num_frozen_uses -= 1
        if unit.num_frozen_uses == 0:
            self._run(self._step.inputs_complete(unit.step))

    def end_forward(self, unit: Unit, output: Any, *, whole: bool = True) -> Any:
        """Signal that a unit's forward has ended, and register hooks on its output. Returns the output, cast as the user chose.

        Args:
            whole: False if other modules of the unit have not run yet, so that its parameters stay unsharded.
        """
        if unit.state.activity == Activity.FORWARD:  # otherwise it was recomputed within its backward
            self._run(self._step.end_forward(unit.step, whole=whole))
            if torch.is_grad_enabled():
                self._watch(unit, output, whole=whole)
            unit.current_use = None
        dtype = unit.options.output_dtype
        return output if dtype is None else cast_floating(output, dtype)

    def has_run_in_part(self, unit: Unit) -> bool:
        """Whether modules of a unit have run in this forward, and others have not."""
        return self._step.has_run_in_part(unit.step)

    def _watch(self, unit: Unit, output: Any, *, whole: bool) -> None:
        tensors = list(tensors_in(output))
        if not any(tensor.requires_grad for tensor in tensors):
            self._step.needs_no_backward(unit.step)
        for tensor in tensors:
            if tensor.requires_grad:
                # A unit may return what one inside it has returned. On every rank the outer one begins its backward first,
                # whether or not something lies between their outputs there.
                version, watching = getattr(tensor, _WATCHING, (None, []))
                if version != tensor._version:
                    watching = []
                    setattr(tensor, _WATCHING, (tensor._version, watching))
                    tensor.register_hook(functools.partial(_begin_backwards, watching))
                watching.append((self, unit, unit.current_use, whole))
        opaque = not tensors and not isinstance(output, _WITHOUT_TENSORS)
        if opaque and unit.trained and unit.step.settings.reshard_after_forward:
            raise UsageError(
                f"unit {unit.name!r} returned a {type(output).__name__}, in which FSDP finds no tensor, so it could not "
                "unshard the parameters for backward; return tensors, alone or in a tuple, list, dict, set or dataclass"
            )

    def abandon_forward(self, unit: Unit) -> None:
        """Signal that the module raised in forward. Resets all units for the outermost module, and otherwise only this unit
        because an outer module may catch the exception (R17)."""
        unit.current_use = None
        if not self._within_autograd:  # there checkpointing ends what it computes again by an exception of its own
            error = sys.exception()
            self._left_for = self._left_for or f"{type(error).__name__} in the forward of unit {unit.name!r}"
        if unit is self.root and not self._within_autograd:
            self.reset()
        else:
            self._run(self._step.leave_forward(unit.step))

    # Backward

    def begin_backward(self, unit: Unit, *, whole: bool = True) -> None:
        """Signal that a gradient of the unit's output is available.

        Args:
            whole: False if other modules of the unit had not run when the output was made.
        """
        if not self._step.in_backward:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]
        self._run(self._step.begin_backward(unit.step, whole=whole))

    def backward_done(self, unit: Unit) -> None:
        """Signal that backward reached the unit's anchor, so that all gradients of its parameters are available."""
        unit.step.has_grads = unit.has_grads
        self._run(self._step.gradients_complete(unit.step))

    def reduce(self, unit: Unit) -> None:
        """Issue the reduction of a unit's gradients after advancing the pending ones by one collective, which bounds the number
        of pending reductions by the number of collectives of a reduction."""
        self._advance()
        unit.start_reduction()
        self._in_flight.append(unit)

    def _advance(self) -> None:
        """Take every reduction in flight one collective further, the oldest first: in one order on all ranks."""
        for _ in range(len(self._in_flight)):
            unit = self._in_flight.popleft()
            if not unit.advance_reduction():
                self._in_flight.append(unit)

    @without_grad
    def _end_backward(self) -> None:
        """The last thing in a backward."""
        for unit in self.units:
            unit.step.has_grads = unit.has_grads
        self._run(self._step.end_backward())
        while self._in_flight:
            self._advance()
        for streams in self._streams:
            host = any(bucket.offloaded for unit in self.units for bucket in unit.buckets)
            if host or self.is_last_backward:
                streams.end_reductions(host=host)
        self._step.leave_backward()
        self._forget_inputs()

    # After an exception

    def reset(self) -> None:
        """Bring every unit back to its shard after an exception in forward or backward (R17), and let the other ranks know."""
        abandon(self._groups, self._left_for or "an exception in its backward")
        self._left_for = ""
        for streams in self._streams:
            streams.end_reductions(host=False)
        self._forget_inputs()
        self._in_flight.clear()
        self._step.reset()
        for unit in self.units:
            unit.reset()

    def recover(self) -> None:
        """Reset all units after a backward that was begun and is not under way: it ended in an exception (R17)."""
        if self._step.in_backward and not self._within_autograd:
            self.reset()
            rejoin(self._groups)

    def check_summon(self) -> None:
        """Raise StateError if the user cannot be shown full parameters now, since a forward or backward is under way (R18)."""
        self.recover()
        self._step.check_summon()


def executor_of(unit: Unit) -> StepExecutor | None:
    """The step executor of the root that a unit runs under, once that has run."""
    return unit.executor  # type: ignore[return-value]
