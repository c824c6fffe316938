"""Bucket: the uniform part of a unit (R11). Owns the memory of its shard, its unsharded parameters and its gradients."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import assert_never

import torch
from torch import Tensor, nn

from crossframe.api import Api
from crossframe.layout import FlatLayout, Layout, reduced_layout
from crossframe.precision import PrecisionPolicy
from crossframe.reduction import Missing, missing_grad
from crossframe.trace import FREE, RESHARD_TO_GROUP, Event
from crossframe.unshard import AuthoritativeStorage, UnshardRequest, authoritative_storage, shows_grad
from crossframe.writeback import check_full
from torch_backend.compat._dtypes import dtype_name, torch_dtype
from torch_backend.engine._unused_params import Unused
from torch_backend.memory._gather import GatherBuffer, views_of
from torch_backend.memory._grad_reduction import GradStore, ReductionChoices
from torch_backend.memory._offload import to_storage
from torch_backend.memory._reshard_group import ReshardGroupShard
from torch_backend.memory._store import ShardStore
from torch_backend.memory._streams import streams_of
from torch_backend.observe import observers
from torch_backend.param_registration import Registrar
from torch_backend.param_registration._registered_params import has_grad_hooks, round_grads
from torch_backend.ranks._collectives import UnitMesh
from torch_backend.ranks._comm_hook import CommHook


class Writeback(Enum):
    """Which edits of full parameters persist: none, each rank's slice of its own (R20), or those of the first rank (R23)."""

    NOTHING = "nothing"
    OWN = "own"
    FIRST = "first"


