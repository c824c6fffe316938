"""The mesh of ranks (R10): replicate x shard, alone or next to the axes of tensor, expert and pipeline parallelism (R39)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

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


PIPELINE, REPLICATE, SHARD, EXPERT, TENSOR = "pp", "replicate", "dp", "ep", "tp"
AXES: Mapping[str, str] = MappingProxyType(
    {
        PIPELINE: "stages of a pipeline",
        REPLICATE: "replicas of the model",
        SHARD: "shards",
        EXPERT: "parts of the experts, and shards of all other parameters",
        TENSOR: "parts of the modules that tensor parallelism divides",
    }
)
"""The axes of a `ParallelMesh` by name, from the outermost to the innermost in the usual order."""
MODEL_AXES = (PIPELINE, EXPERT, TENSOR)


@dataclass(frozen=True)
class ParallelMesh:
    """A mesh of named axes, of which some divide the model and the others are data parallel (R39).

    The last axis varies fastest, as in torch's `init_device_mesh`: a rank is the row-major index of its coordinate.

    Attributes:
        names: names of AXES, the outermost axis first.
        sizes: the size of each.

    Raises:
        MeshError: no axes, an unknown name or one that stands twice, or a size below 1.

    >>> mesh = ParallelMesh.of(pp=2, dp=2, tp=2)
    >>> mesh.world_size, mesh.coordinate(5), mesh.group(5, "dp"), mesh.group(5, "dp", "tp")
    (8, {'pp': 1, 'dp': 0, 'tp': 1}, range(5, 9, 2), range(4, 8))
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not (isinstance(self.names, tuple) and isinstance(self.sizes, tuple) and len(self.names) == len(self.sizes)):
            raise MeshError(
                f"expected a tuple of names and one of as many sizes, got {quote(self.names)} and {quote(self.sizes)}"
            )
        if not self.names:
            raise MeshError(f"a mesh needs at least one axis: expected some of {', '.join(AXES)}")
        for name, size in zip(self.names, self.sizes, strict=True):
            if name not in AXES:
                raise MeshError(f"unknown mesh axis {quote(name)}: expected some of {', '.join(AXES)}")
            if type(size) is not int or size < 1:
                raise MeshError(f"mesh axis {name!r}: expected a size of at least 1, got {quote(size)}")
        if len(set(self.names)) < len(self.names):
            raise MeshError(f"a mesh axis stands twice among {quote(self.names)}; name each once")
        if math.prod(self.sizes) > MAX_WORLD_SIZE:
            raise MeshError(f"expected at most {MAX_WORLD_SIZE} ranks, got mesh axes {quote(dict(self.items()))}")

    @classmethod
    def of(cls, **sizes: int) -> "ParallelMesh":
        """The mesh with these sizes by axis, the outermost axis first."""
        return cls(tuple(sizes), tuple(sizes.values()))

    def items(self) -> Sequence[tuple[str, int]]:
        """(name, size) of each axis, the outermost first."""
        return tuple(zip(self.names, self.sizes, strict=True))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """The size of an axis; 1 if the mesh does not have it."""
        return dict(self.items()).get(axis, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """The index of a rank on each axis."""
        check_rank(rank, self.world_size)
        found = {}
        for name, size in reversed(self.items()):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.names}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a coordinate; the index on an axis that is left out is 0."""
        found = 0
        for name, size in self.items():
            found = found * size + coordinate.get(name, 0)
        return found

    def group(self, rank: int, *axes: str) -> Sequence[int]:
        """The ranks that differ from this one along these axes only, including itself, in ascending order."""
        return self._group(rank, [name for name in self.names if name in axes])

    def data_ranks(self, rank: int, *, experts: bool = False) -> "DataRanks":
        """The data-parallel ranks of a rank: those over which its parameters are replicated and sharded (R39).

        Args:
            experts: of parameters that the axis "ep" divides. All others are sharded over that axis too.
        """
        sharding = [name for name in self.names if name == SHARD or (name == EXPERT and not experts)]
        mesh = MeshSpec(math.prod(map(self.size, sharding)), self.size(REPLICATE))
        return DataRanks(mesh, self._group(rank, [REPLICATE, *sharding]))

    def _group(self, rank: int, axes: Sequence[str]) -> Sequence[int]:
        """The ranks that differ along these axes, of which the last one varies fastest."""
        first = self.rank(self.coordinate(rank) | dict.fromkeys(axes, 0))
        strides: list[tuple[int, int]] = []
        for size, stride in ((self.size(axis), self.rank({axis: 1})) for axis in axes if self.size(axis) > 1):
            if strides and strides[-1][1] == size * stride:  # both together are evenly spaced
                strides[-1] = (strides[-1][0] * size, stride)
            else:
                strides.append((size, stride))
        if len(strides) <= 1:
            size, stride = strides[0] if strides else (1, 1)
            return range(first, first + size * stride, stride)
        steps = product(*(range(0, size * stride, stride) for size, stride in strides))
        return tuple(first + sum(step) for step in steps)


@dataclass(frozen=True)
class DataRanks:
    """The ranks over which the parameters of one model rank are replicated and sharded.

    Attributes:
        mesh: how many there are.
        ranks: the rank of the whole mesh for each rank of `mesh`.

    >>> data = ParallelMesh.of(replicate=2, dp=2, tp=2).data_ranks(5)
    >>> data.mesh, data.ranks, data.shard_group(5), data.replicate_group(5)
    (MeshSpec(shard=2, replicate=2), range(1, 9, 2), range(5, 9, 2), range(1, 9, 4))
    """

    mesh: MeshSpec
    ranks: Sequence[int]

    def index(self, rank: int) -> int:
        """The rank of `mesh` for a rank of the whole mesh."""
        if rank not in self.ranks:
            raise MeshError(f"expected one of the data-parallel ranks {quote(self.ranks)}, got {quote(rank)}")
        return self.ranks.index(rank)

    def shard_group(self, rank: int) -> Sequence[int]:
        """The ranks that together hold one replica of this rank's parameters."""
        return self.of(self.mesh.shard_group(self.index(rank)))

    def replicate_group(self, rank: int) -> Sequence[int]:
        """The ranks that hold the same shard as this rank."""
        return self.of(self.mesh.replicate_group(self.index(rank)))

    def of(self, indices: range) -> Sequence[int]:
        """The ranks of the whole mesh for ranks of `mesh`."""
        return as_range(self.ranks[indices.start : indices.stop : indices.step])


def as_range(ranks: Sequence[int]) -> Sequence[int]:
    """Evenly spaced ranks as a `range`, whose size does not grow with them; others as a tuple.

    >>> as_range([1, 3, 5]), as_range((0, 1, 4))
    (range(1, 7, 2), (0, 1, 4))
    """
    if isinstance(ranks, range):
        return ranks
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    even = range(ranks[0], ranks[0] + step * len(ranks), step) if ranks and step else None
    return even if even is not None and list(even) == list(ranks) else tuple(ranks)


def check_rank(rank: int, world_size: int) -> None:
    """Raise MeshError unless 0 <= rank < world_size."""
    if type(rank) is not int or not 0 <= rank < world_size:
        raise MeshError(f"expected a rank from 0 to {world_size - 1}, got {quote(rank)}")


def check_world_size(world_size: int) -> None:
    """Raise MeshError unless this is an int from 1 to MAX_WORLD_SIZE."""
    if type(world_size) is not int or not 1 <= world_size <= MAX_WORLD_SIZE:
        raise MeshError(f"expected a world size of at least 1 and at most {MAX_WORLD_SIZE}, got {quote(world_size)}")
