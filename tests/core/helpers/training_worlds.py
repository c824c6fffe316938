"""Worlds that train: every choice that a step has, and networks whose sums are exact."""

import functools
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from crossframe.api import Api
from crossframe.dtypes import numpy_dtype
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.plan import PlannedUnit, Prefetch, Strategy, Sync, plan_units, step_plan
from crossframe.precision import PrecisionPolicy
from crossframe.reference.net import Batch, Layers
from crossframe.reference.optim import Optimizer
from crossframe.reference.world import World
from crossframe.trace import Event
from tests.conftest import EXHAUSTIVE
from tests.core.helpers.small_worlds import MAKE

EVERY = bool(os.environ.get(EXHAUSTIVE))
# The forward reaches "a.0" and "a" ahead of "b" and the root.
UNITS = ("a.0", "a", "b", "")
SIZES = (3, 5, 4, 5, 2)
LAYERS = Layers(UNITS, SIZES)
POLICIES = {
    "as stored": PrecisionPolicy(),
    "mixed": PrecisionPolicy("bfloat16"),
    "summed in float32": PrecisionPolicy("bfloat16", "float32"),
    "kept low": PrecisionPolicy("bfloat16", keep_low_precision_grads=True),
}


@dataclass(frozen=True)
class Case:
    """The choices of one step."""

    kind: str
    mesh: MeshSpec
    api: Api
    strategy: Strategy
    reshard_after_forward: bool | int | None
    sync: Sync
    microbatches: int
    backward_prefetch: Prefetch | None
    forward_prefetch: int
    policy: str = "as stored"
    dtype: str = "float64"

    def specs(self) -> dict[str, tuple[ParamSpec, ...]]:
        return LAYERS.specs(self.dtype)

    def units(self, specs: Mapping[str, tuple[ParamSpec, ...]] | None = None) -> tuple[PlannedUnit, ...]:
        """The units of a plan, of the layers' parameters unless others are given."""
        layouts = [(name, MAKE[self.kind](params, self.mesh.shard)) for name, params in (specs or self.specs()).items()]
        return plan_units(
            layouts,
            self.strategy,
            api=self.api,
            reshard_after_forward=self.reshard_after_forward,
            policy=POLICIES[self.policy],
        )

    def plan(self, units: Sequence[PlannedUnit], rank: int = 0) -> list[Event]:
        return step_plan(
            units,
            self.mesh,
            rank,
            backward_prefetch=self.backward_prefetch,
            forward_prefetch=self.forward_prefetch,
            microbatches=self.microbatches,
            sync=self.sync,
        )

    def world(
        self,
        optimizer: Optimizer,
        params: Mapping[str, np.ndarray] | None = None,
        specs: Mapping[str, tuple[ParamSpec, ...]] | None = None,
        divide_factor: float | None = None,
    ) -> World:
        initial = LAYERS.initial(0, self.dtype) if params is None else params
        units = self.units(specs)
        return World(units, self.mesh, initial, optimizer=optimizer, divide_factor=divide_factor)


def _strategies(mesh: MeshSpec) -> tuple[Strategy, ...]:
    if mesh.shard == 1:
        return (Strategy.NO_SHARD,)
    if mesh.replicate > 1:
        return (Strategy.HYBRID_SHARD, Strategy.HYBRID_SHARD_ZERO2)
    return (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP)


MESHES = (MeshSpec(4), MeshSpec(2, 2), MeshSpec(1, 4), MeshSpec(3), MeshSpec(3, 2), MeshSpec(4, 2))
CASES = [
    Case(kind, mesh, api, strategy, reshards, sync, microbatches, backward, forward)
    for kind in MAKE
    for mesh in MESHES
    for api in Api
    for strategy in _strategies(mesh)
    for reshards in (None, True, False, *([2] if mesh.shard == 4 else []))
    for sync in Sync
    if sync is not Sync.ALL_REDUCE_LAST or (api is Api.FSDP2 and mesh.replicate > 1)
    for microbatches in (1, 3)
    for backward in (None, *Prefetch)
    for forward in (0, 1, 9)
]