class Bucket:
    """A group of parameters with one layout, and their memory.

    Attributes:
        layout: the layout of the shards.
        mesh: the ranks that share the parameters.
        precision: the dtypes of each stage.
        store: this rank's shard.
        buffer: the unsharded parameters.
        grads: the pending reduction of gradients.
        registrar: registers parameters on the user's modules.
        origins: the identity of each original parameter, to detect sharing after sharding.
        unused: under FSDP2, detects parameters that no rank used in backward (R29).
        reduction_choices: the user's options for gradient reduction.
        group_shard: the reshard group's shard between forward and backward (R08); None without a reshard group.
    """

    def __init__(
        self,
        store: ShardStore,
        mesh: UnitMesh,
        device: torch.device,
        *,
        policy: PrecisionPolicy,
        api: Api,
        limited: bool,
        make_registrar: Callable[[ShardStore, list[nn.Parameter]], Registrar],
    ) -> None:
        """
        Args:
            store: this rank's shard.
            mesh: the ranks that share the parameters.
            device: the compute device.
            policy: the mixed precision policy.
            api: the API whose rules apply.
            limited: see `limit_all_gathers` in [Note: streams].
            make_registrar: creates the registrar from the shard and the unsharded parameters.
        """
        self.layout, self.store = store.layout, store
        self.mesh, self._policy, self._api, self._limited = mesh, policy, api, limited
        self.reduction_choices = ReductionChoices()
        self._provide(device)
        self.registrar = make_registrar(store, self.buffer.leaves)
        self.unused = Unused(mesh)
        # The parameter indices of the pending reduction, and the reduced layouts by set of trained parameters.
        self._reduced: Sequence[int] = ()
        self._layouts: dict[tuple[bool, ...], Layout] = {}
        self.origins: list[object] = []
        self.group_shard: ReshardGroupShard | None = None
        # The parameters that the user sees, and their buffer: the bucket's unless it is in low precision.
        self._shown: GatherBuffer | None = None
        self._shown_grads: list[Tensor | None] | None = None

    def _provide(self, device: torch.device, *, partial: Tensor | None = None) -> None:
        """Create everything that depends on dtype and device, keeping a partial sum (R28). Unsharded parameters stay on the meta
        device while the shard is."""
        shard, self._streams = self.store.buffer, streams_of(device)
        self._device = device
        self.precision = self._policy.resolve(dtype_name(shard.dtype))
        gathered = torch_dtype(self.precision.gathered)
        home = shard.device if shard.is_meta else device
        self.buffer = self.store.gather_buffer(gathered, home, self._streams, limited=self._limited)
        grads = GradStore(self.layout, self.precision, self._api, self.mesh, self._streams, self.reduction_choices)
        grads.partial = None if partial is None else partial.to(device, torch_dtype(self.precision.reduced))
        self.grads = grads

    @property
    def authoritative(self) -> AuthoritativeStorage:
        """The device of the full-precision parameters that a user sees."""
        return authoritative_storage(self.layout, moved=self.offloaded)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def offloaded(self) -> bool:
        """Whether its shard is on another device than the computation (the CPU)."""
        return self.store.buffer.device != self.device

    def place(self, layout: Layout) -> None:
        """Adopt a layout that differs only in the names of parameters."""
        self.layout = self.store.layout = self.buffer.layout = self.grads.layout = layout
        self._layouts.clear()

    # Unsharded parameters

    def shard_written(self) -> None:
        """Let all-gathers wait for what was copied into the shard after the step began."""
        self._streams.shards_written()

    def gather(self, *, unit: str, phase: str) -> None:
        """Issue the all-gather of the shards, or of the reshard group's shards."""
        kept = self.group_shard
        if kept is not None and kept.buffer is not None:
            self.registrar.show_sharded()
            self._streams.gather_after(self._group_shard_taken)
            self.buffer.start(kept.give(), kept.communicator, unit=unit, phase=phase, layout=kept.layout)
        else:
            self.buffer.start(self.store.buffer, self.mesh.shards, unit=unit, phase=phase)

    def finish(self) -> bool:
        """Wait until the unsharded parameters are readable. Returns whether their tensors have been replaced."""
        if not self.buffer.finish():
            return False
        self.registrar.take_leaves(self.buffer.leaves)
        return True

    def free(self, *, unit: str, phase: str) -> None:
        """Free the unsharded parameters, or the reshard group's shard."""
        if self.group_shard is not None and self.group_shard.buffer is not None:
            self.registrar.show_sharded()
            self.group_shard.give()
            return
        self.buffer.free()
        if observers and not self.buffer.is_shard:
            self._record_event(FREE, unit, phase, self.layout.gathered_numel)

    def free_to_part(self, *, unit: str, phase: str) -> None:
        """Free the unsharded parameters and keep the reshard group's shard (R08)."""
        assert self.group_shard is not None
        self.group_shard.take(self.buffer.full, self.buffer.leaves)
        self._group_shard_taken = self._streams.moment()
        self.registrar.show_group_shard(self.group_shard)
        self.buffer.free()
        if observers:
            assert self.group_shard.buffer is not None
            freed = self.layout.gathered_numel - self.group_shard.buffer.numel()
            self._record_event(RESHARD_TO_GROUP, unit, phase, freed)

    def _record_event(self, kind: str, unit: str, phase: str, numel: int) -> None:
        full = self.buffer.full
        event = Event(kind, unit, phase, dtype_name(full.dtype), numel * full.itemsize, self.mesh.shards.ranks)
        for observer in observers:
            observer.event(event)

    # Gradients

    def allow_held(self, num: int) -> None:
        """Allow `num` pending reduce-scatter inputs on this device."""
        self._streams.max_held = num

    @property
    def accumulated(self) -> torch.dtype:
        """The dtype of unsharded gradients that are kept for a later backward (R15)."""
        return torch_dtype(self.precision.accumulated(self._api))

    def start_reduction(
        self, grads: Sequence[Tensor | None], *, unit: str, hook: CommHook | None, all_reduce: bool = True
    ) -> None:
        """Issue the reduction of unsharded gradients, in the layout's order.

        If the API distinguishes parameters without a gradient on any rank from zeros (R29), ranks exchange which trained
        parameters have none. In the per-parameter layout, frozen parameters are not communicated.
        """
        layout, self._reduced = self.layout, range(len(grads))
        if missing_grad(self._api, unit_used=True) is Missing.NONE:
            present = [grad is not None for grad in grads]
            if all(present):
                self.unused.lack(())
            else:
                unused = [
                    not some and leaf.requires_grad for some, leaf in zip(present, self.buffer.leaves, strict=True)
                ]
                self.unused.lack(unused)
                travels = tuple(some or lacks for some, lacks in zip(present, unused, strict=True))
                if not layout.contiguous and not all(travels):
                    layout = self._layout_of(travels)
                    self._reduced = [i for i, some in enumerate(travels) if some]
                    grads = [grads[i] for i in self._reduced]
        self.grads.start(grads, layout, unit=unit, hook=hook, all_reduce=all_reduce)

    def _layout_of(self, trained: tuple[bool, ...]) -> Layout:
        """The layout of the communicated gradients if some parameters are frozen."""
        if trained not in self._layouts:
            self._layouts[trained] = reduced_layout(self.layout, trained)
        return self._layouts[trained]

    def advance_reduction(self) -> bool:
        """Advance the pending reduction; at its end, accumulate the gradient. Returns whether it has finished."""
        if not self.grads.advance():
            return False
        if self.grads.arrived is not None:
            with self._streams.reducing():
                shard, device = self.grads.take(), self.store.buffer.device
                rounded = self.precision.kept != self.precision.stored
                if shard.device != device:
                    read_now = rounded or any(grad is not None for grad in self.registrar.grads())
                    read_now = read_now or any(map(has_grad_hooks, self.registrar.managed()))
                    shard = to_storage(shard, device, read_now=read_now)
                unused = self.unused.everywhere(self._streams.join_host)
                self.registrar.add_grad(shard, self._reduced, unused)
                if rounded:
                    round_grads(self.registrar.managed(), torch_dtype(self.precision.kept))
        return True

    def reset(self) -> None:
        """Free unsharded parameters and discard pending reductions (R17)."""
        self.registrar.show_sharded()
        if self.group_shard is not None and self.group_shard.buffer is not None:
            self.group_shard.give()
        self.buffer.free()
        self.grads.abandon()
        self.unused.forget()

    # Full parameters for the user (R18-R24)

    def summon(self, request: UnshardRequest, *, visible: bool, aside: bool, unit: str) -> None:
        """All-gather in full precision and, if `visible`, register the parameters, or a copy if `aside`. The buffer must be
        free."""
        stored, device = self.store.buffer.dtype, self.device
        shown = self.buffer
        if self.precision.is_mixed:
            shown = GatherBuffer(self.layout, stored, device, self._streams, shard=self.store.buffer)
        self._streams.shards_written()
        shown.start(self.store.buffer, self.mesh.shards, unit=unit, phase="summon")
        shown.finish()
        grads = self._gather_grads(unit) if request.with_grads else None
        if not visible:
            shown.free()
            return
        self._shown, self._shown_grads = shown, grads
        full = shown.full
        if request.offload_to_cpu and device.type != "cpu":
            full = full.to("cpu")
            shown.free()
        elif aside and shown.is_shard:
            full = full.clone()
        self.registrar.summon(views_of(self.layout, full), grads)

    def dismiss(self, writeback: Writeback) -> None:
        """End `summon` in the order of R24: write edits back as requested, then free the shown parameters.

        The steps of `UnshardRequest.exit_steps` are one try statement here: what is shown is freed also if the writeback raises,
        and the copy into the shard brings values back from the CPU.
        """
        full = grads = None
        try:
            if self._shown is not None:
                full, grads = self.registrar.dismiss()
            match writeback:
                case Writeback.NOTHING:
                    pass
                case Writeback.OWN:
                    if full is not None:
                        self.store.write(full)
                    if self._shown_grads is not None and grads is not None:
                        self.registrar.write_grads(grads)
                case Writeback.FIRST:
                    self._write_from_first(full)
                case _:
                    assert_never(writeback)
        finally:
            if self._shown is not None:
                self._shown.free()
            self._shown = self._shown_grads = None

    def check_shown(self) -> None:
        """Raise ParamError unless the values in the shown parameters can be written back (R20)."""
        if self._shown is not None:
            for spec, value in zip(self.layout.params, self.registrar.left(), strict=True):
                check_full(spec, tuple(value.shape))

    def _gather_grads(self, unit: str) -> list[Tensor | None]:
        """Full gradients in the layout's order; None if no rank has one. Missing gradients of single ranks are zeros (R22)."""
        own = self.registrar.grads()
        if self.authoritative is AuthoritativeStorage.FULL:
            return own
        has = torch.tensor([grad is not None for grad in own], dtype=torch.uint8, device=self.device)
        shown = [shows_grad(ranks) for ranks in self.mesh.shards.gather_all(has).T.tolist()]
        if not any(shown):
            return [None] * len(own)
        shard = torch.zeros_like(self.store.buffer, dtype=torch_dtype(self.precision.kept))
        for part, grad in zip(self.store.split(shard), own, strict=True):
            if grad is not None and part.numel():
                part.copy_(grad)
        full = GatherBuffer(self.layout, shard.dtype, self.device, self._streams, shard=shard)
        full.start(shard, self.mesh.shards, unit=unit, phase="summon")
        full.finish()
        return [view if some else None for view, some in zip(views_of(self.layout, full.full), shown, strict=True)]

    def _write_from_first(self, full: Sequence[Tensor] | None) -> None:
        """Scatter the full parameters of the first rank of the mesh, in the layout's order.

        Args:
            full: the parameters on the first rank; None on other ranks.
        """
        mesh, stored = self.mesh, self.store.buffer
        # Communicated on the compute device, whatever the device of the shard and of the user's parameters.
        buffer = stored if stored.device == self.device else torch.empty_like(stored, device=self.device)
        if mesh.replicas.rank == 0:
            shards = None
            if full is not None:
                world = range(self.layout.world_size)
                shards = [ShardStore(self.layout, rank, full, self.device).buffer for rank in world]
            mesh.shards.scatter(buffer, shards)
        mesh.replicas.broadcast([buffer])
        if buffer is not stored:
            stored.copy_(buffer)

    def compute_in(self, policy: PrecisionPolicy) -> None:
        """Change the mixed precision policy. The unsharded parameters must be freed."""
        self._policy = policy
        self._provide(self.device, partial=self.grads.partial)
        self.registrar.take_leaves(self.buffer.leaves)

    # Moved or converted by the user

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply `fn` (of `module.to` etc.) to this rank's shard.

        The padding is part of the shard and stays (R02). The compute device becomes that of the shard unless the shard is
        offloaded.
        """
        with torch.no_grad():
            shard = fn(self.store.buffer)
        device = self.device if self.offloaded or shard.is_meta else shard.device
        dtype = dtype_name(shard.dtype)
        params = tuple(replace(spec, dtype=dtype) for spec in self.layout.params)
        options = {}
        if isinstance(self.layout, FlatLayout):
            options["compute_dtype"] = self.layout.compute_dtype or self.layout.dtype
        self.store.buffer = shard
        self.place(replace(self.layout, params=params, **options))  # type: ignore[type-var]
        self.store.cut()
        self._provide(device, partial=self.grads.partial)
        self.registrar.follow(self.buffer.leaves, fn)
