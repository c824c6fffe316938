"""Parameters that a model axis of the mesh divides on a dim, and where the elements of a part lie in the parameter (R39)."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from crossframe.errors import LayoutError
from crossframe.layout.pieces import Piece
from crossframe.params import ParamSpec


@dataclass(frozen=True)
class Division:
    """One of `parts` equal parts of a parameter along a dim, as DTensor's `Shard(dim)` over a mesh axis.

    Attributes:
        axis: the mesh axis.
        dim: the dim, from 0 on.
        parts: the size of the axis.
        index: the part, from 0 on: the index on the axis.
    """

    axis: str
    dim: int
    parts: int
    index: int


def local_part(param: ParamSpec, divisions: Sequence[Division]) -> ParamSpec:
    """The part of a parameter that one model rank holds.

    Args:
        divisions: at most one for each dim.

    Raises:
        LayoutError: a dim that does not exist, that two axes divide, or whose size is not a multiple of the size of its axis.

    >>> local_part(ParamSpec("w", (6, 4)), [Division("ep", 0, 2, 1), Division("tp", 1, 4, 0)]).shape
    (3, 1)
    """
    shape = list(param.shape)
    for at, division in enumerate(divisions):
        where = f"parameter {param.name!r} of shape {param.shape}, axis {division.axis!r} of size {division.parts}"
        if not 0 <= division.dim < len(shape):
            raise LayoutError(f"{where}: it has no dim {division.dim} to divide; give it another style")
        if other := next((each for each in divisions[:at] if each.dim == division.dim), None):
            raise LayoutError(f"{where}: axis {other.axis!r} divides dim {division.dim} too; give it one of the two")
        if shape[division.dim] % division.parts:
            raise LayoutError(
                f"{where}: dim {division.dim} has {param.shape[division.dim]} elements, expected a multiple of "
                f"{division.parts}; pad it, choose another size of the axis, or give it the style 'replicated'"
            )
        shape[division.dim] //= division.parts
    return replace(param, shape=tuple(shape))


def in_whole(piece: Piece, param: ParamSpec, divisions: Sequence[Division]) -> Iterator[Piece]:
    """A piece of a part of a parameter as pieces of the whole parameter, in the order of the shard.

    Args:
        piece: of `local_part(param, divisions)`.
        param: the whole parameter.

    >>> half = Division("tp", 1, 2, 1)  # the right half of a (3, 4) matrix; the piece holds its last two rows
    >>> [tuple(run) for piece in in_whole(Piece("w", 0, 0, 4, 2, 6), ParamSpec("w", (3, 4)), [half]) for run in piece.runs()]
    [(0, 6, 2), (2, 10, 2)]
    """
    if not divisions:
        yield piece
        return
    *others, last = divisions
    # The last division is undone first: its part lies in what the others leave of the parameter.
    shape = local_part(param, others).shape
    inner = math.prod(shape[last.dim + 1 :])
    stride = shape[last.dim] * inner
    block = stride // last.parts
    for each in _spread(piece, block, stride, block * last.index):
        yield from in_whole(each, param, others)


def in_part(element: int, param: ParamSpec, divisions: Sequence[Division]) -> int | None:
    """The index in a part, as a row-major line, of an element of the whole parameter; None if the part does not have it.

    >>> param, right_half = ParamSpec("w", (3, 4)), [Division("tp", 1, 2, 1)]
    >>> [in_part(element, param, right_half) for element in range(6)]
    [None, None, 0, 1, None, None]
    """
    for division in divisions:
        inner = math.prod(param.shape[division.dim + 1 :])
        stride = param.shape[division.dim] * inner
        block = stride // division.parts
        row, rest = divmod(element, stride)
        if rest // block != division.index:
            return None
        element = row * block + rest % block
        param = local_part(param, [division])
    return element


def _spread(piece: Piece, block: int, stride: int, offset: int) -> Iterator[Piece]:
    """A piece whose parameter's blocks of `block` elements move apart: block i starts at `i * stride + offset`."""

    def at(element: int) -> int:
        return element // block * stride + offset + element % block

    first, last = piece.param_start // block, (piece.param_stop - 1) // block
    if first == last:
        start = at(piece.param_start)
        yield replace(piece, param_start=start, param_stop=start + piece.param_stop - piece.param_start)
    elif piece.num_runs == 1:
        yield from _blocks(piece, block, stride, at)
    elif piece.stride % block == 0 and piece.param_start % block + piece.run_numel <= block:
        apart = piece.stride // block * stride
        start = at(piece.param_start)
        stop = start + (piece.num_runs - 1) * apart + piece.run_numel
        yield replace(piece, param_start=start, param_stop=stop, stride=apart)
    else:
        for run in piece.runs():
            single = replace(
                piece,
                shard_start=run.shard_start,
                shard_stop=run.shard_start + run.numel,
                param_start=run.param_start,
                param_stop=run.param_start + run.numel,
                num_runs=1,
                stride=0,
            )
            yield from _spread(single, block, stride, offset)


def _blocks(piece: Piece, block: int, stride: int, at: Callable[[int], int]) -> Iterator[Piece]:
    """A piece of one run: the end of a block, whole blocks, and the start of another."""
    start, stop, held = piece.param_start, piece.param_stop, piece.shard_start
    while start < stop:
        whole = (stop - start) // block if start % block == 0 else 0
        numel = whole * block or min(stop, (start // block + 1) * block) - start
        runs = max(1, whole)
        first = at(start)
        yield replace(
            piece,
            shard_start=held,
            shard_stop=held + numel,
            param_start=first,
            param_stop=first + (runs - 1) * stride + numel // runs,
            num_runs=runs,
            stride=stride if runs > 1 else 0,
        )
        start, held = start + numel, held + numel
