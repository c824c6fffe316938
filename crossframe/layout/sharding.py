"""A whole model on a mesh (R10), and the layout of a unit in a reshard group between forward and backward (R08)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from crossframe.errors import LayoutError, MeshError
from crossframe.layout.flat import FlatLayout
from crossframe.layout.per_param import PerParamLayout
from crossframe.layout.pieces import Layout, Piece
from crossframe.layout.ragged import RaggedLayout
from crossframe.mesh import MeshSpec, check_rank
from crossframe.params import ParamSpec, check_unique_names
from crossframe.quoting import quote

LAYOUTS = (FlatLayout, PerParamLayout, RaggedLayout)
LAYOUT_KINDS = tuple(layout.kind for layout in LAYOUTS)
"""The names of the layouts in arguments, options and recordings."""


@dataclass(frozen=True)
class Sharding:
    """Which rank of a mesh holds which element of a model.

    Attributes:
        units: (unit name, layout) of each bucket, in order; a unit of several buckets occurs several times. The position in this
            tuple is the index of the bucket.
        mesh: the ranks (R10). Each of `mesh.replicate` replicas holds the whole model, cut over `mesh.shard` ranks.

    Raises:
        LayoutError: `units` is not such a tuple, or a layout is over another number of ranks than `mesh.shard`.
        MeshError: `mesh` is not a MeshSpec.
        ParamError: a name or an alias that belongs to two parameters.

    >>> layout = FlatLayout((ParamSpec("w", (3,)),), world_size=2, keep_original=False)
    >>> sharding = Sharding((("", layout),), MeshSpec(shard=2, replicate=2))
    >>> [(bucket, piece.rank, piece.param_start, piece.param_stop) for bucket, piece in sharding.pieces(3)]
    [(0, 3, 2, 3)]
    >>> sharding.where("w", 2)
    ((1, '', 0), (3, '', 0))
    """

    units: tuple[tuple[str, Layout], ...]
    mesh: MeshSpec

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, MeshSpec):
            raise MeshError(f"expected a MeshSpec, got {quote(self.mesh)}")
        if not isinstance(self.units, tuple):
            raise LayoutError(f"expected a tuple of (unit name, layout), got {quote(self.units)}")
        for unit in self.units:
            if not (
                isinstance(unit, tuple) and len(unit) == 2 and isinstance(unit[0], str) and isinstance(unit[1], LAYOUTS)
            ):
                raise LayoutError(f"expected a unit as (name, layout), got {quote(unit)}")
            name, layout = unit
            if layout.world_size != self.mesh.shard:
                raise LayoutError(
                    f"unit {name!r}: its layout is over {layout.world_size} ranks, the mesh cuts each replica over "
                    f"{self.mesh.shard}; expected the same, as layout.over({self.mesh.shard}) gives it"
                )
        check_unique_names(self.params)

    @cached_property
    def params(self) -> tuple[ParamSpec, ...]:
        """All parameters, bucket by bucket."""
        return tuple(param for _, layout in self.units for param in layout.params)

    @cached_property
    def _index(self) -> dict[str, tuple[int, int]]:
        """By name and by alias: the bucket, and the index of the parameter in it."""
        return {
            name: (bucket, i)
            for bucket, (_, layout) in enumerate(self.units)
            for i, param in enumerate(layout.params)
            for name in (param.name, *param.aliases)
        }

    def find(self, name: str) -> tuple[int, int] | None:
        """The bucket of the parameter of this name or alias, and its index in that bucket's `params`; None if there is none."""
        return self._index.get(name)

    def param(self, name: str) -> ParamSpec | None:
        """The parameter of this name or alias; None if there is none."""
        found = self.find(name)
        return None if found is None else self.units[found[0]][1].params[found[1]]

    def pieces(self, rank: int) -> Iterator[tuple[int, Piece]]:
        """The (bucket index, piece) pairs that a rank of the mesh holds, in order; `Piece.rank` is that rank."""
        replica, shard_rank = self.mesh.coordinate(rank)
        return self._pieces(replica * self.mesh.shard, shard_rank)

    def _pieces(self, first: int, shard_rank: int) -> Iterator[tuple[int, Piece]]:
        for bucket, (_, layout) in enumerate(self.units):
            for piece in layout.pieces(shard_rank):
                yield bucket, replace(piece, rank=first + shard_rank) if first else piece

    def where(self, name: str, element: int) -> tuple[tuple[int, str, int], ...]:
        """The places of an element, one for each replica: (rank, unit, offset in the shard of the parameter's bucket).

        Args:
            name: the parameter's name or one of its aliases.
            element: index in the flattened parameter.

        Raises:
            LayoutError: no such parameter, or no such element.
        """
        found = self.find(name) if isinstance(name, str) else None
        if found is None:
            raise LayoutError(f"no parameter is named {quote(name)}: expected one of {quote(sorted(self._index))}")
        bucket, i = found
        unit, layout = self.units[bucket]
        if type(element) is not int:
            raise LayoutError(f"parameter {name!r}: expected an element as an int, got {quote(element)}")
        (piece,) = layout.find(i, element, element + 1)
        ranks = range(piece.rank, self.mesh.world_size, self.mesh.shard)
        return tuple((rank, unit, piece.shard_start) for rank in ranks)


