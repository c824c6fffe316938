"""The parameters of a bucket in an optimizer, and the entries of their state on all ranks (R37)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from crossframe.layout import Layout
from crossframe.params import ParamSpec
from crossframe.state import Description, Role, Seen, merged
from torch_backend.compat._dtypes import dtype_name, to_numpy
from torch_backend.engine._bucket import Bucket
from torch_backend.param_registration import FlatRegistrar
from torch_backend.pieces._piece_tensor import PieceTensor
from torch_backend.pieces._sharded_tensors import shape_and_dtype

# The state of an optimizer, by the identity of the parameter and by entry.
StateOf = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class OptimizedBucket:
    """The parameters of a bucket that an optimizer holds.

    Attributes:
        layout: of these parameters, with their names in the model.
        params: what the optimizer holds of them: one flat parameter, or each of them.
    """

    bucket: Bucket
    layout: Layout
    params: Sequence[nn.Parameter]

    @property
    def specs(self) -> tuple[ParamSpec, ...]:
        return self.layout.params

    @property
    def is_flat(self) -> bool:
        """Whether one flat parameter holds all of them."""
        return isinstance(self.bucket.registrar, FlatRegistrar)

    def members(self, at: int) -> range:
        """The indices of the parameters that the optimizer's parameter `at` stands for."""
        return range(len(self.specs)) if self.is_flat else range(at, at + 1)

    def _numels(self, at: int) -> list[int]:
        """How many elements each rank has of the optimizer's parameter `at`."""
        numels = [0] * self.layout.world_size
        if self.is_flat:
            return [self.layout.padded_shard_numel for _ in numels]
        for piece in self.layout.find(at, 0, self.specs[at].numel):
            numels[piece.rank] += piece.numel
        return numels

    def entries(self, by_rank: Sequence["Descriptions"]) -> list[dict[str, tuple[Role, Seen, Any]]]:
        """The entries of the state of each parameter of the optimizer; see `merged`.

        Raises:
            StateDictError: an entry that is neither elementwise nor a scalar, or whose value differs between ranks.
        """
        found = []
        for at in range(len(self.params)):
            name = f"the flat parameter of {self.specs[0].name!r}" if self.is_flat else self.specs[at].name
            found.append(merged(name, [each.get(at, {}) for each in by_rank], self._numels(at)))
        return found

    def pieces(self, entry: str, states: StateOf) -> dict[int, Tensor]:
        """This rank's elements of an entry, 1-D, by index of the parameter; without those of which it has no state."""
        values = {at: states.get(id(param), {}).get(entry) for at, param in enumerate(self.params)}
        local = {at: local_of(value).reshape(-1) for at, value in values.items() if value is not None}
        return dict(enumerate(self.bucket.store.split(local[0]))) if self.is_flat and local else local


# A rank's descriptions of the state of a bucket, by index in `OptimizedBucket.params` and by entry.
Descriptions = dict[int, dict[str, Description]]


def gather_descriptions(buckets: Sequence[OptimizedBucket], states: StateOf) -> list[list[Descriptions]]:
    """For each bucket the descriptions of every rank of its shard group. One exchange of objects for all buckets of a group."""
    found: list[list[Descriptions]] = [[] for _ in buckets]
    groups: dict[tuple[int, ...], list[int]] = {}
    for k, each in enumerate(buckets):
        groups.setdefault(each.bucket.mesh.shards.ranks, []).append(k)
    for members in groups.values():
        own = [
            {
                at: {entry: describe(local_of(value)) for entry, value in states[id(param)].items()}
                for at, param in enumerate(buckets[k].params)
                if id(param) in states
            }
            for k in members
        ]
        gathered = buckets[members[0]].bucket.mesh.shards.gather_objects(own)
        for place, k in enumerate(members):
            found[k] = [by_rank[place] for by_rank in gathered]
    return found


def describe(value: Any) -> Description:
    """The shape and dtype of a value, and the value if there is a single one, as an array if it is a tensor."""
    if not isinstance(value, Tensor):
        return Seen(None, type(value).__name__), value
    shape, dtype = shape_and_dtype(value)
    is_one = not isinstance(value, DTensor | ShardedTensor) and value.numel() == 1
    return Seen(tuple(shape), dtype_name(dtype)), to_numpy(value) if is_one else None


def local_of(value: Any) -> Any:
    """The elements of a tensor that this rank holds; other values as they are."""
    if isinstance(value, PieceTensor):
        return value.local
    return value.to_local() if isinstance(value, DTensor) else value
