"""Two comparable recordings and properties of the pair."""

import math
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from crossframe.dtypes import coarser, unit_roundoff
from crossframe.recording import Recording, common_steps
from crossframe.recording.event_format import BACKWARD, PARAMETERS, REDUCE, UPDATE
from crossframe.verdict.measure.bounds_by_dtype import Bounds, bounds_for
from crossframe.verdict.measure.metrics import distance, norm, root_mean_square
from crossframe.verdict.measure.quantities import finite
from crossframe.verdict.measure.sample_ranks import is_by_rank
from crossframe.verdict.measure.values import Sides, assemble, match_values, rank_values
from crossframe.verdict.measure.zero_gradient import (
    GradientSizes,
    gradient_sizes,
    terms_of,
    zero_gradient_elements,
    zero_gradient_parameters,
)

T = TypeVar("T")


class Pair:
    """Two comparable recordings.

    Attributes:
        sketched: whether large tensors are compared by their sketches even if their elements were recorded.
        num_steps: the number of steps in both recordings.
        steps: the steps whose tensors both recorded.
        whole_until: the first step that is not in `steps`.
        dtype: the compute dtype; the coarser one if the runs differ. If only products differ, the coarser one of these.
        coarser: the side with the coarser compute or parameter dtype, or with coarser products, 0 for a and 1 for b; None if they
            are equal (`crossframe.verdict.measure.unequal_dtypes`).
        by_products: whether only the rounding of products differs, as of TF32.
        measured: the sides whose perturbed runs measure rounding: the coarser one, or the finer one if only products differ.
        noise: parameters whose gradient is noise according to the perturbed runs (`crossframe.verdict.perturbed_runs.limits`).
        of_other_shapes: by (module, use), a clause on an activation that was not compared because its shapes differ.
        routed: modules, such as experts, whose rows come in different orders, with the first step at which they do.
        unmatched: by (module, use), why an activation that both recorded is not compared, as a clause: it could not be matched by
            sample, has too many rows in different orders, or is before an elementwise activation on one side and after it on the
            other.
        unlike_buffers: by name, why a buffer that both recorded is not compared, as a clause.
        by_rank: whether each rank has the same samples in both, so that ranks are compared one by one.
        rounds_in: the dtype whose rounding gradients carry: `dtype`, or a narrower one once a part is found to compute in it.
    """

    def __init__(self, a: Recording, b: Recording, *, sketched: bool = False, by_rank: bool = True) -> None:
        self.a, self.b, self.sketched = a, b, sketched
        self.num_steps = len(common_steps(a, b))
        self.steps = tuple(sorted(set(a.recorded_steps()) & set(b.recorded_steps())))
        self.dtype: str = _dtype_of(a, b)
        self.coarser: int | None = _coarser_of(a, b)
        products = [unit_roundoff(recording.manifest.products_in) for recording in (a, b)]
        self.by_products: bool = self.coarser is None and products[0] != products[1]
        if self.by_products:
            self.coarser = int(products[1] > products[0])
            self.dtype = (a, b)[self.coarser].manifest.products_in
        self.measured: tuple[int, ...] = (0, 1)
        if self.coarser is not None:
            self.measured = (1 - self.coarser if self.by_products else self.coarser,)
        self.bounds: Bounds = bounds_for(self.dtype)
        self.rounds_in: str = self.dtype
        self.by_rank: bool = by_rank and is_by_rank(a, b)
        self.losses = (a.losses(), b.losses())
        self.whole_until = next(i for i in range(self.num_steps + 1) if i not in self.steps)
        self.noise: tuple[str, ...] = ()
        self.of_other_shapes: dict[tuple[str, str], str] = {}
        self.routed: dict[str, int] = {}
        self.unmatched: dict[tuple[str, str], str] = {}
        self.unlike_buffers: dict[str, str] = {}
        self._known: dict[Hashable, Any] = {}

    @property
    def two_programs(self) -> bool:
        """Whether the recordings are of two implementations: of other frameworks, or of other models."""
        return any(getattr(self.a.manifest, what) != getattr(self.b.manifest, what) for what in ("framework", "model"))

    def remember(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The value of `compute`, which is called once for each key."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    @cached_property
    def sizes(self) -> tuple[GradientSizes, GradientSizes]:
        return gradient_sizes(self.a), gradient_sizes(self.b)

    @cached_property
    def zero_gradient(self) -> tuple[str, ...]:
        """Parameters whose gradient is zero up to rounding (`crossframe.verdict.measure.zero_gradient`)."""
        return zero_gradient_parameters(self.a, self.b, self.steps, self.sizes, self.rounds_in)

    def zero_gradient_elements(self, name: str) -> np.ndarray | None:
        """A mask of the elements of a parameter whose gradient is zero up to rounding; None if there are none, or all."""
        return self.remember(
            (Pair.zero_gradient_elements, name),
            lambda: zero_gradient_elements(self.a, self.b, self.steps, self.sizes, name, self.rounds_in),
        )

    @property
    def replicas(self) -> list[tuple[int, int]]:
        """The pairs of compared replicas. The last replica of the side with fewer is used repeatedly, as replicas must be
        equal."""
        counts = [recording.manifest.mesh.replicate for recording in (self.a, self.b)]
        return [(min(i, counts[0] - 1), min(i, counts[1] - 1)) for i in range(max(counts))]

    def reordered(self, step: int) -> bool:
        """Whether the ranks have samples in a different order or in different microbatches, or models are called with other
        arrays."""
        if self.a.manifest.world_size != self.b.manifest.world_size:
            return False
        fed = [[r.batch(step, rank) for rank in range(r.manifest.world_size)] for r in (self.a, self.b)]
        if any(x.digest != y.digest for x, y in zip(*fed, strict=True)):
            return True
        known = all(batch.sample_ids for batches in fed for batch in batches)
        return known and not all(x.has_rows_of(y) for x, y in zip(*fed, strict=True))

    def names(self, *, backward: bool = False) -> list[str]:
        """All parameters with elements, in the order of units, or in that of backward."""
        names = self.a.backward_order if backward else self.a.manifest.params
        return [name for name in names if self.a.manifest.params[name].numel]

    def has(self, phase: str, step: int, name: str, use: str = "") -> bool:
        """Whether both recorded it."""
        return all(recording.has(phase, step, name, use=use) for recording in (self.a, self.b))

    def any_has(self, phase: str, step: int, name: str) -> bool:
        """Whether one of them recorded it."""
        return any(recording.has(phase, step, name) for recording in (self.a, self.b))

    def assemble(self, phase: str, step: int, name: str, replicas: tuple[int, int], use: str = "") -> Sides:
        """Both sides of a parameter, gradient or optimizer state entry, assembled from shards."""
        sides = (
            assemble(recording, phase, step, name, use, replica)
            for recording, replica in zip((self.a, self.b), replicas, strict=True)
        )
        return match_values(*sides, by_sketch=self.sketched)

    def lacks_local_grad(self, step: int, name: str) -> int | None:
        """The recording, 0 or 1, that has no local gradient of a parameter on any rank although the reduced one is not zero: its
        recorder could not follow the parameter, as in a compiled module. None: neither; a gradient that is lacking is zero."""
        lacking = [side for side, each in enumerate((self.a, self.b)) if not each.has(BACKWARD, step, name)]
        if not lacking or not self.has(REDUCE, step, name):
            return None
        reduced = self.assemble(REDUCE, step, name, (0, 0))[:2]
        return next((side for side in lacking if np.any(reduced[side])), None)

    def rank_values(self, phase: str, step: int, rank: int, name: str) -> Sides:
        """Both sides of a rank's own full tensor for a parameter."""
        sides = (rank_values(recording, phase, step, rank, name) for recording in (self.a, self.b))
        return match_values(*sides, by_sketch=self.sketched)

    @cached_property
    def terms(self) -> int:
        return max(terms_of(recording) for recording in (self.a, self.b))

    def typical_local(self, step: int, rank: int) -> float:
        """The root mean square over all local gradients of a rank."""
        recording = self.a
        names = [name for name in self.names() if recording.has(BACKWARD, step, name, rank)]
        norms = np.array([rank_values(recording, BACKWARD, step, rank, name).norm for name in names])
        return root_mean_square(norm(norms), sum(recording.manifest.params[name].numel for name in names))

    def gradient_noise(self, typical: float, numel: int) -> float:
        """The smallest scale by which a gradient's difference is divided (`Bounds.noise_scale`)."""
        return self.bounds.noise_scale(self.terms, typical, numel)

    def total_update_norm(self, name: str) -> float:
        """The norm of a parameter's change from its initial value to its last recorded one."""
        return self.remember((Pair.total_update_norm, name), lambda: self._moved(name))

    def _moved(self, name: str) -> float:
        last = max((step for step in self.steps if self.a.has(UPDATE, step, name)), default=None)
        if last is None or not self.a.has(PARAMETERS, 0, name):
            return 0.0
        ends = (assemble(self.a, phase, step, name) for phase, step in ((PARAMETERS, 0), (UPDATE, last)))
        initial, final, _ = match_values(*ends, by_sketch=self.sketched)
        moved = distance(finite(final), finite(initial))
        return moved if math.isfinite(moved) else 0.0


def _dtype_of(a: Recording, b: Recording) -> str:
    """The coarsest compute dtype, or coarsest parameter dtype that differs."""
    ours, theirs = a.manifest.params, b.manifest.params
    stored = [(spec.dtype, theirs[name].dtype) for name, spec in ours.items()]
    return coarser(a.manifest.dtype, b.manifest.dtype, *(coarser(x, y) for x, y in stored if x != y))


def _coarser_of(a: Recording, b: Recording) -> int | None:
    roundoffs = [
        (unit_roundoff(r.manifest.dtype), sum(unit_roundoff(spec.dtype) for spec in r.manifest.params.values()))
        for r in (a, b)
    ]
    return None if roundoffs[0] == roundoffs[1] else int(roundoffs[1] > roundoffs[0])
