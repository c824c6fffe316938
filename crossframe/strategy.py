"""The user's choices for a step: sharding strategy, prefetch, which microbatches are reduced (R14-R16), and their order."""

from enum import Enum

from crossframe.errors import PlanError
from crossframe.mesh import MeshSpec
from crossframe.quoting import quote


class Strategy(Enum):
    """The ranks over which parameters are sharded, and when full parameters are freed (R14)."""

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    NO_SHARD = "no_shard"
    HYBRID_SHARD = "hybrid_shard"
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"

    @property
    def reshards_after_forward(self) -> bool:
        """Whether full parameters are freed between forward and backward."""
        return self in (Strategy.FULL_SHARD, Strategy.HYBRID_SHARD)

    @property
    def is_hybrid(self) -> bool:
        """Whether it shards inside groups of ranks and replicates over these groups."""
        return self in (Strategy.HYBRID_SHARD, Strategy.HYBRID_SHARD_ZERO2)

    def mesh(self, world_size: int, shard: int | None = None) -> MeshSpec:
        """The mesh of this strategy for a world size (R10).

        Args:
            shard: number of ranks in a shard group, a divisor of the world size. Required by hybrid strategies only.

        Raises:
            PlanError: `shard` is missing, is not allowed, or is not a divisor.

        >>> Strategy.HYBRID_SHARD.mesh(16, shard=8), Strategy.NO_SHARD.mesh(4)
        (MeshSpec(shard=8, replicate=2), MeshSpec(shard=1, replicate=4))
        """
        world = MeshSpec(shard=world_size)
        if self.is_hybrid != (shard is not None):
            expected = "the number of ranks in a shard group" if self.is_hybrid else "no size of a shard group"
            raise PlanError(f"{self.value}: expected {expected}, got {quote(shard)}")
        if shard is not None:
            group = MeshSpec(shard=shard)
            if world.shard % group.shard:
                raise PlanError(
                    f"{self.value}: expected a shard group whose size divides {world_size} ranks, got {shard}"
                )
            return MeshSpec(shard=shard, replicate=world_size // shard)
        return MeshSpec(shard=1, replicate=world_size) if self is Strategy.NO_SHARD else world


class Prefetch(Enum):
    """When backward issues the all-gather of the previous unit (R16): before or after it computes the gradients of the current
    unit. This affects when the all-gather is issued, never its content."""

    BACKWARD_PRE = "backward_pre"
    BACKWARD_POST = "backward_post"


class Sync(Enum):
    """The microbatches of a step whose gradients are reduced (R15, R28).

    EACH: every microbatch. LAST: only the last one; the others run under `no_sync`. ALL_REDUCE_LAST: every one over the shard
    group, and only the last one over the replicas (FSDP2's `set_requires_all_reduce(False)`).
    """

    EACH = "each"
    LAST = "last"
    ALL_REDUCE_LAST = "all_reduce_last"


class Schedule(Enum):
    """The order of the forwards and backwards of microbatches on a stage of a pipeline.

    ONE_F_ONE_B: as many forwards as stages follow, counting this one, then a backward and a forward in turn. GPIPE: all forwards,
    then all backwards. Source: torch.distributed.pipelining's Schedule1F1B and ScheduleGPipe.
    """

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"

    def order(self, stage: int, num_stages: int, microbatches: int) -> list[tuple[str, int]]:
        """("forward" or "backward", microbatch) in order.

        >>> [f"{phase[0]}{i}" for phase, i in Schedule.ONE_F_ONE_B.order(stage=0, num_stages=2, microbatches=3)]
        ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
        """
        ahead = microbatches if self is Schedule.GPIPE else min(num_stages - stage, microbatches)
        found = [("forward", i) for i in range(ahead)]
        for i in range(microbatches):
            found.append(("backward", i))
            if ahead + i < microbatches:
                found.append(("forward", ahead + i))
        return found
