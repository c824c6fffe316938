"""The grid of ranks (R10): replicate x shard. A shard group varies along the shard axis alone."""

from dataclasses import dataclass

from crossframe.errors import MeshError


@dataclass(frozen=True)
class MeshSpec:
    """`replicate` copies of the model, each cut into `shard` shards; rank = replicate_index * shard + shard_index.

    >>> mesh = MeshSpec(replicate=2, shard=3)
    >>> mesh.world_size, mesh.coordinate(4), mesh.shard_group(4), mesh.replicate_group(4)
    (6, (1, 1), (3, 4, 5), (1, 4))
    """

    shard: int
    replicate: int = 1

    def __post_init__(self) -> None:
        for axis in ("shard", "replicate"):
            size = getattr(self, axis)
            if type(size) is not int or size < 1:
                raise MeshError(f"mesh axis {axis!r}: expected a size of at least 1, got {size!r}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard

    def coordinate(self, rank: int) -> tuple[int, int]:
        """(replicate index, shard index) of a rank."""
        check_rank(rank, self.world_size)
        return divmod(rank, self.shard)

    def shard_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that together hold one copy of the model, this rank among them."""
        first = self.coordinate(rank)[0] * self.shard
        return tuple(range(first, first + self.shard))

    def replicate_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same shard as this rank."""
        return tuple(range(self.coordinate(rank)[1], self.world_size, self.shard))


def check_rank(rank: int, world_size: int) -> None:
    """Raise MeshError unless 0 <= rank < world_size."""
    if type(rank) is not int or not 0 <= rank < world_size:
        raise MeshError(f"expected a rank from 0 to {world_size - 1}, got {rank!r}")


def check_world_size(world_size: int) -> None:
    """Raise MeshError unless the world has at least one rank."""
    if type(world_size) is not int or world_size < 1:
        raise MeshError(f"expected a world size of at least 1, got {world_size!r}")
