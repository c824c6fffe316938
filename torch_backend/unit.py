"""A unit: what is gathered together, freed together and reduced together. The only writer of its own state."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from crossframe.errors import StateError
from crossframe.layout import Layout
from crossframe.lifecycle import Activity, Freshness, Move, Residency, UnitState
from crossframe.lifecycle import Exposure as Exposed
from crossframe.params import ParamSpec
from crossframe.trace import FREE, Event
from torch_backend.anchor import Use, anchored
from torch_backend.collectives import Communicator, dtype_name
from torch_backend.exposure import Exposure
from torch_backend.gather import GatherBuffer
from torch_backend.grads import GradStore
from torch_backend.observe import observers
from torch_backend.store import ShardStore

if TYPE_CHECKING:
    from torch_backend.schedule import Schedule


@dataclass
class Bucket:
    """The uniform part of a unit (R11): one layout, and the memory of its shard, its full parameters and its gradients."""

    layout: Layout
    store: ShardStore
    buffer: GatherBuffer
    grads: GradStore
    exposure: Exposure


class Unit:
    """One unit on this rank.

    Attributes:
        name: its module's path from the root, known once the root has run; "" for the root.
        state: where it is in its life; only this class moves it.
        reshard_after_forward: whether full memory is freed between forward and backward (R13, R14).
        reduces: whether a backward ends in a reduction; False under no_sync (R15).
        keeps_full_unreduced: whether a backward without reduction leaves the full parameters in memory (R15).
        schedule: the schedule of the root that this unit runs under, once that has run.
    """

    def __init__(
        self,
        name: str,
        buckets: Sequence[Bucket],
        communicator: Communicator,
        *,
        reshard_after_forward: bool,
        keeps_full_unreduced: bool,
    ) -> None:
        self.name = name
        self.buckets = list(buckets)
        self.communicator = communicator
        self.state = UnitState()
        self.reshard_after_forward = reshard_after_forward
        self.reduces = True
        self.keeps_full_unreduced = keeps_full_unreduced
        self.schedule: Schedule | None = None
        # Whether the full parameters that are here are for the next forward, and how many optimizer steps they have seen.
        self._kept = False
        self._steps_seen = 0
        # The unsharded parameters, bucket by bucket, and whether any of them takes a gradient.
        self.leaves = [leaf for bucket in self.buckets for leaf in bucket.buffer.leaves]
        self.trained = any(leaf.requires_grad for leaf in self.leaves)
        self._shown = False
        self._aliases: list[Tensor] = []
        # Full gradients that autograd has delivered and that wait for the reduction, one a leaf.
        self._grads: list[Tensor | None] = [None] * len(self.leaves)
        # Forwards whose gradients have not come, of those whose graphs are alive; and in which backward the unit is.
        self._uses: weakref.WeakSet[Use] = weakref.WeakSet()
        self._task = -1

    @property
    def device(self) -> torch.device | None:
        """Where its parameters are; None if it has none."""
        return self.buckets[0].store.buffer.device if self.buckets else None

    def place(self, name: str) -> None:
        """Learn the path from the root, and name the parameters after it."""
        self.name = name
        for bucket in self.buckets:
            layout = replace(bucket.layout, params=named_below(name, bucket.layout.params))  # type: ignore[type-var]
            bucket.layout = bucket.store.layout = bucket.buffer.layout = bucket.grads.layout = layout

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
            return
        for bucket in self.buckets:
            bucket.exposure.adopt()
        self.move(Move.GATHER)
        self._steps_seen = optimizer_steps()
        self._kept = False
        for bucket in self.buckets:
            bucket.buffer.start(bucket.store.buffer, self.communicator, unit=self.name, phase=phase)

    def unshard(self, phase: str) -> None:
        """Have the full parameters in memory, readable."""
        self.gather(phase)
        for bucket in self.buckets:
            bucket.buffer.finish()

    def expose(self) -> None:
        """Register the full parameters."""
        if self.state.exposure != Exposed.FULL:
            self.move(Move.EXPOSE)
            for bucket in self.buckets:
                bucket.exposure.sync_requires_grad()
                bucket.exposure.show_full()
            self.trained = any(leaf.requires_grad for leaf in self.leaves)

    def begin_use(self) -> None:
        """Let the module compute with the full parameters, behind a new anchor where gradients are wanted."""
        use = Use()
        if torch.is_grad_enabled() and self.trained:
            self._uses.add(use)
        self._aliases = anchored(self, use, self.leaves)
        self._put_aliases()

    def resume_use(self) -> None:
        """Let what is computed again within a backward have what the last forward had."""
        if self._aliases:
            self._put_aliases()

    def _put_aliases(self) -> None:
        start = 0
        for bucket in self.buckets:
            stop = start + len(bucket.buffer.leaves)
            bucket.exposure.use(self._aliases[start:stop])
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

    def reshard(self, phase: str) -> None:
        """Show the shards and free the full parameters."""
        self.conceal()
        if self.is_full:
            self._free(phase)

    def _free(self, phase: str) -> None:
        self.move(Move.RESHARD)
        for bucket in self.buckets:
            bucket.buffer.free()
            self._tell_free(bucket, phase)

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
        if self.is_full and self._steps_seen != optimizer_steps():
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
        self.unshard("backward")
        if self.state.exposure != Exposed.FULL:
            self.expose()
            self.resume_use()

    def end_backward(self) -> None:
        """The whole backward is over."""
        if self.state.activity == Activity.BACKWARD:
            self.move(Move.END_BACKWARD)
        self._aliases = []

    def collect(self, use: Use, indices: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """Autograd delivers the gradients of one use of the unit; see [Note: anchors]."""
        if self.state.activity != Activity.BACKWARD:
            if self.reshard_after_forward or self.schedule is None:
                raise StateError(
                    f"unit {self.name!r}: gradients of its parameters came, but none of its output, so that they were "
                    "computed without the parameters; return the tensors that the loss is made of, as they are or in a "
                    "tuple, list, dict, set or dataclass"
                )
            self.schedule.begin_backward(self)
        for i, grad in zip(indices, grads, strict=True):
            if grad is not None:
                # Out of place: the tensor that came may be another node's gradient as well.
                before = self._grads[i]
                self._grads[i] = grad if before is None else before + grad
        # What a nested backward delivers (reentrant checkpointing inside the unit) is a part; the rest is to come.
        if torch._C._current_graph_task_id() == self._task:
            self._uses.discard(use)
            if not self._uses and self.schedule is not None:
                self.schedule.backward_done(self)

    @property
    def has_grads(self) -> bool:
        """Whether full gradients wait for a reduction."""
        return any(grad is not None for grad in self._grads) or any(leaf.grad is not None for leaf in self.leaves)

    def drop_grads(self) -> None:
        """Forget full gradients that were not reduced."""
        self._grads = [None] * len(self._grads)
        for leaf in self.leaves:
            leaf.grad = None

    def start_reduction(self) -> None:
        """Issue the reduction of the full gradients that have come, and forget these."""
        start = 0
        for bucket in self.buckets:
            stop = start + len(bucket.buffer.leaves)
            # A leaf has a gradient of its own where the user took it from `parameters()` while it was registered.
            grads = [_sum(a, leaf.grad) for a, leaf in zip(self._grads[start:stop], bucket.buffer.leaves, strict=True)]
            start = stop
            if any(grad is not None for grad in grads):
                self._tell_local_grads(bucket, grads)
                bucket.grads.start(grads, self.communicator, unit=self.name)
        self.drop_grads()

    def finish_reduction(self) -> None:
        """Wait for the reduction and hand the sharded gradient to the optimizer's parameters."""
        for bucket in self.buckets:
            if bucket.grads.pending:
                bucket.exposure.add_grad(bucket.grads.finish())

    def reset(self) -> None:
        """Back to the shard from anywhere (R17): nothing full, nothing pending, no gradient half done."""
        for bucket in self.buckets:
            bucket.exposure.show_sharded()
            bucket.buffer.free()
            bucket.grads.abandon()
        self.drop_grads()
        self.move(Move.RESET)
        self._uses.clear()
        self.end_backward()

    @property
    def summoned(self) -> bool:
        """Whether the user is being shown full parameters."""
        return self.state.exposure == Exposed.SUMMONED

    def check_summon(self) -> None:
        """Raise StateError if the user cannot be shown full parameters now (R18)."""
        if self.summoned or self.state.activity:
            self.move(Move.SUMMON)

    def summon(self, *, visible: bool) -> bool:
        """Show the user full parameters, if `visible` on this rank. Returns whether memory held them before (R21).

        They are gathered in any case: what the user is shown, and may write back, is what the shards hold now.
        """
        was_full = self.is_full
        self.reshard("summon")
        self.unshard("summon")
        self.move(Move.SUMMON)
        if visible:
            for bucket in self.buckets:
                bucket.exposure.summon()
        else:
            self._free("summon")
        self._shown = visible
        return was_full

    def dismiss(self, *, writeback: bool, was_full: bool, failed: bool) -> None:
        """End `summon`: persist the edits if asked, then return to the memory that was there before (R20, R21, R24).

        What was full before is gathered again, so that it holds what the shards hold: all ranks' edits merged, or none of
        them. Not so when the user's code has `failed`: then it is freed, since other ranks may not come along.
        """
        edited = [bucket.exposure.dismiss() if self._shown else [] for bucket in self.buckets]
        self.move(Move.DISMISS)
        try:
            if writeback:
                for bucket, full in zip(self.buckets, edited, strict=True):
                    bucket.store.write(full)
        finally:
            if self.is_full:
                for bucket in self.buckets:
                    bucket.buffer.realias()
                self._free("summon")
        if was_full and not failed:
            self.unshard("summon")

    def _tell_free(self, bucket: Bucket, phase: str) -> None:
        for observer in observers:
            full = bucket.buffer.full
            num_bytes = bucket.layout.gathered_numel * full.itemsize
            observer.event(Event(FREE, self.name, phase, dtype_name(full.dtype), num_bytes, self.communicator.ranks))

    def _tell_local_grads(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> None:
        if observers:
            named = {
                spec.name: torch.zeros_like(leaf) if grad is None else grad
                for spec, leaf, grad in zip(bucket.layout.params, bucket.buffer.leaves, grads, strict=True)
            }
            for observer in observers:
                observer.local_grads(self.name, named)


_optimizer_steps = 0


def optimizer_steps() -> int:
    """How many optimizers have stepped in this process: shards may have changed when this has."""
    return _optimizer_steps


def _count_step(*_: object) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


def named_below(module: str, params: Sequence[ParamSpec]) -> tuple[ParamSpec, ...]:
    """Parameters named relative to a module, under their full names."""
    prefix = f"{module}." if module else ""
    return tuple(
        replace(spec, name=prefix + spec.name, aliases=tuple(prefix + alias for alias in spec.aliases))
        for spec in params
    )


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


# Where a sharded module keeps its unit: in its `__dict__`, so that it is no attribute of the user's module tree.
UNIT = "_crossframe_unit"


def unit_of(module: nn.Module) -> Unit:
    """The unit of a module that either face has sharded."""
    return module.__dict__[UNIT]
