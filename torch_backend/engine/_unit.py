"""A unit on this rank: executes its step machine's actions, and collects the gradients of all its uses until backward ends.

The rules are in `crossframe.step`: a method here sends a signal to the unit's machine and executes the actions that come back.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from crossframe.errors import StateError, UnsupportedError
from crossframe.layout import Layout
from crossframe.lifecycle import Activity, Residency, UnitState
from crossframe.precision import PrecisionPolicy
from crossframe.step import Action, StepCount, UnitStep
from crossframe.step.unit import Actions
from crossframe.unshard import UnshardRequest
from torch_backend.engine._anchor import Use, anchored, without_grad
from torch_backend.engine._bucket import Bucket, Writeback
from torch_backend.engine._unit_options import UnitOptions
from torch_backend.memory._full_grads import FullGrads
from torch_backend.memory._optimizer_steps import count_steps
from torch_backend.observe import observers, tell_local_grads
from torch_backend.ranks._collectives import UnitMesh


class Executor(Protocol):
    """What a unit asks of the step executor of its root (`_step_hooks.py`)."""

    def begin_backward(self, unit: "Unit") -> None:
        """Signal that a gradient of the unit's output is available."""

    def backward_done(self, unit: "Unit") -> None:
        """Signal that all gradients of the unit's parameters are available."""

    def reduce(self, unit: "Unit") -> None:
        """Issue the reduction of the unit's gradients."""

    def recover(self) -> None:
        """Reset all units after a backward that an exception has ended (R17)."""

    def check_summon(self) -> None:
        """Raise StateError if a forward or backward is under way (R18)."""