def post_forward(layout: Layout, group_size: int) -> Layout:
    """The layout of a unit in a reshard group, between forward and backward under `reshard_after_forward=group_size` (R08).

    Per parameter, each rank holds its chunk over `group_size` ranks, as `torch.chunk` cuts the parameter itself; torch cuts its
    padded buffer instead, and shows wrong rows if dim 0 is uneven. A line is cut into `group_size` equal parts as it is, padding
    included, so that it is gathered in place and the offsets of parameters do not change.

    Raises:
        MeshError: the group size does not divide the layout's world size, or is 1 or the whole world size.

    >>> layout = PerParamLayout((ParamSpec("w", (5, 3)),), world_size=4)
    >>> [post_forward(layout, 2).shard_shape(0, rank) for rank in range(2)]
    [(3, 3), (2, 3)]
    >>> line = FlatLayout((ParamSpec("w", (3, 3)),), world_size=4, keep_original=True)
    >>> line.gathered_numel, post_forward(line, 2).gathered_numel, line.over(2).gathered_numel
    (12, 12, 10)
    """
    if not isinstance(layout, LAYOUTS):
        raise LayoutError(f"expected a layout, got {quote(layout)}")
    _check_group_size(group_size, layout.world_size)
    return layout.over(group_size) if isinstance(layout, PerParamLayout) else layout.cut_over(group_size)


def reduced_layout(layout: Layout, trained: Sequence[bool] | None = None) -> Layout:
    """The layout of the buffer in which the gradients of a bucket are reduced.

    Per parameter, it holds the trained parameters only; a line is reduced as a whole, with zeros for frozen parameters.

    Args:
        trained: whether each parameter is trained, at least one of them; None: whether it requires a gradient.

    >>> frozen = ParamSpec("a", (8,), requires_grad=False)
    >>> layout = PerParamLayout((frozen, ParamSpec("b", (4,))), world_size=2)
    >>> layout.gathered_numel, reduced_layout(layout).gathered_numel
    (12, 4)
    """
    if not isinstance(layout, PerParamLayout):
        return layout
    flags = [param.requires_grad for param in layout.params] if trained is None else list(trained)
    if all(flags):
        return layout
    params = tuple(param for param, some in zip(layout.params, flags, strict=True) if some)
    dims = tuple(dim for dim, some in zip(layout.shard_dims, flags, strict=True) if some)
    return replace(layout, params=params, dims=dims)


def post_forward_group(mesh: MeshSpec, rank: int, group_size: int) -> range:
    """The reshard group of a rank: the consecutive ranks that hold a unit between forward and backward (R08).

    The position of a rank in this range is its rank in the layout that `post_forward` returns.

    >>> post_forward_group(MeshSpec(shard=4, replicate=2), rank=6, group_size=2)
    range(6, 8)
    """
    if not isinstance(mesh, MeshSpec):
        raise MeshError(f"expected a MeshSpec, got {quote(mesh)}")
    check_rank(rank, mesh.world_size)
    _check_group_size(group_size, mesh.shard)
    first = rank - rank % group_size  # the group size divides the shard group, so no group spans two replicas
    return range(first, first + group_size)


def check_reshard_group(group_size: int, world_size: int) -> None:
    """Raise MeshError unless the size of a reshard group is that of groups that divide the shard group."""
    if type(group_size) is not int or group_size < 1 or world_size % group_size:
        raise MeshError(
            f"reshard_after_forward={quote(group_size)}: expected the size of a group that divides the {world_size} ranks of a "
            "shard group"
        )


def _check_group_size(group_size: int, world_size: int) -> None:
    check_reshard_group(group_size, world_size)
    if group_size in (1, world_size):
        means = "False (keep the parameters)" if group_size == 1 else "True (reshard to the shard group)"
        raise MeshError(
            f"reshard_after_forward={group_size} on {world_size} ranks is not a reshard group: it means {means}; pass that"
        )
