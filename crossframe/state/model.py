"""The state dict of a sharded model (R36): which keys, of which shape, and who gives and who has which elements.

FULL: every parameter in full, under the name that it has in the unwrapped model, so that either loads the other's. SHARDED:
the same keys and shapes, each rank with a part. LOCAL: torch's own, one key a unit for the rank's shard of the flat parameter.

A tied parameter stands under each of its names, as in the unwrapped model. Buffers are replicated: every rank that has keys
has them in full, which needs no rule here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain

from crossframe.errors import LayoutError, StateDictError, UnsupportedError
from crossframe.layout import FlatLayout, Layout, PerParamLayout, Piece, Sharding
from crossframe.mesh import check_world_size
from crossframe.params import ParamSpec
from crossframe.shown import shown
from crossframe.state.names import local_key


class StateKind(Enum):
    """What a state dict of a model holds."""

    FULL = "full"
    SHARDED = "sharded"
    LOCAL = "local"


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one entry of a state dict, buffers included: any dtype that has a name.

    Raises:
        StateDictError: a shape that is no tuple of sizes, or a dtype that is no string.
    """

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not isinstance(self.shape, tuple) or not all(type(size) is int and size >= 0 for size in self.shape):
            raise StateDictError(f"expected a tuple of sizes >= 0 as the shape of an entry, got {shown(self.shape)}")
        if not isinstance(self.dtype, str):
            raise StateDictError(f"expected the name of a dtype, got {shown(self.dtype)}")


@dataclass(frozen=True)
class StateEntry:
    """One key of a state dict, as one rank sees it.

    Attributes:
        key: its name.
        tensor: its global shape and dtype.
        bucket: whose shard it comes from, as an index into `Sharding.units`.
        gives: the pieces of the rank's shard that are in it.
        has: the pieces of it that the rank's state dict has, with offsets in the array that it has there; nothing where that
            array is empty, None where the rank's dict is without the key.

    What a rank has and does not give, it receives: FULL gathers over the shard group, SHARDED moves elements of flat shards to
    chunks of whole rows and sends nothing where the layout holds chunks already, LOCAL sends nothing.
    """

    key: str
    tensor: TensorSpec
    bucket: int
    gives: tuple[Piece, ...]
    has: tuple[Piece, ...] | None


def state_entries(
    sharding: Sharding, kind: StateKind, rank: int, *, rank0_only: bool = False
) -> tuple[StateEntry, ...]:
    """The state dict of one rank, in the order of units and parameters, the aliases of each behind it.

    Args:
        rank0_only: only rank 0 of its group (`MeshSpec.group_rank`) has keys; the others give their pieces. FULL alone.

    Raises:
        MeshError: no such rank.
        StateDictError: a kind that is none, or rank0_only with another kind than FULL.
        UnsupportedError: LOCAL of a layout that has no flat parameter.
        LayoutError: SHARDED with a parameter without dims.

    >>> from crossframe.mesh import MeshSpec
    >>> layout = FlatLayout((ParamSpec("w", (3, 2), aliases=("v",)),), world_size=2, keep_original=False)
    >>> sharding = Sharding((("head", layout),), MeshSpec(2))
    >>> for kind in StateKind:
    ...     for entry in state_entries(sharding, kind, rank=0):
    ...         print(kind.value, entry.key, entry.tensor.shape, [(piece.param_start, piece.param_stop) for piece in entry.has])
    full w (3, 2) [(0, 6)]
    full v (3, 2) [(0, 6)]
    sharded w (3, 2) [(0, 4)]
    sharded v (3, 2) [(0, 4)]
    local head._flat_param (6,) [(0, 3)]
    """
    if not isinstance(sharding, Sharding):
        raise LayoutError(f"expected a Sharding, got {shown(sharding)}")
    if not isinstance(kind, StateKind):
        raise StateDictError(f"expected a StateKind, got {shown(kind)}")
    if rank0_only and kind is not StateKind.FULL:
        raise StateDictError(f"rank0_only: in a {kind.value} state dict every rank has a part of its own; ask for FULL")
    first, shard_rank = sharding.mesh.coordinate(rank)
    first *= sharding.mesh.shard
    found = []
    for bucket, (unit, layout) in enumerate(sharding.units):
        if kind is StateKind.LOCAL:
            entries = [_local_entry(unit, layout, bucket, shard_rank)]
        else:
            own = layout.pieces(shard_rank)
            entries = [
                _entry(
                    key,
                    spec,
                    layout,
                    bucket,
                    tuple(piece for piece in own if piece.name == spec.name),
                    kind,
                    shard_rank,
                )
                for spec in layout.params
                for key in (spec.name, *spec.aliases)
            ]
        found += [
            _on_rank(entry, first + shard_rank, absent=rank0_only and sharding.mesh.group_rank(rank) != 0)
            for entry in entries
        ]
    return tuple(found)


