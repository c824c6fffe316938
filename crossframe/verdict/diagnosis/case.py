"""What a hypothesis may look at: one difference, and all that both recordings hold."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from crossframe.dtypes import FLOATING, coarser, unit_roundoff
from crossframe.layout import Sharding
from crossframe.recording import Recording
from crossframe.recording.lines import BACKWARD, PARAMETERS, STATE, UNSHARDED, UPDATE
from crossframe.verdict.diagnosis.fit import Contrast
from crossframe.verdict.measure.comparable import labels
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import Quantity
from crossframe.verdict.measure.values import Side, activation_name, activation_values, assemble, rank_values

At = tuple[int, str, str]
"""An activation: (microbatch, module, use)."""


@dataclass(frozen=True)
class Case:
    """One quantity in which two recordings differ, with one of them taken to be right.

    Attributes:
        right, wrong: the recordings. The same twice, where one contradicts itself: then the shards are right.
        names: what they are called.
        replicas: which copy of the model the quantity is of, in each.
        limit: the largest norm(right - wrong) that rounding may leave.
        start, stop: which elements are looked at; None: all.
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
        """At which step."""
        return self.quantity.step

    @property
    def phase(self) -> str:
        """In which phase."""
        return self.quantity.phase

    @property
    def name(self) -> str:
        """Of which parameter; "" of none."""
        return self.quantity.parameter

    @property
    def whole(self) -> bool:
        """Whether all elements are looked at, and are there."""
        return self.start is None and not self.quantity.sketched

    @cached_property
    def both(self) -> Contrast:
        """Both sides, all elements."""
        a, b = (self.quantity.b, self.quantity.a) if self.swapped else (self.quantity.a, self.quantity.b)
        return Contrast.of(a, b, self.limit)

    @cached_property
    def sides(self) -> Contrast:
        """Both sides, of the elements that are looked at."""
        return self.both if self.start is None or self.stop is None else self.both.within(self.start, self.stop)

    def cut(self, array: np.ndarray) -> np.ndarray:
        """The elements that are looked at, in float64."""
        array = np.asarray(array, np.float64)
        return array if self.start is None else array.reshape(-1)[self.start : self.stop]

    def swap(self) -> "Case":
        """The other recording taken to be right."""
        return replace(
            self,
            right=self.wrong,
            wrong=self.right,
            names=self.names[::-1],
            replicas=self.replicas[::-1],
            swapped=not self.swapped,
        )

    def within(self, start: int, stop: int) -> "Case":
        """The same of a range of elements."""
        return replace(self, start=start, stop=stop)

    def replica_of(self, recording: Recording) -> int:
        """Which of its copies of the model."""
        return self.replicas[0 if recording is self.right else 1]

    # What the recordings hold. None where that was not recorded, or is there as a sketch and elements are needed.

    def read(self, recording: Recording, phase: str, step: int, name: str, slot: str = "") -> np.ndarray | None:
        """A parameter, or what has its shape, put together from shards: elements, or sums where sketches are compared."""
        if step < 0 or step >= recording.num_steps or not recording.has(phase, step, name, use=slot):
            return None
        return self._values(name, assemble(recording, phase, step, name, slot, self.replica_of(recording)))

    def own(self, recording: Recording, phase: str, step: int, rank: int, name: str) -> np.ndarray | None:
        """What one rank holds of a parameter in full."""
        if step < 0 or step >= recording.num_steps or not recording.has(phase, step, name, rank):
            return None
        return self._values(name, rank_values(recording, phase, step, rank, name))

    def activation(self, recording: Recording, step: int, at: At) -> np.ndarray | None:
        """What a module was given or gave on the rank of the quantity."""
        rank = self.quantity.rank
        if rank is None or not 0 <= step < recording.num_steps or at not in recording.activations(step):
            return None
        return self._values(activation_name(at), activation_values(recording, step, rank, at))

    def _values(self, name: str, side: Side) -> np.ndarray | None:
        return side.sketched(name).sums if self.quantity.sketched else side.elements

    def before(self, recording: Recording, step: int, name: str) -> np.ndarray | None:
        """A parameter before the update of a step."""
        if step == 0 or not recording.manifest.params[name].requires_grad:
            return self.read(recording, PARAMETERS, 0, name)
        return self.read(recording, UPDATE, step - 1, name)

    def as_used(self, recording: Recording, name: str) -> np.ndarray | None:
        """A parameter as the quantity's rank used it in this step."""
        seen = None
        if self.quantity.rank is not None:
            seen = self.own(recording, UNSHARDED, self.step, self.quantity.rank, name)
        return seen if seen is not None else self.before(recording, self.step, name)

    def moment(self, recording: Recording, step: int, name: str, slot: str) -> np.ndarray | None:
        """A slot of the optimizer's state behind a step; zeros ahead of the first."""
        if step < 0:
            return np.zeros(recording.manifest.params[name].shape)
        return self.read(recording, STATE, step, name, slot)

    def local_grads(self, recording: Recording, name: str) -> list[np.ndarray] | None:
        """Every rank's own gradient of a parameter at this step; zeros where a rank has none (R29). None too where some are not
        finite: nothing can be made of their sum."""
        ranks = range(recording.manifest.world_size)
        if self.step >= recording.num_steps or not recording.has(BACKWARD, self.step, name):
            return None
        found = [self._values(name, rank_values(recording, BACKWARD, self.step, rank, name)) for rank in ranks]
        grads = [grad for grad in found if grad is not None and np.isfinite(grad.astype(np.float64)).all()]
        return grads if len(grads) == len(found) else None

    def earlier(self, *, same_shape: bool) -> Iterator[At]:
        """The activations of this microbatch that forward met before this quantity, the nearest first."""
        order = self.right.activations(self.step)
        here = (self.quantity.microbatch, self.quantity.module, self.quantity.use)
        if here not in order or self.quantity.rank is None:
            return
        shape = self.right.activation_shape(self.step, self.quantity.rank, *here)
        for at in order[: order.index(here)][::-1]:
            alike = self.right.activation_shape(self.step, self.quantity.rank, *at) == shape
            if at[0] == here[0] and (alike or not same_shape) and at in self.wrong.activations(self.step):
                yield at

    def elements_of(self, rank: int, name: str = "") -> np.ndarray:
        """Which elements of the parameter, or of another one, a rank of the shard group holds, in the wrong recording."""
        manifest, name = self.wrong.manifest, name or self.name
        sharding = Sharding(manifest.units, manifest.mesh)
        found = sharding.find(name)
        assert found is not None, name
        layout = sharding.units[found[0]][1]
        runs = [
            run for piece in layout.pieces(rank) if piece.name == layout.params[found[1]].name for run in piece.runs()
        ]
        return np.concatenate(
            [np.arange(run.param_start, run.param_start + run.numel) for run in runs] or [np.zeros(0, int)]
        )

    @property
    def microbatches(self) -> int:
        """How many microbatches the wrong recording adds up in a step, as far as it says."""
        stated = self.wrong.manifest.settings.get("accumulate") or 1
        return max(stated, 1 + max((at[0] for at in self.wrong.activations(self.step)), default=0))

    @property
    def reduce_roundoff(self) -> float:
        """The unit roundoff of the dtype in which gradients should be reduced (R33); 0 where that is the one they are kept in."""
        runs = (self.right, self.wrong)
        stated = [r.manifest.settings.get("reduce_dtype") or r.manifest.settings.get("param_dtype") for r in runs]
        if self.right.manifest.dtype == self.wrong.manifest.dtype:
            return unit_roundoff(stated[0]) if stated[0] in FLOATING else 0.0
        return max(unit_roundoff(s if s in FLOATING else r.manifest.dtype) for s, r in zip(stated, runs, strict=True))

    @property
    def compute_roundoff(self) -> float:
        """The unit roundoff of the dtype in which forward computes."""
        return unit_roundoff(coarser(self.right.manifest.dtype, self.wrong.manifest.dtype))


def case_of(pair: Pair, quantity: Quantity, limit: Callable[[Quantity], float]) -> Case:
    """The quantity as a case, with the first recording taken to be right."""
    recordings = {"": (pair.a, pair.b), "a": (pair.a, pair.a), "b": (pair.b, pair.b)}[quantity.within]
    names = labels(pair.a, pair.b)
    called = {"": names, "a": (names[0], names[0]), "b": (names[1], names[1])}[quantity.within]
    first, second = (min(quantity.replica, recording.manifest.mesh.replicate - 1) for recording in recordings)
    allowed = 0.0 if quantity.bound is None else float(limit(quantity))
    return Case(quantity, recordings[0], recordings[1], called, (first, second), allowed)
