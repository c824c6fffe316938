"""Writeback of edited full parameters, of which each rank copies only its slice (R20), and checks of replaced data (R25)."""

from dataclasses import dataclass

from crossframe.errors import ReplacedError
from crossframe.layout import Layout
from crossframe.params import ParamSpec


@dataclass(frozen=True)
class Copy:
    """A copy of elements `param_start:param_stop` of parameter `index` to `shard_start:shard_stop` of the rank's shard."""

    index: int
    param_start: int
    param_stop: int
    shard_start: int
    shard_stop: int


def writeback_copies(layout: Layout, rank: int) -> tuple[Copy, ...]:
    """The copies by which one rank persists edits of full parameters: one for each run of its pieces, and none of padding."""
    index = {param.name: i for i, param in enumerate(layout.params)}
    return tuple(
        Copy(
            index[piece.name],
            run.param_start,
            run.param_start + run.numel,
            run.shard_start,
            run.shard_start + run.numel,
        )
        for piece in layout.pieces(rank)
        for run in piece.runs()
    )


def check_full(spec: ParamSpec, shape: tuple[int, ...]) -> None:
    """Raise ReplacedError unless full values of this shape can be written back to a parameter."""
    if shape != spec.shape:
        raise ReplacedError(
            f"parameter {spec.name!r}: expected the unsharded shape {spec.shape}, got {shape}; "
            "write into the parameter instead of replacing it, or replace it with the same shape"
        )


def check_replaced(
    name: str, rank: int, expected: tuple[tuple[int, ...], str], came: tuple[tuple[int, ...], str]
) -> None:
    """Raise ReplacedError unless the tensor that replaced a sharded parameter's data can be adopted (R25).

    Args:
        name: name of the parameter, or of another tensor that was replaced.
        expected: shape and dtype of this rank's shard.
        came: shape and dtype of the replacement.
    """
    if came[0] != expected[0]:
        raise ReplacedError(
            f"parameter {name!r}, rank {rank}: its data was replaced while it is sharded; expected this rank's sharded shape "
            f"{expected[0]}, got {came[0]}; replace it with this rank's shard, or load full values as a state dict"
        )
    if came[1] != expected[1]:
        raise ReplacedError(
            f"parameter {name!r}, rank {rank}: expected {expected[1]}, as it was sharded, got {came[1]}; convert the module "
            "before sharding it"
        )