def expected_tensors(sharding: Sharding, kind: StateKind) -> dict[str, TensorSpec]:
    """Every key of a model's state dict with its global shape and dtype, for `check_load`."""
    return {entry.key: entry.tensor for entry in state_entries(sharding, kind, 0)}


def _entry(
    key: str, spec: ParamSpec, layout: Layout, bucket: int, own: tuple[Piece, ...], kind: StateKind, rank: int
) -> StateEntry:
    if kind is StateKind.FULL:
        has = (Piece(key, rank, 0, spec.numel, 0, spec.numel),) if spec.numel else ()
    else:  # whole rows, which any reader can place; a layout by parameter holds such chunks already, on whichever dim
        chunks = own if isinstance(layout, PerParamLayout) else PerParamLayout((spec,), layout.world_size).pieces(rank)
        has = tuple(replace(piece, name=key, shard_start=0, shard_stop=piece.numel) for piece in chunks)
    return StateEntry(key, TensorSpec(spec.shape, spec.dtype), bucket, own, has)


def _local_entry(unit: str, layout: Layout, bucket: int, rank: int) -> StateEntry:
    if not isinstance(layout, FlatLayout):
        raise UnsupportedError(
            f"unit {unit!r} has the {layout.kind} layout and no flat parameter: a LOCAL state dict is of flat parameters; ask "
            "for SHARDED"
        )
    start, stop = layout.shard_range(rank)
    key = local_key(unit)
    own = (Piece(key, rank, 0, stop - start, start, stop),) if start < stop else ()
    return StateEntry(key, TensorSpec((layout.flat_numel,), layout.dtype), bucket, own, own)


def _on_rank(entry: StateEntry, rank: int, *, absent: bool) -> StateEntry:
    gives = tuple(replace(piece, rank=rank) for piece in entry.gives)
    has = None if absent else tuple(replace(piece, rank=rank) for piece in entry.has or ())
    return replace(entry, gives=gives, has=has)


@dataclass(frozen=True)
class IncompatibleKeys:
    """What a state dict lacks and what it has too much, sorted: what torch's `load_state_dict(strict=False)` returns."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def check_load(
    expected: Mapping[str, TensorSpec], found: Mapping[str, TensorSpec], *, strict: bool = True, cast: bool = False
) -> IncompatibleKeys:
    """Whether a state dict fits a model. Asked before anything is written: what is refused has changed nothing.

    Args:
        expected, found: keys without wrapper prefixes.
        strict: refuse missing and unexpected keys too, not only tensors that do not fit.
        cast: accept other dtypes, as torch does, which converts them as it copies.

    Raises:
        StateDictError: lists all that is wrong, sorted.

    >>> w = TensorSpec((2, 3), "float32")
    >>> check_load({"w": w, "b": w}, {"w": w, "c": w}, strict=False)
    IncompatibleKeys(missing=('b',), unexpected=('c',))
    """
    for side in (expected, found):
        if not isinstance(side, Mapping) or not all(isinstance(key, str) for key in side):
            raise StateDictError(f"expected a state dict as TensorSpecs by name, got {shown(side)}")
        if wrong := [key for key in sorted(side) if not isinstance(side[key], TensorSpec)]:
            raise StateDictError(f"expected a TensorSpec as {wrong[0]!r}, got {shown(side[wrong[0]])}")
    keys = IncompatibleKeys(tuple(sorted(set(expected) - set(found))), tuple(sorted(set(found) - set(expected))))
    both = sorted(set(expected) & set(found))
    shapes = [
        f"{key} (expected {expected[key].shape}, got {found[key].shape})"
        for key in both
        if expected[key].shape != found[key].shape
    ]
    dtypes = [
        f"{key} (expected {expected[key].dtype}, got {found[key].dtype})"
        for key in both
        if expected[key].dtype != found[key].dtype and not cast
    ]
    problems = [
        f"{title}: {', '.join(names)}"
        for title, names in chain(
            (("missing", keys.missing), ("unexpected", keys.unexpected)) if strict else (),
            (("of another shape", shapes), ("of another dtype", dtypes)),
        )
        if names
    ]
    if problems:
        raise StateDictError(f"the state dict does not fit the model, and nothing was loaded. {'; '.join(problems)}")
    return keys


def check_local_load(saved_world_size: int, world_size: int) -> None:
    """A LOCAL state dict is a rank's own shard: it loads on as many ranks as wrote it, and on no others (R36).

    Raises:
        StateDictError: with both numbers.
        MeshError: what is no world size.
    """
    check_world_size(saved_world_size)
    check_world_size(world_size)
    if saved_world_size != world_size:
        raise StateDictError(
            f"a LOCAL state dict of {saved_world_size} shards was saved, and the model has {world_size}: its shards fit the "
            "same number only; save FULL or SHARDED to load on another"
        )
