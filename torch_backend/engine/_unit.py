"""A unit: what is gathered together, freed together and reduced together. The only writer of its own state."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from crossframe.errors import StateError, UnsupportedError
from crossframe.layout import Layout
from crossframe.lifecycle import Activity, Freshness, Move, Residency, UnitState
from crossframe.lifecycle import Exposure as Exposed
from crossframe.precision import PrecisionPolicy
from crossframe.unshard import UnshardRequest, residency_after
from torch_backend.engine._anchor import Use, anchored
from torch_backend.engine._bucket import Bucket, Writeback
from torch_backend.engine._choices import Choices
from torch_backend.memory._full_grads import FullGrads
from torch_backend.memory._optimizer_steps import StepCount, count_steps
from torch_backend.observe import tell_local_grads
from torch_backend.ranks._collectives import UnitMesh

if TYPE_CHECKING:
    from torch_backend.engine._schedule import Schedule


class Unit:
    """One unit on this rank.

    Attributes:
        name: its module's path from the root, known once the root has run; "" for the root.
        state: where it is in its life; only this class moves it.
        mesh: the ranks that it is sharded and replicated over; one of its buckets may have other ranks.
        choices: the user's.
        reduces: whether a backward ends in a reduction; False under no_sync (R15).
        all_reduces: whether a reduction goes on over the replicas; False leaves partial sums for a later one (R28).
        schedule: the schedule of the root that this unit runs under, once that has run.
        num_modules: how many modules it has; they are gathered and reduced together.
        when_agreed: what needs all ranks and waits until these have agreed that they have the same units; None: nothing.
        is_converting: whether its parameters are being moved or converted.
        call_around: under FSDP2, what is called before and after a forward of any of its modules.
    """

    call_around: tuple[Callable[..., Any], Callable[..., Any]]

    def __init__(
        self, name: str, buckets: Sequence[Bucket], mesh: UnitMesh, choices: Choices, *, num_modules: int = 1
    ) -> None:
        self.name, self.num_modules = name, num_modules
        self.buckets = list(buckets)
        self.mesh, self.choices = mesh, choices
        self.state = UnitState()
        self.reduces = self.all_reduces = True
        self.when_agreed: Callable[[], None] | None = None
        self.is_converting = False
        self.schedule: Schedule | None = None
        # Whether the full parameters that are here are for the next forward, and how many optimizer steps they have seen.
        self._kept = False
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
        # The unsharded parameters, bucket by bucket, and whether any of them takes a gradient.
        self.leaves = [leaf for bucket in self.buckets for leaf in bucket.buffer.leaves]
        self.trained = any(leaf.requires_grad for leaf in self.leaves)

    def _follow_leaves(self) -> None:
        """Other unsharded parameters are in use; gradients that wait for a reduction follow."""
        self._take_leaves()
        self._grads = self._grads.move_to(self.leaves, self._accumulated)

    def count_steps(self, steps: StepCount) -> None:
        """Let optimizers that hold any of this unit's parameters be counted in `steps`."""
        self._steps, self._steps_seen = steps, steps.num
        for bucket in self.buckets:
            count_steps(bucket.exposure.managed(), steps)

    @property
    def device(self) -> torch.device | None:
        """Where it computes; None if it has no parameters."""
        return self.buckets[0].device if self.buckets else None

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether any of its parameters is a part of a DTensor."""
        return any(bucket.exposure.wholes for bucket in self.buckets)

    def refuse_tensor_parallelism(self, advice: str) -> None:
        """Raise UnsupportedError if any of its parameters is a part of a DTensor."""
        for bucket in self.buckets:
            for spec, whole in zip(bucket.layout.params, bucket.exposure.wholes, strict=False):
                if whole is not None:
                    raise UnsupportedError(
                        f"unit {self.name!r}: parameter {spec.name!r} is a part of a DTensor of placements "
                        f"{whole.spec.placements}: {advice}"
                    )

    def place(self, name: str, layouts: Sequence[Layout]) -> None:
        """Learn what the unit is called in the root's model, and of each bucket the layout under the names of that model."""
        for bucket, layout in zip(self.buckets, layouts, strict=True):
            bucket.place(layout)
        self.name = name

    def move(self, move: Move) -> None:
        """Take one step of the lifecycle, or raise StateError with this unit's name."""
        self.state = self.state.after(move, self.name)

    @property
    def is_full(self) -> bool:
        """Whether memory holds the full parameters (or their gather is under way)."""
        return self.state.residency == Residency.FULL

    def gather(self, phase: str) -> None:
        """Issue the all-gather, unless the full parameters are here and fresh."""
        if self.is_full:
            for bucket in self.buckets:
                if bucket.buffer.is_shard and self.state.exposure == Exposed.SHARDED:
                    bucket.exposure.adopt()
            return
        if self.state.residency == Residency.SHARD:
            for bucket in self.buckets:
                bucket.exposure.adopt()
        self.move(Move.GATHER)
        self._steps_seen = self._steps.num
        self._kept = False
        for bucket in self.buckets:
            bucket.gather(unit=self.name, phase=phase)

    def unshard(self, phase: str) -> None:
        """Have the full parameters in memory, readable."""
        self.gather(phase)
        changed = [bucket.finish() for bucket in self.buckets]
        if any(changed):
            self._follow_leaves()

    def expose(self, *, again: bool = False) -> None:
        """Register the full parameters.

        Args:
            again: for a backward, which trains what the forward did.
        """
        if self.state.exposure != Exposed.FULL:
            self.move(Move.EXPOSE)
            for bucket in self.buckets:
                if not again:
                    bucket.exposure.sync_requires_grad()
                bucket.exposure.show_full()
            if not again:
                self.trained = any(leaf.requires_grad for leaf in self.leaves)

    def begin_use(self) -> None:
        """Let the module compute with the full parameters, after a new anchor where gradients are wanted."""
        use = Use()
        if torch.is_grad_enabled() and self.trained:
            self._uses.add(use)
        self.current_use = use
        aliases, self._used = anchored(self, use, self.leaves), []
        for bucket in self.buckets:
            start = len(self._used)
            used = bucket.exposure.used_params(aliases[start : start + len(bucket.buffer.leaves)])
            bucket.exposure.use(used)
            self._used += used

    def _resume_use(self) -> None:
        """Let what is computed again in a backward use the tensors that the last forward used."""
        start = 0
        for bucket in self.buckets if self._used else ():
            stop = start + len(bucket.buffer.leaves)
            bucket.exposure.use(self._used[start:stop])
            start = stop

    def end_use(self) -> None:
        """The module has computed."""
        for bucket in self.buckets:
            bucket.exposure.unuse()

    def conceal(self) -> None:
        """Let the module show the shards again."""
        if self.state.exposure == Exposed.FULL:
            self.move(Move.CONCEAL)
            for bucket in self.buckets:
                bucket.exposure.show_sharded()

    def show_shards(self) -> None:
        """Let the module show its shards, whatever memory holds."""
        self.conceal()
        if self.state.residency == Residency.K_GROUP:
            for bucket in self.buckets:
                bucket.exposure.show_sharded()

    def free_before_edit(self) -> None:
        """All ranks are about to write into their shards: what was gathered of them goes stale, so free it, unless the unit is in
        use."""
        if self.state.activity == Activity.IDLE and not self.summoned:
            self.reshard("summon")

    def reshard(self, phase: str) -> None:
        """Show the shards and free the full parameters, or what a smaller group holds of them."""
        self.conceal()
        if self.state.residency != Residency.SHARD:
            self.move(Move.RESHARD)
            for bucket in self.buckets:
                bucket.free(unit=self.name, phase=phase)

    def reshard_after_forward(self) -> None:
        """Free what need not be there between forward and backward (R08, R14)."""
        if not self.buckets or self.buckets[0].part is None:
            self.reshard("forward")
            return
        self.conceal()
        self.move(Move.RESHARD_TO_GROUP)
        for bucket in self.buckets:
            bucket.free_to_part(unit=self.name, phase="forward")

    def keep(self) -> None:
        """The next forward takes the full parameters as they are: the user asked for them, or a backward that reduced nothing
        left them (R15)."""
        self._kept = True

    def free_outdated(self, phase: str, *, training: bool) -> None:
        """Free full parameters that an earlier forward left behind and that may no longer equal the shards.

        What decides must be the same on every rank, or some would gather and others not: so not whether this rank's shard was
        written, which a rank without elements never sees, but whether an optimizer has stepped, and whether a forward for
        training begins, which gathers anew in any case.
        """
        if self.state.residency != Residency.SHARD and self._steps_seen != self._steps.num:
            self.conceal()
            self.move(Move.EDIT_SHARDS)
            assert self.state.freshness == Freshness.STALE
            self.reshard(phase)
        elif training and not self._kept:
            self.reshard(phase)

    def begin_backward(self) -> None:
        """A gradient has reached the unit: have the full parameters, also for what is computed again."""
        if self.state.activity != Activity.BACKWARD:
            self.move(Move.BEGIN_BACKWARD)
            self._task = torch._C._current_graph_task_id()
            # The uses of a backward are added up first, and the backwards then.
            self._grads.keep(lambda: self._accumulated)
        if not self.choices.unshards_in_backward and not self.is_full:
            return
        self.unshard("backward")
        if self.state.exposure != Exposed.FULL:
            if (
                not self.choices.reshard_after_forward
            ):  # nothing was gathered, and what a user has put in goes to the shards
                for bucket in self.buckets:
                    bucket.exposure.adopt()
            self.expose(again=True)
        self._resume_use()

    @property
    def _accumulated(self) -> list[torch.dtype]:
        """Of each leaf the dtype in which its gradients accumulate (R15)."""
        return [bucket.accumulated for bucket in self.buckets for _ in bucket.buffer.leaves]

    def end_backward(self) -> None:
        """The whole backward is over."""
        if self.state.activity == Activity.BACKWARD:
            self.move(Move.END_BACKWARD)
        if self._used:
            self.end_use()
            self._used = []

    def check_double_backward(self) -> None:
        """Raise StateError if a graph of the parameters' gradients is asked for, where the interface refuses that."""
        if torch.is_grad_enabled() and self.choices.refuses_double_backward:
            raise StateError(
                f"unit {self.name!r}: backward with create_graph=True reached its parameters; their gradients are reduced over "
                "the ranks and have no graph, so gradients of gradients cannot be computed; leave create_graph out"
            )

    def collect(self, use: Use | None, indices: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """Autograd delivers the gradients of one use of the unit; see [Note: anchors]."""
        if self.state.activity != Activity.BACKWARD:
            if self.choices.reshard_after_forward or self.schedule is None:
                raise StateError(
                    f"unit {self.name!r}: gradients of its parameters came, but none of its output, so that they were "
                    "computed without the parameters; return the tensors that the loss is made of, as they are or in a "
                    "tuple, list, dict, set or dataclass"
                )
            self.schedule.begin_backward(self)
        self._grads.add(indices, grads)
        # What a nested backward delivers (reentrant checkpointing inside the unit) is a part; the rest is to come.
        if torch._C._current_graph_task_id() == self._task:
            if use is not None:
                self._uses.discard(use)
            if not self._uses and self.schedule is not None:
                self.schedule.backward_done(self)

    @property
    def has_grads(self) -> bool:
        """Whether full gradients wait for a reduction."""
        return self._grads.any

    def drop_grads(self) -> None:
        """Forget full gradients that were not reduced."""
        self._grads.drop()

    def start_reduction(self) -> None:
        """Issue the reduction of the full gradients that have come, and forget these."""
        start, choices, arrived = 0, self.choices, self._grads.take()
        for bucket in self.buckets:
            stop = start + len(bucket.buffer.leaves)
            grads, start = arrived[start:stop], stop
            if choices.reduces_unused:
                grads = [
                    torch.zeros_like(leaf) if grad is None and leaf.requires_grad else grad
                    for grad, leaf in zip(grads, bucket.buffer.leaves, strict=True)
                ]
            if any(grad is not None for grad in grads):
                tell_local_grads(self.name, bucket.layout, grads, bucket.buffer.leaves)
                bucket.start_reduction(grads, unit=self.name, hook=choices.comm_hook, all_reduce=self.all_reduces)

    def advance_reduction(self) -> bool:
        """Go one collective further, and hand a gradient that is ready to the optimizer's parameters. Returns whether all is
        done."""
        over = [bucket.advance_reduction() for bucket in self.buckets]
        return all(over)

    def reset(self) -> None:
        """Back to the shard from anywhere (R17): nothing full, nothing pending, no gradient half done."""
        for bucket in self.buckets:
            bucket.reset()
        self.drop_grads()
        self.move(Move.RESET)
        self._uses.clear()
        self.end_backward()

    @contextmanager
    def converting(self, fn: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Inside, the module shows no parameters of this unit, so that `fn`, which `module.to` and its like apply to every
        parameter, is applied to the shards instead, and padding goes along (R25).

        Raises:
            StateError: in a forward or backward, or while parameters are summoned.
        """
        if self.schedule is not None:
            self.schedule.recover()
        if self.state != UnitState():
            if self.state.activity == Activity.IDLE:
                self.conceal()
            self.move(Move.EDIT_SHARDS)  # refused in use, and the message says why
            self.reshard("summon")
        # Shards on meta cannot take values over. What was put in their place is taken over as soon as they are real.
        others: list[Mapping[int, nn.Parameter]] = []
        for bucket in self.buckets:
            if bucket.store.buffer.is_meta:
                others.append(bucket.exposure.put_back())
            else:
                others.append({})
                bucket.exposure.adopt()
            bucket.exposure.deregister()
        self.is_converting = True
        try:
            yield
        finally:
            self.is_converting = False
            for bucket, put_back in zip(self.buckets, others, strict=True):
                bucket.convert(fn)
                if put_back:
                    bucket.exposure.put_in(put_back)
                    if not bucket.store.buffer.is_meta:
                        bucket.exposure.adopt()
                count_steps(bucket.exposure.managed(), self._steps)
            self._follow_leaves()

    def compute_in(self, policy: PrecisionPolicy) -> None:
        """Gather and reduce by another policy from the next forward on."""
        self.reshard("forward")
        for bucket in self.buckets:
            bucket.compute_in(policy)
        self._follow_leaves()

    @property
    def summoned(self) -> bool:
        """Whether the user is being shown full parameters."""
        return self.state.exposure == Exposed.SUMMONED

    def check_summon(self) -> None:
        """Raise StateError if the user cannot be shown full parameters now (R18)."""
        if self.summoned or self.state.activity:
            self.move(Move.SUMMON)

    def summon(self, request: UnshardRequest, *, visible: bool, aside: bool = False) -> Residency:
        """Show the user full parameters, if `visible` on this rank. Returns what memory shall hold afterwards (R21).

        Args:
            aside: show a copy, so that nothing is written unless it is written back.

        They are gathered in any case: what the user is shown, and may write back, is what the shards hold now.
        """
        before = residency_after(self.state.residency, [bucket.precision for bucket in self.buckets])
        for bucket in self.buckets:
            bucket.exposure.adopt()
        self.reshard("summon")
        self.move(Move.GATHER)
        for bucket in self.buckets:
            bucket.summon(request, visible=visible, aside=aside, unit=self.name)
        self.move(Move.SUMMON)
        if not visible:
            self.move(Move.RESHARD)
        return before

    def dismiss(self, writeback: Writeback, *, after: Residency) -> None:
        """End `summon`: persist the edits as asked, then return to the memory that was there before (R20, R21, R24).

        What was full before is gathered again, so that it holds what the shards hold: all ranks' edits merged, or none of
        them.

        Args:
            after: what memory shall hold; the shard alone when the user's code has failed, since other ranks may not come along.
        """
        self.move(Move.DISMISS)
        if self.is_full:
            self.move(Move.RESHARD)
        with ExitStack() as stack:
            for bucket in self.buckets:
                stack.callback(bucket.dismiss, writeback)
        if after == Residency.FULL:
            self.unshard("summon")


# Where a sharded module keeps its unit: in its `__dict__`, so that it is no attribute of the user's module tree.
UNIT = "_crossframe_unit"


def unit_of(module: nn.Module) -> Unit:
    """The unit of a module that either face has sharded."""
    return module.__dict__[UNIT]
