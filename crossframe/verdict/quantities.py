"""What is compared, in the order in which one thing causes the next.

Initial parameters; then at each step what each unit gave in forward, the losses, the gradients of each rank, the reduced ones,
the updated parameters.
The backward reaches the last unit first, so gradients are walked in reverse order of the units.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from crossframe.errors import RecordingError
from crossframe.recording import Recording
from crossframe.recording.lines import BACKWARD, FORWARD, PARAMETERS, REDUCE, UPDATE
from crossframe.trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from crossframe.verdict.bounds import Bounds, bounds_for
from crossframe.verdict.metrics import gradient_scale, norm, parameter_scale, root_mean_square
from crossframe.verdict.zero_gradient import gradient_sizes, zero_gradient_parameters

OUTPUT = "output"
LATE_UPDATE = "late update"


@dataclass(frozen=True)
class Quantity:
    """One thing that both recordings hold.

    Attributes:
        event: what made it, in words of a step: "all_gather", "output", "loss", "backward", "reduce_scatter", "all_reduce",
            "optimizer".
        parameter: canonical name; "" for an output and for a loss.
        rank: the rank whose it is alone; None for what is put together from shards, and for a mean over ranks.
        replica: the copy of the model in the second recording that it was put together from.
        scale: what norm(a - b) is divided by.
        bound: how large that may be. None asks for equal bits; inf asks only that both are finite.
    """

    step: int
    phase: str
    event: str
    unit: str
    parameter: str
    rank: int | None
    replica: int
    a: np.ndarray
    b: np.ndarray
    scale: float
    bound: float | None
    microbatch: int = 0
    late: bool = False

    @property
    def kind(self) -> str:
        """The phase, of which two are of two kinds: "output" and the loss; an update, and a "late update" that comes after a step
        that was not recorded."""
        if self.event == OUTPUT:
            return OUTPUT
        return LATE_UPDATE if self.late else self.phase


class Pair:
    """Two comparable recordings, and what is true of the pair as a whole."""

    def __init__(self, a: Recording, b: Recording) -> None:
        self.a, self.b = a, b
        self.num_steps = min(a.num_steps, b.num_steps)
        self.steps = tuple(sorted(set(a.recorded_steps()) & set(b.recorded_steps())))
        self.bounds: Bounds = bounds_for(a.manifest.dtype)
        self.same_world = a.manifest.world_size == b.manifest.world_size
        self._all_losses = (a.losses(), b.losses())
        # All steps before this one were recorded.
        self._whole_until = next(i for i in range(self.num_steps + 1) if i not in self.steps)
        self._update_norms: dict[str, float] = {}
        self._sizes = (gradient_sizes(a, self.steps), gradient_sizes(b, self.steps))

    @cached_property
    def zero_gradient(self) -> tuple[str, ...]:
        """Parameters that are reported apart (`crossframe.verdict.zero_gradient`)."""
        return zero_gradient_parameters(self.a, self.b, self.steps, self._sizes)

    def groups(self) -> Iterator[list[Quantity]]:
        """All quantities in causal order. Those of one group are the same thing on several ranks or replicas."""
        yield from self._parameters()
        for step in range(self.num_steps):
            if self.same_world:
                yield from self._outputs(step)
            yield self._losses(step)
            if step in self.steps:
                if self.same_world:
                    yield from self._local_grads(step)
                yield from self._reduced_grads(step)
                yield from self._updates(step)

    def _names(self, *, backward: bool) -> list[str]:
        names = [name for name, spec in self.a.manifest.params.items() if spec.numel]
        return names[::-1] if backward else names

    def _replicas(self) -> list[tuple[int, int]]:
        """Which copy is held against which. The shorter side's last one stands for the rest: copies must be equal."""
        counts = [recording.manifest.mesh.replicate for recording in (self.a, self.b)]
        return [(min(i, counts[0] - 1), min(i, counts[1] - 1)) for i in range(max(counts))]

    def _full(self, phase: str, step: int, name: str, replicas: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Both sides in full. A gradient that one side has not counts as zeros there: None and zeros mean the same (R29)."""
        arrays = []
        for recording, replica in zip((self.a, self.b), replicas, strict=True):
            if phase == REDUCE and not recording.has(phase, step, name):
                arrays.append(np.zeros(recording.manifest.params[name].shape))
            else:
                arrays.append(recording.full(phase, step, name, replica=replica))
        return arrays[0], arrays[1]

    def _quantity(
        self,
        step: int,
        phase: str,
        event: str,
        name: str,
        arrays: tuple[np.ndarray, np.ndarray],
        *,
        scale: float,
        bound: float | None,
        rank: int | None = None,
        replica: int = 0,
    ) -> Quantity:
        unit = self.b.manifest.unit_of.get(name, "")
        late = phase == UPDATE and step >= self._whole_until
        if name in self.zero_gradient and bound is not None:
            bound = np.inf
        return Quantity(step, phase, event, unit, name, rank, replica, arrays[0], arrays[1], scale, bound, late=late)

    def _parameters(self) -> Iterator[list[Quantity]]:
        for name in self._names(backward=False):
            yield [
                self._quantity(
                    0,
                    PARAMETERS,
                    ALL_GATHER,
                    name,
                    self._full(PARAMETERS, 0, name, replicas),
                    scale=1.0,
                    bound=None,
                    replica=replicas[1],
                )
                for replicas in self._replicas()
            ]

    def _outputs(self, step: int) -> Iterator[list[Quantity]]:
        theirs = set(self.b.outputs(step))
        for microbatch, unit in self.a.outputs(step):
            if (microbatch, unit) not in theirs:
                continue
            group = []
            for rank in range(self.a.manifest.world_size):
                a, b = (recording.output(step, rank, microbatch, unit) for recording in (self.a, self.b))
                if a.shape != b.shape:
                    raise RecordingError(
                        f"step {step}, rank {rank}: the output of unit {unit!r} is of shape {a.shape} in {self.a.directory} and "
                        f"{b.shape} in {self.b.directory}; record both in one order of axes"
                    )
                scale, bound = norm(finite(a)), self.bounds.parameter
                group.append(Quantity(step, FORWARD, OUTPUT, unit, "", rank, 0, a, b, scale, bound, microbatch))
            yield group

    def _losses(self, step: int) -> list[Quantity]:
        rows = [losses[step] for losses in self._all_losses]
        ranks: list[int | None] = list(range(self.a.manifest.world_size)) if self.same_world else [None]
        if not self.same_world:
            rows = [np.array([row.mean()]) for row in rows]
        return [
            self._quantity(
                step,
                FORWARD,
                "loss",
                "",
                (rows[0][i : i + 1], rows[1][i : i + 1]),
                scale=abs(float(rows[0][i])),
                bound=self.bounds.loss,
                rank=rank,
            )
            for i, rank in enumerate(ranks)
        ]

    def _local_grads(self, step: int) -> Iterator[list[Quantity]]:
        ranks, names = range(self.a.manifest.world_size), self._names(backward=True)
        held = [name for name in names if any(r.has(BACKWARD, step, name) for r in (self.a, self.b))]
        if any(not any(r.has(BACKWARD, step, name) for name in names) for r in (self.a, self.b)):
            return  # one side recorded none at all at this step: its dense window is shorter
        typical = [self._typical_local(step, rank) for rank in ranks]
        for name in held:
            group = []
            for rank in ranks:
                arrays = tuple(
                    r.local(step, rank, name)
                    if r.has(BACKWARD, step, name, rank)
                    else np.zeros(r.manifest.params[name].shape)
                    for r in (self.a, self.b)
                )
                scale = self._gradient_scale(arrays[0], typical[rank])
                group.append(
                    self._quantity(
                        step,
                        BACKWARD,
                        "backward",
                        name,
                        (arrays[0], arrays[1]),
                        scale=scale,
                        bound=self.bounds.parameter,
                        rank=rank,
                    )
                )
            yield group

    def _typical_local(self, step: int, rank: int) -> float:
        names = [name for name in self._names(backward=True) if self.a.has(BACKWARD, step, name, rank)]
        norms = np.array([norm(finite(self.a.local(step, rank, name))) for name in names])
        return root_mean_square(norm(norms), sum(self.a.manifest.params[name].numel for name in names))

    def _gradient_scale(self, a: np.ndarray, typical: float) -> float:
        terms = max(self.a.manifest.terms, self.b.manifest.terms)
        return gradient_scale(finite(a), self.bounds.noise_scale(terms, typical, a.size))

    def _reduced_grads(self, step: int) -> Iterator[list[Quantity]]:
        event = REDUCE_SCATTER if self.b.manifest.mesh.shard > 1 else ALL_REDUCE
        for name in self._names(backward=True):
            if not any(recording.has(REDUCE, step, name) for recording in (self.a, self.b)):
                continue
            group = []
            for replicas in self._replicas():
                arrays = self._full(REDUCE, step, name, replicas)
                scale = self._gradient_scale(arrays[0], self._sizes[0].typical[step])
                group.append(
                    self._quantity(
                        step, REDUCE, event, name, arrays, scale=scale, bound=self.bounds.parameter, replica=replicas[1]
                    )
                )
            yield group

    def _updates(self, step: int) -> Iterator[list[Quantity]]:
        for name in self._names(backward=False):
            if not any(recording.has(UPDATE, step, name) for recording in (self.a, self.b)):
                continue  # frozen
            group = []
            for replicas in self._replicas():
                arrays = self._full(UPDATE, step, name, replicas)
                scale = parameter_scale(
                    finite(arrays[0]), self._total_update_norm(name), self.a.manifest.learning_rate, self.num_steps
                )
                group.append(
                    self._quantity(
                        step,
                        UPDATE,
                        "optimizer",
                        name,
                        arrays,
                        scale=scale,
                        bound=self.bounds.parameter,
                        replica=replicas[1],
                    )
                )
            yield group

    def _total_update_norm(self, name: str) -> float:
        if name not in self._update_norms:
            final, initial = self.a.full(UPDATE, self.steps[-1], name), self.a.full(PARAMETERS, 0, name)
            self._update_norms[name] = norm(finite(finite(final) - finite(initial)))
        return self._update_norms[name]


def finite(array: np.ndarray) -> np.ndarray:
    """Without what is not finite: that is judged apart, and would make every scale infinite."""
    array = np.asarray(array, np.float64)
    return np.where(np.isfinite(array), array, 0.0)
