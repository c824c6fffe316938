"""Two comparable recordings, and what is true of the pair as a whole."""

import math
from functools import cached_property

import numpy as np

from crossframe.dtypes import coarser, unit_roundoff
from crossframe.recording import Recording
from crossframe.recording.lines import BACKWARD, PARAMETERS, UPDATE
from crossframe.verdict.measure.bounds import Bounds, bounds_for
from crossframe.verdict.measure.metrics import distance, norm, root_mean_square
from crossframe.verdict.measure.quantities import finite
from crossframe.verdict.measure.values import Sides, assemble, match_values, rank_values
from crossframe.verdict.measure.zero_gradient import GradientSizes, gradient_sizes, terms_of, zero_gradient_parameters


class Pair:
    """Two comparable recordings.

    Attributes:
        sketched: whether everything large is compared by its sketch, though its elements be there.
        num_steps: that both have.
        steps: those whose tensors both recorded.
        whole_until: all steps before this one are among them.
        dtype: in which the runs compute, or where they differ, the dtype that rounds more.
        coarser: which of both rounds more, 0 for a and 1 for b; None if they compute and store parameters in the same dtypes
            (`crossframe.verdict.precision`).
        noise: parameters whose gradient perturbed runs show to be noise (`crossframe.verdict.envelope`).
        rounds_in: the dtype whose rounding gradients carry: that of the runs, until a part of them is seen to compute in a
            narrower one.
    """

    def __init__(self, a: Recording, b: Recording, *, sketched: bool = False) -> None:
        self.a, self.b, self.sketched = a, b, sketched
        self.num_steps = min(a.num_steps, b.num_steps)
        self.steps = tuple(sorted(set(a.recorded_steps()) & set(b.recorded_steps())))
        self.dtype: str = _dtype_of(a, b)
        self.coarser: int | None = _coarser_of(a, b)
        self.bounds: Bounds = bounds_for(self.dtype)
        self.rounds_in: str = self.dtype
        self.same_world = a.manifest.world_size == b.manifest.world_size
        self.losses = (a.losses(), b.losses())
        self.whole_until = next(i for i in range(self.num_steps + 1) if i not in self.steps)
        self.noise: tuple[str, ...] = ()
        self._update_norms: dict[str, float] = {}

    @cached_property
    def sizes(self) -> tuple[GradientSizes, GradientSizes]:
        """How large the reduced gradients are, of a and of b."""
        return gradient_sizes(self.a), gradient_sizes(self.b)

    @cached_property
    def zero_gradient(self) -> tuple[str, ...]:
        """Parameters that are reported apart (`crossframe.verdict.measure.zero_gradient`)."""
        return zero_gradient_parameters(self.a, self.b, self.steps, self.sizes, self.rounds_in)

    @property
    def replicas(self) -> list[tuple[int, int]]:
        """Which copy is held against which. The shorter side's last one stands for the rest: copies must be equal."""
        counts = [recording.manifest.mesh.replicate for recording in (self.a, self.b)]
        return [(min(i, counts[0] - 1), min(i, counts[1] - 1)) for i in range(max(counts))]

    def reordered(self, step: int) -> bool:
        """Whether a rank was fed the same samples in another order, as accumulated microbatches may be."""
        fed = [[r.batch(step, rank).sample_ids for rank in range(r.manifest.world_size)] for r in (self.a, self.b)]
        return self.same_world and fed[0] != fed[1] and all(all(ids) for ids in fed)

    def names(self, *, backward: bool = False) -> list[str]:
        """All parameters that have elements, in the order of forward or of backward."""
        names = [name for name, spec in self.a.manifest.params.items() if spec.numel]
        return names[::-1] if backward else names

    def assemble(self, phase: str, step: int, name: str, replicas: tuple[int, int], use: str = "") -> Sides:
        """Both sides of a parameter, or of what has its shape."""
        sides = (
            assemble(recording, phase, step, name, use, replica)
            for recording, replica in zip((self.a, self.b), replicas, strict=True)
        )
        return match_values(name, *sides, by_sketch=self.sketched)

    def rank_values(self, phase: str, step: int, rank: int, name: str) -> Sides:
        """Both sides of what one rank holds of a parameter in full."""
        sides = (rank_values(recording, phase, step, rank, name) for recording in (self.a, self.b))
        return match_values(name, *sides, by_sketch=self.sketched)

    @cached_property
    def terms(self) -> int:
        """How many terms the sum behind a gradient element has."""
        return max(terms_of(recording) for recording in (self.a, self.b))

    def typical_local(self, step: int, rank: int) -> float:
        """The root mean square of all of a rank's own gradients."""
        recording = self.a
        names = [name for name in self.names() if recording.has(BACKWARD, step, name, rank)]
        norms = np.array([rank_values(recording, BACKWARD, step, rank, name).norm for name in names])
        return root_mean_square(norm(norms), sum(recording.manifest.params[name].numel for name in names))

    def gradient_noise(self, typical: float, numel: int) -> float:
        """The norm below which a gradient is measured by this instead of by itself."""
        return self.bounds.noise_scale(self.terms, typical, numel)

    def total_update_norm(self, name: str) -> float:
        """How far training moved a parameter, from its first value to the last one that was recorded of it."""
        if name not in self._update_norms:
            last = max((step for step in self.steps if self.a.has(UPDATE, step, name)), default=None)
            moved = 0.0
            if last is not None and self.a.has(PARAMETERS, 0, name):
                ends = (assemble(self.a, phase, step, name) for phase, step in ((PARAMETERS, 0), (UPDATE, last)))
                initial, final, _ = match_values(name, *ends, by_sketch=self.sketched)
                moved = distance(finite(final), finite(initial))
            self._update_norms[name] = moved if math.isfinite(moved) else 0.0
        return self._update_norms[name]


def _dtype_of(a: Recording, b: Recording) -> str:
    """The coarsest dtype that makes the two differ; that of both if none does."""
    ours, theirs = a.manifest.params, b.manifest.params
    stored = [(spec.dtype, theirs[name].dtype) for name, spec in ours.items()]
    return coarser(a.manifest.dtype, b.manifest.dtype, *(coarser(x, y) for x, y in stored if x != y))


def _coarser_of(a: Recording, b: Recording) -> int | None:
    roundoffs = [
        (unit_roundoff(r.manifest.dtype), sum(unit_roundoff(spec.dtype) for spec in r.manifest.params.values()))
        for r in (a, b)
    ]
    return None if roundoffs[0] == roundoffs[1] else int(roundoffs[1] > roundoffs[0])
