"""The simplest model of a unit's life: full arrays and a few words. What `live_unit` does with shards, this predicts without any.

It knows of a layout only which rank owns which element. `experiments.spec.histories.explore` holds the two beside each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from crossframe.api import Api
from crossframe.dtypes import numpy_dtype
from crossframe.errors import CrossframeError, ParamError, PlanError, StateError, UnsupportedError
from crossframe.layout import Layout, post_forward
from crossframe.mesh import MeshSpec
from crossframe.plan import PlannedUnit
from crossframe.unshard import UnshardRequest

Full = dict[str, np.ndarray]
Refusal = type[CrossframeError] | None


def owners(layout: Layout) -> Full:
    """For each element of each parameter, the shard that holds it."""
    found = {spec.name: np.full(spec.shape, -1) for spec in layout.params}
    for index in range(layout.world_size):
        for piece in layout.pieces(index):
            for run in piece.runs():
                found[piece.name].reshape(-1)[run.param_start : run.param_start + run.numel] = index
    return found


@dataclass
class Simple:
    """A unit of one bucket. Lists have one entry a rank, or, where it says so, one a replica.

    Attributes:
        authoritative: by replica, the parameters.
        memory: "shard", "part" or "full".
        stale: what was gathered is older than the authoritative storage.
        shows: "shards", "full" or "summoned".
        copy: what was gathered, with the user's edits of it; unused where `aliased`.
        aliased: what was gathered is the authoritative storage itself.
        waiting: full gradients that are not reduced.
        mean: by replica, the reduced gradients; zeros where a rank has none.
        reached: of which parameters a rank has a reduced gradient.
        shown: the full gradients that the user is shown, None where nothing is.
    """

    planned: PlannedUnit
    mesh: MeshSpec
    api: Api
    lr: float
    authoritative: list[Full]
    memory: str = "shard"
    stale: bool = False
    shows: str = "shards"
    copy: list[Full] = field(default_factory=list)
    aliased: bool = False
    waiting: list[Full] = field(default_factory=list)
    mean: list[Full] = field(default_factory=list)
    reached: list[set[str]] = field(default_factory=list)
    shown: list[Full | None] = field(default_factory=list)
    request: UnshardRequest = field(default_factory=UnshardRequest)
    before: str = "shard"

    def __post_init__(self) -> None:
        bucket = self.planned.buckets[0]
        self.layout, self.precision = bucket.layout, bucket.precision
        self.names = [spec.name for spec in self.layout.params]
        self.group = self.planned.reshard_after_forward
        self.owner = owners(self.layout)
        self.part_owner = owners(post_forward(self.layout, self.group)) if type(self.group) is int else self.owner
        self.ranks = range(self.mesh.world_size)
        self.forget()

    def where(self, rank: int) -> tuple[int, int]:
        """The replica and the shard of a rank."""
        return self.mesh.coordinate(rank)

    def visible(self, rank: int) -> bool:
        """Whether the rank is shown full parameters."""
        return self.shows == "full" or (self.shows == "summoned" and self.request.visible(self.mesh.group_rank(rank)))

    def holds(self, rank: int) -> str:
        """What the rank's memory holds."""
        return (
            "shard"
            if self.shows == "summoned" and not self.request.visible(self.mesh.group_rank(rank))
            else self.memory
        )

    def full(self, rank: int) -> Full:
        """The full parameters that the rank has in memory."""
        return self.authoritative[self.where(rank)[0]] if self.aliased else self.copy[rank]

    # What is refused

    def refusal_of_use(self) -> Refusal:
        """Of an unshard, a reshard, a forward, a backward, a reduction or an optimizer's step."""
        return StateError if self.shows == "summoned" else None

    def refusal_of_group(self) -> Refusal:
        """Of resharding to a reshard group."""
        if type(self.group) is not int:
            return PlanError
        return None if self.memory == "full" and not self.stale and self.shows != "summoned" else StateError

    def refusal_of_summon(self, request: UnshardRequest) -> Refusal:
        """Of full parameters for the user."""
        kept, sharded = getattr(self.layout, "keep_original", True), self.mesh.shard > 1
        if (
            (request.writeback and request.rank0_only)
            or (request.with_grads and (not kept or request.offload_to_cpu))
            or (request.offload_to_cpu and not sharded)
        ):
            return UnsupportedError
        return self.refusal_of_use()

    def refusal_of_exit(self) -> Refusal:
        """Of the end of an unsharding."""
        return None if self.shows == "summoned" else StateError

    def refusal_of_edit(self, rank: int, *, full: bool) -> Refusal:
        """Of an edit of a full parameter, or of the piece that a rank holds of it."""
        holds_piece = bool((self.owner[self.names[0]] == self.where(rank)[1]).any())
        return None if self.visible(rank) == full and (full or holds_piece) else ParamError

    def refusal_of_grad_edit(self, rank: int, name: str) -> Refusal:
        """Of an edit of a shown gradient."""
        return None if name in (self.shown[rank] or {}) else ParamError

    # What is done

    def gather(self, dtype: str) -> None:
        """Full parameters in memory: those of the authoritative storage, or, from a reshard group, those that it kept."""
        if self.memory == "part" and not self.stale:
            kept, size = self.copy, int(self.group)
            merged = [{name: kept[rank][name].copy() for name in self.names} for rank in self.ranks]
            for rank in self.ranks:
                first = rank - rank % size
                for index in range(size):
                    _take(merged[rank], kept[first + index], self.part_owner, index)
            self.copy = merged
        else:
            self.aliased = self.mesh.shard == 1 and dtype == self.precision.stored
            self.copy = [
                {
                    name: value.astype(numpy_dtype(dtype))
                    for name, value in self.authoritative[self.where(rank)[0]].items()
                }
                for rank in self.ranks
            ]
        self.memory, self.stale = "full", False

    def unshard(self) -> None:
        """Full parameters in use."""
        if self.memory != "full" or self.stale:
            self.gather(self.precision.gathered)
        self.shows = "full"

    def reshard(self) -> None:
        """The shards alone."""
        self.memory, self.stale, self.shows = "shard", False, "shards"

    def keep_group(self) -> None:
        """The reshard group's shard."""
        self.memory, self.shows = "part", "shards"

    def forward(self) -> None:
        """A forward, and what the unit's choice makes of its memory."""
        self.unshard()
        self.shows = "shards"
        if type(self.group) is int:
            self.keep_group()
        elif self.group:
            self.reshard()

    def backward(self, grads: Callable[[int], Full], *, syncs: bool) -> None:
        """A backward that leaves gradients of each rank waiting."""
        self.unshard()
        self.shows = "shards"
        dtype = numpy_dtype(self.precision.accumulated(self.api))
        for rank in self.ranks:
            for name, grad in grads(rank).items():
                self.waiting[rank][name] = (self.waiting[rank].get(name, 0) + grad).astype(dtype)
        if syncs or not self.planned.keeps_full_unreduced:
            self.reshard()

    def reduce(self) -> None:
        """The mean over all ranks, added to what is there. The gradients are such that all of it is exact."""
        used = {name for grads in self.waiting for name in grads}
        if used and self.api is Api.FSDP1:
            used = set(self.names)
        for name in used:
            total = np.sum([grads[name].astype(np.float64) for grads in self.waiting if name in grads], axis=0)
            for mean in self.mean:
                mean[name] = mean[name] + (total / self.mesh.world_size).astype(numpy_dtype(self.precision.kept))
        for reached in self.reached:
            reached |= used
        self.waiting = [{} for _ in self.ranks]

    def zero_grad(self, ranks: Sequence[int]) -> None:
        """Some ranks drop their reduced gradients."""
        for rank in ranks:
            replica, index = self.where(rank)
            for name in self.names:
                self.mean[replica][name] = np.where(self.owner[name] == index, 0, self.mean[replica][name])
            self.reached[rank] = set()

    def forget(self) -> None:
        """No gradients at all."""
        kept = numpy_dtype(self.precision.kept)
        self.waiting = [{} for _ in self.ranks]
        self.mean = [{name: np.zeros(value.shape, kept) for name, value in full.items()} for full in self.authoritative]
        self.reached = [set() for _ in self.ranks]
        self.shown = [None for _ in self.ranks]

    def reset(self) -> None:
        """After an exception."""
        self.reshard()
        self.forget()

    def edited(self) -> None:
        """The authoritative storage was written."""
        self.shows = "shards"
        self.stale = self.memory != "shard" and not self.aliased

    def edit_piece(self, rank: int, value: float) -> None:
        """A rank writes a value into all that it holds of the first parameter."""
        if self.shows != "summoned":
            self.edited()
        replica, index = self.where(rank)
        self.authoritative[replica][self.names[0]][self.owner[self.names[0]] == index] = value

    def edit_full(self, rank: int, value: float) -> None:
        """A rank writes a value into the full first parameter that it is shown."""
        self.full(rank)[self.names[0]][...] = value

    def edit_grad(self, rank: int, name: str, value: float) -> None:
        """A rank writes a value into a full gradient that it is shown."""
        shown = self.shown[rank]
        assert shown is not None
        shown[name] = np.full_like(shown[name], value)
        if self.mesh.shard == 1 and self.reached[rank]:
            self.mean[rank][name] = shown[name].copy()

    def step(self) -> None:
        """Gradient descent on what has a gradient: alone in the world, on what waits too."""
        if self.mesh.world_size == 1:
            self.reduce()
        self.edited()
        for rank in self.ranks:
            replica, index = self.where(rank)
            for name in self.reached[rank]:
                param, mean = self.authoritative[replica][name], self.mean[replica][name]
                own = self.owner[name] == index
                param[own] -= param.dtype.type(self.lr) * mean[own].astype(param.dtype)
        self.zero_grad(self.ranks)

    def summon(self, request: UnshardRequest) -> None:
        """Full parameters for the user, in full precision."""
        self.before, self.request = self.memory, request
        self.reshard()
        self.gather(self.precision.stored)
        self.shows = "summoned"
        names = [name for name in self.names if any(name in reached for reached in self.reached)]
        for rank in self.ranks if request.with_grads and names else ():
            if request.visible(self.mesh.group_rank(rank)):
                self.shown[rank] = {name: self.mean[self.where(rank)[0]][name].copy() for name in names}

    def exit(self, *, failed: bool) -> None:
        """The end of that: slices go back, and memory returns to what it was."""
        for rank in self.ranks if self.request.writeback else ():
            replica, index = self.where(rank)
            _take(self.authoritative[replica], self.full(rank), self.owner, index)
            if self.reached[rank]:
                _take(self.mean[replica], self.shown[rank] or {}, self.owner, index)
        self.shown = [None for _ in self.ranks]
        self.reshard()
        if self.before != "shard" and not failed and not self.precision.is_mixed:
            self.gather(self.precision.gathered)
            self.memory = self.before


def _take(into: Full, values: Full, owner: Full, index: int) -> None:
    """The elements of `values` that a shard owns."""
    for name, value in values.items():
        own = owner[name] == index
        into[name][own] = value[own]
