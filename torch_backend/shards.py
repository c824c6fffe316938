"""What a rank holds of a sharded model, in the core's terms: for recorders, comparisons and checkpoints."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from crossframe.layout import Layout
from torch_backend.slots import canonical_name
from torch_backend.unit import UNIT, Bucket, unit_of


@dataclass(frozen=True)
class LocalPiece:
    """A run of elements of a parameter that this rank holds; `grad` is their reduced gradient, or None.

    `values` and `grad` are 1-D and alias the shard and its gradient.
    """

    unit: str
    name: str
    start: int
    stop: int
    values: Tensor
    grad: Tensor | None


def sharded_units(model: nn.Module) -> list[tuple[str, list[Bucket]]]:
    """The units of a model under either interface, by canonical module name, the outermost first."""
    return [
        (canonical_name(name), unit_of(module).buckets)
        for name, module in model.named_modules()
        if UNIT in module.__dict__
    ]


def layouts_of(model: nn.Module) -> list[tuple[str, Layout]]:
    """The layout of every bucket, under its unit's name. Parameters have their full names once the root has run."""
    return [(name, bucket.layout) for name, buckets in sharded_units(model) for bucket in buckets]


def local_pieces(model: nn.Module, rank: int) -> Iterator[LocalPiece]:
    """Every piece that this rank (of its shard group) holds, unit by unit in order; padding is in none of them (R06)."""
    for unit, buckets in sharded_units(model):
        for bucket in buckets:
            index = {spec.name: i for i, spec in enumerate(bucket.layout.params)}
            grads = bucket.exposure.grads()
            for piece in bucket.layout.pieces(rank):
                i = index[piece.name]
                values = bucket.store.pieces[i]
                yield LocalPiece(unit, piece.name, piece.param_start, piece.param_stop, values, grads[i])