def sample(number: int, seed: int, **changes: str) -> list[Case]:
    """Some of all cases, the same ones every time, among them each choice of each kind; three times as many if exhaustive."""
    cases = random.Random(seed).sample(CASES, 3 * number if EVERY else number)
    for name in ("kind", "mesh", "api", "strategy", "reshard_after_forward", "sync", "backward_prefetch"):
        assert {getattr(case, name) for case in cases} == {getattr(case, name) for case in CASES}
    return [replace(case, **changes) for case in cases]


def in_turn(cases: Sequence[Case], **choices: Sequence[str]) -> list[Case]:
    """The cases, the i-th with the i-th of these choices; each choice meets every layout, interface and number of microbatches.
    If exhaustive, each case with each choice."""
    num_choices = len(next(iter(choices.values())))
    picked = [{name: values[i] for name, values in choices.items()} for i in range(num_choices)]
    if EVERY:
        return [replace(case, **choice) for case in cases for choice in picked]
    for i in range(num_choices):
        for name in ("kind", "api", "microbatches"):
            assert {getattr(case, name) for case in cases[i::num_choices]} == {getattr(case, name) for case in CASES}
    return [replace(case, **picked[i % num_choices]) for i, case in enumerate(cases)]


@dataclass
class Integers:
    """A network whose gradients are small integers that its batches give, and that looks at the parameters it is given.

    Gradients are multiples of 24, so that they divide by any number of ranks here, and fit into bfloat16 summed.

    Attributes:
        expected: the full parameters that every forward and backward must find, by name.
        dtype: and their dtype.
        unused: names without a gradient, by rank; None stands for all ranks.
        fail_at: (unit, phase, rank) at which it raises.
    """

    expected: Mapping[str, np.ndarray]
    dtype: str
    unused: dict[int | None, set[str]] = field(default_factory=dict)
    fail_at: tuple[str, str, int] | None = None
    seen: list[tuple[str, str, int]] = field(default_factory=list)
    _batch: dict[int, Batch] = field(default_factory=dict)

    def start(self, rank: int, batch: Batch) -> None:
        self._batch[rank] = batch

    def loss(self, rank: int) -> float:
        return float(self._batch[rank][0].sum())

    def _look(self, phase: str, unit: str, rank: int, params: Mapping[str, np.ndarray]) -> None:
        for name, value in params.items():
            wanted = self.expected[name].astype(numpy_dtype(self.dtype))
            assert value.dtype == wanted.dtype and value.shape == wanted.shape, (phase, unit, rank, name)
            assert value.tobytes() == wanted.tobytes(), (phase, unit, rank, name)
        self.seen.append((phase, unit, rank))
        if self.fail_at == (unit, phase, rank):
            raise KeyboardInterrupt

    def forward(self, unit: str, rank: int, params: Mapping[str, np.ndarray]) -> None:
        self._look("forward", unit, rank, params)

    def backward(self, unit: str, rank: int, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self._look("backward", unit, rank, params)
        return self.grads(rank, {name: value.shape for name, value in params.items()}, self._batch[rank])

    def grads(self, rank: int, shapes: Mapping[str, tuple[int, ...]], batch: Batch) -> dict[str, np.ndarray]:
        """A rank's gradients on a batch."""
        unused = self.unused.get(rank, set()) | self.unused.get(None, set())
        first = int(batch[0].sum()) % 3
        return {name: _multiples(shape, first).copy() for name, shape in shapes.items() if name not in unused}


@functools.cache
def _multiples(shape: tuple[int, ...], first: int) -> np.ndarray:
    """-24, 0 and 24 by turns, from the first-th of them on."""
    return (24.0 * ((np.arange(math.prod(shape)) + first) % 3 - 1)).reshape(shape)


def integer_batches(case: Case, seed: int) -> list[list[Batch]]:
    """Of each microbatch, each rank's."""
    rng = np.random.default_rng(seed)
    return [
        [(rng.integers(0, 9, (1,)), np.zeros(1)) for _ in range(case.mesh.world_size)] for _ in range(case.microbatches)
    ]


def layer_batches(mesh: MeshSpec, microbatches: int = 1) -> list[list[Batch]]:
    return [[LAYERS.batch(10 * m + rank) for rank in range(mesh.world_size)] for m in range(microbatches)]
