"""What a user chooses of a step: over which ranks parameters are sharded, when full ones are freed, and when what is prefetched
and reduced (R14-R16)."""

from enum import Enum

from crossframe.errors import PlanError
from crossframe.mesh import MeshSpec
from crossframe.shown import shown


class Strategy(Enum):
    """Over which ranks parameters are sharded, and when full ones are freed (R14)."""

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
        """Whether it shards inside groups of ranks and replicates over them."""
        return self in (Strategy.HYBRID_SHARD, Strategy.HYBRID_SHARD_ZERO2)

    def mesh(self, world_size: int, shard: int | None = None) -> MeshSpec:
        """The mesh that this strategy makes of a world (R10).

        Args:
            shard: ranks that hold one copy of the model; hybrid strategies need it, and it divides the world size.

        Raises:
            PlanError: `shard` missing, given for nothing, or not a divisor.

        >>> Strategy.HYBRID_SHARD.mesh(16, shard=8), Strategy.NO_SHARD.mesh(4)
        (MeshSpec(shard=8, replicate=2), MeshSpec(shard=1, replicate=4))
        """
        world = MeshSpec(shard=world_size)
        if self.is_hybrid != (shard is not None):
            expected = "the number of ranks in a shard group" if self.is_hybrid else "no size of a shard group"
            raise PlanError(f"{self.value}: expected {expected}, got {shown(shard)}")
        if shard is not None:
            group = MeshSpec(shard=shard)
            if world.shard % group.shard:
                raise PlanError(
                    f"{self.value}: expected a shard group whose size divides {world_size} ranks, got {shard}"
                )
            return MeshSpec(shard=shard, replicate=world_size // shard)
        return MeshSpec(shard=1, replicate=world_size) if self is Strategy.NO_SHARD else world


class Prefetch(Enum):
    """When backward issues the all-gather of the unit that ran before the present one (R16): ahead of the present one's
    gradients, or behind them. Either changes when it is issued and never what."""

    BACKWARD_PRE = "backward_pre"
    BACKWARD_POST = "backward_post"


class Sync(Enum):
    """What of a step's microbatches is reduced (R15, R28).

    EACH: every microbatch. LAST: the last alone, those before it under `no_sync`. ALL_REDUCE_LAST: every one over the shard
    group, and the last alone over replicas (FSDP2's `set_requires_all_reduce(False)`).
    """

    EACH = "each"
    LAST = "last"
    ALL_REDUCE_LAST = "all_reduce_last"
