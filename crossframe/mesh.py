"""The mesh of ranks (R10): replicate x shard. A shard group varies along the shard axis only."""

from dataclasses import dataclass

from crossframe.errors import MeshError
from crossframe.quoting import quote

# Communication libraries represent ranks by 32-bit ints.
MAX_WORLD_SIZE = 2**31 - 1


@dataclass(frozen=True)
class MeshSpec:
    """`replicate` copies of the model, each cut into `shard` shards; rank = replicate_index * shard + shard_index.

    >>> mesh = MeshSpec(replicate=2, shard=3)
    >>> mesh.world_size, mesh.coordinate(4), mesh.shard_group(4), mesh.replicate_group(4)
    (6, (1, 1), range(3, 6), range(1, 6, 3))
    """

    shard: int
    replicate: int = 1

    def __post_init__(self) -> None:
        for axis in ("shard", "replicate"):
            size = getattr(self, axis)
            if type(size) is not int or size < 1:
                raise MeshError(f"mesh axis {axis!r}: expected a size of at least 1, got {quote(size)}")
        if self.world_size > MAX_WORLD_SIZE:
            raise MeshError(
                f"expected at most {MAX_WORLD_SIZE} ranks, got mesh axes of {quote(self.replicate)} x {quote(self.shard)}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard

    def coordinate(self, rank: int) -> tuple[int, int]:
        """(replicate index, shard index) of a rank."""
        check_rank(rank, self.world_size)
        return divmod(rank, self.shard)

    def shard_group(self, rank: int) -> range:
        """The ranks that together hold one replica of the model, including this rank."""
        first = self.coordinate(rank)[0] * self.shard
        return range(first, first + self.shard)

    def group_rank(self, rank: int) -> int:
        """A rank's index in its shard group, or among the replicas if the model is not sharded. If one rank acts for its group,
        it is the one with index 0 (R19): one in each replica of a hybrid mesh.

        >>> [MeshSpec(shard=2, replicate=2).group_rank(rank) for rank in range(4)]
        [0, 1, 0, 1]
        >>> [MeshSpec(shard=1, replicate=2).group_rank(rank) for rank in range(2)]
        [0, 1]
        """
        return self.coordinate(rank)[1] if self.shard > 1 else self.coordinate(rank)[0]

    def replicate_group(self, rank: int) -> range:
        """The ranks that hold the same shard as this rank."""
        return range(self.coordinate(rank)[1], self.world_size, self.shard)


def check_rank(rank: int, world_size: int) -> None:
    """Raise MeshError unless 0 <= rank < world_size."""
    if type(rank) is not int or not 0 <= rank < world_size:
        raise MeshError(f"expected a rank from 0 to {world_size - 1}, got {quote(rank)}")


def check_world_size(world_size: int) -> None:
    """Raise MeshError unless this is an int from 1 to MAX_WORLD_SIZE."""
    if type(world_size) is not int or not 1 <= world_size <= MAX_WORLD_SIZE:
        raise MeshError(f"expected a world size of at least 1 and at most {MAX_WORLD_SIZE}, got {quote(world_size)}")
