"""The state dict of a sharded model (R36): its keys and shapes, and which rank sends and which rank holds which elements.

FULL: every parameter in full, under its name in the unwrapped model, so that each loads the state dict of the other. SHARDED:
the same keys and shapes; each rank holds a part. LOCAL, as in torch: one key for each unit, the rank's shard of its flat
parameter.

A tied parameter has an entry under each of its names, as in the unwrapped model. Buffers are replicated: every rank that has
entries has them in full.
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
    """The kinds of state dicts of a model."""

    FULL = "full"
    SHARDED = "sharded"
    LOCAL = "local"


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one entry of a state dict, also of a buffer: any dtype that has a name.

    Raises:
        StateDictError: the shape is not a tuple of sizes, or the dtype is not a string.
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
    """One entry of a state dict on one rank.

    Attributes:
        key: the name of the entry.
        tensor: its global shape and dtype.
        bucket: the bucket that it is part of, as an index into `Sharding.units`.
        gives: the pieces of the rank's shard that are part of the entry.
        has: the pieces of the entry in the rank's state dict, with offsets in the rank's array; empty if that array is empty,
            None if the rank's state dict lacks the key.

    A rank receives what it has and does not give: FULL gathers over the shard group, SHARDED moves elements of flat shards to
    chunks of whole rows and sends nothing if the layout consists of such chunks, and LOCAL sends nothing.
    """

    key: str
    tensor: TensorSpec
    bucket: int
    gives: tuple[Piece, ...]
    has: tuple[Piece, ...] | None


def state_entries(
    sharding: Sharding, kind: StateKind, rank: int, *, rank0_only: bool = False
) -> tuple[StateEntry, ...]:
    """The entries of one rank's state dict, in the order of units and parameters; aliases follow their parameter.

    Args:
        rank0_only: only rank 0 of each group (`MeshSpec.group_rank`) has keys, and the others give their pieces. For FULL only.

    Raises:
        MeshError: `rank` is not a rank of the mesh.
        StateDictError: `kind` is not a StateKind, or rank0_only is given with another kind than FULL.
        UnsupportedError: LOCAL with a layout that has no flat parameter.
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
    """The global shape and dtype of every entry of a model's state dict, by key, for `check_load`."""
    return {entry.key: entry.tensor for entry in state_entries(sharding, kind, 0)}


def _entry(
    key: str, spec: ParamSpec, layout: Layout, bucket: int, own: tuple[Piece, ...], kind: StateKind, rank: int
) -> StateEntry:
    if kind is StateKind.FULL:
        has = (Piece(key, rank, 0, spec.numel, 0, spec.numel),) if spec.numel else ()
    else:  # whole rows, which any reader can place; a per-parameter layout has such chunks already, on any dim
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
    """Missing and unexpected keys of a state dict, sorted, as torch's `load_state_dict(strict=False)` returns them."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def check_load(
    expected: Mapping[str, TensorSpec], found: Mapping[str, TensorSpec], *, strict: bool = True, cast: bool = False
) -> IncompatibleKeys:
    """Check that a state dict fits a model. Called before anything is written, so that an error leaves the model unchanged.

    Args:
        expected, found: entries by key, without wrapper prefixes.
        strict: reject missing and unexpected keys too, not only tensors that do not fit.
        cast: accept other dtypes, as torch does, which converts them when it copies.

    Returns:
        The missing and unexpected keys.

    Raises:
        StateDictError: the state dict does not fit. The message lists everything that is wrong, sorted.

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
    """Check the world size of a LOCAL state dict: it holds shards, so it loads only on the number of ranks that wrote it (R36).

    Raises:
        StateDictError: the numbers differ.
        MeshError: one of them is not a valid world size.
    """
    check_world_size(saved_world_size)
    check_world_size(world_size)
    if saved_world_size != world_size:
        raise StateDictError(
            f"a LOCAL state dict of {saved_world_size} shards was saved, and the model has {world_size}: its shards fit the "
            "same number only; save FULL or SHARDED to load on another"
        )
