"""A unit: what is gathered together, freed together and reduced together. The only writer of its own state."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from crossframe.layout import Layout
from crossframe.lifecycle import Exposure as Exposed
from crossframe.lifecycle import Freshness, Move, Residency, UnitState
from crossframe.params import ParamSpec
from crossframe.trace import FREE, Event
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
        module: nn.Module,
        buckets: Sequence[Bucket],
        communicator: Communicator,
        *,
        reshard_after_forward: bool,
        keeps_full_unreduced: bool,
    ) -> None:
        self.name = type(module).__name__
        self.module = module
        self.buckets = list(buckets)
        self.communicator = communicator
        self.state = UnitState()
        self.reshard_after_forward = reshard_after_forward
        self.reduces = True
        self.keeps_full_unreduced = keeps_full_unreduced
        self.schedule: Schedule | None = None
        self._gathered_version = -1
        self._shown = False
        self._num_ready = 0
        self._num_trained = 0
        for leaf in self.leaves:
            # Hooks can be put only on what takes a gradient; what is frozen now may be trained later.
            frozen = not leaf.requires_grad
            leaf.requires_grad_(True).register_post_accumulate_grad_hook(self._leaf_ready)
            leaf.requires_grad_(not frozen)

    @property
    def device(self) -> torch.device | None:
        """Where its parameters are; None if it has none."""
        return self.buckets[0].store.buffer.device if self.buckets else None

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The unsharded parameters that autograd sees, bucket by bucket."""
        return [leaf for bucket in self.buckets for leaf in bucket.buffer.leaves]

    @property
    def params(self) -> list[ParamSpec]:
        """The parameters of all buckets."""
        return [spec for bucket in self.buckets for spec in bucket.layout.params]

    def place(self, name: str) -> None:
        """Learn the path from the root, and name the parameters after it."""
        self.name = name
        prefix = f"{name}." if name else ""
        for bucket in self.buckets:
            specs = tuple(
                replace(spec, name=prefix + spec.name, aliases=tuple(prefix + alias for alias in spec.aliases))
                for spec in bucket.layout.params
            )
            layout = replace(bucket.layout, params=specs)  # type: ignore[type-var]
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
        self._gathered_version = self._shard_version()
        for bucket in self.buckets:
            bucket.buffer.start(bucket.store.buffer, self.communicator, unit=self.name, phase=phase)

    def unshard(self, phase: str) -> None:
        """Have the full parameters in memory, readable."""
        self.gather(phase)
        for bucket in self.buckets:
            bucket.buffer.finish()

    def expose(self) -> None:
        """Let the module show the full parameters, for use."""
        if self.state.exposure != Exposed.FULL:
            self.move(Move.EXPOSE)
            for bucket in self.buckets:
                bucket.exposure.sync_requires_grad()
                bucket.exposure.show_full()
            self._num_trained = sum(leaf.requires_grad for leaf in self.leaves)

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

    def notice_edits(self) -> None:
        """Full parameters that the optimizer has since changed the shards of are stale: gather them anew."""
        if self.is_full and self._gathered_version != self._shard_version():
            self.conceal()
            self.move(Move.EDIT_SHARDS)
            assert self.state.freshness == Freshness.STALE
            self.reshard("forward")

    def _shard_version(self) -> int:
        return sum(bucket.exposure.version for bucket in self.buckets)

    def _leaf_ready(self, _leaf: Tensor) -> None:
        """A leaf has accumulated its gradient; when all that take one have, the schedule frees and reduces the unit."""
        self._num_ready += 1
        if self._num_ready >= self._num_trained and self.schedule is not None:
            self._num_ready = 0
            self.schedule.grads_ready(self)

    def reset_ready(self) -> None:
        """Forget which leaves are ready: the backward is over."""
        self._num_ready = 0

    def start_reduction(self) -> None:
        """Issue the reduction of whatever gradients the leaves hold, and take these from the leaves."""
        for bucket in self.buckets:
            grads = [leaf.grad for leaf in bucket.buffer.leaves]
            if all(grad is None for grad in grads):
                continue
            self._tell_local_grads(bucket, grads)
            bucket.grads.start(grads, self.communicator, unit=self.name)
            for leaf in bucket.buffer.leaves:
                leaf.grad = None

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
            for leaf in bucket.buffer.leaves:
                leaf.grad = None
        self._num_ready = 0
        self.move(Move.RESET)

    @property
    def summoned(self) -> bool:
        """Whether the user is being shown full parameters."""
        return self.state.exposure == Exposed.SUMMONED

    def check_summon(self) -> None:
        """Raise StateError if the user cannot be shown full parameters now (R18)."""
        if self.summoned or self.state.activity:
            self.move(Move.SUMMON)

    def summon(self, *, visible: bool) -> bool:
        """Show the user full parameters, if `visible` on this rank. Returns whether memory held them before (R21)."""
        self.notice_edits()
        was_full = self.is_full
        self.unshard("summon")
        self.conceal()
        self.move(Move.SUMMON)
        if visible:
            for bucket in self.buckets:
                bucket.exposure.summon()
        elif not was_full:
            self._free("summon")
        self._shown = visible
        return was_full

    def dismiss(self, *, writeback: bool, keep_full: bool) -> None:
        """End `summon`: persist the edits if asked, then return to the memory that was there before (R20, R21, R24)."""
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
                if not keep_full:
                    self._free("summon")

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


# Where a sharded module keeps its unit: in its `__dict__`, so that it is no attribute of the user's module tree.
UNIT = "_crossframe_unit"


def unit_of(module: nn.Module) -> Unit:
    """The unit of a module that either face has sharded."""
    return module.__dict__[UNIT]
