"""The input of a hypothesis: one differing quantity, and access to both recordings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from crossframe.dtypes import FLOATING, coarser, unit_roundoff
from crossframe.layout import Sharding
from crossframe.recording import Recording
from crossframe.recording.event_format import (
    BACKWARD,
    INPUT,
    OUTPUT,
    PARAMETERS,
    REDUCE,
    STATE,
    UNSHARDED,
    UPDATE,
    activation_key,
)
from crossframe.verdict.diagnosis.fit import Contrast
from crossframe.verdict.measure.comparable import labels
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import Quantity
from crossframe.verdict.measure.values import Side, activation_values, assemble, rank_values

T = TypeVar("T")
At = tuple[int, str, str]
"""An activation: (microbatch, module, use)."""


@dataclass(frozen=True)
class Case:
    """A differing quantity, with one recording assumed to be right.

    Attributes:
        right, wrong: the recordings; the same twice for a check within one recording, where the shards are right.
        names: their names.
        replicas: the replica of the quantity in each.
        limit: the bound on norm(right - wrong) due to rounding.
        start, stop: the range of elements to explain; None for all.
    """

    quantity: Quantity
    right: Recording
    wrong: Recording
    names: tuple[str, str]
    replicas: tuple[int, int]
    limit: float
    swapped: bool = False
    start: int | None = None
    stop: int | None = None

    @property
    def step(self) -> int:
        return self.quantity.step

    @property
    def phase(self) -> str:
        return self.quantity.phase

    @property
    def name(self) -> str:
        """The parameter; "" if there is none."""
        return self.quantity.parameter

    @property
    def here(self) -> At:
        """The activation."""
        return self.quantity.microbatch, self.quantity.module, self.quantity.use

    @property
    def whole(self) -> bool:
        """Whether all elements are to be explained and were recorded."""
        return self.start is None and not self.quantity.sketched

    @cached_property
    def both(self) -> Contrast:
        """All elements of both sides."""
        a, b = (self.quantity.b, self.quantity.a) if self.swapped else (self.quantity.a, self.quantity.b)
        return Contrast.of(a, b, self.limit)

    @cached_property
    def sides(self) -> Contrast:
        """The elements to explain of both sides."""
        return self.both if self.start is None or self.stop is None else self.both.within(self.start, self.stop)

    def cut(self, array: np.ndarray) -> np.ndarray:
        """The elements to explain, in float64."""
        array = np.asarray(array, np.float64)
        return array if self.start is None else array.reshape(-1)[self.start : self.stop]

    @cached_property
    def module(self) -> str:
        """The module that computed the quantity; "" if there is none.

        For an output, it is the quantity's own module. For an input, it is the module whose output it is on the right side, bit
        for bit, if the wrong side does not call that module but may call a function instead.
        """
        here = self.here
        if self.quantity.use == OUTPUT:
            return self.quantity.module
        order = self.right.activations(self.step)
        if self.quantity.use != INPUT or here not in order:
            return ""
        earlier = reversed(order[: order.index(here)])
        before = next((at for at in earlier if at[0] == here[0] and at[2] == OUTPUT), None)
        if before is None or before in self.wrong.activations(self.step):
            return ""
        computed = self.activation(self.right, self.step, before)
        return before[1] if computed is not None and np.array_equal(computed, self.both.right) else ""

    def swap(self) -> "Case":
        """The case with the other recording assumed to be right."""
        return replace(
            self,
            right=self.wrong,
            wrong=self.right,
            names=self.names[::-1],
            replicas=self.replicas[::-1],
            swapped=not self.swapped,
        )

    def within(self, start: int, stop: int) -> "Case":
        return replace(self, start=start, stop=stop)

    def replica_of(self, recording: Recording) -> int:
        return self.replicas[0 if recording is self.right else 1]

    def ranks(self, recording: Recording) -> Sequence[int]:
        """The rank of the quantity, or all ranks."""
        return range(recording.manifest.world_size) if self.quantity.rank is None else (self.quantity.rank,)

    def in_both(self, read: Callable[[Recording], T | None]) -> tuple[T, T] | None:
        """What is read from the right and the wrong recording; None if either has nothing."""
        right, wrong = read(self.right), read(self.wrong)
        return None if right is None or wrong is None else (right, wrong)

    # Recorded values; None if not recorded, or if only a sketch was recorded and elements are needed.

    def read(self, recording: Recording, phase: str, step: int, name: str, slot: str = "") -> np.ndarray | None:
        """A parameter, gradient or optimizer state entry assembled from shards: elements, or sums if sketches are compared."""
        if not recording.has(phase, step, name, use=slot):
            return None
        return self._values(name, assemble(recording, phase, step, name, slot, self.replica_of(recording)))

    def own(self, recording: Recording, phase: str, step: int, rank: int, name: str) -> np.ndarray | None:
        """A rank's own full tensor for a parameter."""
        if not recording.has(phase, step, name, rank):
            return None
        return self._values(name, rank_values(recording, phase, step, rank, name))

    def activation(self, recording: Recording, step: int, at: At) -> np.ndarray | None:
        """The input or output of a module on the rank of the quantity."""
        rank = self.quantity.rank
        if rank is None or not 0 <= step < recording.num_steps or at not in recording.activations(step):
            return None
        microbatch, module, use = at
        return self._values(activation_key(use, microbatch, module), activation_values(recording, step, rank, at))

    def _values(self, name: str, side: Side) -> np.ndarray | None:
        if self.quantity.sketches is None:
            return side.elements
        by_name = self.quantity.sketches[0].seed  # of recordings up to format 6
        return side.sketched(name if by_name else "").folded(self.quantity.sketches[0].sums.size).sums

    def before(self, recording: Recording, step: int, name: str) -> np.ndarray | None:
        if step == 0 or not recording.manifest.params[name].requires_grad:
            return self.read(recording, PARAMETERS, 0, name)
        return self.read(recording, UPDATE, step - 1, name)

    def as_used(self, recording: Recording, name: str, rank: int | None = None) -> np.ndarray | None:
        """A parameter as a rank (default: that of the quantity) used it in this step."""
        rank = self.quantity.rank if rank is None else rank
        seen = None if rank is None else self.own(recording, UNSHARDED, self.step, rank, name)
        return seen if seen is not None else self.before(recording, self.step, name)

    def gradient(self, recording: Recording, step: int, name: str) -> np.ndarray | None:
        """The local gradient on the rank of the quantity, or the reduced one if there is no rank."""
        if self.quantity.rank is None:
            return self.read(recording, REDUCE, step, name)
        return self.own(recording, BACKWARD, step, self.quantity.rank, name)

    def moment(self, recording: Recording, step: int, name: str, slot: str) -> np.ndarray | None:
        """An optimizer state entry after a step; zeros before the first step."""
        if step < 0:
            return np.zeros(recording.manifest.params[name].shape)
        return self.read(recording, STATE, step, name, slot)

    def local_grads(self, recording: Recording, name: str) -> list[np.ndarray] | None:
        """The local gradient of each rank at this step, zeros for a rank without one (R29); None if any is not finite."""
        ranks = range(recording.manifest.world_size)
        if not recording.has(BACKWARD, self.step, name):
            return None
        found = [self._values(name, rank_values(recording, BACKWARD, self.step, rank, name)) for rank in ranks]
        grads = [grad for grad in found if grad is not None and np.isfinite(grad.astype(np.float64)).all()]
        return grads if len(grads) == len(found) else None

    def earlier(self, *, same_shape: bool) -> Iterator[At]:
        """The activations of this microbatch before this quantity in forward order, the nearest first."""
        order, here = self.right.activations(self.step), self.here
        if here not in order or self.quantity.rank is None:
            return
        shape = self.right.activation_shape(self.step, self.quantity.rank, *here)
        for at in order[: order.index(here)][::-1]:
            alike = self.right.activation_shape(self.step, self.quantity.rank, *at) == shape
            if at[0] == here[0] and (alike or not same_shape) and at in self.wrong.activations(self.step):
                yield at

    def elements_of(self, rank: int, name: str = "") -> np.ndarray:
        """The elements of a parameter that a rank of the shard group owns in the wrong recording."""
        manifest, name = self.wrong.manifest, name or self.name
        pieces = (piece for _, piece in Sharding(manifest.units, manifest.mesh).pieces(rank) if piece.name == name)
        runs = [np.arange(run.param_start, run.param_start + run.numel) for piece in pieces for run in piece.runs()]
        return np.concatenate([np.zeros(0, int), *runs])

    @property
    def reduce_roundoff(self) -> float:
        """The unit roundoff of the stated reduce dtype (R33); 0 if it is the dtype of the gradients."""
        runs = (self.right, self.wrong)
        stated = [r.manifest.settings.get("reduce_dtype") or r.manifest.settings.get("param_dtype") for r in runs]
        if self.right.manifest.dtype == self.wrong.manifest.dtype:
            return unit_roundoff(stated[0]) if stated[0] in FLOATING else 0.0
        return max(unit_roundoff(s if s in FLOATING else r.manifest.dtype) for s, r in zip(stated, runs, strict=True))

    @property
    def compute_roundoff(self) -> float:
        return unit_roundoff(coarser(self.right.manifest.dtype, self.wrong.manifest.dtype))


def case_of(pair: Pair, quantity: Quantity, limit: Callable[[Quantity], float]) -> Case:
    """The case of a quantity, with the first recording assumed to be right."""
    recordings = {"": (pair.a, pair.b), "a": (pair.a, pair.a), "b": (pair.b, pair.b)}[quantity.within]
    names = labels(pair.a, pair.b)
    called = {"": names, "a": (names[0], names[0]), "b": (names[1], names[1])}[quantity.within]
    first, second = (min(quantity.replica, recording.manifest.mesh.replicate - 1) for recording in recordings)
    allowed = 0.0 if quantity.bound is None else float(limit(quantity))
    return Case(quantity, recordings[0], recordings[1], called, (first, second), allowed)
