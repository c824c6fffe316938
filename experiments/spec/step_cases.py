"""The steps that the checks of plans go through: which models, sharded how, with which microbatches."""

import random
from dataclasses import dataclass
from functools import cache

from crossframe.api import Api
from crossframe.layout import FlatLayout, Layout, PerParamLayout
from crossframe.mesh import MeshSpec
from crossframe.plan import PlannedUnit, plan_units, step_plan
from crossframe.precision import PrecisionPolicy
from crossframe.strategy import Prefetch, Strategy, Sync
from crossframe.trace import Event
from experiments.spec.checks import SEED
from experiments.spec.watch import NESTS, specs_of

NUM_STEPS = 1200
PREFETCHES = (*Prefetch, None)
MICROBATCHES = ((1, Sync.EACH), (2, Sync.EACH), (2, Sync.LAST), (3, Sync.LAST), (2, Sync.ALL_REDUCE_LAST))
GRIDS = tuple((replicate, shard) for replicate in range(1, 9) for shard in range(1, 8 // replicate + 1))


@dataclass(frozen=True)
class Step:
    """A model, how it is sharded, and what is done with it."""

    nest: tuple[str, ...]
    api: Api
    mesh: MeshSpec
    rank: int
    strategy: Strategy = Strategy.FULL_SHARD
    reshard_after_forward: bool | int | None = None
    prefetch: Prefetch | None = Prefetch.BACKWARD_PRE
    forward_prefetch: int = 0
    backward_by_hand: bool = False  # FSDP2 alone: what it does by itself, said unit by unit
    microbatches: int = 1
    sync: Sync = Sync.EACH
    low: bool = False
    keep_original: bool = True

    @property
    def policy(self) -> PrecisionPolicy:
        """Its precision."""
        return PrecisionPolicy("bfloat16", "float32") if self.low else PrecisionPolicy()

    def units(self) -> tuple[PlannedUnit, ...]:
        """The core's units."""
        layouts: list[tuple[str, Layout]] = []
        for name, params in specs_of(self.nest):
            if self.api is Api.FSDP2:
                layouts.append((name, PerParamLayout(params, self.mesh.shard)))
            else:
                computed = "bfloat16" if self.low else None
                layouts.append((name, FlatLayout(params, self.mesh.shard, self.keep_original, computed)))
        return plan_units(
            layouts,
            self.strategy,
            api=self.api,
            reshard_after_forward=self.reshard_after_forward,
            policy=self.policy,
        )

    def plan(self) -> list[Event]:
        """The core's plan."""
        return step_plan(
            self.units(),
            self.mesh,
            self.rank,
            backward_prefetch=self.prefetch,
            forward_prefetch=self.forward_prefetch,
            microbatches=self.microbatches,
            sync=self.sync,
        )


@cache
def flat_steps() -> tuple[Step, ...]:
    """A seeded sample of FSDP1's steps: every strategy, grids of up to 8 ranks, every prefetch, microbatches, precision."""
    rng = random.Random(SEED)
    return tuple(_flat_step(rng) for _ in range(NUM_STEPS))


def _flat_step(rng: random.Random) -> Step:
    strategy = rng.choice(list(Strategy))
    if strategy.is_hybrid:
        replicate, shard = rng.choice(GRIDS)
        mesh = MeshSpec(shard, replicate)
    else:
        mesh = strategy.mesh(rng.randint(1, 8))
    microbatches, sync = rng.choice(MICROBATCHES[:-1])
    return Step(
        rng.choice(NESTS),
        Api.FSDP1,
        mesh,
        rng.randrange(mesh.world_size),
        strategy,
        prefetch=rng.choice(PREFETCHES),
        forward_prefetch=rng.randrange(2),
        microbatches=microbatches,
        sync=sync,
        low=rng.random() < 0.5,
        keep_original=rng.random() < 0.5,
    )


@cache
def per_param_steps() -> tuple[Step, ...]:
    """A seeded sample of FSDP2's steps: every choice behind forward, grids of up to 8 ranks, prefetch, what is put off."""
    rng = random.Random(SEED)
    return tuple(_per_param_step(rng) for _ in range(NUM_STEPS))


def _per_param_step(rng: random.Random) -> Step:
    mesh = MeshSpec(*reversed(rng.choice(GRIDS)))
    groups = [k for k in range(2, mesh.shard) if mesh.shard % k == 0]
    microbatches, sync = rng.choice(MICROBATCHES if mesh.replicate > 1 else MICROBATCHES[:-1])
    return Step(
        rng.choice(NESTS),
        Api.FSDP2,
        mesh,
        rng.randrange(mesh.world_size),
        reshard_after_forward=rng.choice([None, True, False, *groups]),
        forward_prefetch=rng.randrange(3),
        backward_by_hand=rng.random() < 0.5,
        microbatches=microbatches,
        sync=sync,
        low=rng.random() < 0.5,
    )