class Unit:
    """One unit on this rank.

    Attributes:
        name: its module's path from the root, known once the root has run; "" for the root.
        step: its step machine, which owns its state and its step settings.
        mesh: the ranks that it is sharded and replicated over; one of its buckets may have other ranks.
        options: the user's.
        executor: the step executor of the root that this unit runs under, once that has run.
        num_modules: how many modules it has; they are gathered and reduced together.
        when_agreed: what needs all ranks and waits until these have agreed that they have the same units; None: nothing.
        is_converting: whether its parameters are being moved or converted.
        call_around: under FSDP2, what is called before and after a forward of any of its modules.
    """

    call_around: tuple[Callable[..., Any], Callable[..., Any]]

    def __init__(
        self, name: str, buckets: Sequence[Bucket], mesh: UnitMesh, options: UnitOptions, *, num_modules: int = 1
    ) -> None:
        self.name, self.num_modules = name, num_modules
        self.buckets = list(buckets)
        self.mesh, self.options = mesh, options
        self.step = UnitStep(name, options.step)
        self.step.choose(conceal_after_forward=all(bucket.registrar.conceals_after_forward for bucket in self.buckets))
        self.when_agreed: Callable[[], None] | None = None
        self.is_converting = False
        self.executor: Executor | None = None
        self.count_steps(StepCount())
        # The use that a forward is in the midst of.
        self.current_use: Use | None = None
        # Of a unit without anything trained: forwards whose inputs have not got their gradients yet.
        self.num_frozen_uses = 0
        # What its modules computed with in the last forward; see [Note: hooks of autograd].
        self._used: list[Tensor] = []
        # Forwards whose gradients have not come, of those whose graphs are alive; and in which backward the unit is.
        self._uses: weakref.WeakSet[Use] = weakref.WeakSet()
        self._task = -1
        self._take_leaves()
        self._grads = FullGrads(self.leaves)

    def _take_leaves(self) -> None:
        # The unsharded parameters, bucket by bucket.
        self.leaves = [leaf for bucket in self.buckets for leaf in bucket.buffer.leaves]
        self.step.trained = any(leaf.requires_grad for leaf in self.leaves)
        self.step.mixed = any(bucket.precision.is_mixed for bucket in self.buckets)

    def _follow_leaves(self) -> None:
        """Other unsharded parameters are in use; gradients that wait for a reduction follow."""
        self._take_leaves()
        self._grads = self._grads.move_to(self.leaves, self._accumulated)

    def count_steps(self, steps: StepCount) -> None:
        """Let optimizers that hold any of this unit's parameters be counted in `steps`."""
        self._steps = steps
        self.step.count_steps(steps)
        for bucket in self.buckets:
            count_steps(bucket.registrar.managed(), steps)

    @property
    def device(self) -> torch.device | None:
        """Where it computes; None if it has no parameters."""
        return self.buckets[0].device if self.buckets else None

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether any of its parameters is a part of a DTensor."""
        return any(bucket.registrar.tp_params for bucket in self.buckets)

    def refuse_tensor_parallelism(self, advice: str) -> None:
        """Raise UnsupportedError if any of its parameters is a part of a DTensor."""
        for bucket in self.buckets:
            for spec, tp_param in zip(bucket.layout.params, bucket.registrar.tp_params, strict=False):
                if tp_param is not None:
                    raise UnsupportedError(
                        f"unit {self.name!r}: parameter {spec.name!r} is a part of a DTensor of placements "
                        f"{tp_param.spec.placements}: {advice}"
                    )

    def place(self, name: str, layouts: Sequence[Layout]) -> None:
        """Learn what the unit is called in the root's model, and of each bucket the layout under the names of that model."""
        for bucket, layout in zip(self.buckets, layouts, strict=True):
            bucket.place(layout)
        self.name = self.step.name = name

    @property
    def state(self) -> UnitState:
        """What memory holds, what the module shows, and what the unit is doing."""
        return self.step.state

    @property
    def trained(self) -> bool:
        """Whether any of its parameters takes a gradient."""
        return self.step.trained

    @property
    def is_full(self) -> bool:
        """Whether memory holds the unsharded parameters (or their all-gather is in flight)."""
        return self.step.is_unsharded

    def run(self, actions: Actions, phase: str) -> None:
        """Execute actions of the step machine.

        Args:
            phase: "forward", "backward" or "summon", for messages and the trace.
        """
        for action in actions:
            _EXECUTE[action](self, phase)

    def gather(self, phase: str) -> None:
        """Issue the all-gather, unless the unsharded parameters are in memory."""
        self.run(self.step.gather(), phase)

    def unshard(self, phase: str) -> None:
        """Have the unsharded parameters in memory, readable."""
        self.run(self.step.unshard(), phase)

    def expose(self) -> None:
        """Register the unsharded parameters."""
        self.run(self.step.expose(), "summon")

    def _adopt(self) -> None:
        for bucket in self.buckets:
            if bucket.registrar.adopt():
                bucket.shard_written()

    def _gather(self, phase: str) -> None:
        try:
            self._adopt()
        except BaseException:
            self.step.gather_failed()
            raise
        self._gather_from_group(phase)

    def _gather_from_group(self, phase: str) -> None:
        for bucket in self.buckets:
            bucket.gather(unit=self.name, phase=phase)

    def _reuse(self, phase: str) -> None:
        for bucket in self.buckets:
            if bucket.buffer.is_shard:
                bucket.registrar.adopt()

    def _wait(self, phase: str) -> None:
        changed = [bucket.finish() for bucket in self.buckets]
        if any(changed):
            self._follow_leaves()

    def _expose(self, phase: str) -> None:
        for bucket in self.buckets:
            bucket.registrar.sync_requires_grad()
            bucket.registrar.show_full()
        self.step.trained = any(leaf.requires_grad for leaf in self.leaves)

    def _expose_again(self, phase: str) -> None:
        for bucket in self.buckets:
            bucket.registrar.show_full()

    def _adopt_expose_again(self, phase: str) -> None:
        self._adopt()
        self._expose_again(phase)

    def _use(self, phase: str) -> None:
        """Let the module compute with the unsharded parameters, after a new anchor where gradients are wanted."""
        use = Use()
        if torch.is_grad_enabled() and self.step.trained:
            self._uses.add(use)
        self.current_use = use
        aliases, self._used = anchored(self, use, self.leaves), []
        for bucket in self.buckets:
            start = len(self._used)
            used = bucket.registrar.used_params(aliases[start : start + len(bucket.buffer.leaves)])
            bucket.registrar.use(used)
            self._used += used

    def _use_again(self, phase: str) -> None:
        """Let a recomputation in backward use the tensors that the last forward used."""
        start = 0
        for bucket in self.buckets if self._used else ():
            stop = start + len(bucket.buffer.leaves)
            bucket.registrar.use(self._used[start:stop])
            start = stop

    def _end_use(self, phase: str) -> None:
        for bucket in self.buckets:
            bucket.registrar.unuse()

    def _end_backward(self, phase: str) -> None:
        if self._used:
            self._end_use(phase)
            self._used = []

    def _conceal(self, phase: str) -> None:
        for bucket in self.buckets:
            bucket.registrar.show_sharded()

    def _free(self, phase: str) -> None:
        for bucket in self.buckets:
            bucket.free(unit=self.name, phase=phase)

    def _reshard_to_group(self, phase: str) -> None:
        for bucket in self.buckets:
            bucket.free_to_part(unit=self.name, phase=phase)

    def _begin_backward(self, phase: str) -> None:
        self._task = torch._C._current_graph_task_id()
        # The uses of a backward are added up first, and the backwards then.
        self._grads.keep(lambda: self._accumulated)

    def _reduce(self, phase: str) -> None:
        assert self.executor is not None
        self.executor.reduce(self)

    @property
    def summoned(self) -> bool:
        """Whether the user is shown unsharded parameters."""
        return self.step.is_summoned

    def check_summon(self) -> None:
        """Raise StateError if the user cannot be shown unsharded parameters now (R18)."""
        self.step.check_summon()

    def show_shards(self) -> None:
        """Let the module show its shards, whatever memory holds."""
        self.run(self.step.conceal(), "summon")
        if self.state.residency == Residency.RESHARD_GROUP:
            self._conceal("summon")

    def free_before_edit(self) -> None:
        """All ranks are about to write into their shards, which makes unsharded parameters stale: free them, unless the unit is
        in use."""
        self.run(self.step.free_before_edit(), "summon")

    def reshard(self, phase: str) -> None:
        """Show the shards and free the unsharded parameters, or the reshard group's shard."""
        self.run(self.step.reshard(), phase)

    def free_outdated(self, phase: str, *, training: bool) -> None:
        """Free unsharded parameters of an earlier forward that may no longer equal the shards."""
        self.run(self.step.free_outdated(training=training), phase)

    @property
    def _accumulated(self) -> list[torch.dtype]:
        """Of each leaf the dtype in which its gradients accumulate (R15)."""
        return [bucket.accumulated for bucket in self.buckets for _ in bucket.buffer.leaves]

    def check_double_backward(self) -> None:
        """Raise StateError if a graph of the parameters' gradients is asked for, where the interface refuses that."""
        if torch.is_grad_enabled() and self.options.refuses_double_backward:
            raise StateError(
                f"unit {self.name!r}: backward with create_graph=True reached its parameters; their gradients are reduced over "
                "the ranks and have no graph, so gradients of gradients cannot be computed; leave create_graph out"
            )

    @without_grad
    def collect(self, use: Use | None, indices: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """Autograd delivers the gradients of one use of the unit; see [Note: anchors]."""
        if self.state.activity != Activity.BACKWARD:
            if self.step.settings.reshard_after_forward or self.executor is None:
                raise StateError(
                    f"unit {self.name!r}: backward reached its parameters but not its output, so they were not "
                    "unsharded; return the tensors that the loss is computed from, alone or in a tuple, list, dict, "
                    "set or dataclass"
                )
            self.executor.begin_backward(self)
        if observers:
            names = [spec.name for bucket in self.buckets for spec in bucket.layout.params]
            tell_local_grads(
                self.name, {names[i]: grad for i, grad in zip(indices, grads, strict=True) if grad is not None}
            )
        self._grads.add(indices, grads)
        # What a nested backward delivers (reentrant checkpointing inside the unit) is a part; the rest is to come.
        if torch._C._current_graph_task_id() == self._task:
            if use is not None:
                self._uses.discard(use)
            if not self._uses and self.executor is not None:
                self.executor.backward_done(self)

    @property
    def has_grads(self) -> bool:
        """Whether full gradients wait for a reduction."""
        return self._grads.any

    def drop_grads(self) -> None:
        """Forget full gradients that were not reduced."""
        self._grads.drop()

    def start_reduction(self) -> None:
        """Issue the reduction of the full gradients that have come, and forget these."""
        start, settings, arrived = 0, self.step.settings, self._grads.take()
        for bucket in self.buckets:
            stop = start + len(bucket.buffer.leaves)
            grads, start = arrived[start:stop], stop
            if settings.reduce_unused:
                grads = [
                    torch.zeros_like(leaf) if grad is None and leaf.requires_grad else grad
                    for grad, leaf in zip(grads, bucket.buffer.leaves, strict=True)
                ]
            if any(grad is not None for grad in grads):
                hook = self.options.comm_hook
                bucket.start_reduction(grads, unit=self.name, hook=hook, all_reduce=settings.all_reduce_grads)

    def advance_reduction(self) -> bool:
        """Go one collective further, and hand a gradient that is ready to the optimizer's parameters. Returns whether all is
        done."""
        over = [bucket.advance_reduction() for bucket in self.buckets]
        return all(over)

    def reset(self) -> None:
        """Free whatever a step has left, after an exception and the machine's reset (R17)."""
        for bucket in self.buckets:
            bucket.reset()
        self.drop_grads()
        self._uses.clear()
        self._end_backward("backward")

    @contextmanager
    def converting(self, fn: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Inside, the module shows no parameters of this unit, so that `fn`, which `module.to` and its like apply to every
        parameter, is applied to the shards instead, and padding goes along (R25).

        Raises:
            StateError: in a forward or backward, or while parameters are summoned.
        """
        if self.executor is not None:
            self.executor.recover()
        if self.state != UnitState():
            self.run(self.step.edit(), "summon")
            self.reshard("summon")
        # Shards on meta cannot take values over. What was put in their place is taken over as soon as they are real.
        others: list[Mapping[int, nn.Parameter]] = []
        for bucket in self.buckets:
            if bucket.store.buffer.is_meta:
                others.append(bucket.registrar.put_back())
            else:
                others.append({})
                bucket.registrar.adopt()
            bucket.registrar.deregister()
        self.is_converting = True
        try:
            yield
        finally:
            self.is_converting = False
            for bucket, put_back in zip(self.buckets, others, strict=True):
                bucket.convert(fn)
                if put_back:
                    bucket.registrar.put_in(put_back)
                    if not bucket.store.buffer.is_meta:
                        bucket.registrar.adopt()
                count_steps(bucket.registrar.managed(), self._steps)
            self._follow_leaves()

    def compute_in(self, policy: PrecisionPolicy) -> None:
        """Gather and reduce by another policy from the next forward on."""
        self.reshard("forward")
        for bucket in self.buckets:
            bucket.compute_in(policy)
        self._follow_leaves()

    def summon(self, request: UnshardRequest, *, visible: bool, aside: bool = False) -> None:
        """Show the user unsharded parameters in full precision, if `visible` on this rank (R18, R19).

        Args:
            aside: show a copy, so that nothing is written unless it is written back.
        """
        self._adopt()
        self._shown = request, visible, aside
        self.run(self.step.summon(visible=visible), "summon")

    def _summon(self, phase: str) -> None:
        request, visible, aside = self._shown
        for bucket in self.buckets:
            bucket.summon(request, visible=visible, aside=aside, unit=self.name)

    def dismiss(self, writeback: Writeback, *, failed: bool) -> None:
        """End `summon`: write edits back as asked, then return to what memory held before (R20, R21, R24).

        Args:
            failed: whether the user's code has raised on this rank, so that other ranks may not come along.
        """
        self._writeback = writeback
        self.run(self.step.dismiss(), "summon")
        if not failed:
            self.run(self.step.return_memory(), "summon")

    def _dismiss(self, phase: str) -> None:
        with ExitStack() as stack:
            for bucket in self.buckets:
                stack.callback(bucket.dismiss, self._writeback)


_METHODS: dict[Action, Callable[[Unit, str], None]] = {
    Action.GATHER: Unit._gather,
    Action.GATHER_FROM_GROUP: Unit._gather_from_group,
    Action.REUSE: Unit._reuse,
    Action.WAIT: Unit._wait,
    Action.EXPOSE: Unit._expose,
    Action.EXPOSE_AGAIN: Unit._expose_again,
    Action.ADOPT_EXPOSE_AGAIN: Unit._adopt_expose_again,
    Action.CONCEAL: Unit._conceal,
    Action.USE: Unit._use,
    Action.USE_AGAIN: Unit._use_again,
    Action.END_USE: Unit._end_use,
    Action.END_BACKWARD: Unit._end_backward,
    Action.BEGIN_BACKWARD: Unit._begin_backward,
    Action.FREE: Unit._free,
    Action.FREE_GROUP_SHARD: Unit._free,
    Action.RESHARD_TO_GROUP: Unit._reshard_to_group,
    Action.REDUCE: Unit._reduce,
    Action.SUMMON: Unit._summon,
    Action.DISMISS: Unit._dismiss,
}
_EXECUTE = tuple(_METHODS[action] for action in Action)  # by number: actions of every hook look here


# Where a sharded module keeps its unit: in its `__dict__`, so that it is no attribute of the user's module tree.
UNIT = "_crossframe_unit"


def unit_of(module: nn.Module) -> Unit:
    """The unit of a module that either API has sharded."""
    return module.__dict__[UNIT]
